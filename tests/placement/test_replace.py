"""Replacing replicas because an operator says so, and drains whose replacement runs otherwise."""

from __future__ import annotations

from dataclasses import replace

import pytest

from controller.placement.model import Asked, Create, Move, Settings
from controller.reconcile.scale import PATIENCE_S
from tests.placement.made_fleet import gpu, model, node, profile
from tests.placement.simulated import Fleet

EDITED = profile("p", fingerprint="f-edited")


def settled(wanted=1, nodes=2, cards=1):
    made = {f"n{i}": node(f"n{i}", cards) for i in range(1, nodes + 1)}
    one = Fleet(made, {"m": model("m", wanted)})
    one.settle()
    one.models["m"] = model("m", wanted, EDITED)
    return one


def asked(one, *, force=False):
    for id_, member in one.replicas.items():
        if member.state == "ready":
            facts = {"replace_asked": one.now, "replace_force": force}
            one.replicas[id_] = replace(member, **facts)


def ran(one):
    return {r.fingerprint for r in one.replicas.values() if r.state == "ready"}


def test_an_edited_profile_alone_replaces_nothing():
    assert not settled().tick().items


def test_replicas_are_replaced_one_at_a_time_and_the_new_one_is_ready_first():
    one = settled(3, nodes=2, cards=2)
    asked(one)
    for _ in range(60):
        one.tick()
        assert len(one.nodes_of(state="ready")) >= 3, "capacity must not fall"
        assert len(one.states_of()) <= 4, "one more than wanted at a time"
    assert one.states_of() == ["ready"] * 3
    assert ran(one) == {"f-edited"}
    assert not one.tick().items
    told = {i.reason for i in one.log if isinstance(i, Create | Move)}
    assert {"replacement: an operator asked to replace it", "an operator asked to replace it"} <= (
        told
    )


@pytest.mark.parametrize("nodes", [1, 6])
@pytest.mark.parametrize("mark", [False, True])
@pytest.mark.parametrize("least", [0, 1])
def test_one_more_for_a_drain_is_no_wish_for_more(nodes, mark, least):
    """Of a model that scales by demand: each replacement must not ask for another one."""
    wanted = model("m", 1, max_replicas=4, asked=Asked(in_flight=1))
    one = Fleet({f"n{i}": node(f"n{i}", 1) for i in range(nodes)}, {"m": wanted})
    one.settle()
    one.models["m"] = replace(wanted, min_replicas=least)
    one.settle()
    (old,) = one.nodes_of()
    if mark:
        asked(one)
    else:
        one.states[old] = "draining"
    for _ in range(100):
        one.tick()
        assert len(one.states_of()) <= 2
        assert one.nodes_of(state="ready")
    assert one.states_of() == (["ready"] if nodes > 1 else ["pending", "ready"])


def test_a_drain_of_more_than_needed_keeps_them_while_it_lasts():
    wanted = model("m", 3, max_replicas=4, asked=Asked(in_flight=1))
    one = Fleet({f"n{i}": node(f"n{i}", 1) for i in range(6)}, {"m": wanted})
    one.settle()
    one.now += 70.0
    one.models["m"] = replace(wanted, min_replicas=1, asked=Asked(in_flight=1, peak=20))
    one.states[one.nodes_of()[0]] = "draining"
    for _ in range(20):
        one.tick()
        assert len(one.nodes_of(state="ready")) >= 3
        assert len(one.states_of()) <= 4
    assert one.states_of() == ["ready"] * 3


def test_without_room_for_both_nothing_stops_and_the_reasons_are_told():
    one = settled(1, nodes=1)
    asked(one)
    for _ in range(20):
        plan = one.tick()
        assert one.nodes_of(state="ready") == ["n1"]
    assert one.states_of() == ["pending", "ready"]
    assert [(r.node, r.code) for r in plan.attempts[0].refusals] == [("n1", "gpu_taken")]
    for id_, member in one.replicas.items():  # the operator takes it back
        one.replicas[id_] = replace(member, replace_asked=None)
    one.settle()
    assert one.states_of() == ["ready"]
    assert ran(one) == {"f-p"}


