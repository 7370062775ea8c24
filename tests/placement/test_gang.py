"""Replicas over several nodes: which nodes together, what their agents are told, why not others."""

from __future__ import annotations

import pytest

from controller.placement import explain
from controller.placement.model import Attempt
from controller.placement.place import Planner
from tests.placement.made_fleet import gpu, model, node, profile, replica, shard, whole

TRAY = {"cards": 4, "imex_ready": True}
FOUR = {"gpus": 4, "shards": 4, "fabric": "nvlink-domain"}
IB, ROCE = "ib:08c0", "roce:10.1.0.0/16"


def rack(number, trays=18, **facts):
    """An NVL72: 18 trays of 4 cards in one NVLink domain."""
    return [
        node(f"r{number}t{i:02}", **(TRAY | {"nvlink_domain": f"rack-{number}.0"} | facts))
        for i in range(trays)
    ]


def on(name, *keys, **facts):
    """A server of 8 cards with two ports on each of these fabrics."""
    found = {key: (f"mlx5_{2 * i}:1", f"mlx5_{2 * i + 1}:1") for i, key in enumerate(keys)}
    return node(name, cards=8, fabrics=found, **facts)


def planned(nodes, wants, *pending, seed=0):
    wanted = model("m", 1, wants)
    planner = Planner(nodes, [wanted], [], seed)
    return [planner.place(wanted, r) for r in (pending or (replica(1, "pending"),))]


def placed(nodes, wants, **more):
    ((place, _),) = planned(nodes, wants, **more)
    return place and [s.node_id for s in place.shards]


def refused(nodes, wants):
    ((place, refusals),) = planned(nodes, wants)
    assert place is None
    return [(r.node, r.code, r.have) for r in refusals]


def test_a_gang_of_4_trays_lands_in_one_domain():
    fleet = rack(1) + rack(2)
    for seed in range(5):
        names = placed(fleet, profile(**FOUR), seed=seed)
        assert len(set(names)) == 4
        assert len({name[:2] for name in names}) == 1
        assert names == sorted(names), "neighbours have neighbouring ranks"


def test_whole_domains_stay_whole():
    busy = tuple(gpu(i, "x", claims=whole(9)) for i in range(4))
    taken = {"gpus": busy, "cards": 0, "shards_live": 1}
    fleet = rack(1) + rack(2)[:4] + rack(2, **taken)[4:]
    assert set(placed(fleet, profile(**FOUR))) == {f"r2t0{i}" for i in range(4)}
    found = planned(fleet, profile(**FOUR), *(replica(i, "pending") for i in (1, 2, 3)))
    heads = [place.shards[0].node_id[:2] for place, _ in found]
    assert heads == ["r2", "r1", "r1"]
    nodes = [s.node_id for place, _ in found for s in place.shards]
    assert len(set(nodes)) == 12


def test_D13_with_one_tray_unjoined_the_explain_names_it_and_nothing_is_placed():
    fleet = rack(1)
    why = "card 2: the fabric is still being set up"
    fleet[7] = node("r1t07", nvlink_reason=why, **TRAY)
    wants = profile(gpus=4, shards=18, fabric="nvlink-domain")
    found = refused(fleet, wants)
    assert ("r1t07", "nvlink_not_joined", why) in found
    assert found.count(("r1t00", "gang_too_small", "17 in NVLink domain rack-1.0")) == 1
    assert {name for name, _, _ in found} == {n.id for n in fleet}, "every node has its reason"
    ((_, refusals),) = planned(fleet, wants)
    rows = explain.table(refusals)
    assert ("p", "-", "r1t07", f"the node has not joined an NVLink domain: {why}") in rows
    assert explain.main_reason(Attempt("m", placed=False, refusals=refusals)) == (
        "17 of 18 nodes have too few others to work with "
        "(need 18 nodes in one NVLink domain, best 17 in NVLink domain rack-1.0)"
    )
    assert placed(fleet, profile(gpus=4, shards=17, fabric="nvlink-domain"))


def test_a_tray_needs_imex_and_hears_of_all_that_is_missing():
    fleet = rack(1, trays=2)
    fleet += [
        node(
            "silent",
            cards=4,
            nvlink_domain="rack-1.0",
            imex_ready=False,
            imex_reason="IMEX is DOWN",
        ),
        node("without", cards=4, nvlink_domain="rack-1.0", imex_reason="no IMEX service"),
        node("neither", cards=4, imex_ready=False, state="cordoned"),
        node("other", cards=4),
    ]
    found = refused(fleet, profile(gpus=4, shards=3, fabric="nvlink-domain"))
    assert found == [
        ("r1t00", "gang_too_small", "2 in NVLink domain rack-1.0"),
        ("r1t01", "gang_too_small", "2 in NVLink domain rack-1.0"),
        ("silent", "imex_not_ready", "IMEX is DOWN"),
        ("without", "imex_not_ready", "no IMEX service"),
        ("neither", "node_cordoned", "cordoned"),
        ("neither", "nvlink_not_joined", "no NVLink domain"),
        ("neither", "imex_not_ready", "no cause reported"),
        ("other", "nvlink_not_joined", "no NVLink domain"),
    ]


