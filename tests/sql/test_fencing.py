"""Only the leading term writes, and only what still fits: leases, commit_plan, claims."""

from __future__ import annotations

import threading
import time
import uuid
from functools import partial

import psycopg
import pytest
from psycopg.types.json import Jsonb

from tests.sql.fleet import SICK, card, connected, snapshot

DEADLINE_S = 20.0


def take(connection, holder, duty="tick"):
    """The term, or None when another holder leads."""
    row = connection.execute(
        "select term from llmgw_core.lease_take_v1(%s, %s)", (duty, holder)
    ).fetchone()
    return row and row["term"]


def join(connection):
    """Registers a controller that is present as long as this connection lives."""
    me = uuid.uuid4()
    number = connection.execute(
        "select llmgw_core.controller_join_v1(%s, 'control', 'h', 1, '0') as n", (me,)
    ).fetchone()["n"]
    assert connection.execute("select pg_try_advisory_lock(7719, %s) as ok", (number,)).fetchone()[
        "ok"
    ]
    return me


def wait_until_blocked(admin, connection):
    """Returns once a backend waits for a lock, seen in pg_stat_activity."""
    deadline = time.monotonic() + DEADLINE_S
    pid = connection.info.backend_pid
    while time.monotonic() < deadline:
        row = admin.execute(
            "select wait_event_type as w from pg_stat_activity where pid = %s", (pid,)
        ).fetchone()
        if row["w"] == "Lock":
            return
    raise AssertionError(f"backend {pid} never waited for a lock")


def in_thread(call):
    """Runs a call in a thread; returns the thread and the list its result or error lands in."""
    found = []

    def run():
        try:
            found.append(call())
        except psycopg.Error as error:
            found.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread, found


def ended(thread):
    """Joins a thread that must end in time."""
    thread.join(DEADLINE_S)
    assert not thread.is_alive()


def sqlstate(connection, statement, *args):
    """The SQLSTATE with which a statement is refused."""
    with pytest.raises(psycopg.Error) as caught:
        connection.execute(statement, args)
    return caught.value.sqlstate


@pytest.fixture
def second(database):
    """Another controller's connection."""
    with connected(database, database.controller_url) as connection:
        yield connection


def test_F07_a_stale_term_is_refused_and_no_row_changes(fleet):
    fleet.model("m")
    term = fleet.lead()
    before = snapshot(fleet.admin)
    item = {"kind": "create", "model": "m", "reason": "x"}
    for stale in (term - 1, term + 1, 0, None):
        plan = "select llmgw_core.commit_plan_v1(%s, %s)"
        assert sqlstate(fleet.controller, plan, stale, Jsonb([item])) == "LG001"
        attempts = "select llmgw_core.record_attempts_v1(%s, '[]')"
        assert sqlstate(fleet.controller, attempts, stale) == "LG001"
        notes = "select llmgw_core.tick_notes_v1(%s, array['x'])"
        assert sqlstate(fleet.controller, notes, stale) == "LG001"
        assert sqlstate(fleet.controller, "select llmgw_core.housekeep_v1(%s)", stale) == "LG001"
    assert snapshot(fleet.admin) == before


def test_F04_a_live_holder_keeps_its_duty_and_a_dead_one_is_replaced_at_once(
    fleet, second, database
):
    with connected(database, database.controller_url) as listening:
        me, other = join(listening), join(second)
        assert take(fleet.controller, me) == 1
        assert take(second, other) is None
        assert take(fleet.controller, me) == 1, "renewing keeps the term"
    # Its connection is closed: presence is gone although the lease has not expired.
    deadline = time.monotonic() + DEADLINE_S
    while (term := take(second, other)) is None:
        assert time.monotonic() < deadline
    assert term == 2
    assert take(fleet.controller, me) is None, "the former leader does not get it back"


def test_F07_a_frozen_leader_is_replaced_after_the_ttl_and_its_late_commit_changes_nothing(
    fleet, second
):
    fleet.model("m")
    me, other = join(fleet.controller), join(second)
    term = take(fleet.controller, me)
    assert take(second, other) is None
    fleet.admin.execute(
        "update llmgw_core.lease set expires_at = clock_timestamp() - interval '1 ms'"
    )
    assert take(second, other) == term + 1
    before = snapshot(fleet.admin)
    item = {"kind": "create", "model": "m", "reason": "late"}
    plan = "select llmgw_core.commit_plan_v1(%s, %s)"
    assert sqlstate(fleet.controller, plan, term, Jsonb([item])) == "LG001"
    assert take(fleet.controller, me) is None
    assert snapshot(fleet.admin, without=["lease"]) == {
        k: v for k, v in before.items() if k != "lease"
    }


