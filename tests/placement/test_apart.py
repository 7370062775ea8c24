"""Replicas of one model prefer other failure domains: zones, racks, NVLink domains."""

from __future__ import annotations

from collections import Counter

import pytest

from controller.placement.apart import Hosts, home
from controller.placement.candidates import candidates
from controller.placement.place import Planner
from tests.placement.made_fleet import (
    gpu,
    model,
    node,
    profile,
    replica,
    shard,
    snapshot,
    whole,
)


def placed(nodes, wanted, count=1, there=(), seed=0):
    """The planner's places for so many replicas, and the nodes that they are on."""
    planner = Planner(nodes, [wanted], there, seed)
    found = [planner.place(wanted, replica(i, "pending"))[0] for i in range(1, count + 1)]
    return found, [place.shards[0].node_id for place in found]


def on(name, **labels):
    return node(name, labels=labels)


@pytest.mark.parametrize(
    ("labels", "facts", "expected"),
    [
        ({}, {}, ()),
        ({"zone": ""}, {}, ()),
        ({"zone": "a"}, {}, (("zone", "a"),)),
        ({"topology.kubernetes.io/zone": "k", "zone": "a"}, {}, (("zone", "k"),)),
        ({"rack": "r1"}, {}, (("rack", "r1"),)),
        ({"zone": "a", "rack": "r1"}, {}, (("zone", "a"), ("rack", "a/r1"))),
        ({"topology.kubernetes.io/rack": "r"}, {"nvlink_domain": "d.0"},
         (("rack", "r"), ("domain", "d.0"))),
    ],
)  # fmt: skip
def test_what_goes_down_with_a_node(labels, facts, expected):
    assert home(node(labels=labels, **facts)) == expected


@pytest.mark.parametrize("label", ["zone", "topology.kubernetes.io/zone", "rack"])
def test_the_second_replica_goes_to_another_domain_whatever_the_seed(label):
    nodes = [on(f"{name}{i}", **{label: name}) for name in "abc" for i in range(4)]
    for seed in range(6):
        _, names = placed(nodes, model("m", 6), 6, seed=seed)
        assert Counter(name[0] for name in names) == {"a": 2, "b": 2, "c": 2}
        assert len({name[0] for name in names[:3]}) == 3
        assert len(set(names)) == 6, "and never two on a node while another is free"


def test_racks_within_the_zone_that_must_be_shared():
    nodes = [on(f"{z}{r}{i}", zone=z, rack=r) for z in "ab" for r in "12" for i in range(3)]
    _, names = placed(nodes, model("m", 4), 4)
    assert {name[:2] for name in names} == {"a1", "a2", "b1", "b2"}
    assert {name[0] for name in names[:2]} == {"a", "b"}, "zones first"


def test_nvlink_domains_are_failure_domains_too():
    nodes = [node(f"{d}{i}", nvlink_domain=f"{d}.0") for d in "ab" for i in range(3)]
    _, names = placed(nodes, model("m", 2), 2)
    assert {name[0] for name in names} == {"a", "b"}


def test_the_points_are_kept_and_shown():
    there = [replica(8, "ready", shard(on="a1"))]
    nodes = [on("a1", zone="a", rack="1"), on("a2", zone="a", rack="1"), on("a3", zone="a")]
    (place,), (name,) = placed(nodes, model(), there=there)
    assert name == "a3", "an unknown rack is not known to be shared"
    assert place.score["zone"] == -50
    assert "rack" not in place.score
    assert "zone -50" in place.reason
    found = {c.node: c.parts for c in candidates(snapshot(nodes, [model()], there), model())}
    assert found["a3"] == place.score
    assert (found["a2"]["zone"], found["a2"]["rack"], found["a2"]["spread"]) == (-50, -50, 300)
    assert found["a1"]["spread"] == 150


def test_a_single_replica_takes_the_best_fit_as_before():
    used = on("a1", zone="a")
    used = node("a1", labels={"zone": "a"}, gpus=(gpu(0, "a1", claims=whole(9)), gpu(1, "a1")),
                shards_live=1)  # fmt: skip
    (place,), names = placed([used, on("b1", zone="b"), node("c1")], model())
    assert names == ["a1"], "whole nodes stay whole"
    assert not {"zone", "rack", "domain"} & place.score.keys()
    others = [replica(8, "ready", shard(on="b1"), of="other")]
    assert placed([used, on("b1", zone="b")], model(), there=others)[1] == ["a1"]


def test_apart_is_worth_a_download_but_not_a_node_that_is_shared():
    there = [replica(8, "ready", shard(on="a1"))]
    held = frozenset({"hf:x/m"})
    full = node("a1", labels={"rack": "a"}, gpus=())
    holder = node("a2", labels={"rack": "a"}, sources_on_disk=held)
    assert placed([full, holder, on("b1", rack="b")], model(), there=there)[1] == ["b1"]
    same_node = on("a1", rack="a")
    other = node("a2", labels={"rack": "a"}, nvlink_domain="d.0")
    assert placed([same_node, other], model(), there=there)[1] == ["a2"]


def test_a_node_that_failed_again_and_again_is_left_for_one_in_a_shared_rack():
    there = [replica(8, "ready", shard(on="a1"))]
    nodes = [node("a1", gpus=(), labels={"rack": "a"}), on("a2", rack="a"), on("b1", rack="b")]
    wanted = model()
    planner = Planner(nodes, [wanted], there, 0)
    often = replica(1, "pending", shard("failed", "b1"), restarts=3)
    assert planner.place(wanted, often)[0].shards[0].node_id == "a2"


def test_a_gang_counts_once_and_its_twin_goes_to_another_domain():
    rack = [
        node(f"{r}{i:02}", cards=4, imex_ready=True, nvlink_domain=f"{r}.0", labels={"rack": r})
        for r in "ab" for i in range(6)
    ]  # fmt: skip
    wants = profile(gpus=4, shards=3, fabric="nvlink-domain")
    found, heads = placed(rack, model("m", 2, wants), 2)
    assert {head[0] for head in heads} == {"a", "b"}, "although one domain would stay whole"
    assert len({s.node_id for place in found for s in place.shards}) == 6
    homes = {n.id: home(n) for n in rack}
    hosts = Hosts(homes, frozenset(homes.values()))
    hosts.add(f"a{i:02}" for i in range(3))
    assert (hosts.in_domain("a.0"), hosts.in_domain("b.0")) == (1, 0)
    assert hosts.parts("a05") == {"rack": -50, "domain": -30}
    assert (hosts.points("a05"), hosts.points("b00"), hosts.most) == (-80, 0, 0)


def test_replicas_on_nodes_that_are_no_more_count_for_nobody():
    there = [replica(8, "ready", shard(on="away"))]
    assert placed([on("b1", zone="b")], model(), there=there)[1] == ["b1"]
