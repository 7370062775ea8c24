"""Whole plans: scaling, draining, bad rows, races; on a simulated fleet where time matters."""

from __future__ import annotations

from dataclasses import replace

import pytest

from controller.placement.model import Create, Move, Place
from controller.reconcile.decide import MOST_NOTES, decide
from controller.reconcile.scale import MOST_CREATES
from tests.placement.made_fleet import (
    GIB,
    gpu,
    model,
    node,
    profile,
    replica,
    shard,
    snapshot,
    whole,
)
from tests.placement.simulated import Fleet

NOW = 10_000.0


def fleet(wanted=1, nodes=2, **facts):
    made = {f"n{i}": node(f"n{i}") for i in range(1, nodes + 1)}
    return Fleet(made, {"m": model("m", wanted)}, **facts)


def moved(plan):
    return [(i.replica_id, i.to_state) for i in plan.items if isinstance(i, Move)]


def test_wanted_replicas_are_created_placed_and_then_nothing_more():
    one = fleet(3)
    one.settle()
    assert one.states_of() == ["ready"] * 3
    assert decide(one.snapshot(), one.now, 0).items == ()


def test_on_demand_models_have_no_replica_unless_woken():
    one = fleet(0)
    one.settle()
    assert one.states_of() == []


def test_a_plan_creates_a_bounded_number():
    plan = decide(snapshot([node()], [model("m", 500_000)], []), NOW)
    assert plan.items == (Create("m", "500000 wanted, 0 there"),) * MOST_CREATES


def test_scale_down_takes_those_who_serve_least():
    replicas = [
        replica(1, "ready", last_used_at=50.0),
        replica(2, "ready", last_used_at=10.0),
        replica(3, "starting", state_at=NOW),
        replica(4, "failed", backoff_until=NOW + 9),
        replica(5, "pending"),
    ]
    for wanted, expected in [
        (4, [(5, "gone")]),
        (3, [(4, "gone"), (5, "gone")]),
        (2, [(3, "stopping"), (4, "gone"), (5, "gone")]),
        (1, [(2, "draining"), (3, "stopping"), (4, "gone"), (5, "gone")]),
    ]:
        plan = decide(snapshot([node()], [model("m", wanted)], replicas), NOW)
        assert moved(plan) == expected
    assert plan.items[0].drain_deadline == NOW + 600


def test_a_replica_that_just_failed_is_what_scale_down_takes():
    replicas = [replica(1, "ready", shard("failed"), ready_at=NOW - 5), replica(2, "ready")]
    assert moved(decide(snapshot([node()], [model("m", 1)], replicas), NOW)) == [(1, "failed")]


def test_a_removed_model_winds_down_to_nothing():
    one = fleet(2)
    one.settle()
    del one.models["m"]
    one.settle()
    assert one.states_of() == []
    reasons = {i.reason for i in one.log if isinstance(i, Move) and i.to_state == "draining"}
    assert reasons == {"its model left the catalog"}


def test_scaling_up_again_takes_a_draining_replica_back():
    replicas = [replica(1, "draining", in_flight=2, state_at=NOW)]
    plan = decide(snapshot([node()], [model("m", 1)], replicas), NOW)
    assert moved(plan) == [(1, "ready")]


def test_drain_moves_one_at_a_time_and_only_once_the_replacement_is_ready():
    one = fleet(2, nodes=3)
    one.settle()
    one.models["m"] = model("m", 4)
    one.settle()
    one.states["n1"] = "draining"
    for _ in range(60):
        one.tick()
        assert len(one.nodes_of(state="ready")) >= 4, "capacity must not fall during a drain"
        assert sum(s in ("draining", "stopping") for s in one.states_of()) <= 1
    assert one.states_of() == ["ready"] * 4
    assert "n1" not in one.nodes_of()
    assert not one.tick().items
    assert "node n1 is draining" in {i.reason for i in one.log if isinstance(i, Move)}


