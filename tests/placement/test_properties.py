"""What must hold for any fleet and any history (hypothesis)."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace
from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from controller.placement import filters, score
from controller.placement.model import Place
from controller.placement.place import Demand, Planner
from controller.reconcile.decide import decide
from tests.placement.made_fleet import GIB, gpu, model, node, profile, replica
from tests.placement.simulated import Fleet

LABELS = [{}, {"zone": "a"}, {"zone": "b", "rack": "1"}, {"zone": "a", "rack": "1"}, {"rack": "1"}]
STATES = ["ready", "ready", "ready", "cordoned", "draining", "unreachable", "lost"]


def mostly(usual, *odd):
    """Oddities are rare: of fleets where each node has one, nothing is ever placed."""
    return st.sampled_from([usual] * 8 * len(odd) + list(odd))


@st.composite
def cards(draw, name):
    count = draw(st.integers(0, 4))
    known = mostly(80 * GIB, 24 * GIB, None)
    unified = draw(mostly(False, True))
    if unified:
        known = st.sampled_from([12 * GIB, 14 * GIB, None])
    return tuple(
        gpu(
            index,
            name,
            class_=draw(st.sampled_from(["H100", "H100", "A100"])),
            memory_mib=draw(known),
            memory_foreign_mib=draw(mostly(0, 100, 30 * GIB, None)),
            healthy=draw(mostly(True, False)),
            slice=draw(mostly(False, True)),
            unified=unified,
        )
        for index in range(count)
    )


@st.composite
def connections(draw):
    """A node's domain and fabrics, whole and odd ones."""
    keys = draw(st.lists(st.sampled_from(["ib:1", "ib:2", "roce:a"]), max_size=2, unique=True))
    names = st.sampled_from([frozenset(), frozenset({"a"}), frozenset({"b"})])
    return {
        "nvlink_domain": draw(st.sampled_from([None, "d.0", "d.0", "d.1"])),
        "imex_ready": draw(st.sampled_from([True, True, False, None])),
        "fabrics": dict.fromkeys(keys, ("mlx5_0:1", "mlx5_1:1")),
        "declared": {key: draw(names) for key in keys},
    }


@st.composite
def nodes(draw, at_least=0):
    return {
        name: node(
            name,
            gpus=draw(cards(name)),
            cpus=draw(mostly(8.0, 4.0, None)),
            memory_mib=draw(mostly(16 * GIB, 8 * GIB, None)),
            labels=draw(st.sampled_from(LABELS)),
            engines=draw(mostly({"vllm": ("0.32.0",)}, {"vllm": ("",)}, None, {})),
            provisions=draw(st.sampled_from([frozenset(), frozenset({"vllm"})])),
            engine_failures=draw(mostly({}, {("vllm", "0.32.0"): "no luck"})),
            mgmt_addr=draw(mostly("10.0.0.1", None)),
            ports=draw(st.sampled_from([(20000, 20001), (20000, 20009)])),
            sources_on_disk=draw(st.sampled_from([frozenset(), frozenset({"hf:x/m0"})])),
            **draw(connections()),
        )
        for name in (f"n{i}" for i in range(draw(st.integers(at_least, 5))))
    }


@st.composite
def profiles(draw):
    share = draw(st.booleans())
    return profile(
        draw(st.sampled_from(["p", "q", "r"])),
        gpus=draw(st.integers(1 if share else 0, 3)),
        gpu_class=draw(st.sampled_from([None, "H100"])),
        gpu_memory_mib=draw(st.sampled_from([10 * GIB, 30 * GIB] + ([] if share else [None]))),
        share=share,
        fit_mib=draw(st.sampled_from([None, None, 13 * GIB, 60 * GIB])),
        cpus=draw(st.sampled_from([None, 1.0, 3.0])),
        memory_mib=draw(st.sampled_from([None, 1024, 6 * GIB])),
        pool_labels=draw(mostly({}, {"zone": ("a",)})),
        engine_version=draw(st.sampled_from([None, "0.32.0"])),
        shards=draw(st.sampled_from([1, 1, 1, 2, 3])),
        fabric=draw(st.sampled_from(["nvlink-domain", "fabric", "any"])),
    )


def _name(one):
    return one.name


