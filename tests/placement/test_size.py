"""Work grows with kinds of nodes, not with nodes: counted, not timed."""

from __future__ import annotations

from itertools import count

from controller.placement.model import Place
from controller.placement.place import Planner
from controller.reconcile.decide import decide
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


def big_fleet(nodes, used=0):
    """Nodes of 8 cards that differ by name, rack, a few MiB and cards in use."""
    return [
        node(
            f"n{i:04d}",
            labels={"host": f"n{i}", "zone": f"z{i % 4}"},
            memory_mib=1000 * GIB + i % 31,
            gpus=tuple(
                gpu(c, f"n{i:04d}", claims=whole(i * 8 + c + 1) if c < (used + i) % 9 else ())
                for c in range(8)
            ),
        )
        for i in range(nodes)
    ]


def wanted_models(many, wants=2):
    pools = [{"zone": (f"z{i}",)} for i in range(4)]
    return [
        model(
            f"m{i}",
            wants,
            profile(gpus=(1, 2, 4)[i % 3], cpus=1.0, memory_mib=GIB, pool_labels=pools[i % 4]),
        )
        for i in range(many)
    ]


def evaluations(nodes, many):
    models = wanted_models(many)
    planner = Planner(big_fleet(nodes), models, [], 0)
    ids = count(1)
    placed = sum(
        planner.place(m, replica(next(ids), "pending", of=m.name))[0] is not None
        for _ in range(2)
        for m in models
    )
    return planner.evaluations, placed


def test_rules_run_per_kind_of_node_and_demand():
    small, placed = evaluations(100, 40)
    large, placed_of_large = evaluations(1000, 40)
    assert placed == placed_of_large == 80
    assert large <= small * 1.5, "ten times the nodes must not be ten times the work"
    more, _ = evaluations(1000, 120)
    assert more <= large * 2, "three times the models ask for the same twelve things"


def test_refusals_of_a_large_fleet_are_worked_out_only_when_read():
    models = [model(f"m{i}", 1, profile(gpu_class="B200")) for i in range(200)]
    planner = Planner(big_fleet(1000), models, [], 0)
    found = [planner.place(m, replica(i, "pending", of=m.name)) for i, m in enumerate(models)]
    assert all(place is None for place, _ in found)
    assert len({refused.digest for _, refused in found}) == 1
    assert planner.evaluations < 100
    assert all(found)
    assert all("_all" not in vars(refused) for _, refused in found)
    assert len(found[0][1]) == 1000


def test_a_large_fleet_at_rest_has_an_empty_plan():
    nodes = big_fleet(500)
    models = [model(f"m{i}", 4) for i in range(100)]
    replicas = [
        replica(i + 1, "ready", shard(on=nodes[i % 500].id), of=f"m{i // 4}") for i in range(400)
    ]
    plan = decide(snapshot(nodes, models, replicas), 100.0)
    assert plan.items == plan.attempts == plan.notes == ()


def test_a_burst_is_placed_in_one_plan():
    models = wanted_models(50, 4)
    replicas = [replica(i + 1, "pending", of=f"m{i // 4}") for i in range(200)]
    plan = decide(snapshot(big_fleet(400), models, replicas), 100.0)
    places = [i for i in plan.items if isinstance(i, Place)]
    assert len(places) == 200
    cards = [(s.node_id, g) for place in places for s in place.shards for g in s.gpus]
    assert len(cards) == len(set(cards))