@pytest.mark.parametrize(("nodes", "cards"), [(4, 1), (3, 2)])
def test_a_drain_moves_a_gang_as_a_whole_and_the_new_one_is_ready_first(nodes, cards):
    """Also where the new one needs the nodes that stay of the old one."""
    wanted = model("m", 1, profile(shards=2, fabric="any"))
    one = Fleet({f"n{i}": node(f"n{i}", cards) for i in range(nodes)}, {"m": wanted})
    one.settle()
    leaving = one.nodes_of()[0]
    one.states[leaving] = "draining"
    for _ in range(40):
        one.tick()
        assert len(one.nodes_of(state="ready")) >= 2, "never less than a whole one"
    assert one.states_of() == ["ready"]
    assert leaving not in one.nodes_of()
    assert not [s for s in one.shards.values() if not s.over and s.shard.node_id == leaving]


def test_drain_waits_when_the_replacement_fits_nowhere_and_uncordon_cancels_it():
    one = fleet(1, nodes=1)
    one.settle()
    one.states["n1"] = "draining"
    for _ in range(10):
        plan = one.tick()
    assert one.states_of() == ["pending", "ready"]
    assert [(r.node, r.code) for r in plan.attempts[0].refusals] == [("n1", "node_draining")]
    del one.states["n1"]
    one.settle()
    assert one.states_of() == ["ready"]


def test_draining_two_nodes_one_after_the_other_never_stops_serving():
    one = fleet(1, nodes=3)
    one.settle()
    for name in ("n1", "n2"):
        one.states[name] = "draining"
        for _ in range(30):
            one.tick()
            assert one.nodes_of(state="ready")
    assert one.nodes_of() == ["n3"]


def test_a_crashing_replacement_does_not_let_the_old_one_go():
    one = fleet(1, nodes=2)
    one.settle()
    (old,) = one.nodes_of()
    one.states[old] = "draining"
    one.broken = {"n1", "n2"} - {old}
    for _ in range(40):
        one.tick()
        assert one.nodes_of() == [old]


def test_a_starting_replica_leaves_a_draining_node_at_once():
    nodes = [node("n1", state="draining"), node("n2")]
    plan = decide(snapshot(nodes, [model("m", 1)], [replica(1, "starting", state_at=NOW)]), NOW)
    assert moved(plan) == [(1, "stopping")]
    assert Create("m", "1 wanted, 0 there") in plan.items


def test_cordoned_nodes_keep_what_they_have():
    one = fleet(2)
    one.settle()
    one.states = {"n1": "cordoned", "n2": "cordoned"}
    assert not one.tick().items


def test_a_failed_replica_is_retried_and_placed_in_one_plan():
    failed = replica(1, "failed", shard("failed"), backoff_until=NOW - 1, restarts=1)
    plan = decide(snapshot([node()], [model("m", 1)], [failed]), NOW)
    assert moved(plan) == [(1, "pending")]
    assert isinstance(plan.items[1], Place)


def test_what_was_edited_fails_once_and_then_waits_again():
    failed = replica(1, "failed", fingerprint="older", backoff_until=NOW + 99, restarts=7)
    (move, place) = decide(snapshot([node()], [model("m", 1)], [failed]), NOW).items
    assert (move.to_state, move.restarts, place.fingerprint) == ("pending", 0, "f-p")
    again = replica(1, "failed", fingerprint=place.fingerprint, backoff_until=NOW + 99)
    assert not decide(snapshot([node()], [model("m", 1)], [again]), NOW).items


def test_a_lost_node_is_replaced_and_its_return_runs_nothing_twice():
    one = fleet(1, nodes=2)
    one.settle()
    (lost,) = one.nodes_of()
    one.states[lost] = "lost"
    one.settle()
    assert one.nodes_of() == list({"n1", "n2"} - {lost})
    del one.states[lost]
    one.settle()
    assert one.states_of() == ["ready"]
    assert sum(not s.over for s in one.shards.values()) == 1


def test_first_replicas_of_all_models_come_before_second_ones():
    models = [model("a", 2), model("b", 1)]
    replicas = [replica(i, "pending", of=m) for i, m in ((1, "a"), (2, "a"), (3, "b"))]
    plan = decide(snapshot([node(cards=2)], models, replicas), NOW)
    assert {i.replica_id for i in plan.items if isinstance(i, Place)} == {1, 3}