@st.composite
def models(draw):
    return {
        name: model(
            name,
            draw(st.integers(0, 4)),
            *draw(st.lists(profiles(), min_size=1, max_size=2, unique_by=_name)),
        )
        for name in (f"m{i}" for i in range(draw(st.integers(1, 3))))
    }


fleets = st.builds(Fleet, nodes(), models(), seed=st.integers(0, 3))
events = st.lists(
    st.one_of(
        st.tuples(st.just("word"), st.integers(0, 4), st.sampled_from(STATES)),
        st.tuples(st.just("scale"), st.integers(0, 2), st.integers(0, 4)),
        st.tuples(st.just("remove"), st.integers(0, 2)),
        st.tuples(
            st.just("crash"), st.integers(1, 12), st.sampled_from(["failed", "stopped", "starting"])
        ),
        st.tuples(st.just("break"), st.integers(0, 4)),
        st.tuples(st.just("use"), st.sampled_from([0, 1, None])),
        st.tuples(st.just("wait"), st.sampled_from([1.0, 70.0, 700.0, 9000.0])),
    ),
    max_size=12,
)


def happen(fleet, event):
    kind, *facts = event
    if kind == "word":
        fleet.states[f"n{facts[0]}"] = facts[1]
    elif kind == "scale" and f"m{facts[0]}" in fleet.models:
        old = fleet.models[f"m{facts[0]}"]
        fleet.models[old.name] = model(old.name, facts[1], *old.profiles)
    elif kind == "remove":
        fleet.models.pop(f"m{facts[0]}", None)
    elif kind == "crash" and facts[0] in fleet.shards and not fleet.shards[facts[0]].over:
        fleet.report(fleet.shards[facts[0]], facts[1], "exit code 1")
    elif kind == "break":
        fleet.broken ^= {f"n{facts[0]}"}
    elif kind == "use":
        fleet.in_flight = facts[0]
    elif kind == "wait":
        fleet.now += facts[0]


def complete(fleet, attempt, present):
    """Every node of every profile has at least one reason."""
    refused = {(r.profile, r.node) for r in attempt.refusals}
    names = {p.name for p in fleet.models[attempt.model].profiles}
    return refused == {(name, n) for name in names for n in present or [None]}


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(fleets, events)
def test_any_history_keeps_every_invariant(fleet, history):
    for event in [None, None, None, *history]:
        if event is not None:
            happen(fleet, event)
        snapshot = fleet.snapshot()
        plan = decide(snapshot, fleet.now, fleet.seed)
        assert plan == decide(snapshot, fleet.now, fleet.seed), "same inputs, same plan"
        assert not plan.notes or all("silent" in note for note in plan.notes)
        seen = [
            i.replica_id
            for i in plan.items
            if not isinstance(i, Place) and hasattr(i, "replica_id")
        ]
        assert len(seen) == len(set(seen)), "a replica moves once a plan"
        for attempt in plan.attempts:
            assert attempt.placed or complete(fleet, attempt, fleet.nodes), attempt
        fleet.apply(plan)  # checks moves, gangs, cards, ports, cores and memory
        fleet.work()
        fleet.now += 1.0


@pytest.mark.slow
@settings(max_examples=100, deadline=None)
@given(fleets, events)
def test_any_history_comes_to_rest_once_the_fleet_is_well(fleet, history):
    for event in history:
        happen(fleet, event)
        fleet.tick()
    fleet.states, fleet.broken, fleet.in_flight = {}, set(), 0
    fleet.now += 1000.0
    fleet.settle()
    fleet.now += 1000.0  # what came up just now and nobody uses
    fleet.settle()
    for name, wanted in fleet.models.items():
        states = fleet.states_of(name)
        assert len(states) == wanted.min_replicas
        assert set(states) <= {"ready", "pending"}
    assert all(r.state == "gone" or r.model in fleet.models for r in fleet.replicas.values())
    waiting = {name for name in fleet.models if "pending" in fleet.states_of(name)}
    assert {a.model for a in fleet.tick().attempts if not a.placed} == waiting


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(nodes(), profiles())
def test_a_single_replica_is_placed_exactly_when_some_node_has_no_refusal(made, wants):
    fleet = Fleet(made, {"m": model("m", 1, wants)})
    fleet.tick()
    plan = decide(fleet.snapshot(), fleet.now)
    fits = [n for n in fleet.snapshot().nodes if not filters.refusals(wants, n)]
    places = [i for i in plan.items if isinstance(i, Place)]
    ways = [set(s) for s in combinations([n.id for n in fits], wants.shards)]
    ways = [way for way in ways if together(wants, [n for n in fits if n.id in way], made)]
    assert bool(places) == bool(ways)
    for place in places:
        assert {s.node_id for s in place.shards} in ways
        assert [s.rank for s in place.shards] == list(range(wants.shards))
        assert [s.master_port is None for s in place.shards] == [
            rank > 0 or wants.shards == 1 for rank in range(wants.shards)
        ]
        held = {s.node_id: s.gpus for s in place.shards}
        kinds = {g.class_ for n in fits for g in n.gpus if g.uuid in held.get(n.id, ())}
        assert len(kinds) == (wants.gpus > 0), "cards of one class"


