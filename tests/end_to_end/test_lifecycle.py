"""Life under traffic: clients send requests all the time while things are moved, killed, stopped.

One cluster for the whole file; each test brings models of its own and leaves the cluster whole.
"""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import tempfile
import time
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.end_to_end.cluster import Cluster, Shard, clusters, database_to_monotonic
from tests.end_to_end.traffic import send

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.end_to_end.traffic import Sent

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    yield from clusters(Path(tempfile.mkdtemp(prefix="llmgw-test-life-", dir="/var/tmp")))


@pytest.fixture
def said(record_property: Callable[[str, object], None]) -> Callable[..., None]:
    """Figures of a test, for its report and for people (pytest -s)."""

    def say(**figures: float) -> None:
        for name, value in figures.items():
            record_property(name, round(value, 3))
        print({name: round(value, 3) for name, value in figures.items()})

    return say


def test_C13_scale_up_and_down_under_traffic(cluster: Cluster, said: Any) -> None:
    cluster.fake("scaled")
    cluster.serving("scaled")
    with cluster.traffic("scaled") as traffic:
        cluster.post("/models/scaled/scale", min=2)
        cluster.serving("scaled", 2)
        shards = cluster.shards("scaled")
        slow = {"tokens": 20, "gap": 0.05, "hold_after": 5}
        streams = [cluster.stream("scaled", fake=slow) for _ in range(6)]
        cluster.wait(lambda: all(any(map(_slow, _records(s))) for s in shards), "a stream on each")

        cluster.post("/models/scaled/scale", min=1)
        drained_at, leaver = cluster.wait(lambda: _draining(cluster, "scaled"), "a drain")
        (shard,) = (s for s in shards if s.replica == leaver)
        cluster.wait(lambda: time.monotonic() > drained_at + 5, "who has not heard to send it more")
        for one in shards:
            one.kill(signal.SIGUSR1)  # lets its streams go on
        records: list[dict[str, Any]] = []

        def over() -> bool:
            records[:] = _records(shard) or records
            return not shard.alive

        cluster.wait(over, "the drained engine to end")
        drain_s = time.monotonic() - drained_at
        ends = [stream.finished() for stream in streams]
        cluster.serving("scaled", 1)

    traffic.all_answered(20)
    assert not [sent for sent in ends if sent.failed]
    late = [r for r in records if r["method"] == "POST" and r["started"] > drained_at + 3]
    assert not late, late
    latest = max(r["started"] for r in records if r["method"] == "POST") - drained_at
    said(drain_s=drain_s, last_new_after_commit_s=latest, requests=len(traffic.sent))
    nothing_is_left(cluster, shard)
    cluster.remove("scaled")


def nothing_is_left(cluster: Cluster, shard: Shard) -> None:
    """Every process, the port and the claims of a stopped shard are gone."""
    with pytest.raises(ProcessLookupError):
        os.killpg(shard.pid, 0)
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind(shard.address)
    state = "select state from llmgw.shards where id = %s"
    cluster.wait(lambda: cluster.row(state, shard.id) == ("stopped",), "the shard to be stopped")
    assert cluster.row("select count(*) from llmgw.replicas where id = %s", shard.replica) == (0,)


def _draining(cluster: Cluster, model: str) -> tuple[float, int] | None:
    """When (monotonic) the replica went draining, and which."""
    query = (
        "select extract(epoch from state_at)::double precision, id from llmgw_core.replica"
        " where model = %s and state = 'draining'"
    )
    found = cluster.row(query, model)
    return None if found is None else (database_to_monotonic(found[0]), found[1])


def _records(shard: Shard) -> list[dict[str, Any]]:
    """What a fake engine saw; nothing when it is gone."""
    connection = http.client.HTTPConnection(*shard.address, timeout=30)
    try:
        connection.request("GET", "/_records")
        found: list[dict[str, Any]] = json.loads(connection.getresponse().read())
    except (OSError, http.client.HTTPException, ValueError):
        return []
    else:
        return found
    finally:
        connection.close()


def _slow(record: dict[str, Any]) -> bool:
    return '"gap"' in record["body"] and not record["answered"]


