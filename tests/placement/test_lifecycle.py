"""One replica, one tick: what observation makes of it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from controller.placement.model import Settings
from controller.reconcile import lifecycle
from sql.states import REPLICA
from tests.placement.made_fleet import gpu, model, node, profile, replica, shard, snapshot

NOW = 10_000.0


def stepped(one, nodes=None, models=(), **settings):
    around, _ = lifecycle.survey(
        snapshot([node("n1"), node("n2")] if nodes is None else nodes, models, [one], **settings),
        NOW,
        1,
    )
    move = lifecycle.step(one, around)
    assert move is None or move.to_state in REPLICA[one.state]
    return move


CASES = [
    ("starting", ["starting"], {}, None),
    ("starting", ["ready"], {}, "ready"),
    ("starting", ["ready", "fetching"], {}, None),
    ("starting", ["ready", "ready"], {}, "ready"),
    ("starting", ["ready", "failed"], {}, "failed"),
    ("starting", ["stopped"], {}, "failed"),
    ("ready", ["ready"], {}, None),
    ("ready", ["ready", "starting"], {}, "starting"),
    ("ready", ["assigned"], {}, "starting"),
    ("ready", ["draining"], {}, "starting"),
    ("ready", ["ready", "failed"], {}, "failed"),
    ("draining", ["ready"], {"in_flight": 1, "drain_deadline": NOW + 1}, None),
    ("draining", ["ready"], {"in_flight": None, "drain_deadline": NOW + 1}, None),
    ("draining", ["ready"], {"in_flight": 0, "drain_deadline": NOW + 1}, "stopping"),
    ("draining", ["ready"], {"in_flight": None, "drain_deadline": NOW - 1}, "stopping"),
    ("draining", ["ready"], {"in_flight": 3, "state_at": NOW - 601}, "stopping"),
    ("draining", ["failed"], {"in_flight": 3, "drain_deadline": NOW + 1}, "stopping"),
    ("stopping", ["draining"], {}, None),
    ("stopping", ["stopped", "failed"], {}, "gone"),
    ("pending", [], {}, None),
    ("failed", ["failed"], {}, None),
]


@pytest.mark.parametrize(("state", "shards", "facts", "expected"), CASES)
def test_step(state, shards, facts, expected):
    rows = [shard(s, "n1", rank, id_=rank + 1) for rank, s in enumerate(shards)]
    one = replica(1, state, *rows, **({"state_at": NOW - 5} | facts))
    move = stepped(one)
    assert (move and move.to_state) == expected


def test_D07_a_crash_is_told_with_exit_code_and_last_lines():
    failed = shard("failed", error="exit code 1 after 0.2 s: CUDA out of memory")
    move = stepped(replica(1, "starting", failed, state_at=NOW - 1))
    assert move.error == "shard 0 on n1 failed: exit code 1 after 0.2 s: CUDA out of memory"
    assert move.restarts == 1
    assert 0.8 <= move.backoff_until - NOW <= 1.2


def test_D07_a_start_that_never_ends_fails_at_its_deadline():
    slow = shard("starting", state_at=NOW - 1801)
    move = stepped(replica(1, "starting", slow, state_at=NOW - 1801))
    assert move.reason == "start deadline exceeded"
    assert "shard 0 on n1 is starting" in move.error
    # A long download is a stage of its own, yet changing stages for ever does not help.
    fresh = shard("starting", state_at=NOW - 10)
    assert stepped(replica(1, "starting", fresh, state_at=NOW - 80_000)) is None
    assert stepped(replica(1, "starting", fresh, state_at=NOW - 86_401)).to_state == "failed"


def test_the_head_of_a_gang_has_its_time_from_when_the_last_of_the_others_came():
    head = shard("starting", state_at=NOW - 7000)
    for came_s, expected in ((1700, None), (1900, "failed")):
        other = shard("ready", rank=1, id_=2, state_at=NOW - came_s)
        move = stepped(replica(1, "starting", head, other, state_at=NOW - 7200))
        assert (move and move.to_state) == expected


@pytest.mark.parametrize("stage", ["fetching", "provisioning"])
def test_what_is_still_being_brought_has_no_start_deadline(stage):
    """700 GB over 1 Gbit/s take an hour and a half: the agent says when it gets nowhere."""
    bringing = shard(stage, state_at=NOW - 7000)
    waiting = shard("starting", rank=1, id_=2, state_at=NOW - 6000)
    for shards in ([bringing], [bringing, waiting]):
        assert stepped(replica(1, "starting", *shards, state_at=NOW - 7200)) is None
    old = replica(1, "starting", bringing, state_at=NOW - 86_401)
    assert "(deadline 86400 s): shard 0 on n1 is" in stepped(old).error


def test_the_profile_may_set_its_own_start_deadline():
    quick = model("m", 1, profile("p", start_deadline_s=20.0))
    one = replica(1, "starting", shard("starting", state_at=NOW - 21), state_at=NOW - 21)
    assert stepped(one, models=[quick]).to_state == "failed"


def test_the_first_shard_that_died_is_the_cause():
    rows = [
        shard("failed", rank=0, state_at=9.0, error="peer lost"),
        shard("failed", rank=1, state_at=8.0),
    ]
    assert stepped(replica(1, "ready", *rows)).reason == "shard 1 on n1 failed"


@pytest.mark.parametrize(
    ("error", "state"), [("signal 9", "failed"), ("exit code 0", "failed"), (None, "stopped")]
)
def test_D08_every_end_of_a_serving_engine_is_counted_and_retried(error, state):
    one = replica(
        1, "ready", shard(state, error=error), restarts=2, ready_at=NOW - 5, state_at=NOW - 5
    )
    move = stepped(one)
    assert (move.to_state, move.restarts) == ("failed", 3)
    assert 0.8 * 4 <= move.backoff_until - NOW <= 1.2 * 4
    assert (error or "stopped without being asked") in move.error


def test_D14_who_says_goodbye_ends_its_gang_without_blame_and_is_not_silence():
    nodes = [
        node("n1"),
        node("n2", state="unreachable", agent_ended=True),
        node("n3", state="unreachable", agent_ended=True),
    ]
    # The head fell first, because its peer was stopped.
    rows = [
        shard("failed", "n1", error="peer lost"),
        shard("draining", "n2", rank=1, id_=2),
    ]
    one = replica(1, "ready", *rows, restarts=2, ready_at=NOW - 5, state_at=NOW - 5)
    move = stepped(one, nodes=nodes)
    assert (move.to_state, move.restarts, move.backoff_until) == ("failed", 2, NOW)
    assert move.error == "the agent of n2 ended and stopped its shard"
    others = [replica(i, "ready", shard("ready", f"n{i}")) for i in (2, 3)]
    lost = [replace(n, state="lost") if n.agent_ended else n for n in nodes]
    seen = snapshot(lost, [], others)
    found, notes = lifecycle.lost_nodes(seen, {n.id: n for n in lost})
    assert (set(found), notes) == ({"n2", "n3"}, ())


def test_a_stable_minute_forgets_failures():
    one = replica(1, "ready", shard("failed"), restarts=7, ready_at=NOW - 61, state_at=NOW - 61)
    assert stepped(one).restarts == 1


@pytest.mark.parametrize(("ready_s", "restarts"), [(61, 0), (59, None)])
def test_C14_an_engine_that_hangs_after_a_stable_minute_waits_as_after_its_first_failure(
    ready_s, restarts
):
    since = NOW - ready_s
    one = replica(1, "ready", shard("starting"), restarts=7, ready_at=since, state_at=since)
    move = stepped(one)
    assert (move.to_state, move.restarts) == ("starting", restarts)


def test_backoff_doubles_to_its_maximum_with_jitter_that_can_be_repeated():
    settings = Settings()
    for failures, middle in [(0, 1), (1, 2), (5, 32), (9, 300), (500, 300)]:
        waits = {lifecycle.backoff_s(settings, id_, failures, 3) for id_ in range(50)}
        assert len(waits) == 50
        assert all(0.8 * middle <= wait <= 1.2 * middle for wait in waits)
    assert lifecycle.backoff_s(settings, 1, 1, 3) == lifecycle.backoff_s(settings, 1, 1, 3)


def test_a_lost_node_fails_its_replicas_without_blaming_them():
    nodes = [node("n1", state="lost", state_reason="silent for 130 s"), node("n2"), node("n3")]
    move = stepped(replica(1, "ready", restarts=2, ready_at=NOW - 5), nodes)
    assert (move.to_state, move.error) == ("failed", "node n1 lost: silent for 130 s")
    assert (move.restarts, move.backoff_until) == (2, NOW)


def test_a_node_that_vanished_counts_as_lost():
    move = stepped(replica(1, "ready"), [node("n2"), node("n3")])
    assert move.error == "node n1 lost: it is no longer registered"


def test_stopping_does_not_wait_for_a_lost_node():
    nodes = [node("n1", state="lost"), node("n2")]
    assert stepped(replica(1, "stopping"), nodes).to_state == "gone"


def test_D29_an_unreachable_node_moves_nothing():
    nodes = [node("n1", state="unreachable"), node("n2")]
    assert stepped(replica(1, "ready"), nodes) is None


def test_D13_a_gang_with_a_lost_node_fails_as_a_whole():
    nodes = [node("n1"), node("n2", state="lost"), node("n3")]
    gang = replica(1, "ready", shard(on="n1"), shard(on="n2", rank=1, id_=2))
    assert stepped(gang, nodes).to_state == "failed"


def test_D13_a_launch_without_all_its_ranks_is_no_launch():
    assert stepped(replica(1, "starting", shard("ready", rank=1))).to_state == "failed"


def guarded(nodes, replicas, **settings):
    return lifecycle.survey(snapshot(nodes, [], replicas, **settings), NOW, 1)


def test_the_guard_keeps_everybody_and_says_why():
    nodes = [node("n1", state="lost"), node("n2")]
    around, notes = guarded(nodes, [replica(1)], guard="the database restarted 5 s ago")
    assert lifecycle.step(replica(1), around) is None
    assert notes == ("no silent node is given up: the database restarted 5 s ago; waiting: n1",)
    assert guarded([node("n1")], [replica(1)], guard="new leader")[1] == ()


def test_many_silent_at_once_move_nobody():
    nodes = [node(f"n{i}", state="lost" if i < 3 else "ready") for i in range(10)]
    replicas = [replica(i, "ready", shard(on=f"n{i}")) for i in range(10)]
    around, (note,) = guarded(nodes, replicas)
    assert not around.lost
    assert note.startswith("3 of 10 nodes are silent at once, more than the share of 0.2")
    assert len(guarded(nodes[1:], replicas[1:])[0].lost) == 0
    nodes[0] = node("n0")
    assert len(guarded(nodes, replicas)[0].lost) == 2


def test_those_about_to_be_lost_count_too():
    nodes = [node(f"n{i}", state="unreachable" if i else "lost") for i in range(4)]
    nodes += [node(f"r{i}") for i in range(6)]
    replicas = [replica(i, "ready", shard(on=f"n{i}")) for i in range(4)]
    assert not guarded(nodes, replicas)[0].lost


def test_one_of_two_nodes_may_be_lost():
    nodes = [node("n1", state="lost"), node("n2")]
    assert guarded(nodes, [replica(1)])[0].lost == {"n1": "node n1 lost: silent"}


def test_nodes_given_up_long_ago_hold_nothing_up():
    nodes = [node(f"old{i}", state="lost") for i in range(30)]
    nodes += [node("n1", state="lost"), *(node(f"r{i}") for i in range(9))]
    assert "n1" in guarded(nodes, [replica(1)])[0].lost


def test_retry_waits_for_the_backoff():
    around, _ = guarded([node()], [])
    assert lifecycle.retry(replica(1, "failed", backoff_until=NOW + 0.1), around) is None
    assert lifecycle.retry(replica(1, "failed", backoff_until=NOW), around).to_state == "pending"
    assert lifecycle.retry(replica(1, "failed"), around).to_state == "pending"


def test_an_edited_profile_is_tried_at_once():
    """What failed is not what will be started: a person who mends a typo waits for no backoff."""
    late = {"backoff_until": NOW + 300, "restarts": 9}
    around, _ = lifecycle.survey(snapshot([node()], [model("m", 1, profile("p"))]), NOW, 0)
    assert lifecycle.retry(replica(1, "failed", fingerprint="f-p", **late), around) is None
    move = lifecycle.retry(replica(1, "failed", fingerprint="older", **late), around)
    assert (move.to_state, move.restarts) == ("pending", 0)
    assert move.reason == "its profile was edited since it failed"
    of_another = replica(1, "failed", fingerprint="f-p", of="other", **late)
    assert lifecycle.retry(of_another, around) is not None
    never_launched = replica(1, "failed", fingerprint=None, **late)
    assert lifecycle.retry(never_launched, around) is None


def test_E19_a_replica_whose_slice_is_no_more_fails_without_blame():
    held = shard("ready", "n1", gpus=("MIG-a",))
    gone = gpu(0, slice=True, gone=True, healthy=False)
    nodes = [node("n1", gpus=(replace(gone, uuid="MIG-a"), gpu(1)))]
    move = stepped(replica(1, "ready", held, state_at=NOW - 5), nodes)
    assert (move.to_state, move.reason, move.restarts) == ("failed", "device gone", 0)
    assert "MIG-a" in move.error
    other = [node("n1", gpus=(replace(gone, uuid="MIG-b"), gpu(1, uuid="MIG-a")))]
    assert stepped(replica(1, "ready", held, state_at=NOW - 5), other) is None