def test_with_force_one_after_the_other_stops_first():
    one = settled(3, nodes=3)
    asked(one, force=True)
    begun = one.now
    for _ in range(100):
        one.tick()
        assert len(one.nodes_of(state="ready")) >= 2, "one at a time"
        assert one.now > begun + PATIENCE_S or len(one.nodes_of(state="ready")) == 3
    assert one.states_of() == ["ready"] * 3
    assert ran(one) == {"f-edited"}


def test_with_force_and_room_the_new_one_is_still_ready_first():
    one = settled(1, nodes=2)
    asked(one, force=True)
    for _ in range(30):
        one.tick()
        assert one.nodes_of(state="ready")
    assert ran(one) == {"f-edited"}


def test_force_stops_no_second_one_when_the_first_replacement_fails():
    one = settled(2, nodes=2)
    one.broken = {"n1", "n2"}
    asked(one, force=True)
    for _ in range(80):
        one.tick()
        assert len(one.nodes_of(state="ready")) >= 1


def test_a_replica_that_fails_meanwhile_starts_by_the_new_profile_and_is_done():
    one = settled(1, nodes=1)
    asked(one)
    (live,) = (s for s in one.shards.values() if not s.over)
    one.report(live, "failed", "exit code 1")
    one.settle()
    assert one.states_of() == ["ready"]
    assert ran(one) == {"f-edited"}


def test_a_starting_replica_starts_again_by_the_new_profile():
    one = Fleet({"n1": node("n1", 1)}, {"m": model("m", 1)})
    one.tick()
    one.tick()
    assert one.states_of() == ["starting"]
    one.models["m"] = model("m", 1, EDITED)
    (id_,) = one.replicas
    one.replicas[id_] = replace(one.replicas[id_], replace_asked=one.now)
    one.settle()
    assert one.states_of() == ["ready"]
    assert ran(one) == {"f-edited"}


def two_kinds():
    """The first profile fits n1 only, the second anywhere."""
    ways = (profile("big", gpu_class="H100"), profile("small", gpu_class="L4"))
    nodes = {
        "n1": node("n1", 1),
        "n2": node("n2", gpus=(gpu(0, "n2", class_="L4"),)),
    }
    one = Fleet(nodes, {"m": model("m", 1, *ways)})
    one.settle()
    assert one.nodes_of() == ["n1"]
    return one


def test_D11_a_drain_takes_the_models_other_profile_where_only_that_fits():
    one = two_kinds()
    one.states["n1"] = "draining"
    for _ in range(30):
        one.tick()
        assert one.nodes_of(state="ready"), "the replacement is ready first"
    assert one.nodes_of() == ["n2"]
    (left,) = (r for r in one.replicas.values() if r.state == "ready")
    assert left.profile == "small"


def test_D11_uncordon_cancels_a_drain_that_has_begun():
    one = two_kinds()
    one.in_flight = 1  # requests keep the drained replica until its deadline
    one.states["n1"] = "draining"
    while "draining" not in one.states_of():
        one.tick()
    del one.states["n1"]
    one.models["m"] = replace(one.models["m"], min_replicas=2, max_replicas=2)
    one.tick()
    assert one.states_of() == ["ready", "ready"], "wanted again: taken back, not started anew"
    assert "wanted again: its drain is cancelled" in {i.reason for i in one.log}


def test_D11_uncordon_before_the_replacement_is_ready_leaves_everything_as_it_was():
    one = two_kinds()
    one.states["n1"] = "draining"
    one.tick()
    assert one.states_of() != ["ready"]
    del one.states["n1"]
    one.settle()
    assert (one.states_of(), one.nodes_of()) == (["ready"], ["n1"])


def test_a_replacement_is_no_wish_for_more_where_nobody_resides():
    """Held at what there is, each replacement counted as wanted: five replicas of one model."""
    fleet = Fleet({"n1": node("n1", 6)}, {"m": model("m", 1, max_replicas=5)})
    fleet.settings = Settings(min_residence_s=0.0)
    fleet.settle()
    fleet.replicas[1] = replace(fleet.replicas[1], replace_asked=fleet.now)
    fleet.models["m"] = replace(fleet.models["m"], asked=Asked(heard=False))
    fleet.settle()
    assert fleet.states_of("m") == ["ready"]
    assert fleet.replicas[1].state == "gone"
