"""What must hold for any demand: bounds, nobody busy is sent away, rest, and turns for all."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from controller.placement.model import Create, Move, Settings
from controller.reconcile.scale import ACTIVE
from tests.placement.asked_fleet import AskedFleet
from tests.placement.made_fleet import model, node, profile

NUMBERS = Settings(min_residence_s=10.0, idle_timeout_s=30.0, fairness_s=20.0)
PATIENT = replace(NUMBERS, fairness_s=1e9)
LONG = 250


def make(cards, models, **more):
    by_name = {m.name: m for m in models}
    nodes = {name: node(name, cards) for name in more.pop("nodes", ["n1"])}
    return AskedFleet(nodes, by_name, **{"settings": NUMBERS} | more)


@st.composite
def fleets(draw):
    models = []
    for number in range(draw(st.integers(1, 3))):
        low = draw(st.integers(0, 2))
        facts = {
            "max_replicas": max(low + draw(st.integers(0, 3)), 1),
            "priority": draw(st.integers(-1, 1)),
            "idle_timeout_s": draw(st.sampled_from([None, 15.0])),
        }
        models.append(model(f"m{number}", low, profile(), **facts))
    numbers = draw(st.sampled_from([NUMBERS, PATIENT]))
    return make(draw(st.integers(1, 3)), models, nodes=["n1", "n2"], settings=numbers)


loads = st.dictionaries(st.sampled_from(["m0", "m1", "m2"]), st.integers(0, 9))
words = st.sampled_from(["ready", "ready", "draining", "cordoned", "lost"])
histories = st.lists(st.tuples(loads, words, st.integers(1, 40)), max_size=6)


def checked(fleet):
    """One tick, judged by what was there when it was decided."""
    fleet.clients()
    before = {r.id: r for r in fleet.seen_replicas()}
    plan = super(AskedFleet, fleet).tick()
    gone = {i.replica_id for i in plan.items if isinstance(i, Move) and i.to_state == "draining"}
    for item in plan.items:
        if not isinstance(item, Move) or item.to_state != "draining":
            continue
        moved = before[item.replica_id]
        idle = [
            r.id for r in before.values()
            if r.model == moved.model and r.state == "ready" and not r.in_flight
            and r.id not in gone
        ]  # fmt: skip
        leaves = any(fleet.states.get(s.node_id) == "draining" for s in moved.shards)
        assert not (moved.in_flight and idle and not leaves and not item.room_for), item
        if item.room_for:
            other, own = fleet.models[item.room_for], fleet.models[moved.model]
            assert own.priority <= other.priority
            # `now` is a second later than it was when this was decided.
            assert fleet.now - moved.ready_at > NUMBERS.min_residence_s
            since = [r.state_at for r in before.values()
                     if (r.model, r.state) == (item.room_for, "pending")]  # fmt: skip
            waited = max((fleet.now - 1 - at for at in since), default=0.0)
            assert not moved.in_flight or waited >= fleet.settings.fairness_s, item
    for name, wants in fleet.models.items():
        active = [r for r in fleet.replicas.values() if r.model == name and r.state in ACTIVE]
        extra = "draining" in fleet.states.values()  # its replacement
        assert len(active) <= max(wants.max_replicas, wants.min_replicas) + extra
        if any(isinstance(i, Create) and i.model == name for i in plan.items):
            assert active
    return plan


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(fleets(), histories, loads)
def test_any_demand_keeps_the_bounds_and_constant_demand_comes_to_rest(fleet, history, last):
    for load, word, seconds in history:
        fleet.load, fleet.states = load, {"n2": word}
        for _ in range(seconds):
            checked(fleet)
    fleet.load, fleet.states = last, {}
    plans = [checked(fleet) for _ in range(LONG)]
    if fleet.settings is PATIENT:  # else those that have no place take turns
        assert [i for plan in plans[-60:] for i in plan.items] == []
    for name, wants in fleet.models.items():
        states = fleet.states_of(name)
        assert len(states) >= wants.min_replicas
        assert fleet.settings is NUMBERS or set(states) <= {"ready", "pending"}


@pytest.mark.parametrize("slots", [1, 2])
def test_D26_models_that_alternate_on_too_few_slots_all_get_their_turns(slots):
    models = [model(f"m{n}", 0, profile(), max_replicas=1) for n in range(3)]
    fleet = make(slots, models)
    waited, worst, served = dict.fromkeys(fleet.models, 0), 0, set()
    for second in range(300):
        asks = f"m{second % 3}"
        fleet.load = {n: int(w > 0 or n == asks) for n, w in waited.items()}
        checked(fleet)
        for name in waited:
            found = bool(fleet.serving(name))
            served |= {(name, second // 100)} if found else set()
            waited[name] = 0 if found or not fleet.load[name] else waited[name] + 1
            worst = max(worst, waited[name])
    assert len(served) == 9  # each model in each third of the time
    assert worst <= 3 * (NUMBERS.min_residence_s + 10)  # two others' turns, and starting
    swaps = [i for i in fleet.log if isinstance(i, Move) and i.room_for]
    assert len(swaps) <= 300 / NUMBERS.min_residence_s * slots


@pytest.mark.slow
@pytest.mark.parametrize(("count", "slots"), [(2, 1), (10, 1), (10, 3), (4, 3)])
def test_D17_nobody_starves_though_nobody_is_ever_idle(count, slots):
    fleet = make(slots, [model(f"m{n}", 0, profile(), max_replicas=1) for n in range(count)])
    fleet.load = dict.fromkeys(fleet.models, 1)
    waited, worst = dict.fromkeys(fleet.models, 0), 0
    for _ in range(1500):
        checked(fleet)
        for name in waited:
            waited[name] = 0 if fleet.serving(name) else waited[name] + 1
            worst = max(worst, waited[name])
    # The others' turns on these slots: a wait past the limit, or a residence, and a start each.
    turn = max(NUMBERS.fairness_s, NUMBERS.min_residence_s) + 10
    assert worst <= -(-count // slots) * turn
    swaps = [i for i in fleet.log if isinstance(i, Move) and i.room_for]
    assert count <= len(swaps) <= 1500 / NUMBERS.min_residence_s * slots


def test_D17_ten_models_that_are_asked_in_turn_share_one_slot():
    fleet = make(1, [model(f"m{n}", 0, profile(), max_replicas=1) for n in range(10)])
    waiting: dict[str, int] = {}
    served, worst = dict.fromkeys(fleet.models, 0), 0
    for second in range(1500):
        waiting.setdefault(f"m{second % 10}", second)
        fleet.load = dict.fromkeys(waiting, 1)
        checked(fleet)
        for name in [n for n in waiting if fleet.serving(n)]:
            worst = max(worst, second - waiting.pop(name))
            served[name] += 1
    assert min(served.values()) >= 1500 / (10 * (NUMBERS.min_residence_s + 10))
    assert worst <= 10 * (NUMBERS.min_residence_s + 10)


def test_without_a_residence_alternating_models_still_get_no_error():
    models = [model(f"m{n}", 0, profile(), max_replicas=1) for n in range(2)]
    fleet = make(1, models)
    fleet.settings = Settings(min_residence_s=0.0)
    for second in range(100):
        fleet.load = {f"m{second // 10 % 2}": 1}
        fleet.tick()
        if second % 10 == 9:
            assert fleet.serving(f"m{second // 10 % 2}"), second


def test_a_model_that_nobody_asks_for_again_is_gone_after_its_timeout():
    fleet = make(1, [model("m0", 0, profile(), max_replicas=1, idle_timeout_s=15.0)])
    fleet.load = {"m0": 1}
    for _ in range(20):
        checked(fleet)
    assert fleet.states_of("m0") == ["ready"]
    fleet.load = {}
    quiet = 0
    while fleet.states_of("m0"):
        checked(fleet)
        quiet += 1
    assert 15 <= quiet <= 20
