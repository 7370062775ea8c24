"""Hosts, levels, rails and links of a fabric, and the map made of them."""

from __future__ import annotations

import json
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from controller.fabric.graph import build
from controller.fabric.ibnetdiscover import parse
from controller.fabric.map import ranges, to_map, to_text
from controller.fabric.model import HostPort
from controller.fabric.names import hca_label, host_and_hca, natural
from tests.fabric.made_fabric import Made, by_rails, without


def graph_of(made, known=None, **options):
    return build(parse(made.text(**options)), known or {})


def levels(graph):
    return {switch.name: switch.level for switch in graph.switches}


def test_hosts_leaves_spines_and_rails():
    graph = graph_of(by_rails(hosts=4, rails=3, spines=2))
    assert [host.name for host in graph.hosts] == ["node1", "node2", "node3", "node4"]
    assert levels(graph) == {f"leaf{i}": 1 for i in range(3)} | {"spine0": 2, "spine1": 2}
    assert [(p.hca, p.rail, p.leaf_port) for p in graph.hosts[1].ports] == [
        ("mlx5_0", 1, 2),
        ("mlx5_1", 2, 2),
        ("mlx5_2", 3, 2),
    ]
    assert graph.rails is not None
    assert len(graph.rails) == 3
    assert Counter(link.kind for link in graph.links) == {"host": 12, "trunk": 6}
    assert {link.ends for link in graph.links} == {2}
    assert [(s.host_ports, s.uplinks) for s in graph.leaves] == [(4, 2)] * 3


def test_a_host_is_named_by_the_guids_that_its_agent_reported():
    made = by_rails(hosts=2, rails=2)
    known = {
        made.port_guid("node1 mlx5_0"): HostPort("n1", "mlx5_10", 1),
        made.guid("node1 mlx5_1"): HostPort("n1", "mlx5_11", 9),
    }
    graph = graph_of(made, known)
    one, two = graph.hosts
    assert (one.name, one.node, [p.hca for p in one.ports]) == ("n1", "n1", ["mlx5_10", "mlx5_11"])
    assert [p.matched for p in one.ports] == [True, True]
    assert (two.name, two.node, two.named) == ("node2", None, True)


def test_a_stale_description_does_not_move_a_port_to_another_node():
    made = by_rails(hosts=2, rails=2)
    known = {made.port_guid("node1 mlx5_0"): HostPort("new", "mlx5_0", 1)}
    graph = graph_of(made, known)
    assert {h.name: len(h.ports) for h in graph.hosts} == {"new": 1, "node1": 1, "node2": 2}


def test_one_board_is_one_machine_unless_its_names_differ():
    made = Made()
    made.add("leaf", "S")
    for port, (name, text) in enumerate(
        [("a", "MT4129 ConnectX7   Mellanox Technologies"), ("b", "x HCA-1"), ("c", "y HCA-1")], 1
    ):
        made.add(name, "H", text)
        made.cable((name, 1), ("leaf", port))
    made.systems = {"a": made.guid("a"), "b": made.guid("a")}
    assert {h.name: len(h.ports) for h in graph_of(made).hosts} == {"x": 2, "y": 1}
    made.systems["c"] = made.guid("a")
    graph = graph_of(made)
    assert {h.name: h.named for h in graph.hosts} == {"x": True, "y": True, made.guid("a"): False}


def test_adapters_that_claim_one_name_twice_are_not_put_together():
    made = Made()
    made.add("leaf", "S")
    for port, name in enumerate(["ubuntu HCA-1", "ubuntu HCA-1", "ubuntu HCA-2"], 1):
        made.add(str(port), "H", name)
        made.cable((str(port), 1), ("leaf", port))
    graph = graph_of(made)
    assert [(len(h.ports), h.named) for h in graph.hosts] == [(1, False)] * 3
    assert graph.shared_descriptions == (("ubuntu HCA-1", 2),)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("node1 mlx5_0", ("node1", "mlx5_0")),
        ("a08-p1-dgx-04-c01 HCA-6", ("a08-p1-dgx-04-c01", "HCA-6")),
        ("RMD701091901003 ibp11s0f0", ("RMD701091901003", "ibp11s0f0")),
        ("n mlx5_bond_0", ("n", "mlx5_bond_0")),
        ("my host hfi1_0 ", ("my host", "hfi1_0")),
        ("MT4129 ConnectX7   Mellanox Technologies", (None, None)),
        ("MT25408", (None, None)),
        ("Voltaire HCA400Ex-D", (None, None)),
        ("worker20", ("worker20", None)),
        ("mlx5_0", (None, None)),
        ("", (None, None)),
    ],
)
def test_host_part_of_a_description(text, found):
    assert host_and_hca(text) == found


