"""Three models on demand and one slot: real engines, two controllers, alternating requests."""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests import fake_engine
from tests.end_to_end.cluster import Cluster, clusters
from tests.end_to_end.stops import STOPS, Stops
from tests.end_to_end.traffic import send

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.end_to_end.traffic import Sent

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

NAMES = ("red", "green", "blue")
ROUNDS, BESIDE = 4, 25
"""A round takes five seconds of waiting, so that many models have theirs side by side."""
SLOT = 0.9 * len(os.sched_getaffinity(0))
"""Cores of one of the models here: no two fit on a node."""


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    yield from clusters(Path(tempfile.mkdtemp(prefix="llmgw-test-wake-", dir="/var/tmp")))


def test_D26_three_models_on_one_slot_serve_alternating_requests(cluster: Cluster) -> None:
    cluster.set("min_residence", 1)
    for name in NAMES:
        cluster.model(name, least=0, cpus=SLOT, exclude_nodes=["n2"])
    _known(cluster, *NAMES)
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


def _fake(cluster: Cluster, name: str, cpus: float = SLOT, **default: Any) -> None:
    """A model on demand (that takes the whole slot), with an engine that does as it is told."""
    program = [sys.executable, fake_engine.__file__, "--host", "{host}", "--port", "{port}"]
    program += ["--default", json.dumps(default)]
    exclude = ["n2"] if cpus == SLOT else []
    cluster.model(name, least=0, engine="command", command=program, args=[], cpus=cpus,
                  health_path="/health", exclude_nodes=exclude)  # fmt: skip


def test_D17_a_model_that_is_always_busy_lets_another_in_and_finishes_what_it_runs(
    cluster: Cluster,
) -> None:
    cluster.set("min_residence", 1)
    cluster.set("fairness", 1)
    _fake(cluster, "busy")
    _fake(cluster, "meek")
    _known(cluster, "busy", "meek")
    stream = cluster.stream("busy", fake={"tokens": 60, "gap": 0.1})
    cluster.wait(lambda: _live(cluster) == ["busy"], "the busy model to serve")
    with cluster.traffic("busy") as traffic:
        sent = send(cluster.ports[0][0], cluster.key, "meek", stream=False)
        assert not sent.failed, sent
        assert stream.running is False
        assert not stream.finished().failed, stream.sent
        # Its own clients wait for its next turn.
        turns = "select count(*) from llmgw.decisions where detail->>'room_for' = 'busy'"
        cluster.wait(lambda: cluster.row(turns) >= (1,), "the busy model's next turn")
    traffic.all_answered(at_least=4)
    (told, *_) = cluster.rows("select reason from llmgw.decisions where model = 'busy'"
                              " and detail->>'room_for' = 'meek' order by at")  # fmt: skip
    assert "what runs here" in told[0]
    cluster.remove("busy", "meek")
    cluster.gone("busy")
    cluster.gone("meek")


def test_D19_callers_that_give_up_in_turn_share_one_load(cluster: Cluster) -> None:
    gate = cluster.folder / "slow-may-start"
    script = 'until [ -e "$0" ]; do sleep 0.1; done; exec "$@"'
    slow = ["/bin/sh", "-c", script, str(gate), sys.executable, fake_engine.__file__,
            "--host", "{host}", "--port", "{port}"]  # fmt: skip
    cluster.model("slow", least=0, engine="command", command=slow, args=[], health_path="/health")
    _known(cluster, "slow")
    sent = []
    while not sent or sent[-1].status == 503:
        if len(sent) == 2:
            gate.touch()
        number = len(sent) % 2
        port = cluster.ports[number][0]
        sent.append(send(port, cluster.key, "slow", stream=bool(number), wait="1.5"))
        assert len(sent) < 20, sent
    assert not sent[-1].failed, sent
    assert len(sent) >= 3
    for gave_up in sent[:-1]:
        assert "was not ready after 2 s" in (gave_up.error or ""), gave_up
        assert gave_up.retry_after == "10"
    starts = "select count(*), max(launch) from llmgw.shards where model = 'slow'"
    assert cluster.row(starts) == (1, 1)
    cluster.remove("slow")
    cluster.gone("slow")