def test_D11_drain_of_a_node_under_traffic(cluster: Cluster, said: Any) -> None:
    cluster.model("moved", least=2)
    cluster.serving("moved", 2)
    with cluster.traffic("moved") as traffic:
        begun = time.monotonic()
        done = cluster.say("drain", "n1", "--wait", "--timeout", "60s")
        drain_s = time.monotonic() - begun
        assert done.returncode == 0, done.stderr
        cluster.serving("moved", 2)
        assert {shard.node for shard in cluster.shards("moved")} == {"n2"}
        replacements_came_first(cluster, "moved")

        cluster.post("/nodes/n1/state", state="cordon", reason="new fan")
        node_as_new_machine(cluster, "n1")
        assert cluster.nodes()["n1"] == "cordoned"
        cluster.post("/nodes/n1/state", state="uncordon")
        cluster.post("/models/moved/scale", min=3)
        cluster.serving("moved", 3)
        assert {shard.node for shard in cluster.shards("moved")} == {"n1", "n2"}
    traffic.all_answered(20)
    said(drain_s=drain_s, requests=len(traffic.sent))
    cluster.remove("moved")


def test_an_edited_profile_takes_hold_by_replace_under_traffic(cluster: Cluster, said: Any) -> None:
    cluster.model("renewed")
    cluster.serving("renewed")
    old = cluster.shard("renewed")
    with cluster.traffic("renewed") as traffic:
        cluster.model("renewed", args=["-c", "2048", "-np", "2", "-t", "1"])
        stale = "select stale from llmgw.replicas where id = %s"
        assert cluster.row(stale, old.replica) == (True,)
        imagined = json.loads(cluster.say("what-if", "--drain", old.node, "--json").stdout)
        assert [move["replica"] for move in imagined["moves"]] == [old.replica]
        assert cluster.shard("renewed").pid == old.pid, "an edit alone restarts nothing"
        begun = time.monotonic()
        done = cluster.say("replace", "renewed", "--stale", "--wait", "--timeout", "60s")
        replace_s = time.monotonic() - begun
        assert done.returncode == 0, done.stderr
        cluster.serving("renewed")
        new = cluster.shard("renewed")
        assert new.replica != old.replica
        assert cluster.row(stale, new.replica) == (False,)
    traffic.all_answered()
    said(replace_s=replace_s, requests=len(traffic.sent))
    nothing_is_left(cluster, old)
    cluster.remove("renewed")


def replacements_came_first(cluster: Cluster, model: str) -> None:
    """After no commit were fewer replicas ready than wanted, from the time when all were."""
    query = (
        "select sum(case detail->>'to_state' when 'ready' then 1 else -1 end)::int"
        " from llmgw_core.decision where model = %s and kind = 'move'"
        " and detail->>'to_state' in ('ready', 'draining') group by xmin::text order by min(id)"
    )
    changes = [change for (change,) in cluster.rows(query, model)]
    counts = list(accumulate(changes))
    assert min(counts[counts.index(2) :]) == 2, changes


def node_as_new_machine(cluster: Cluster, node: str) -> None:
    """The agent dies with its state; the next one enrols as if the disk had been changed."""
    boot = cluster.row("select boot from llmgw_core.beat where node_id = %s", node)
    cluster.agents[node].kill()
    cluster.join(node, folder=f"{node}-again")
    query = "select boot from llmgw_core.beat where node_id = %s"
    cluster.wait(lambda: cluster.row(query, node) != boot, "the new agent to be seen")


def test_D08_killed_engines_come_back(cluster: Cluster, said: Any) -> None:
    cluster.model("killed")
    cluster.fake("leaving")
    cluster.serving("killed")
    cluster.serving("leaving")
    first, leaving = cluster.shard("killed"), cluster.shard("leaving")
    with cluster.traffic("killed") as traffic:
        first.kill()
        failed_at = time.monotonic()
        why = "select error from llmgw_core.shard where id = %s and error is not null"
        told = cluster.wait(lambda: cluster.row(why, first.id), "the failure to be told")
        leaving.kill(signal.SIGTERM)  # it exits 0
        cluster.serving("killed")
        back_s = time.monotonic() - failed_at
        assert "signal 9" in told[0], told
        assert cluster.shard("killed").pid != first.pid
        cluster.shard("killed").kill()
        restarts = "select restarts from llmgw.replicas where model = %s"
        cluster.wait(lambda: cluster.row(restarts, "killed") == (2,), "a second restart")
        cluster.serving("killed")
        assert not traffic.later().failed
    cluster.serving("leaving")
    assert cluster.row(restarts, "leaving") == (1,)
    everything_refused_cleanly(traffic.failures)
    said(back_s=back_s, refused=len(traffic.failures), requests=len(traffic.sent),
         slowest_s=max(sent.took_s for sent in traffic.failures))  # fmt: skip
    backoff_grew(cluster, "killed")
    cluster.remove("killed", "leaving")


