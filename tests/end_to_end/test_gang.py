"""A replica over two nodes as real processes: placed, served, one shard killed, started again."""

from __future__ import annotations

import os
import signal
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests import fake_shard
from tests.end_to_end.cluster import Cluster, clusters

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

COMMAND = [sys.executable, fake_shard.__file__]
for option in ("rank", "nodes", "head", "host", "port"):
    COMMAND += [f"--{option}", f"{{{option}}}"]
COMMAND += ["--master-port", "{master_port}"]
PAIR = {"engine": "command", "command": COMMAND, "args": [], "health_path": "/health",
        "shards": 2, "fabric": "any", "stop_grace": "2s"}  # fmt: skip
SHARDS = """select s.node_id, s.pid, s.state, s.master_port, s.exit_code
    from llmgw_core.shard s join llmgw_core.replica r on r.id = s.replica_id
    where r.model = %s and s.launch = %s order by s.rank"""


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    yield from clusters(Path(tempfile.mkdtemp(prefix="llmgw-test-gang-", dir="/var/tmp")))


def test_D13_D14_a_pair_serves_and_one_dead_shard_starts_both_again(cluster: Cluster) -> None:
    cluster.model("pair", **PAIR)
    cluster.serving("pair")
    head, other = cluster.rows(SHARDS, "pair", 1)
    assert {head[0], other[0]} == {"n1", "n2"}
    assert (head[2], other[2]) == ("ready", "ready")
    assert head[3] is not None
    assert other[3] is None

    os.killpg(other[1], signal.SIGKILL)
    again = "select launch from llmgw_core.replica where model = 'pair' and state = 'ready'"
    cluster.wait(lambda: cluster.row(again) == (2,), "the second launch")
    cluster.serving("pair")
    first, last = cluster.rows(SHARDS, "pair", 1)
    assert (first[2], last[2], last[4]) == ("stopped", "failed", -9)
    for pid in (head[1], other[1]):
        with pytest.raises(ProcessLookupError):
            os.killpg(pid, 0)
    fresh, _ = cluster.rows(SHARDS, "pair", 2)
    assert fresh[3] != head[3], "the shards meet at another port"
    log = cluster.row("select log_tail from llmgw_core.shard where exit_code = -9")
    assert log == (f"rank 1: 1 met at {head[3]}\n",)

    # D13: with one node that may be used there is no half of a pair.
    cluster.post("/nodes/n2/state", state="cordoned", reason="disk swap")
    os.killpg(fresh[1], signal.SIGKILL)
    waits = "select state from llmgw.replicas where model = 'pair'"
    cluster.wait(lambda: cluster.row(waits) == ("pending",), "the pair to wait")
    query = "select node, code from llmgw.rejections where model = 'pair' order by node"
    reasons = [("n1", "gang_too_small"), ("n2", "node_cordoned")]
    cluster.wait(lambda: cluster.rows(query) == reasons, "both reasons")
    live = "select count(*) from llmgw_core.shard where state not in ('stopped', 'failed')"
    assert cluster.row(live) == (0,)
    cluster.post("/nodes/n2/state", state="ready")
    cluster.serving("pair")
    cluster.remove("pair")
    cluster.gone("pair")


@pytest.mark.parametrize("rank", [0, 1])
def test_D14_a_pair_whose_agent_stops_its_shard_stops_whole_and_waits(
    cluster: Cluster, rank: int
) -> None:
    model = f"left{rank}"
    cluster.model(model, **PAIR)
    cluster.serving(model)
    first = cluster.rows(SHARDS, model, 1)
    node = first[rank][0]
    cluster.agents[node].stop()  # on_exit = stop, as when its machine goes down in order
    now = "select state, restarts, error from llmgw.replicas where model = %s"
    _, restarts, error = cluster.wait(
        lambda: (row := cluster.row(now, model)) and row[0] == "pending" and row,
        "the pair to wait for its node",
    )
    assert restarts == 0, "no crash"
    assert f"the agent of {node} ended" in error
    cluster.wait(
        lambda: [row[2] for row in cluster.rows(SHARDS, model, 1)] == ["stopped", "stopped"],
        "both shards to be stopped",
    )
    for row in first:
        with pytest.raises(ProcessLookupError):
            os.killpg(row[1], 0)
    query = "select code from llmgw.rejections where model = %s and node = %s"
    told = [("node_unreachable",)]
    cluster.wait(lambda: cluster.rows(query, model, node) == told, "the refusal of the node")
    cluster.join(node)
    cluster.serving(model)
    again = cluster.rows(SHARDS, model, 2)
    assert again[0][3] != first[0][3], "the shards meet at another port"
    cluster.remove(model)
    cluster.gone(model)