def test_D02_ten_models_for_one_card_in_a_hundred_rounds():
    for round_ in range(100):
        models = [model(f"m{i}", 1, profile(gpu_memory_mib=50 * GIB)) for i in range(10)]
        replicas = [replica(i + 1, "pending", of=f"m{i}") for i in range(10)]
        plan = decide(snapshot([node(cards=1)], models, replicas), NOW, round_)
        assert sum(isinstance(i, Place) for i in plan.items) == 1
        losers = [a for a in plan.attempts if not a.placed]
        assert len(losers) == 9
        assert all([r.code for r in a.refusals] == ["gpu_taken"] for a in losers)


def test_D10_bad_rows_are_told_and_stop_nothing():
    good = replica(9, "pending")
    bad = [
        replica(1, "frobnicating"),
        replica(2, "ready", shard("humming")),
        replica(3, "starting", shard("starting", state_at=None)),
        replica(4, "ready", of=None),
        replica(5, "draining", drain_deadline="soon", in_flight=1),
    ]
    plan = decide(snapshot([node()], [model("m", 4)], [*bad, good]), NOW)
    assert [i.replica_id for i in plan.items if isinstance(i, Place)] == [9]
    told = " / ".join(plan.notes)
    for id_ in (1, 2, 3, 4, 5):
        assert f"replica {id_} " in told
    assert "'frobnicating'" in told
    assert "'humming'" in told


def test_D10_one_unreadable_node_gets_nothing_and_stops_nothing():
    odd = node("n0", gpus=(gpu(0, claims=None),))
    plan = decide(snapshot([odd, node()], [model()], [replica(1, "pending")]), NOW)
    assert [i.shards[0].node_id for i in plan.items if isinstance(i, Place)] == ["n1"]
    assert plan.notes[0].startswith("node n0 gets nothing: its row cannot be read (TypeError")


def test_notes_are_bounded():
    bad = [replica(i, "odd") for i in range(1, 200)]
    notes = decide(snapshot([node()], [], bad), NOW).notes
    assert len(notes) == MOST_NOTES + 1
    assert notes[-1] == "and 149 more notes like these"


def test_D13_a_gang_waits_as_a_whole_while_a_node_is_offline():
    wanted = model("m", 1, profile(shards=2))
    nodes = [node("n1"), node("n2", state="unreachable", state_reason="silent for 40 s")]
    plan = decide(snapshot(nodes, [wanted], [replica(1, "pending")]), NOW)
    assert not plan.items
    codes = {(r.node, r.code) for r in plan.attempts[0].refusals}
    assert ("n2", "node_unreachable") in codes
    assert {n for n, _ in codes} == {"n1", "n2"}


def test_D28_equal_shares_over_unequal_cards_are_refused_with_numbers():
    small = {"memory_mib": 24 * GIB}
    cards = (gpu(0, memory_foreign_mib=4 * GIB, **small), gpu(1, **small))
    wanted = model("m", 1, profile(gpus=2, gpu_memory_mib=22 * GIB))
    plan = decide(snapshot([node(gpus=cards)], [wanted], [replica(1, "pending")]), NOW)
    (refusal,) = plan.attempts[0].refusals
    assert refusal.reason == (
        "processes outside llmgw hold card memory: need 2 cards of one class with 22 GiB each, "
        "have gpu 0: 4 GiB of 24 GiB held by others"
    )


def test_D29_late_beats_move_nothing_and_a_fresh_one_makes_the_node_ready_at_once():
    one = fleet(2)
    one.settle()
    one.states["n1"] = "unreachable"
    assert not one.tick().items
    del one.states["n1"]
    one.models["m"] = replace(one.models["m"], min_replicas=4)
    one.settle()
    assert one.states_of() == ["ready"] * 4


def test_the_same_inputs_give_the_same_plan():
    nodes = [
        node(f"n{i}", gpus=(gpu(0, f"n{i}", claims=whole(9)), gpu(1, f"n{i}"))) for i in range(9)
    ]
    replicas = [replica(i, "pending") for i in range(1, 7)]
    one = snapshot(nodes, [model("m", 6)], replicas)
    assert decide(one, NOW, 5) == decide(one, NOW, 5)
    assert decide(one, NOW, 5) != decide(one, NOW, 6)