def test_a_node_that_fails_a_filter_hears_of_its_group_only_if_it_would_not_help():
    fleet = [*rack(1, trays=2), node("r1t02", nvlink_domain="rack-1.0", state="cordoned", **TRAY)]
    three = refused(fleet, profile(gpus=4, shards=3, fabric="nvlink-domain"))
    assert [code for name, code, _ in three if name == "r1t02"] == ["node_cordoned"]
    four = refused(fleet, profile(**FOUR))
    assert [code for name, code, _ in four if name == "r1t02"] == [
        "node_cordoned",
        "gang_too_small",
    ]


def test_each_kind_of_connection_in_its_order():
    ib = [on(f"ib{i}", IB) for i in range(3)]
    roce = [on(f"roce{i}", ROCE) for i in range(3)]
    plain = [node(f"plain{i}", cards=8) for i in range(3)]
    fleet = plain + roce + ib + rack(1, trays=2)
    two = {"gpus": 4, "shards": 2}

    def transport(nodes, **wants):
        ((place, _),) = planned(nodes, profile(**(two | wants)))
        return place and place.shards[0].gang["transport"]

    assert transport(fleet) == "nvlink"
    assert transport(fleet, fabric="any") == "nvlink"
    assert transport(fleet, shards=3) == "infiniband"
    assert transport(plain + roce, shards=3) == "roce"
    assert transport(plain) is None
    assert transport(plain, fabric="any") == "network"
    assert transport(ib, fabric="nvlink-domain") is None
    assert transport(fleet, gpus=0, cpus=1.0) == "infiniband", "NVLink connects cards"


def test_nodes_of_different_fabrics_are_no_gang():
    fleet = [on("a1", "ib:a"), on("a2", "ib:a"), on("b1", "ib:b"), node("c", cards=8)]
    found = refused(fleet, profile(gpus=8, shards=3))
    assert found == [
        ("a1", "gang_too_small", "2 on ib:a"),
        ("a2", "gang_too_small", "2 on ib:a"),
        ("b1", "gang_too_small", "1 on ib:b"),
        ("c", "fabric_unknown", "no active port on a known fabric"),
    ]
    assert placed(fleet, profile(gpus=8, shards=2)) == ["a1", "a2"]
    assert refused(fleet, profile(gpus=8, shards=5, fabric="any")) == [
        (n, "gang_too_small", "4 in all") for n in ("a1", "a2", "b1", "c")
    ]
    assert len(placed(fleet, profile(gpus=8, shards=4, fabric="any"))) == 4


def test_a_node_that_names_the_fabric_otherwise_is_not_in():
    said = {IB: frozenset({"compute"})}
    fleet = [on("n1", IB, declared=said), on("n2", IB, declared=said), on("quiet", IB)]
    fleet.append(on("odd", IB, declared={IB: frozenset({"storage"})}))
    assert placed(fleet, profile(gpus=8, shards=3)) == ["n1", "n2", "quiet"]
    found = refused(fleet, profile(gpus=8, shards=4))
    assert ("odd", "fabric_names_differ", "storage") in found
    assert ("quiet", "gang_too_small", f"3 on {IB}") in found


def test_the_shards_of_a_gang_are_of_one_kind():
    def some(count, name, **facts):
        cards = facts.pop("class_", "H100")
        return [
            on(f"{name}{i}", IB, gpus=tuple(gpu(c, f"{name}{i}", class_=cards) for c in range(8)))
            if not facts
            else on(f"{name}{i}", IB, **facts)
            for i in range(count)
        ]

    mixed = some(2, "h") + some(2, "b", class_="B200")
    assert {name[0] for name in placed(mixed, profile(gpus=8, shards=2))} in ({"h"}, {"b"})
    have = f"2 of one card class and engine version on {IB}"
    assert {h for _, _, h in refused(mixed, profile(gpus=8, shards=3))} == {have}
    versions = some(2, "old", engines={"vllm": ("0.31.0",)}) + some(2, "new")
    assert len({n[:3] for n in placed(versions, profile(gpus=8, shards=2))}) == 1
    assert {h for _, _, h in refused(versions, profile(gpus=8, shards=3))} == {have}
    assert placed(versions, profile(gpus=8, shards=3, engine="command"))
    both = [on(f"x{i}", IB, gpus=tuple(gpu(c, f"x{i}", class_="AB"[c % 2]) for c in range(8)))
            for i in range(2)]  # fmt: skip
    ((place, _),) = planned(both, profile(gpus=4, shards=2))
    assert [s.gpus for s in place.shards] in (
        [tuple(f"x{i}-{c}" for c in range(odd, 8, 2)) for i in range(2)] for odd in (0, 1)
    )


