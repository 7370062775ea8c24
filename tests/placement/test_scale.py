"""How many replicas a model has, from what is asked of it, and who makes room for whom."""

from __future__ import annotations

from dataclasses import replace

import pytest

from controller.placement.model import Asked, Create, Move, Place, Settings
from controller.reconcile import demand
from controller.reconcile.decide import decide
from controller.reconcile.demand import Standing
from tests.placement.made_fleet import model, node, profile, replica, shard, snapshot, whole

NOW = 10_000.0
SETTINGS = Settings()
LONG_AGO = NOW - 5000


def ready(id_=1, since=LONG_AGO, used=None, busy=0, of="m", on="n1", **facts):
    """A ready replica that ran its last request at `used`."""
    known = {"created_at": since, "state_at": since, "ready_at": since, "last_used_at": used}
    known |= {"in_flight": busy} | facts
    return replica(id_, "ready", shard("ready", on, id_=id_, gpus=(f"{on}-0",)), of=of, **known)


def wish(model_, *replicas, now=NOW, **settings):
    standings = [Standing(r, r.state, moved=False) for r in replicas]
    return demand.desired(model_, standings, now, replace(SETTINGS, **settings)).count


def wants(low, high, idle=None, **asked):
    facts = {"concurrency": 4.0} | asked
    return model("m", low, max_replicas=high, idle_timeout_s=idle, asked=Asked(**facts))


UP = [
    ((1, 1), {"in_flight": 100}, 0, 1),
    ((2, 5), {}, 0, 2),
    ((1, 5), {"in_flight": 4}, 1, 1),
    ((1, 5), {"in_flight": 5}, 1, 2),
    ((1, 5), {"in_flight": 5, "waiting": 4}, 1, 3),
    ((1, 5), {"in_flight": 100}, 1, 5),
    ((1, 5), {"in_flight": 9, "concurrency": None}, 1, 2),  # the default is 8
    ((0, 5), {}, 0, 0),
    ((0, 5), {"waiting": 1}, 0, 1),
    ((0, 5), {"waiting": 9}, 0, 3),
    ((0, 5), {"wanted_at": NOW - 9}, 0, 1),  # its caller left; the next one will be glad
    ((0, 5), {"wanted_at": NOW - 11}, 0, 0),
    ((0, 0), {"waiting": 5}, 0, 0),
    ((0, 5), {"heard": False}, 0, 0),
]


@pytest.mark.parametrize(("bounds", "asked", "have", "expected"), UP)
def test_more_comes_at_once(bounds, asked, have, expected):
    there = [ready(n, since=NOW - 1) for n in range(have)]
    assert wish(wants(*bounds, **asked), *there) == expected


DOWN = [
    # min, max, ready since, last minute's peak -> of 3
    (1, 5, LONG_AGO, 0, 1),
    (1, 5, LONG_AGO, 3, 1),  # 3 of 4 is under 80 %
    (1, 5, LONG_AGO, 4, 2),  # 4 of 4 is not
    (1, 5, LONG_AGO, 7, 3),
    (2, 5, LONG_AGO, 0, 2),
    (0, 5, LONG_AGO, 1, 1),
    (1, 5, NOW - 59, 0, 3),  # the last of them has just come
    (1, 5, NOW - 61, 0, 1),
    (1, 2, NOW - 1, 0, 2),  # a smaller max counts at once
    (1, 5, LONG_AGO, 50, 3),
]


@pytest.mark.parametrize(("low", "high", "since", "peak", "expected"), DOWN)
def test_fewer_only_after_a_quiet_minute_and_the_residence(low, high, since, peak, expected):
    there = [ready(1, used=NOW - 1), ready(2, used=NOW - 1), ready(3, since=since, used=NOW - 1)]
    assert wish(wants(low, high, peak=peak), *there) == expected


IDLE = [
    # idle timeout, ready since, last use, in flight -> stays
    (100, LONG_AGO, NOW - 101, 0, False),
    (100, LONG_AGO, NOW - 99, 0, True),
    (100, LONG_AGO, NOW - 101, None, True),  # unknown is not idle
    (100, LONG_AGO, NOW - 101, 1, True),
    (100, NOW - 99, None, 0, True),
    (100, NOW - 101, None, 0, False),  # every router knows it and none ever used it
    (10, NOW - 59, NOW - 50, 0, True),  # minimum residence
    (None, LONG_AGO, NOW - 899, 0, True),
    (None, LONG_AGO, NOW - 901, 0, False),
]


