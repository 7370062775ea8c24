"""What must hold for every choice on any fleet that is in use already (hypothesis)."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from controller.placement import filters
from controller.placement.candidates import candidates
from controller.placement.model import Claim
from controller.placement.place import Planner
from tests.placement.made_fleet import GIB, gpu, model, node, profile, replica, snapshot
from tests.placement.test_properties import STATES, connections, models, mostly, nodes


@st.composite
def used(draw, made):
    """The fleet with claims of launches that nobody here knows, and with nodes that are away."""
    return {name: draw(in_use(one)) for name, one in made.items()}


@st.composite
def in_use(draw, one):
    cards = tuple(
        replace(card, claims=draw(claims(card.memory_mib))) if not card.unified else card
        for card in one.gpus
    )
    ports = st.frozensets(st.integers(*one.ports), max_size=2)
    return replace(
        one, gpus=cards, ports_taken=draw(ports), state=draw(mostly("ready", *STATES)),
        shards_live=sum(len(card.claims) for card in cards),
    )  # fmt: skip


def claims(total):
    shares = [(), (), (Claim(90, None),), (Claim(91, 5 * GIB),)]
    shares += [(Claim(92, 10 * GIB), Claim(93, 10 * GIB))] if total and total > 20 * GIB else []
    return st.sampled_from(shares if total else shares[:3])


fleets = nodes(at_least=1).flatmap(used)


def placed(made, wanted, seed, rounds=3):
    """(model, fleet before, place or None, refusals) of each attempt, and the fleet afterwards."""
    planner = Planner(made, wanted.values(), [], seed)
    found = []
    for number in range(rounds):
        for one in wanted.values():
            before = dict(planner.ledger.nodes)
            pending = replica(number, "pending", of=one.name)
            found.append((one, before, *planner.place(one, pending)))
    return found, planner.ledger.nodes


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(fleets, models(), st.integers(0, 3))
def test_every_candidate_is_chosen_or_refused_with_a_reason(made, wanted, seed):
    for one, before, place, refused in placed(made.values(), wanted, seed)[0]:
        names = [p.name for p in one.profiles]
        tried = names if place is None else names[: names.index(place.profile)]
        assert {(r.profile, r.node) for r in refused} == {(p, n) for p in tried for n in before}
        assert all(r.reason and r.code for r in refused)
        if place is None:
            continue
        chosen = one.profiles[len(tried)]
        for shard in place.shards:
            assert not filters.refusals(chosen, before[shard.node_id])
        others = [n for n in before.values() if filters.refusals(chosen, n)]
        assert not {s.node_id for s in place.shards} & {n.id for n in others}
        shown = candidates(snapshot(before.values(), [one]), one)
        able = {n.id for n in before.values()} - {n.id for n in others}
        if chosen is not one.profiles[0]:
            continue
        if chosen.shards == 1:
            assert {c.node for c in shown} == able, "the rest of the fleet is refused"
        else:  # of those that are able, the ones with enough partners
            assert {s.node_id for s in place.shards} <= {c.node for c in shown} <= able


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(fleets, models(), st.integers(0, 3), st.randoms(use_true_random=False))
def test_the_order_in_which_nodes_are_read_decides_nothing(made, wanted, seed, chance):
    mixed = list(made.values())
    chance.shuffle(mixed)
    first, _ = placed(made.values(), wanted, seed)
    second, _ = placed(mixed, wanted, seed)
    for (_, _, place, refused), (_, _, other, others) in zip(first, second, strict=True):
        assert place == other
        assert refused.digest == others.digest
        assert set(refused) == set(others)


@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@given(fleets, models(), st.integers(0, 3))
def test_nothing_is_given_twice_whatever_is_there_already(made, wanted, seed):
    found, after = placed(made.values(), wanted, seed, rounds=4)
    event(f"{sum(place is not None for _, _, place, _ in found)} placed")
    ports = Counter((n.id, p) for n in made.values() for p in n.ports_taken)
    cards = {(n.id, g.uuid): g for n in made.values() for g in n.gpus}
    for _, _, place, _ in found:
        for shard in () if place is None else place.shards:
            ports.update((shard.node_id, p) for p in (shard.port, shard.master_port) if p)
            first, last = made[shard.node_id].ports
            assert first <= shard.port <= last
            assert made[shard.node_id].state == "ready"
            assert len(shard.gpus) == len(set(shard.gpus))
            for uuid in shard.gpus:
                assert cards[shard.node_id, uuid].healthy
    assert max(ports.values(), default=1) == 1, "a port has one holder"
    for one in after.values():
        assert one.cpus is None or one.cpus_claimed <= one.cpus + filters.CORES_SLACK
        assert one.memory_mib is None or one.memory_claimed_mib <= one.memory_mib
        for card in one.gpus:
            _held_once(card, cards[one.id, card.uuid])


def _held_once(card, before):
    new = card.claims[len(before.claims) :]
    whole = [c for c in card.claims if c.memory_mib is None]
    assert len(whole) <= 1, card
    assert not (whole and len(card.claims) > 1), "whole and shared"
    if new and not whole:
        foreign = card.memory_foreign_mib or 0
        assert sum(c.memory_mib for c in card.claims) + foreign <= card.memory_mib, card


@st.composite
def gangs(draw):
    """Nodes of which some can work together, and what wants several of them."""
    made = {
        name: node(
            name,
            gpus=tuple(
                gpu(i, name, class_=draw(st.sampled_from(["H100", "H100", "A100"])))
                for i in range(draw(st.integers(2, 4)))
            ),
            engines=draw(st.sampled_from([{"vllm": ("1",)}, {"vllm": ("1",)}, {"vllm": ("2",)}])),
            mgmt_addr=f"10.0.0.{name[1:]}",
            labels=draw(st.sampled_from([{}, {"rack": "a"}, {"rack": "b"}])),
            **draw(connections()),
        )
        for name in (f"n{i}" for i in range(draw(st.integers(3, 7))))
    }
    wants = profile(
        gpus=draw(st.integers(0, 2)),
        shards=draw(st.sampled_from([2, 2, 3])),
        fabric=draw(st.sampled_from(["nvlink-domain", "fabric", "fabric", "any"])),
    )
    return made, model("m", 2, wants)


@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@given(gangs(), st.integers(0, 3))
def test_a_gang_is_whole_and_in_one_place(fleet, seed):
    made, wanted = fleet
    (chosen,) = wanted.profiles
    for _, before, place, refused in placed(made.values(), {"m": wanted}, seed)[0]:
        if place is None:
            assert {r.node for r in refused} == set(made)
            continue
        there = [before[s.node_id] for s in place.shards]
        assert len({n.id for n in there}) == chosen.shards, "a node for each shard"
        assert [s.rank for s in place.shards] == list(range(chosen.shards))
        assert {s.gang["master_port"] for s in place.shards} == {place.shards[0].master_port}
        assert {s.gang["head"] for s in place.shards} == {there[0].mgmt_addr}
        assert len({str(n.engines) for n in there}) == 1, "one version of the engine"
        held = {s.node_id: s.gpus for s in place.shards}
        classes = {g.class_ for n in there for g in n.gpus if g.uuid in held[n.id]}
        assert len(classes) == (chosen.gpus > 0)
        (transport,) = {s.gang["transport"] for s in place.shards}
        event(f"over {transport}")
        domains = {n.nvlink_domain if n.imex_ready else None for n in there}
        shared = set.intersection(*(set(n.fabrics) for n in there))
        assert (transport == "nvlink") == (
            len(domains) == 1 and None not in domains
            and (chosen.gpus > 0 or chosen.fabric == "nvlink-domain")
        ), "NVLink wherever it is there"  # fmt: skip
        if transport in ("infiniband", "roce"):
            assert any(key.startswith("ib:" if transport == "infiniband" else "roce:")
                       for key in shared)  # fmt: skip
            assert all(s.gang["hcas"] for s in place.shards)
        if transport == "network":
            assert chosen.fabric == "any"


@given(
    st.lists(st.integers(1, 5), min_size=2, max_size=5),
    st.sampled_from(["zone", "rack", "topology.kubernetes.io/zone"]),
    st.integers(1, 12),
    st.integers(0, 9),
)
def test_each_replica_goes_where_there_are_fewest_of_its_model(sizes, label, wants, seed):
    fleet = [
        node(f"{at}-{i}", cards=1, labels={label: f"d{at}"})
        for at, size in enumerate(sizes)
        for i in range(size)
    ]
    found, _ = placed(fleet, {"m": model("m", wants, profile())}, seed, rounds=wants)
    inside: Counter[int] = Counter()
    for _, before, place, _ in found:
        if place is None:
            assert sum(inside.values()) == sum(sizes)
            continue
        free = {int(n.id[0]) for n in before.values() if not any(g.claims for g in n.gpus)}
        at = int(place.shards[0].node_id[0])
        assert inside[at] == min(inside[one] for one in free)
        inside[at] += 1


PLAN = """
from tests.placement import test_plan_properties as t
from tests.placement.made_fleet import gpu, model, node, profile