def _failed(cluster: Cluster, model: str) -> dict[str, Any] | None:
    """The replica as `llmgwctl replicas` tells it, once it has failed."""
    (replica,) = cluster.ctl("replicas", "--model", model)
    return replica if replica.get("error") else None


def everything_refused_cleanly(failures: list[Sent]) -> None:
    """Each an answer at once that says when to come again, or a stream that says it broke."""
    assert failures
    for sent in failures:
        assert sent.took_s < 20, sent
        if sent.status != 200:
            assert sent.status in (502, 503), sent
            assert sent.retry_after is not None, sent
        else:
            assert "error" in (sent.error or ""), sent


def backoff_grew(cluster: Cluster, model: str) -> None:
    query = (
        "select extract(epoch from to_timestamp((detail->>'backoff_until')::float) - at)::float"
        " from llmgw.decisions where model = %s and detail->>'to_state' = 'failed' order by id"
    )
    first, second = (wait_s for (wait_s,) in cluster.rows(query, model))
    assert first < second < 2.5


def test_A07_stream_of_a_killed_engine_says_so(cluster: Cluster) -> None:
    cluster.fake("cut")
    cluster.serving("cut")
    stream = cluster.stream("cut", fake={"tokens": 1000, "gap": 0.05})
    shard = cluster.shard("cut")
    cluster.wait(lambda: any(_slow(r) for r in _records(shard)), "the stream to run")
    shard.kill()
    sent = stream.finished()
    assert sent.status == 200
    assert "upstream_failed" in (sent.error or ""), sent
    query = "select status from llmgw.usage_recent where request_id = %s"
    cluster.wait(lambda: cluster.row(query, sent.id) == ("partial",), "the row to say partial")
    cluster.remove("cut")


def test_D04_killed_agent_is_followed_by_one_that_adopts(cluster: Cluster) -> None:
    cluster.model("adopted")
    cluster.serving("adopted")
    shard = cluster.shard("adopted")
    seen: set[str] = set()
    with cluster.traffic("adopted") as traffic:
        boot = cluster.row("select boot from llmgw_core.beat where node_id = %s", shard.node)
        cluster.agents[shard.node].kill()
        cluster.join(shard.node, folder=_folder(cluster, shard.node))

        def known_again() -> bool:
            seen.add(cluster.nodes()[shard.node])
            query = (
                "select boot, applied_gen = alloc_gen from llmgw_core.beat"
                " join llmgw_core.node on id = node_id where node_id = %s"
            )
            new, whole = cluster.row(query, shard.node) or (None, False)
            return whole and (new,) != boot

        cluster.wait(known_again, "the new agent to speak")
        cluster.serving("adopted")
    traffic.all_answered()
    assert seen == {"ready"}
    assert cluster.shard("adopted").pid == shard.pid
    assert cluster.row("select restarts from llmgw.replicas where model = 'adopted'") == (0,)
    cluster.remove("adopted")


def _folder(cluster: Cluster, node: str) -> str:
    """The node's state directory: D11's test gave it a new one."""
    again = f"{node}-again"
    return again if (cluster.folder / again).exists() else node


def test_D07_engine_that_never_starts_says_why(cluster: Cluster, said: Any) -> None:
    cluster.model("sound")
    cluster.serving("sound")
    with cluster.traffic("sound") as traffic:
        cluster.model("broken", args=["--no-such-flag", "7"])
        told = cluster.wait(lambda: _failed(cluster, "broken"), "the failure to be told")
        status = cluster.say("status").stdout
    traffic.all_answered(5)
    assert "unrecognized arguments: --no-such-flag" in told["error"]
    assert "code 2" in told["error"]
    assert "broken fails: " in status, status
    assert "unrecognized arguments: --no-such-flag 7" in status, status
    query = (
        "select extract(epoch from d.at - s.created_at)::float from llmgw.decisions d"
        " join llmgw_core.shard s on s.replica_id = d.replica where d.model = 'broken'"
        " and d.detail->>'to_state' = 'failed' order by d.id, s.id limit 1"
    )
    (from_placement_s,) = cluster.row(query)
    assert from_placement_s < 60  # its deadline is that of models that load for minutes
    said(placed_to_failed_s=from_placement_s)
    cluster.remove("broken", "sound")