def test_an_expired_lease_taken_again_by_its_own_holder_gets_a_new_term(fleet):
    term = fleet.lead()
    fleet.admin.execute(
        "update llmgw_core.lease set expires_at = clock_timestamp() - interval '1 ms'"
    )
    assert fleet.lead() == term + 1


def test_resigning_frees_the_duty_and_the_term_goes_on(fleet, second):
    me, other = join(fleet.controller), join(second)
    assert take(fleet.controller, me) == 1
    second.execute("select llmgw_core.lease_resign_v1('tick', %s)", (other,))
    assert take(second, other) is None, "only the holder can resign"
    fleet.controller.execute("select llmgw_core.lease_resign_v1('tick', %s)", (me,))
    assert take(second, other) == 2


def test_F07_a_takeover_waits_for_a_commit_in_flight(fleet, second):
    fleet.model("m")
    term = fleet.lead()
    with fleet.controller.transaction():
        assert fleet.commit({"kind": "create", "model": "m", "reason": "in flight"}, term=term) == [
            "ok"
        ]
        # The holder is not present, so the other may take over, but not during this commit.
        thread, found = in_thread(lambda: take(second, uuid.uuid4()))
        wait_until_blocked(fleet.admin, second)
        assert found == []
    ended(thread)
    assert found == [term + 1]
    assert fleet.value("select count(*) from llmgw_core.replica where reason = 'in flight'") == 1


def test_a_node_that_changed_since_the_snapshot_refuses_that_item_only(fleet):
    fleet.model("m")
    first, other = fleet.node("n1"), fleet.node("n2")
    a, b = fleet.replica("m"), fleet.replica("m")
    items = [fleet.place(a, fleet.part(first)), fleet.place(b, fleet.part(other))]
    fleet.controller.execute("select llmgw.set_node_intent('n1', 'ready')")  # alloc_gen moves on
    outcomes = fleet.commit(*items)
    assert outcomes == ["node n1 changed since the snapshot", "ok"]
    assert fleet.value("select state from llmgw_core.replica where id = %s", a) == "pending"
    refused = fleet.rows("select reason, node from llmgw.decisions where kind = 'refuse'")
    assert refused == [{"reason": "node n1 changed since the snapshot", "node": "n1"}]


@pytest.mark.parametrize("intent", ["cordoned", "draining"])
def test_nothing_is_placed_on_a_node_that_the_operator_took_away(fleet, intent):
    fleet.model("m")
    node = fleet.node("n1")
    replica = fleet.replica("m")
    fleet.controller.execute("select llmgw.set_node_intent('n1', %s)", (intent,))
    assert fleet.commit(fleet.place(replica, fleet.part(node))) == [f"node n1 is {intent}"]


def test_a_gang_lands_whole_or_not_at_all(fleet):
    fleet.model("m")
    one, two = fleet.node("n1", gpus=1), fleet.node("n2", gpus=1)
    fleet.running("m", two, 0)
    before = snapshot(fleet.admin, without=["decision", "lease", "node", "replica"])
    gang = fleet.replica("m")
    [outcome] = fleet.commit(fleet.place(gang, fleet.part(one, 0), fleet.part(two, 0)))
    assert outcome == "gpu n2-0 of node n2 is taken"
    after = snapshot(fleet.admin, without=["decision", "lease", "node", "replica"])
    assert {k: v for k, v in after.items() if not k.startswith("decision")} == {
        k: v for k, v in before.items() if not k.startswith("decision")
    }
    assert fleet.rows("select state, launch from llmgw_core.replica where id = %s", gang) == [
        {"state": "pending", "launch": 0}
    ]
    assert fleet.sync(one)["assignments"] == []