def test_what_the_agents_are_told():
    near = tuple(gpu(c, "n1", nearest_nic=f"mlx5_{1 - c // 4}") for c in range(8))
    fleet = [on("n1", IB, gpus=near, mgmt_addr="10.0.0.1"), on("n2", IB, mgmt_addr="10.0.0.2")]
    ((place, _),) = planned(fleet, profile(gpus=8, shards=2))
    head, other = place.shards
    assert (head.rank, head.node_id, other.rank, other.node_id) == (0, "n1", 1, "n2")
    assert head.master_port not in (None, head.port)
    assert other.master_port is None
    told = {"head": "10.0.0.1", "master_port": head.master_port, "nodes": 2}
    told |= {"transport": "infiniband"}
    assert head.gang == told | {"hcas": ["mlx5_1:1", "mlx5_0:1"]}, "nearest first"
    assert other.gang == told | {"hcas": ["mlx5_0:1", "mlx5_1:1"]}
    cards = "gpu 0, 1, 2, 3, 4, 5, 6, 7"
    assert place.reason.startswith(f"on n1 {cards}; n2 {cards} on {IB} by profile p: ")
    ((place, _),) = planned(rack(1), profile(**FOUR))
    assert {s.gang["transport"] for s in place.shards} == {"nvlink"}
    assert place.shards[2].gang["hcas"] == []
    ((place, _),) = planned([node("n1")], profile())
    assert (place.shards[0].gang, place.shards[0].master_port) == (None, None)


def test_every_launch_meets_at_another_port():
    fleet = rack(1, trays=4)
    seen, last = set(), None
    for launch in range(20):
        old = [shard("failed", "r1t00", id_=launch * 4 + 1, master_port=last)] if launch else []
        pending = replica(1, "pending", *old, restarts=min(launch, 3))
        ((place, _),) = planned(fleet, profile(**FOUR), pending)
        assert place.shards[0].master_port != last
        last = place.shards[0].master_port
        seen.add(last)
    assert len(seen) > 10
    narrow = rack(1, trays=4, ports=(20000, 20001))
    again = replica(1, "pending", shard("failed", "r1t00", master_port=20001))
    ((place, _),) = planned(narrow, profile(**FOUR), again)
    assert place.shards[0].master_port == 20001, "the only one there is"


def test_ports_of_two_gangs_on_the_same_nodes_differ():
    fleet = rack(1, trays=2, ports=(20000, 20003))
    pending = [replica(i, "pending") for i in (1, 2, 3)]
    wants = profile(gpus=1, shards=2, fabric="nvlink-domain")
    found = [place for place, _ in planned(fleet, wants, *pending)]
    assert found[2] is None, "four ports are two heads"
    heads = [place.shards[0] for place in found[:2]]
    assert len({p for s in heads for p in (s.port, s.master_port)}) == 4


@pytest.mark.parametrize("change", [{"state": "cordoned"}, {"nvlink_domain": None}])
def test_digest_follows_the_nodes_that_are_refused(change):
    wants = profile(gpus=4, shards=18, fabric="nvlink-domain")

    def digest(*more):
        ((_, refusals),) = planned(rack(1, trays=5) + list(more), wants)
        return refusals.digest

    one = digest(node("x", nvlink_domain="rack-1.0", **TRAY))
    assert one == digest(node("x", nvlink_domain="rack-1.0", memory_claimed_mib=5, **TRAY))
    assert one != digest(node("x", **({"nvlink_domain": "rack-1.0"} | TRAY | change)))


def test_profiles_in_order_and_a_gang_may_be_the_second_choice():
    fleet = [*rack(1, trays=2), node("big", cards=8)]
    wanted = model("m", 1, profile("one", gpus=16), profile("two", gpus=4, shards=2))
    place, refusals = Planner(fleet, [wanted], [], 0).place(wanted, replica(1, "pending"))
    assert (place.profile, len(place.shards)) == ("two", 2)
    assert {r.profile for r in refusals} == {"one"}