def test_model_removed_while_a_stream_runs(cluster: Cluster, said: Any) -> None:
    cluster.fake("leaver")
    cluster.model("stayer")
    cluster.serving("leaver")
    cluster.serving("stayer")
    shard = cluster.shard("leaver")
    stream = cluster.stream("leaver", fake={"tokens": 10, "gap": 0.05, "hold_after": 5})
    with cluster.traffic("stayer") as traffic:
        cluster.wait(lambda: any(_slow(r) for r in _records(shard)), "the stream to run")
        cluster.remove("leaver")
        removed_at = time.monotonic()
        for port, _ in cluster.ports:
            answer = cluster.wait(lambda p=port: _refused(cluster, p, "leaver"), "404", 5)
            assert (answer.status, answer.error) == (404, answer.error)
            assert "does not exist" in (answer.error or "")
        assert stream.running
        shard.kill(signal.SIGUSR1)  # lets it go on
        assert not stream.finished().failed
        cluster.gone("leaver")
        assert not shard.alive
        gone_s = time.monotonic() - removed_at
    traffic.all_answered()
    said(removed_to_gone_s=gone_s)
    cluster.remove("stayer")


def _refused(cluster: Cluster, port: int, model: str, key: str | None = None) -> Sent | None:
    sent = send(port, key or cluster.key, model, stream=False)
    return sent if sent.status in (401, 404) else None


def test_revoked_key_is_refused_everywhere(cluster: Cluster, said: Any) -> None:
    cluster.model("locked")
    cluster.serving("locked")
    made = cluster.post("/keys", name="short")
    for port, _ in cluster.ports:
        cluster.wait(lambda p=port: not send(p, made["key"], "locked", stream=True).failed, "a key")
    cluster.call("DELETE", f"/keys/{made['id']}")
    at = time.monotonic()
    for port, _ in cluster.ports:
        answer = cluster.wait(lambda p=port: _refused(cluster, p, "locked", made["key"]), "401", 5)
        assert answer.status == 401
    said(revoked_s=time.monotonic() - at)
    cluster.remove("locked")


def test_D29_silent_node_is_replaced_and_comes_back(cluster: Cluster, said: Any) -> None:
    cluster.model("silent")
    cluster.serving("silent")
    shard = cluster.shard("silent")
    other = {"n1": "n2", "n2": "n1"}[shard.node]
    cluster.set("unreachable_after", 2)
    seen: list[str] = []

    def replaced() -> list[Shard]:
        state = cluster.nodes()[shard.node]
        seen.extend([state] if state not in seen else [])
        return [s for s in cluster.shards("silent") if s.node == other]

    agent = cluster.agents[shard.node].process.pid
    try:
        with cluster.traffic("silent") as traffic:
            late_beat_moves_nothing(cluster, shard, agent)
            cluster.set("lost_after", 5)
            at = time.monotonic()
            os.kill(agent, signal.SIGSTOP)
            (new,) = cluster.wait(replaced, "a replacement on the other node")
            cluster.wait(lambda: cluster.answers(0, "silent"), "the replacement to serve")
            replaced_s = time.monotonic() - at
            os.kill(agent, signal.SIGCONT)
            at = time.monotonic()
            cluster.wait(lambda: not shard.alive, "the old engine to be stopped")
            stopped_s = time.monotonic() - at
            cluster.wait(lambda: cluster.nodes()[shard.node] == "ready", "the node to be ready")
            cluster.serving("silent")
    finally:
        os.kill(agent, signal.SIGCONT)
        cluster.set("unreachable_after", 30)
        cluster.set("lost_after", 120)
    assert seen == ["ready", "unreachable", "lost"]
    assert cluster.shard("silent").pid == new.pid
    refused = traffic.failures
    assert all(sent.status in (502, 503) and sent.retry_after for sent in refused), refused[:3]
    said(replaced_s=replaced_s, stopped_s=stopped_s, refused=len(refused),
         requests=len(traffic.sent))  # fmt: skip
    cluster.remove("silent")


