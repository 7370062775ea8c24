"""Any sequence of events in any order (hypothesis, stateful), on a fleet in memory."""

from __future__ import annotations

from dataclasses import replace
from operator import attrgetter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from controller.placement.model import Place
from controller.reconcile import lifecycle
from controller.reconcile.decide import decide
from sql.states import SHARD
from tests.placement.made_fleet import GIB, model, node, profile
from tests.placement.simulated import Fleet
from tests.placement.test_properties import STATES, complete

NODES, MODELS = ("n0", "n1", "n2", "n3"), ("m0", "m1", "m2")
WAYS = st.lists(
    st.builds(
        profile,
        st.sampled_from(["p", "q"]),
        gpus=st.integers(1, 2),
        shards=st.sampled_from([1, 1, 2]),
        fabric=st.just("any"),
        share=st.booleans(),
        gpu_memory_mib=st.sampled_from([30 * GIB, 50 * GIB]),
        cpus=st.sampled_from([None, 3.0]),
    ),
    min_size=1,
    max_size=2,
    unique_by=attrgetter("name"),
)
"""Nearly everything fits somewhere, so that much happens; odd fleets are test_properties.py's."""


SAID = ("assigned", "starting", "ready", "stopped", "failed")
"""From other states the simulated agents do not go on by themselves."""


def machine(name, cards):
    """A node with few cards, cores and ports."""
    return node(name, cards, cpus=8.0, ports=(20000, 20006))


class Machine(RuleBasedStateMachine):
    """Each rule is an event; between them the leader may tick, and agents may work."""

    @initialize(ways=WAYS, seed=st.integers(0, 3))
    def begin(self, ways, seed):
        made = {name: machine(name, 2) for name in NODES[:2]}
        self.fleet = Fleet(made, {"m0": model("m0", 2, *ways)}, seed=seed)
        self.live(3)

    @rule(name=st.sampled_from(NODES), cards=st.integers(0, 3))
    def join(self, name, cards):
        self.fleet.nodes.setdefault(name, machine(name, cards))

    @rule(name=st.sampled_from(NODES), word=st.sampled_from(STATES))
    def say_or_fall_silent(self, name, word):
        self.fleet.states[name] = word
        self.live(1)

    @rule(name=st.sampled_from(NODES), healthy=st.booleans())
    def cards_fall_sick_or_heal(self, name, healthy):
        if name in self.fleet.nodes:
            node = self.fleet.nodes[name]
            gpus = tuple(replace(gpu, healthy=healthy) for gpu in node.gpus)
            self.fleet.nodes[name] = replace(node, gpus=gpus)

    @rule(name=st.sampled_from(NODES), gpus=st.data())
    def cards_are_held_by_others(self, name, gpus):
        if name in self.fleet.nodes:
            node = self.fleet.nodes[name]
            used = gpus.draw(st.sampled_from([0, 100, 40_000, None]))
            held = tuple(replace(gpu, memory_foreign_mib=used) for gpu in node.gpus)
            self.fleet.nodes[name] = replace(node, gpus=held)

    @rule(
        name=st.sampled_from(MODELS),
        least=st.integers(0, 4),
        ways=WAYS,
        priority=st.integers(-1, 1),
    )
    def add_or_change(self, name, least, ways, priority):
        running = {(r.model, r.profile) for r in self.fleet.replicas.values() if r.state != "gone"}
        if not any(of == name for of, _ in running):
            self.fleet.models[name] = model(name, least, *ways, priority=priority)
        elif name in self.fleet.models:
            old = self.fleet.models[name]
            edited = tuple(replace(p, fingerprint=f"{p.fingerprint}'") for p in old.profiles)
            facts = {"max_replicas": max(least, 1), "priority": priority}
            self.fleet.models[name] = model(name, least, *edited, **facts)
        self.live(1)

    @rule(name=st.sampled_from(MODELS))
    def remove(self, name):
        self.fleet.models.pop(name, None)
        self.live(1)

    @rule(number=st.integers(0, 7), state=st.sampled_from(SAID))
    def a_shard_says(self, number, state):
        live = [s for s in self.fleet.shards.values() if not s.over]
        if live:
            chosen = live[number % len(live)]
            if state in SHARD[chosen.shard.state]:
                self.fleet.report(chosen, state, "exit code 1" if state == "failed" else None)
                self.live(1)

    @rule(name=st.sampled_from(NODES))
    def engines_break_or_mend(self, name):
        self.fleet.broken ^= {name}

    @rule(name=st.sampled_from(MODELS), force=st.booleans())
    def replace_all(self, name, force):
        for id_, one in self.fleet.replicas.items():
            if one.model == name and one.state in ("starting", "ready"):
                asked = {"replace_asked": self.fleet.now, "replace_force": force}
                self.fleet.replicas[id_] = replace(one, **asked)
        self.live(1)

    @rule(runs=st.sampled_from([0, 1, None]))
    def use(self, runs):
        self.fleet.in_flight = runs

    @rule(seconds=st.sampled_from([1.0, 70.0, 700.0, 9000.0]))
    def wait(self, seconds):
        self.fleet.now += seconds

    @rule(rounds=st.integers(1, 4))
    def time_passes(self, rounds):
        self.live(rounds)

    def live(self, rounds):
        for _ in range(rounds):
            self.fleet.tick()  # checks moves, gangs, cards, ports, cores and memory

    @rule()
    def agents_alone(self):
        self.fleet.work()

    @invariant()
    def every_plan_is_whole_and_the_same_again(self):
        snapshot, now, seed = self.fleet.snapshot(), self.fleet.now, self.fleet.seed
        plan = decide(snapshot, now, seed)
        assert plan == decide(snapshot, now, seed)
        moved = [i.replica_id for i in plan.items if hasattr(i, "to_state")]
        placed = [i.replica_id for i in plan.items if isinstance(i, Place)]
        assert len(moved) == len(set(moved))
        assert len(placed) == len(set(placed))
        for attempt in plan.attempts:
            assert attempt.placed or complete(self.fleet, attempt, self.fleet.nodes), attempt
        around, _ = lifecycle.survey(snapshot, now, seed)
        for calm in set(snapshot.replicas) - set(around.restless):
            assert lifecycle.fault(calm) is None
            assert lifecycle.step(calm, around) is None

    def teardown(self):
        """Events stop, all is well again: it comes to rest, with what fits running."""
        if not hasattr(self, "fleet"):
            return
        fleet = self.fleet
        fleet.states, fleet.broken, fleet.in_flight = {}, set(), 0
        for id_, one in fleet.replicas.items():  # else one more waits for room for ever
            fleet.replicas[id_] = replace(one, replace_asked=None)
        for _ in range(2):  # what came up just now and nobody uses may go after its residence
            fleet.now += 1000.0
            fleet.settle()
        for name, wanted in fleet.models.items():
            there = fleet.states_of(name)
            assert len(there) == wanted.min_replicas, name
            assert set(there) <= {"ready", "pending"}, name
        wanted = {r.id for r in fleet.replicas.values() if r.state in ("starting", "ready")}
        assert {s.replica for s in fleet.shards.values() if not s.over} == wanted


Machine.TestCase.settings = settings(max_examples=60, stateful_step_count=20, deadline=None)


@pytest.mark.slow
class TestAnySequenceOfEvents(Machine.TestCase):
    """The machine, as pytest finds it."""