@pytest.mark.parametrize(("idle", "since", "used", "busy", "stays"), IDLE)
def test_D16_idle_is_counted_from_the_end_of_the_last_request(idle, since, used, busy, stays):
    one = ready(since=since, used=used, busy=busy)
    assert wish(wants(0, 1, idle), one) == int(stays)
    # One that is used keeps no other: but to nothing it goes only when all are idle.
    assert wish(wants(0, 2, idle), one, ready(2, used=NOW - 1)) >= 1
    assert wish(wants(0, 1, idle, heard=False), one) == 1


def test_D19_a_load_goes_on_when_its_callers_have_left():
    loading = replica(1, "starting", created_at=LONG_AGO, state_at=LONG_AGO)
    assert wish(wants(0, 1, 10, wanted_at=LONG_AGO), loading) == 1
    fresh = replica(1, "pending", created_at=NOW - 59)
    assert wish(wants(0, 1, 10, wanted_at=NOW - 59), fresh) == 1
    assert wish(wants(0, 1, 10, wanted_at=NOW - 61), replace(fresh, created_at=LONG_AGO)) == 0


def test_an_idle_replica_leaves_before_a_busy_one_and_what_leaves_drains():
    busy = [ready(n, used=NOW - 900, busy=1) for n in (1, 2)]
    plan = decide(
        snapshot([node("n1", 8)], [wants(1, 5, peak=2)], [*busy, ready(3, used=NOW - 1)]), NOW
    )
    (first, *rest) = [i for i in plan.items if isinstance(i, Move)]
    assert (first.replica_id, first.to_state) == (1, "draining")
    assert [m.replica_id for m in rest] == [3]
    plan = decide(
        snapshot([node("n1", 8)], [wants(2, 5, peak=2)], [*busy, ready(3, used=NOW - 1)]), NOW
    )
    assert [(i.replica_id, i.to_state) for i in plan.items] == [(3, "draining")]


def test_a_wake_says_why():
    plan = decide(snapshot([node()], [wants(0, 2, waiting=3)], []), NOW)
    (create,) = plan.items
    assert create == Create("m", "1 wanted (3 waiting and 0 running, 4 at once on each), 0 there")


# -- making room -----------------------------------------------------------------------------------


def one_slot(*claims):
    """A node with one card, held by these shards."""
    made = node("n1", 1)
    card = replace(made.gpus[0], claims=whole(*claims))
    return replace(made, gpus=(card,), ports_taken=frozenset({20000}), shards_live=len(claims))


def on_demand(name, priority=0, low=0, high=1, **asked):
    facts = {"max_replicas": high, "priority": priority, "idle_timeout_s": 1e9}
    return model(name, low, **facts, asked=Asked(**asked))


def contest(guest, *, wanting=None, of=None, waited=1, restarts=0):
    """Model `new` waits while `guest` (of model `old`) holds the only card; who is moved."""
    wanting = wanting or on_demand("new", waiting=1)
    since = {"created_at": NOW - waited, "state_at": NOW - waited}
    pending = replica(9, "pending", of="new", restarts=restarts, **since)
    models = [of or on_demand("old"), wanting]
    plan = decide(snapshot([one_slot(guest.id)], models, [guest, pending]), NOW)
    assert not plan.notes
    return [i for i in plan.items if isinstance(i, Move)]


def test_the_idle_one_makes_room_and_the_decision_says_for_whom():
    (move,) = contest(ready(1, used=NOW - 120, of="old"))
    assert (move.to_state, move.room_for) == ("draining", "new")
    assert move.reason == "makes room for new: idle for 120 s, priority 0 against 0"


STAYS = {
    "busy": (ready(1, of="old", busy=1), {}),
    "unknown": (ready(1, of="old", busy=None), {}),
    "has just come": (ready(1, of="old", since=NOW - 59), {}),
    "higher priority": (ready(1, of="old"), {"of": on_demand("old", 1)}),
    "equal and not on demand": (ready(1, of="old"), {"of": on_demand("old", low=1)}),
    "lower, but its last": (
        ready(1, of="old"),
        {"of": on_demand("old", -1, low=1)},
    ),
    "asked for itself": (ready(1, of="old"), {"of": on_demand("old", waiting=1)}),
    "equally in need": (ready(1, of="old"), {"of": on_demand("old", in_flight=1)}),
    "no router heard": (ready(1, of="old"), {"of": on_demand("old", heard=False)}),
    "nobody waits for": (ready(1, of="old"), {"wanting": on_demand("new", wanted_at=NOW - 20)}),
    "it would not help": (
        ready(1, of="old"),
        {"wanting": model("new", 0, profile(gpus=2), max_replicas=1, asked=Asked(waiting=1))},
    ),
}  # fmt: skip


@pytest.mark.parametrize("why", STAYS)
def test_nobody_makes_room_who(why):
    guest, facts = STAYS[why]
    assert contest(guest, **facts) == []