def late_beat_moves_nothing(cluster: Cluster, shard: Shard, agent: int) -> None:
    """Unreachable for a moment: the engine stays, and the first beat makes the node ready."""
    os.kill(agent, signal.SIGSTOP)
    cluster.wait(lambda: cluster.nodes()[shard.node] == "unreachable", "silence to be noticed")
    os.kill(agent, signal.SIGCONT)
    cluster.wait(lambda: cluster.nodes()[shard.node] == "ready", "the node to be ready")
    assert [known.pid for known in cluster.shards("silent")] == [shard.pid]


def test_leader_killed_under_traffic(cluster: Cluster, said: Any) -> None:
    cluster.model("steady")
    cluster.serving("steady")
    leader = cluster.leader()
    with cluster.traffic("steady", 1 - leader) as traffic:
        term = cluster.row("select term from llmgw.leases where name = 'tick'")
        cluster.kill_controller(leader)
        at = time.monotonic()
        cluster.model("late")
        query = "select term from llmgw.leases where name = 'tick' and held"
        cluster.wait(lambda: cluster.row(query) not in (None, term), "a new leader")
        takeover_s = time.monotonic() - at
        cluster.wait(lambda: cluster.shards("late"), "the new model to run")
        placed = "select min(s.created_at) from llmgw_core.shard s join llmgw_core.replica r"
        placed += " on r.id = s.replica_id where r.model = 'late'"
        (created,) = cluster.row(placed)
        placed_s = database_to_monotonic(created.timestamp()) - at
        cluster.wait(lambda: len(traffic.sent) >= 10, "requests before and after it")
    traffic.all_answered(10)
    assert placed_s < 20
    said(takeover_s=takeover_s, placed_s=placed_s, requests=len(traffic.sent))
    cluster.controllers.append(cluster.controller())
    cluster.remove("late", "steady")


def test_F25_postgres_away_and_back(cluster: Cluster, said: Any) -> None:
    cluster.set("guard", 60)
    cluster.model("kept")
    cluster.serving("kept")
    shard = cluster.shard("kept")
    admins = [admin for _, admin in cluster.ports]
    cluster.set("unreachable_after", 2)
    cluster.set("lost_after", 4)  # shorter than the outage: only the guard keeps the replica
    with cluster.traffic("kept") as traffic:
        cluster.stop_postgres()
        at = time.monotonic()
        for admin in admins:
            cluster.wait(lambda a=admin: "database" in _not_ready(a), "/readyz to say why")
        cluster.wait(lambda: time.monotonic() > at + 5, "the outage to last")
        for _ in range(2):  # it comes, goes at once, and comes to stay
            cluster.start_postgres()
            cluster.stop_postgres()
        cluster.start_postgres()
        at = time.monotonic()
        for admin in admins:
            cluster.wait(lambda a=admin: not _not_ready(a), "/readyz to recover")
        ready_s = time.monotonic() - at
        both = {"n1": "ready", "n2": "ready"}
        cluster.wait(lambda: cluster.nodes() == both, "both nodes to be ready")
        nodes_s = time.monotonic() - at
    traffic.all_answered(20)
    assert [s.pid for s in cluster.shards("kept")] == [shard.pid]
    assert cluster.row("select restarts from llmgw.replicas where model = 'kept'") == (0,)
    every_request_has_one_row(cluster, [sent.id for sent in traffic.sent])
    said(ready_s=ready_s, nodes_s=nodes_s, requests=len(traffic.sent))
    cluster.model("after")
    cluster.serving("after")


def _not_ready(admin: int) -> str:
    """What /readyz says, '' when it is ready."""
    connection = http.client.HTTPConnection("127.0.0.1", admin, timeout=30)
    try:
        connection.request("GET", "/readyz")
        answer = connection.getresponse()
        said = answer.read().decode()
        return "" if answer.status == 200 else said
    finally:
        connection.close()


def every_request_has_one_row(cluster: Cluster, ids: list[str]) -> None:
    query = "select request_id, status from llmgw.usage_recent where request_id = any(%s)"
    cluster.wait(lambda: len(cluster.rows(query, ids)) >= len(ids), "all usage rows")
    rows = cluster.rows(query, ids)
    assert sorted(name for name, _ in rows) == sorted(ids)
    assert {status for _, status in rows} == {"ok"}