fleet = [
    node(f"n{i}", gpus=tuple(gpu(c, f"n{i}", class_="AB"[c % 2]) for c in range(4)),
         labels={"zone": f"z{i % 3}", "rack": f"r{i % 5}"}, nvlink_domain=f"d{i % 2}.0",
         imex_ready=True, fabrics={f"ib:{i % 2}": ("a:1", "b:1"), "ib:x": ("c:1",)},
         sources_on_disk=frozenset({"hf:x/m0"} if i % 4 == 0 else ()),
         engines={"vllm": ("1", "2"), "sglang": ("3",)})
    for i in range(24)
]
wanted = {n: model(n, 3, profile("g", gpus=2, shards=3), profile("p", gpus=1))
          for n in ("m0", "m1", "m2")}
found, _ = t.placed(fleet, wanted, 7, rounds=6)
for _, _, place, refused in found:
    print(place, refused.digest, list(refused))
"""


@pytest.mark.slow
def test_controllers_with_other_hash_seeds_make_the_same_plan():
    def plan(seed):
        env = os.environ | {"PYTHONHASHSEED": seed}
        root = Path(__file__).parents[2]
        done = subprocess.run(
            [sys.executable, "-c", PLAN], env=env, cwd=root, check=True, capture_output=True
        )
        return done.stdout

    one = plan("1")
    assert b"gang" in one
    assert one == plan("2") == plan("77")
