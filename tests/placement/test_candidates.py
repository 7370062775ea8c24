"""Candidates agree with the planner: its choice has the most points of all."""

from __future__ import annotations

import pytest

from controller.placement.candidates import MOST, candidates
from controller.placement.place import Planner
from tests.placement.made_fleet import gpu, model, node, profile, replica, shard, snapshot, whole


def test_the_planners_choice_comes_first():
    nodes = [
        node("n1", 4),
        node("n2", gpus=(gpu(0, "n2", claims=whole(1)), gpu(1, "n2")), shards_live=1),
        node("n3", 2, sources_on_disk=frozenset({"hf:x/m"})),
        node("n4", 2, state="cordoned"),
    ]
    wanted = model("m", 2)
    there = [replica(1, "ready", shard(on="n2"))]
    found = candidates(snapshot(nodes, [wanted], there), wanted)
    place, _ = Planner(nodes, [wanted], there, 0).place(wanted, replica(2, "pending"))
    assert place is not None
    assert found[0].node == place.shards[0].node_id
    assert found[0].parts == place.score
    assert {c.node for c in found} == {"n1", "n2", "n3"}
    assert [c.total for c in found] == sorted((c.total for c in found), reverse=True)


def test_the_first_profile_that_fits_is_the_one_that_counts():
    ways = (profile("a", gpu_class="B300"), profile("b"), profile("c", gpus=0))
    wanted = model("m", 1, *ways)
    assert {c.profile for c in candidates(snapshot([node()], [wanted]), wanted)} == {"b"}
    assert candidates(snapshot([], [wanted]), wanted) == []


@pytest.mark.parametrize("count", [3, 25])
def test_a_large_fleet_shows_the_best_only(count):
    wanted = model("m", 1)
    nodes = [node(f"n{i}") for i in range(count)]
    assert len(candidates(snapshot(nodes, [wanted]), wanted)) == min(count, MOST)


@pytest.mark.parametrize(("fabric", "shards", "there"), [
    ("nvlink-domain", 2, {"t1", "t2"}), ("nvlink-domain", 3, set()), ("fabric", 2, {"t1", "t2"}),
    ("any", 4, {"t1", "t2", "h1", "h2"}), ("any", 5, set()),
])  # fmt: skip
def test_of_a_gang_only_nodes_with_enough_partners_are_shown(fabric, shards, there):
    nodes = [
        node("t1", nvlink_domain="d.1", imex_ready=True),
        node("t2", nvlink_domain="d.1", imex_ready=True),
        node("h1"), node("h2"), node("h3", state="cordoned"),
    ]  # fmt: skip
    wanted = model("m", 1, profile(shards=shards, fabric=fabric))
    assert {c.node for c in candidates(snapshot(nodes, [wanted]), wanted)} == there
    place, _ = Planner(nodes, [wanted], [], 0).place(wanted, replica(1, "pending"))
    assert (place is not None) == bool(there)