BAD = [
    None,
    7,
    "x",
    [],
    {},
    {"kind": "nonsense"},
    {"kind": "create"},
    {"kind": "create", "model": "gone"},
    {"kind": "place"},
    {"kind": "place", "replica_id": "many"},
    {"kind": "place", "replica_id": 10**30},
    {"kind": "move", "replica_id": 1, "from_state": "pending", "to_state": "ready"},
    {"kind": "move", "replica_id": 1, "from_state": "pending", "to_state": "nowhere"},
    {"kind": "move", "replica_id": 1, "from_state": "ready", "to_state": "gone"},
    {
        "kind": "move",
        "replica_id": 1,
        "from_state": "pending",
        "to_state": "gone",
        "backoff_until": "x",
    },
    {"kind": "move", "replica_id": None, "shards": None},
    {"kind": "move", "replica_id": {}, "shards": 3},
]
BAD_SHARDS = [
    None,
    7,
    {},
    [],
    [None],
    [{}],
    [{"rank": 0}],
    [{"rank": "x", "node_id": "n1"}],
    [{"rank": 0, "node_id": "nope"}],
]
BAD_PARTS = [
    {"basis": None},
    {"basis": "x"},
    {"port": 0},
    {"port": None},
    {"rank": -1},
    {"gpus": "x"},
    {"gpus": ["nope"]},
    {"cpus": -1},
    {"cpus": 1000},
    {"memory_mib": 10**9},
    {"memory_mib": 0},
]


def test_D10_one_bad_item_never_stops_the_others(fleet):
    fleet.model("m")
    node = fleet.node("n1")
    pending, good = fleet.replica("m"), fleet.replica("m")
    assert pending == 1
    bad = [*BAD, *({**fleet.place(pending), "shards": shards} for shards in BAD_SHARDS)]
    bad += [fleet.place(pending, {**fleet.part(node), **odd}) for odd in BAD_PARTS]
    bad += [{**fleet.place(pending, fleet.part(node)), "spec": None}]
    twice = {**fleet.part(node), "rank": 0}
    bad += [{**fleet.place(pending), "shards": [twice, twice]}]
    mixed = [entry for item in bad for entry in (item, {"kind": "create", "model": "m"})]
    outcomes = fleet.commit(*mixed, fleet.place(good, fleet.part(node)))
    assert outcomes.pop() == "ok"
    assert set(outcomes[1::2]) == {"ok"}
    passed = [item for item, outcome in zip(bad, outcomes[::2], strict=True) if outcome == "ok"]
    assert passed == []
    assert fleet.rows("select state from llmgw_core.replica where id = 1") == [{"state": "pending"}]
    assert fleet.value("select count(*) from llmgw_core.decision where kind = 'refuse'") == len(bad)


@pytest.mark.slow
def test_D02_two_commits_of_the_same_cards_one_wins_and_nothing_deadlocks(fleet, second):
    fleet.model("m")
    nodes = [fleet.node(name, gpus=2) for name in ("n1", "n2")]
    term = fleet.lead()
    plan = "select outcome from llmgw_core.commit_plan_v1(%s, %s) order by position"
    for _ in range(100):
        replicas = [fleet.replica("m") for _ in range(4)]
        mine = [fleet.place(replicas[i], fleet.part(n, 0, 1)) for i, n in enumerate(nodes)]
        theirs = [fleet.place(replicas[2 + i], fleet.part(n, 1, 0)) for i, n in enumerate(nodes)]
        gate = threading.Barrier(2)

        def commit(connection, items, gate=gate):
            gate.wait(DEADLINE_S)
            rows = connection.execute(plan, (term, Jsonb(items))).fetchall()
            return [row["outcome"] for row in rows]

        runs = [
            in_thread(partial(commit, fleet.controller, mine)),
            in_thread(partial(commit, second, theirs[::-1])),
        ]
        for thread, _found in runs:
            ended(thread)
        outcomes = [outcome for _thread, found in runs for outcome in found[0]]
        assert sorted(outcome == "ok" for outcome in outcomes) == [False, False, True, True], (
            outcomes
        )
        assert fleet.value("select count(*) from llmgw_core.gpu_claim") == 4
        holders = fleet.value(
            "select max(n) from"
            " (select count(*) n from llmgw_core.gpu_claim group by node_id, gpu_uuid) x"
        )
        assert holders == 1
        fleet.admin.execute(
            "update llmgw_core.shard set state = 'stopped' where state = 'assigned'"
        )
        assert fleet.value("select count(*) from llmgw_core.gpu_claim") == 0


