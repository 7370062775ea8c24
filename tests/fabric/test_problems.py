"""What is found wrong with a fabric, and that a sound one is left alone."""

from __future__ import annotations

import pytest

from controller.fabric.graph import build
from controller.fabric.ibnetdiscover import parse
from controller.fabric.model import HostPort
from controller.fabric.problems import LivePort, problems
from tests.fabric.made_fabric import Made, by_rails, without


def agents(made):
    """Every adapter reported by an agent of its host, by both of its GUIDs."""
    return {
        guid: HostPort(*name.split(), 1)
        for name, (letter, own, _) in made.devices.items()
        for guid in (own, made.port_guid(name))
        if letter == "H"
    }


def found(made, live=None, known=None, **options):
    graph = build(parse(made.text(**options)), agents(made) if known is None else known)
    return {p.code: p for p in problems(graph, live or {})}


def recabled(made, name, rate):
    made.cables = [(a, b, rate if a[0] == name else r) for a, b, r in made.cables]
    return made


def test_a_sound_fabric_has_no_problems():
    assert found(by_rails(8, 4, 2)) == {}


def test_a_slow_host_link_is_named_with_its_ports_and_speeds():
    told = found(recabled(by_rails(4, 2), "node2 mlx5_1", "1xNDR"))
    assert list(told) == ["slow_link"]
    assert told["slow_link"].text == (
        "1 link between a host and a leaf slower than the usual 400 Gb/s (4x NDR):"
        " node2 mlx5_1 to leaf1 port 2 at 100 Gb/s (1x NDR); reseat or replace the cable"
    )


def test_a_slow_link_between_switches():
    made = by_rails(4, 4, 2)
    made.cables = [
        (a, b, "4xHDR" if (a, b[0]) == (("leaf2", 60), "spine0") else r) for a, b, r in made.cables
    ]
    told = found(made)
    assert list(told) == ["slow_link"]
    assert "spine0 port 3 to leaf2 port 60 at 200 Gb/s (4x HDR)" in told["slow_link"].text


def test_an_older_adapter_is_not_slow_and_no_majority_means_no_usual():
    made = by_rails(4, 2)
    recabled(made, "node1 mlx5_0", "4xHDR")
    text = made.text()
    stanza = made.stanza("node1 mlx5_0")
    text = text.replace(stanza, stanza.replace("devid=0x1021", "devid=0x101b"))
    assert [p.code for p in problems(build(parse(text), agents(made)), {})] == []
    made = by_rails(4, 2)
    for h in (1, 2):
        for r in (0, 1):
            recabled(made, f"node{h} mlx5_{r}", "4xHDR")
    assert found(made) == {}


def test_one_lane_everywhere_is_told_though_it_is_usual():
    made = by_rails(2, 2, 1)
    made.cables = [(a, b, "1xNDR") for a, b, _ in made.cables]
    assert found(made)["narrow_link"].count == 6


def test_a_link_that_one_end_does_not_list():
    made = by_rails(4, 2)
    whole = made.stanza("leaf0")
    cut = "\n".join(line for line in whole.splitlines() if not line.startswith("[2]")) + "\n"
    graph = build(parse(made.text().replace(whole, cut)), agents(made))
    (told,) = problems(graph, {})
    assert (told.code, told.count) == ("one_end", 1)
    assert "node2 mlx5_0 to leaf0 port 2" in told.text


def test_a_device_without_lines_of_its_own_is_told_once_and_not_per_link():
    told = found(by_rails(4, 2), leave_out=("spine1",))
    assert list(told) == ["unlisted"]
    assert "spine1" in told["unlisted"].text


def test_hosts_with_fewer_ports_than_their_siblings():
    made = without(without(by_rails(6, 4), "node2 mlx5_1"), "node5 mlx5_1")
    told = found(made)
    assert list(told) == ["few_ports"]
    assert told["few_ports"].text == (
        "2 of 6 hosts like node1 with 3 ports in the fabric where 4 are usual,"
        " without mlx5_1: node2, node5"
    )


def test_an_other_kind_of_host_is_no_sibling():
    made = by_rails(6, 4)
    made.add("login mlx5_0", "H")
    made.cable(("login mlx5_0", 1), ("leaf0", 30))
    assert found(made) == {}


def test_a_leaf_with_fewer_uplinks():
    made = by_rails(4, 4, 3)
    made.cables = [c for c in made.cables if (c[0][0], c[1][0]) != ("leaf2", "spine1")]
    told = found(made)
    assert list(told) == ["few_uplinks"]
    assert "1 of 4 leaves like leaf0 with fewer than the usual 3 uplinks: leaf2 has 2" in (
        told["few_uplinks"].text
    )