def together(wants, chosen, made):
    """Whether these nodes may hold one replica: the rule in its plainest words."""
    if wants.shards == 1:
        return True
    if wants.engine_version is None and len({str(n.engines) for n in chosen}) > 1:
        return False
    one = wants.gpus == 0 or any(
        all(not filters.refusals(replace(wants, gpu_class=name), n) for n in chosen)
        for name in ("H100", "A100")
    )
    if not one or wants.fabric == "any":
        return one
    if wants.gpus > 0 or wants.fabric == "nvlink-domain":
        domains = {n.nvlink_domain if n.imex_ready else None for n in chosen}
        if len(domains) == 1 and None not in domains:
            return True
    return wants.fabric == "fabric" and any(
        all(key in n.fabrics and usual(key, n, made) for n in chosen)
        for key in ("ib:1", "ib:2", "roce:a")
    )


def usual(key, node, made):
    """Whether a node calls the fabric nothing, or what most do (of equals, the first)."""
    said = [n.declared[key] for n in made.values() if n.declared.get(key)]
    most = min(said, key=lambda names: (-said.count(names), sorted(names)), default=None)
    return not node.declared[key] or node.declared[key] == most


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(nodes(at_least=2), models())
def test_nodes_of_one_shape_get_the_same_answer_and_the_best_node_wins(made, wants):
    planner = Planner(made.values(), wants.values(), [], 0)
    ledger = planner.ledger
    demands = [Demand(p, ledger) for m in wants.values() for p in m.profiles]
    for number in range(6):
        for wanted in wants.values():
            before, hosts = dict(ledger.nodes), deepcopy(planner._hosts[wanted.name])
            place, _ = planner.place(wanted, replica(number, "pending", of=wanted.name))
            if place is not None and len(place.shards) == 1:
                chosen = next(p for p in wanted.profiles if p.name == place.profile)
                liking = score.Liking(wanted.source, hosts)
                points = [
                    sum(score.base(chosen, n).values()) + liking.bonus(n)
                    for n in before.values()
                    if not filters.refusals(chosen, n)
                ]
                # Of hosts a shape knows use to an eighth and size to an eleventh.
                slack = score.PACKING / 4 if chosen.gpus == 0 else 1e-9
                assert sum(place.score.values()) >= max(points) - slack
        for demand in demands:
            demand.feasible()
            for id_, now in ledger.nodes.items():
                exact = ",".join(r.code for r in filters.refusals(demand.profile, now))
                assert demand._codes[ledger.shapes[id_]].decode() == exact


@pytest.mark.slow
@settings(max_examples=100, deadline=None)
@given(nodes(at_least=3), models(), st.integers(0, 3))
def test_what_a_plan_remembers_from_gang_to_gang_is_what_it_would_see_anew(made, wants, seed):
    planner = Planner(made.values(), wants.values(), [], seed)
    for number in range(5):
        for wanted in wants.values():
            anew = Planner(planner.ledger.present(), wants.values(), [], seed)
            anew._hosts = deepcopy(planner._hosts)
            pending = replica(number, "pending", of=wanted.name)
            place, refused = planner.place(wanted, pending)
            other, others = anew.place(wanted, pending)
            assert (place, refused.digest, list(refused)) == (other, others.digest, list(others))