def test_D16_requests_at_the_moment_of_the_stop_are_served_100_times(cluster: Cluster) -> None:
    cluster.set("min_residence", 1)
    names = [f"brief{number}" for number in range(BESIDE)]
    for name in names:
        _fake(cluster, name, cpus=0.01, delay=0.5, gap=0.1)
        cluster.post(f"/models/{name}/scale", min=0, idle_timeout="1s")
    _known(cluster, *names)
    with Stops(cluster.database) as stops, ThreadPoolExecutor(BESIDE) as clients:
        races = list(clients.map(partial(_race, cluster, stops), range(BESIDE), names))
    sent = [one for race in races for one in race]
    assert not [one for one in sent if one.failed]
    assert len(sent) == BESIDE * ROUNDS
    told = cluster.rows("select kind, model, reason from llmgw.decisions where model like 'brief%'")
    idle = [model for _, model, why in told if "nobody has used it for 1 s" in why]
    assert set(idle) == set(names)
    # Either the stop is given up or the request waits for a new start; the last race of each
    # model, with what cannot be taken back, leaves only the new start.
    assert [kind for kind, *_ in told].count("create") >= 2 * BESIDE
    cluster.remove(*names)
    for name in names:
        cluster.gone(name)


def _race(cluster: Cluster, stops: Stops, number: int, name: str) -> list[Sent]:
    """Wakes a model and sends a request at each of its next stop decisions.

    The last one races with what cannot be taken back: the engine itself is told to stop.
    """
    sent = []
    stop = 0
    assert not send(cluster.ports[number % 2][0], cluster.key, name, stream=False).failed
    for one in range(1, ROUNDS + 1):
        stop = stops.next(name, stop, STOPS if one < ROUNDS else STOPS[-1:])
        port = cluster.ports[(number + one) % 2][0]
        sent.append(send(port, cluster.key, name, stream=bool((number // 2 + one) % 2)))
    return sent


def test_D16_idle_counts_from_the_end_of_the_last_request_on_any_router(cluster: Cluster) -> None:
    cluster.set("min_residence", 1)
    _fake(cluster, "warm", cpus=0.1, gap=0.1)
    cluster.post("/models/warm/scale", min=0, idle_timeout="4s")
    _known(cluster, "warm")
    used = "from llmgw.usage_recent where model = 'warm'"
    for router in (0, 1):
        assert not cluster.stream("warm", router, fake={"tokens": 45}).finished().failed
        ended = time.monotonic()
        cluster.wait(lambda at=ended: time.monotonic() > at + 1, "a second after its end")
    cluster.wait(lambda: cluster.row(f"select count(*) {used}") == (2,), "both rows")
    stop = (
        "select at from llmgw.decisions where model = 'warm'"
        " and detail->>'to_state' = 'draining' order by at limit 1"
    )
    (first,) = cluster.wait(lambda: cluster.row(stop), "its stop")
    replicas, last = cluster.row(f"select count(distinct replica), max(at) {used}") or ()
    assert replicas == 1, "the engine that the first has warmed serves the second"
    assert first >= last + timedelta(seconds=4)
    cluster.remove("warm")
    cluster.gone("warm")


def test_clients_that_wake_what_cannot_start_are_told_why(cluster: Cluster) -> None:
    crash = ["/bin/sh", "-c", "echo loading; echo no such tensor: lm_head >&2; exit 3"]
    cluster.model("crash", least=0, engine="command", command=crash, args=[], health_path="/h")
    _known(cluster, "crash")
    began = time.monotonic()
    for stream in (False, True):
        sent = send(cluster.ports[0][0], cluster.key, "crash", stream=stream)
        assert sent.status == 503
        assert "the engine exited with code 3: no such tensor: lm_head" in (sent.error or "")
        assert int(sent.retry_after or 0) >= 1
    assert time.monotonic() - began < 100  # not twice the two minutes that a client may wait
    cluster.model("huge", least=0, cpus=10_000)
    _known(cluster, "huge")

    def no_place() -> Sent | None:
        sent = send(cluster.ports[1][0], cluster.key, "huge", stream=False, wait="3")
        told = "there is no place for it: too few free cores: need 10000"
        return sent if told in (sent.error or "") else None

    sent = cluster.wait(no_place, "the reason")
    assert (sent.status, sent.retry_after) == (503, "30")
    cluster.remove("crash", "huge")
    cluster.gone("crash")
    cluster.gone("huge")


def _known(cluster: Cluster, *names: str) -> None:
    """Wait until every router has heard of these models."""
    headers = {"Authorization": f"Bearer {cluster.key}"}

    def listed(port: int, name: str) -> bool:
        asked = urllib.request.Request(f"http://127.0.0.1:{port}/v1/models", headers=headers)
        with urllib.request.urlopen(asked, timeout=30) as got:
            return name in [model["id"] for model in json.load(got)["data"]]

    for port, _ in cluster.ports:
        for name in names:
            cluster.wait(lambda p=port, n=name: listed(p, n), f"the router to know {name}")


def _live(cluster: Cluster) -> list[str]:
    """Models with a replica that serves: there is one slot."""
    found = cluster.rows("select model from llmgw.replicas where state = 'ready'")
    return [name for (name,) in found]