def test_hca_names_that_mean_the_same_slot_and_natural_order():
    assert hca_label("HCA-5") == hca_label("mlx5_4") != hca_label("mlx5_5")
    assert hca_label(None) is None
    assert sorted(["n10", "n2", "n", "m³"], key=natural) == ["m³", "n", "n2", "n10"]


def test_aggregation_nodes_are_no_hosts_and_make_no_leaf():
    made = by_rails()
    made.add("sharp", "H", "Mellanox Technologies Aggregation Node")
    made.cable(("sharp", 1), ("spine0", 65))
    graph = graph_of(made)
    assert (len(graph.hosts), graph.aggregation) == (4, (made.guid("sharp"),))
    assert levels(graph)["spine0"] == 2
    assert Counter(link.kind for link in graph.links)["sharp"] == 1


def test_a_third_level_a_switch_apart_and_a_router():
    made = by_rails()
    for name, letter in [("core", "S"), ("apart", "S"), ("router", "R")]:
        made.add(name, letter)
    made.cable(("core", 1), ("spine0", 40))
    made.cable(("router", 1), ("spine0", 41))
    graph = graph_of(made)
    assert (levels(graph)["core"], graph.levels) == (3, 3)
    assert [s.name for s in graph.without_hosts] == ["apart"]
    assert graph.routers == (made.guid("router"),)


def test_adapters_back_to_back_and_without_a_cable():
    made = Made()
    for name in ("a mlx5_0", "b mlx5_0", "c mlx5_0"):
        made.add(name, "H")
    made.cable(("a mlx5_0", 1), ("b mlx5_0", 1))
    graph = graph_of(made)
    assert [link.kind for link in graph.links] == ["direct"]
    assert [host.name for host, _ in graph.uncabled] == ["c"]
    assert graph.hosts[0].ports[0].peer == made.guid("b mlx5_0")
    assert to_text(to_map(graph))[-1] == "not on a switch: a b c"


def test_links_survive_when_one_end_has_no_stanza():
    made = by_rails()
    whole = graph_of(made)
    cut = graph_of(made, leave_out=("node1 mlx5_0", "spine1"))
    assert [k._replace(ends=2) for k in cut.links] == list(whole.links)
    assert Counter(link.ends for link in cut.links) == {2: 9, 1: 3}
    assert set(cut.unlisted) == {made.guid("node1 mlx5_0"), made.guid("spine1")}
    assert [h.name for h in cut.hosts] == [h.name for h in whole.hosts]
    assert {p.guid for h in cut.hosts for p in h.ports} == {
        p.guid for h in whole.hosts for p in h.ports
    }


def test_where_two_ends_differ_the_slower_one_counts():
    made = by_rails(2, 2, 1)
    text = made.text().replace(" 4xNDR", " 2xNDR", 1)
    assert sorted({link.gbps for link in build(parse(text), {}).links}) == [200.0, 400.0]


def test_a_missing_port_shifts_no_rail():
    made = without(by_rails(hosts=4, rails=4), "node2 mlx5_1")
    graph = graph_of(made)
    assert [p.rail for p in graph.hosts[1].ports] == [1, 3, 4]


def test_no_rails_where_both_ports_of_a_host_share_a_leaf_or_one_host_is_all():
    made = Made()
    made.add("leaf0", "S")
    made.add("leaf1", "S")
    for h in range(4):
        for r in range(2):
            made.add(f"node{h} mlx5_{r}", "H")
            made.cable((f"node{h} mlx5_{r}", 1), (f"leaf{h % 2}", 4 * r + h + 1))
    assert graph_of(made).rails is None
    assert graph_of(by_rails(hosts=1)).rails is None
    assert graph_of(by_rails(hosts=2)).rails is not None