def collide(database, fleet, second, blocked_row, leader, agent):
    """Lets a commit and a report meet on rows: both wait, the commit first, then may go on.

    ``blocked_row`` is locked until both wait, so that each holds what it took before.
    """
    with database.connect() as blocker, blocker.transaction():
        blocker.execute(blocked_row)
        runs = [in_thread(leader)]
        wait_until_blocked(fleet.admin, second)
        runs.append(in_thread(agent))
        wait_until_blocked(fleet.admin, fleet.agent)
    for thread, found in runs:
        ended(thread)
        assert not isinstance(found[0], psycopg.Error), found


def test_a_report_and_a_commit_of_the_same_shards_do_not_deadlock(database, fleet, second):
    fleet.model("m")
    node = fleet.node("n1")
    placed = [fleet.running("m", node) for _ in range(2)]
    term = fleet.lead()
    move = {"kind": "move", "from_state": "ready", "to_state": "failed"}
    moves = Jsonb([{**move, "replica_id": replica} for replica, _ in placed[::-1]])
    words = [{"shard": shard, "state": "draining"} for _, shard in placed]
    collide(
        database,
        fleet,
        second,
        f"select from llmgw_core.shard where id = {placed[1][1]} for update",
        lambda: second.execute("select llmgw_core.commit_plan_v1(%s, %s)", (term, moves)),
        lambda: fleet.sync(node, shards=words),
    )
    assert fleet.rows("select distinct state, desired from llmgw_core.shard") == [
        {"state": "draining", "desired": "stopped"}
    ]


def test_a_list_of_cards_and_a_commit_that_claims_them_do_not_deadlock(database, fleet, second):
    fleet.model("m")
    node = fleet.node("n1", gpus=2)
    term = fleet.lead()
    items = Jsonb([fleet.place(fleet.replica("m"), fleet.part(node, 1, 0))])
    facts = [card(index, uuid=f"n1-{index}") for index in range(2)]
    collide(
        database,
        fleet,
        second,
        "select from llmgw_core.gpu where uuid = 'n1-1' for update",
        lambda: second.execute("select llmgw_core.commit_plan_v1(%s, %s)", (term, items)),
        lambda: fleet.report(node, "gpus", facts),
    )
    assert fleet.value("select count(*) from llmgw_core.gpu_claim") == 2


def test_unhealthy_and_unknown_cards_are_not_placed_on(fleet):
    fleet.model("m")
    node = fleet.node("n1", gpus=2)
    fleet.admin.execute(f"update llmgw_core.gpu set {SICK} where uuid = 'n1-1'")
    replica = fleet.replica("m")
    assert fleet.commit(fleet.place(replica, fleet.part(node, 1))) == [
        "a gpu of node n1 is gone or unhealthy"
    ]
    assert fleet.commit(fleet.place(replica, fleet.part(node, 5))) == [
        "a gpu of node n1 is gone or unhealthy"
    ]
    assert fleet.commit(fleet.place(replica, fleet.part(node, 0))) == ["ok"]


def test_stopping_tells_the_node_and_failed_replicas_start_again(fleet):
    fleet.model("m")
    node = fleet.node("n1", gpus=1)
    replica, shard = fleet.running("m", node, 0)
    gen = fleet.sync(node)["gen"]
    assert fleet.move(replica, "failed", error="it broke") == ["ok"]
    answer = fleet.sync(node, have_gen=gen)
    assert answer["gen"] > gen
    assert [(a["shard"], a["desired"]) for a in answer["assignments"]] == [(shard, "stopped")]
    fleet.say(node, "stopped", shard=shard)
    assert fleet.move(replica, "pending") == ["ok"]
    assert fleet.commit(fleet.place(replica, fleet.part(node, 0))) == ["ok"]
    assert fleet.rows("select launch, error, endpoint from llmgw_core.replica") == [
        {"launch": 2, "error": "it broke", "endpoint": None}
    ]


@pytest.mark.parametrize("addr", ["10.0.0.1", "fd00::1"])
def test_a_ready_replica_has_the_address_of_rank_0(fleet, addr):
    fleet.model("m")
    node = fleet.node("n1", mgmt_addr=addr)
    fleet.running("m", node, port=20007)
    host = f"[{addr}]" if ":" in addr else addr
    assert fleet.value("select endpoint from llmgw.replicas") == f"http://{host}:20007"