def test_a_lower_priority_makes_room_even_for_a_model_that_is_not_on_demand():
    (move,) = contest(ready(1, of="old"), of=on_demand("old", -1), wanting=model("new", 1))
    assert move.room_for == "new"


def test_who_has_just_been_asked_to_leave_is_waited_for():
    leaving = replica(2, "draining", of="x", in_flight=1, state_at=NOW - 1, room_for="new")
    pending = replica(9, "pending", of="new", created_at=NOW - 1)
    models = [on_demand("old"), on_demand("x"), on_demand("new", waiting=1)]
    fleet = snapshot([one_slot(1)], models, [ready(1, of="old"), leaving, pending])
    assert [i for i in decide(fleet, NOW).items if isinstance(i, Move)] == []


def test_the_lowest_priority_idle_longest_that_helps_goes_first():
    small = replace(one_slot(5), id="n0", gpus=(replace(one_slot(5).gpus[0], memory_mib=10),))
    nodes = [small] + [
        replace(one_slot(n), id=f"n{n}", gpus=(replace(one_slot(n).gpus[0], uuid=f"n{n}-0"),))
        for n in (1, 2, 3)
    ]
    there = [
        ready(1, used=NOW - 300, of="a", on="n1"),
        ready(2, used=NOW - 400, of="b", on="n2"),
        ready(3, used=NOW - 100, of="c", on="n3"),
        ready(5, used=NOW - 999, of="d", on="n0"),
    ]
    big = profile(gpu_memory_mib=1000)
    models = [on_demand("a"), on_demand("b"), on_demand("c", -1), on_demand("d", -1)]
    models += [model("new", 0, big, max_replicas=1, priority=1, asked=Asked(waiting=1))]
    pending = replica(9, "pending", of="new", created_at=NOW - 1)

    def who(*without):
        members = [r for r in there if r.id not in without]
        moves = decide(snapshot(nodes, models, [*members, pending]), NOW).items
        return [m.replica_id for m in moves if isinstance(m, Move)]

    assert who() == [3]  # the lowest priority; the other of its rank stands on too small a card
    assert who(3) == [2]
    assert who(3, 2) == [1]
    assert who(1, 2, 3) == []


BUSY = ready(1, of="old", busy=2)
GIVES_WAY = {
    # the guest, its model -> whether it is asked to leave for one that waits past the limit
    "on demand": (BUSY, {}, True),
    "lower": (BUSY, {"of": on_demand("old", -1)}, True),
    "in need of all it has": (BUSY, {"of": on_demand("old", in_flight=99)}, True),
    "higher": (BUSY, {"of": on_demand("old", 1)}, False),
    "the last of a model that always runs": (BUSY, {"of": on_demand("old", low=1)}, False),
    "has just come": (ready(1, of="old", busy=2, since=NOW - 59), {}, False),
    "unknown": (ready(1, of="old", busy=None), {}, False),
    "nobody waits any more": (BUSY, {"wanting": on_demand("new", wanted_at=NOW - 20)}, False),
}


@pytest.mark.parametrize("why", GIVES_WAY)
def test_D17_a_busy_one_drains_only_for_who_waits_past_the_limit(why):
    guest, facts, leaves = GIVES_WAY[why]
    assert contest(guest, waited=29, **facts) == []
    moves = contest(guest, waited=31, **facts)
    assert [(m.replica_id, m.to_state, m.room_for) for m in moves] == (
        [(1, "draining", "new")] if leaves else []
    )
    for move in moves:
        assert move.reason.startswith("makes room for new: it has waited long, what runs here (2)")
        # It is not stopped before routers end its requests themselves.
        assert move.drain_deadline - NOW == 3600


def test_D17_running_requests_outlast_the_usual_drain_deadline():
    facts = {"state_at": NOW - 700, "drain_deadline": NOW + 2900, "room_for": "new"}
    leaving = replica(1, "draining", shard("ready", "n1"), of="old", in_flight=1, **facts)
    pending = replica(9, "pending", of="new", created_at=NOW - 800)
    models = [on_demand("old"), on_demand("new", waiting=1)]
    assert decide(snapshot([one_slot(1)], models, [leaving, pending]), NOW).items == ()
    done = replace(leaving, in_flight=0)
    (move,) = decide(snapshot([one_slot(1)], models, [done, pending]), NOW).items
    assert (move.to_state, move.reason) == ("stopping", "no request is running any more")


def test_D17_one_that_never_comes_up_sends_busy_ones_away_ever_more_rarely():
    assert contest(BUSY, waited=59, restarts=1) == []
    assert contest(BUSY, waited=61, restarts=1)
    assert contest(BUSY, waited=30 * 2**6 - 1, restarts=99) == []
    assert contest(BUSY, waited=30 * 2**6 + 1, restarts=99)