def directors(*systems):
    """Blades L01 and S01 of one name, once for each system image GUID."""
    made = Made()
    for i, system in enumerate(systems):
        for blade in ("L01", "S01"):
            made.add(f"{blade}-{i}", "S", f"MF0;dir:MCS8500/{blade}/U1")
            made.systems[f"{blade}-{i}"] = system
    return [(s.name, s.chassis) for s in graph_of(made).switches]


def test_blades_of_a_director_are_one_chassis_and_two_of_one_name_are_told_apart():
    one, two = f"{1:016x}", f"{2:016x}"
    assert directors(one) == [("dir/L01", "dir"), ("dir/S01", "dir")]
    assert {chassis for _, chassis in directors(one, two)} == {f"dir ({one})", f"dir ({two})"}
    assert {chassis for _, chassis in directors(one, one)} == {None}
    assert {s.chassis for s in graph_of(by_rails()).switches} == {None}


def test_the_map_is_sorted_json_with_bundles():
    made = by_rails(hosts=11, rails=2, spines=1)
    made.cable(("leaf0", 50), ("spine0", 50), "2xNDR")
    document = to_map(graph_of(made))
    assert json.loads(json.dumps(document)) == document
    assert (document["levels"], document["rails"]) == (2, 2)
    assert [host["name"] for host in document["hosts"]] == [f"node{i}" for i in range(1, 12)]
    assert sorted((k["count"], k["gbps"], k.get("slow")) for k in document["links"]) == [
        (1, 400.0, None),
        (2, 200.0, 1),
    ]
    port = document["hosts"][0]["ports"][0]
    assert port == {
        "guid": made.port_guid("node1 mlx5_0"),
        "hca": "mlx5_0",
        "leaf": made.guid("leaf0"),
        "leaf_port": 1,
        "gbps": 400.0,
        "rail": 1,
    }
    assert document["switches"][0] == {
        "guid": made.guid("leaf0"),
        "name": "leaf0",
        "level": 1,
        "host_ports": 11,
    }


def test_the_map_as_text():
    lines = to_text(to_map(graph_of(by_rails(hosts=12))))
    assert lines == [
        "12 hosts (0 with an agent), 24 ports; 4 switches (2 leaves, 2 on level 2),"
        " 4 cables between them, 2 rails",
        "",
        "RAIL  LEAF   PORTS  GB/S  UPLINKS  HOSTS",
        "1     leaf0  12     400   2        node[1-9] node[10-12]",
        "2     leaf1  12     400   2        node[1-9] node[10-12]",
    ]
    assert to_text({}) == ["0 hosts (0 with an agent), 0 ports; 0 switches,"
                           " 0 cables between them, no rails"]  # fmt: skip


def test_names_are_shortened_to_ranges():
    assert ranges(["n02", "n01", "x", "n07", "?", "?"]) == "n[01-02,07] x 2 x ?"
    assert ranges(f"host-{a}-x" for a in range(100)).endswith("more")


def test_capture_of_eight_rails(captures):
    for name in ("", "p-", "full-"):
        text = (captures / f"ibnetdiscover-{name}sim-4dgx-8rail.txt").read_text()
        graph = build(parse(text), {})
        assert [h.name for h in graph.hosts] == ["dgx01", "dgx02", "dgx03", "dgx04"]
        assert [[p.rail for p in h.ports] for h in graph.hosts] == [list(range(1, 9))] * 4
        assert Counter(s.level for s in graph.switches) == {1: 8, 2: 2}
        assert Counter(link.kind for link in graph.links) == {"host": 32, "trunk": 16}
        assert {link.gbps for link in graph.links} == {200.0}


def test_capture_of_a_director(captures):
    graph = build(parse((captures / "ibnetdiscover-azure-ndv4.txt").read_text()), {})
    assert Counter(s.level for s in graph.switches) == {1: 5, 2: 2, 3: 1}
    assert {s.name: s.chassis for s in graph.switches if s.level != 1} == {
        f"rmd70-0101-0908-01ib1-A/{blade}": "rmd70-0101-0908-01ib1-A"
        for blade in ("L01", "L02", "S01")
    }
    assert (len(graph.hosts), graph.rails, graph.levels) == (10, None, 3)
    assert graph.aggregation == ("0ff08c43213b3f38",)