def test_two_swapped_cables():
    made = by_rails(10, 4)
    places = {"node3 mlx5_0": ("leaf1", 3), "node3 mlx5_1": ("leaf0", 3)}
    made.cables = [(a, places.get(a[0], b), r) for a, b, r in made.cables]
    told = found(made)
    assert list(told) == ["wrong_rail"]
    assert told["wrong_rail"].count == 2
    assert "node3 mlx5_0 is on rail 2 (leaf1 port 3), not on rail 1" in told["wrong_rail"].text


def test_an_adapter_without_a_cable_and_a_switch_apart():
    made = by_rails(2, 2)
    made.add("spare mlx5_0", "H")
    made.add("apart", "S")
    told = found(made)
    assert set(told) == {"uncabled", "no_hosts"}
    assert "spare mlx5_0" in told["uncabled"].text
    assert "1 switch from which no host can be reached: apart" in told["no_hosts"].text


def test_one_guid_on_two_devices_and_one_description_on_two():
    made = by_rails(2, 2)
    made.add("twin", "H", "node1 mlx5_0")
    text = made.text().replace(f"({made.port_guid('node2 mlx5_0')})", f"({made.guid('leaf0')})")
    text = text.replace(f"({made.port_guid('node2 mlx5_1')})", f"({made.guid('leaf0')})")
    told = {p.code: p for p in problems(build(parse(text), {}), {})}
    assert made.guid("leaf0") in told["duplicate_guid"].text
    assert "'node1 mlx5_0' on 2" in told["duplicate_description"].text


@pytest.mark.parametrize(
    ("state", "cabled", "code"),
    [
        ("DOWN", True, "down_now"),
        ("ACTIVE", False, "not_in_scan"),
        ("ACTIVE", True, None),
        ("INIT", True, None),
        ("DOWN", False, None),
        (None, True, None),
        (None, False, None),
    ],
)
def test_the_agent_and_the_scan_differ(state, cabled, code):
    made = by_rails(2, 2)
    port = made.port_guid("node1 mlx5_0") if cabled else "f" * 16
    told = found(made, live={port: LivePort("node1", "mlx5_0", state, "Polling")})
    assert list(told) == ([code] if code else [])
    assert all("1 port" in p.text and "node1 mlx5_0" in p.text for p in told.values())


def test_hosts_without_an_agent_and_adapters_without_a_host():
    made = Made()
    made.add("leaf", "S")
    for port, name in enumerate(["node1 mlx5_0", "MT4129 X", "localhost HCA-1"], 1):
        made.add(name, "H")
        made.cable((name, 1), ("leaf", port))
    told = found(made, known={})
    assert told["unmatched_hosts"].count == 1
    assert told["unnamed_adapters"].count == 2
    assert "'MT4129 X' (1), 'localhost HCA-1' (1)" in told["unnamed_adapters"].text


def test_long_lists_are_counted():
    told = found(by_rails(40, 2), known={})["unmatched_hosts"]
    assert told.text.endswith("and 28 more")
    assert len(told.text) < 300


def test_capture_of_a_superpod(captures):
    text = (captures / "ibnetdiscover-gb200-superpod.txt").read_text()
    told = problems(build(parse(text), {}), {})
    by_code = {p.code: p for p in told}
    assert by_code["few_ports"].count == 10
    assert "10 of 56 hosts" in by_code["few_ports"].text
    assert "with 3 ports in the fabric where 4 are usual, without HCA-5:" in (
        by_code["few_ports"].text
    )
    assert [p.count for p in told if p.code == "few_uplinks"] == [7, 5]
    assert "b08-p1-dgx-08-c01 HCA-5 is on rail 4" in by_code["wrong_rail"].text
    assert (by_code["unmatched_hosts"].count, by_code["unnamed_adapters"].count) == (121, 72)
    assert not {"slow_link", "one_end", "duplicate_guid", "uncabled", "no_hosts"} & set(by_code)


@pytest.mark.parametrize("form", ["", "p-", "full-"])
def test_capture_of_a_sound_fabric(captures, form):
    text = (captures / f"ibnetdiscover-{form}sim-4dgx-8rail.txt").read_text()
    assert [p.code for p in problems(build(parse(text), {}), {})] == ["unmatched_hosts"]


def test_capture_of_one_adapter_without_a_cable(captures):
    text = (captures / "ibnetdiscover-single-ca-no-links.txt").read_text()
    told = problems(build(parse(text), {}), {})
    assert [p.code for p in told] == ["uncabled", "unmatched_hosts"]
    assert "dgx-gb200-n01-c1 HCA-1" in told[0].text