def test_D17_an_idle_one_leaves_before_a_busy_one_of_lower_priority():
    cards = [
        replace(one_slot(n), id=f"n{n}", gpus=(replace(one_slot(n).gpus[0], uuid=f"n{n}-0"),))
        for n in (1, 2)
    ]
    there = [ready(1, of="low", busy=1, on="n1"), ready(2, of="even", used=NOW - 1, on="n2")]
    models = [on_demand("low", -1, in_flight=1), on_demand("even"), on_demand("new", waiting=1)]
    pending = replica(9, "pending", of="new", created_at=NOW - 99, state_at=NOW - 99)
    (move,) = decide(snapshot(cards, models, [*there, pending]), NOW).items
    assert move.replica_id == 2


def test_D17_who_serves_already_does_not_send_busy_equals_away():
    cards = [
        replace(one_slot(n), id=f"n{n}", gpus=(replace(one_slot(n).gpus[0], uuid=f"n{n}-0"),))
        for n in (1, 2)
    ]
    there = [ready(1, of="old", busy=1, on="n1"), ready(2, of="new", busy=9, on="n2")]
    pending = replica(9, "pending", of="new", created_at=NOW - 99, state_at=NOW - 99)

    def moves(priority):
        new = on_demand("new", priority, high=2, in_flight=9)
        fleet = snapshot(cards, [on_demand("old", in_flight=1), new], [*there, pending])
        return [i.replica_id for i in decide(fleet, NOW).items if isinstance(i, Move)]

    assert moves(0) == []
    assert moves(1) == [1]


def test_places_go_to_the_higher_priority_first():
    models = [model("a", 1), model("b", 1, priority=1)]
    waiting = [
        replica(1, "pending", of="a", created_at=1.0),
        replica(2, "pending", of="b", created_at=2.0),
    ]
    plan = decide(snapshot([node("n1", 1)], models, waiting), NOW)
    assert [i.model for i in plan.items if isinstance(i, Place)] == ["b"]


def test_D26_a_drain_that_makes_room_is_not_taken_back_while_the_other_waits():
    leaving = replica(1, "draining", of="old", in_flight=1, state_at=NOW - 1, room_for="new")
    models = [on_demand("old", waiting=1), on_demand("new", waiting=1)]
    pending = replica(9, "pending", of="new", created_at=NOW - 1)
    plan = decide(snapshot([one_slot(1)], models, [leaving, pending]), NOW)
    assert [i.model for i in plan.items if isinstance(i, Create)] == ["old"]
    assert not [i for i in plan.items if isinstance(i, Move)]
    # Once the other is served or gone, it is.
    (move,) = decide(snapshot([one_slot(1)], models[:1], [leaving]), NOW).items
    assert move.to_state == "ready"


def test_several_nodes_are_freed_one_replica_at_a_time():
    nodes = [
        replace(one_slot(n), id=f"n{n}", gpus=(replace(one_slot(n).gpus[0], uuid=f"n{n}-0"),),
                mgmt_addr=f"10.0.0.{n}")
        for n in (1, 2)
    ]  # fmt: skip
    there = [ready(n, used=NOW - 100 * n, of="old", on=f"n{n}") for n in (1, 2)]
    gang = profile(shards=2, fabric="any")
    models = [
        model("old", 0, max_replicas=2, idle_timeout_s=1e9, asked=Asked(peak=99)),
        model("new", 0, gang, max_replicas=1, asked=Asked(waiting=1)),
    ]
    pending = replica(9, "pending", of="new", created_at=NOW - 1, state_at=NOW - 1)
    (move,) = decide(snapshot(nodes, models, [*there, pending]), NOW).items
    assert (move.replica_id, move.room_for) == (1, "new")
    freed = [replace(nodes[0], gpus=(replace(nodes[0].gpus[0], claims=()),)), nodes[1]]
    (move,) = decide(snapshot(freed, models, [there[1], pending]), NOW).items
    assert (move.replica_id, move.room_for) == (2, "new")
    # With one that cannot leave nobody leaves in vain.
    stuck = replace(there[0], in_flight=1)
    assert decide(snapshot(nodes, models, [stuck, there[1], pending]), NOW).items == ()


def test_a_number_that_holds_is_the_desired_one():
    for load in range(12):
        for peak in range(load, 14):
            for count in range(8):
                facts = wants(1, 5, in_flight=load, peak=peak)
                if demand.holds(facts, count, NOW, SETTINGS):
                    there = [ready(n, used=NOW - 1) for n in range(count)]
                    assert wish(facts, *there) == count
