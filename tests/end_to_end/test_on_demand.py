"""Three models on demand and one slot: real engines, two controllers, alternating requests."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.end_to_end.cluster import Cluster, clusters
from tests.end_to_end.traffic import send

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]

NAMES = ("red", "green", "blue")


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    yield from clusters(Path(tempfile.mkdtemp(prefix="llmgw-test-wake-", dir="/var/tmp")))


def test_D26_three_models_on_one_slot_serve_alternating_requests(cluster: Cluster) -> None:
    cluster.set("min_residence", 1)
    slot = 0.9 * len(os.sched_getaffinity(0))
    for name in NAMES:
        cluster.model(name, least=0, cpus=slot, exclude_nodes=["n2"])
    assert cluster.row("select count(*) from llmgw.replicas") == (0,)
    for number, name in enumerate(("red", "green", "red")):
        port = cluster.ports[number % 2][0]
        sent = send(port, cluster.key, name, stream=bool(number % 2))
        assert not sent.failed, sent
        assert _live(cluster) == [name]
    together = [cluster.stream(name, number % 2) for number, name in enumerate(NAMES[1:])]
    for stream in together:
        assert not stream.finished().failed, stream.sent
    rooms = cluster.rows(
        "select model, reason from llmgw.decisions where reason like 'makes room for %'"
    )
    assert len(rooms) >= 4
    assert all(f"makes room for {model}:" not in reason for model, reason in rooms)
    wakes = cluster.rows("select reason from llmgw.decisions where kind = 'create' and reason"
                         " like '1 wanted (1 waiting and 0 running%'")  # fmt: skip
    assert wakes
    assert cluster.row("select count(*) from llmgw.usage_recent where status <> 'ok'") == (0,)
    for name in NAMES:
        cluster.post(f"/models/{name}/scale", min=0, idle_timeout="1s")
    for name in NAMES:
        cluster.gone(name)


def _live(cluster: Cluster) -> list[str]:
    """Models with a replica that serves: there is one slot."""
    found = cluster.rows("select model from llmgw.replicas where state = 'ready'")
    return [name for (name,) in found]