def test_capture_of_a_director_matched_by_guid(captures):
    lines = (captures / "ibstat-guid-list-azure.txt").read_text().split("\n")
    vms = [line.split()[1] for line in lines[::2] if line]
    known = {g: HostPort(vm, "mlx5_ib0", 1) for vm, g in zip(vms, lines[1::2], strict=False)}
    graph = build(parse((captures / "ibnetdiscover-azure-ndv4.txt").read_text()), known)
    assert {h.node for h in graph.hosts} == set(vms)


def test_capture_of_a_superpod(captures):
    graph = build(parse((captures / "ibnetdiscover-gb200-superpod.txt").read_text()), {})
    trays = [h for h in graph.hosts if "-dgx-" in h.name]
    assert Counter(len(h.ports) for h in trays) == {4: 109, 3: 10}
    assert {h.name for h in graph.hosts if h.named} - {h.name for h in trays} == {
        "B11-P1-CUFM-02",
        "ubuntu",
    }
    assert sum(not h.named for h in graph.hosts) == 72
    assert len(graph.aggregation) == 40
    assert sum(len(h.ports) for h in graph.hosts) + 40 == 582
    assert Counter(s.level for s in graph.switches) == {1: 31, 2: 9}
    assert all(("LEAF" in s.name) == (s.level == 1) for s in graph.switches)
    assert graph.rails is not None
    names = {s.guid: s.name for s in graph.switches}
    assert [{names[g].split("-")[3] for g in rail} for rail in graph.rails] == [
        {"01"},
        {"02"},
        {"03"},
        {"04"},
    ]
    assert Counter(link.kind for link in graph.links) == {"sharp": 40, "host": 542, "trunk": 532}
    assert {link.ends for link in graph.links} == {2}


@st.composite
def fabrics(draw):
    """Hosts with up to three ports on any leaves, leaves on any spines, several cables each."""
    made = Made()
    spines, leaves = draw(st.integers(0, 3)), draw(st.integers(1, 4))
    for s in range(spines):
        made.add(f"spine{s}", "S")
    for i in range(leaves):
        made.add(f"leaf{i}", "S")
        for port in range(draw(st.integers(0, 3)) if spines else 0):
            spine = f"spine{draw(st.integers(0, spines - 1))}"
            made.cable((f"leaf{i}", 50 + port), (spine, 10 * i + port))
    for h in range(draw(st.integers(0, 5))):
        for r in range(draw(st.integers(1, 3))):
            name = draw(st.sampled_from([f"n{h} mlx5_{r}", "localhost HCA-1", "MT1 X Y"]))
            made.add(f"{h}-{r}", "H", name)
            if draw(st.booleans()):
                leaf = f"leaf{draw(st.integers(0, leaves - 1))}"
                made.cable((f"{h}-{r}", 1), (leaf, 1 + 3 * h + r))
    return made


@settings(max_examples=60, deadline=None)
@given(fabrics(), st.randoms(use_true_random=False))
def test_the_order_of_stanzas_changes_nothing(made, random):
    stanzas = made.stanzas()
    graph = build(parse("\n".join(stanzas)), {})
    random.shuffle(stanzas)
    assert build(parse("\n".join(stanzas)), {}) == graph
    assert len(graph.links) == len(made.cables)
    assert all(link.ends == 2 for link in graph.links)
    adapters = [name for name, (letter, _, _) in made.devices.items() if letter == "H"]
    assert sorted(p.device for h in graph.hosts for p in h.ports) == sorted(
        map(made.guid, adapters)
    )
    assert sum(s.host_ports for s in graph.switches) == sum(k.kind == "host" for k in graph.links)


@settings(max_examples=60, deadline=None)
@given(fabrics(), st.data())
def test_a_link_whose_one_end_is_missing_is_still_one_link(made, data):
    gone = tuple(data.draw(st.sets(st.sampled_from(sorted(made.devices)), max_size=3)))
    graph = build(parse("\n".join(made.stanzas(leave_out=gone))), {})
    seen = [c for c in made.cables if c[0][0] not in gone or c[1][0] not in gone]
    assert len(graph.links) == len(seen)
