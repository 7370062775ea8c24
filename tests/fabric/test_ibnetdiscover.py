"""What the parser makes of each form of ibnetdiscover's output, whole and damaged."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from controller.fabric import ibnetdiscover
from controller.fabric.graph import build
from controller.fabric.ibnetdiscover import gbps, parse
from controller.fabric.map import to_map, to_text
from controller.fabric.problems import problems
from tests.fabric.made_fabric import by_rails

SWITCH = """\
# Topology file: generated on Tue Jun  5 14:15:10 2007
vendid=0x8f1
devid=0x5a06
sysimgguid=0x5442ba00003000
switchguid=0x5442ba00003080(5442ba00003080)
Switch  24 "S-005442ba00003080"         # "ISR9024 Voltaire" base port 0 lid 6 lmc 0
[22]    "H-0008f10403961354"[1](8f10403961355)         # "MT23108 InfiniHost" lid 4 4xSDR
[10]    "S-0008f10400410015"[1]         # "SW-6IB4 Voltaire" lid 3 1xQDR s=4 w=1 v=3 e=1

vendid=0x2c9
devid=0x5a44
caguid=0x8f10403961354
Ca      2 "H-0008f10403961354"          # "MT23108 InfiniHost"
[1](8f10403961355)     "S-005442ba00003080"[22]         # lid 4 lmc 1 "ISR9024 Voltaire" lid 6 4xSDR
"""
REPORT = """\
CA   134  1 0x7cfe9003003b4bde 4x EDR - SW  1719 10 0x7cfe9003009ce5b0 ( 'o1 HCA-1' - ' leaf 1 ' )
CA   135  1 0x7cfe9003003b4bee 4x EDR - SW  1719 11 0x7cfe9003009ce5b0 ( o2 HCA-1 - leaf )
SW  1719 12 0x7cfe9003009ce5b0 4x ???                                    ' leaf 1 '
SW  1719 13 0x7cfe9003009ce5b0 4x SDR                                    ' leaf 1 '
"""


def by_guid(text):
    return {device.guid: device for device in parse(text).devices}


def test_a_switch_and_an_adapter_with_short_guids():
    found = by_guid(SWITCH)
    switch, adapter = found["005442ba00003080"], found["0008f10403961354"]
    assert (switch.kind, switch.lid, switch.port_count) == ("switch", 6, 24)
    assert (switch.system_guid, switch.description) == ("005442ba00003000", "ISR9024 Voltaire")
    assert (adapter.kind, adapter.device_id, adapter.system_guid) == ("ca", 0x5A44, None)
    (port,) = adapter.ports
    assert (port.number, port.guid, port.lid) == (1, "0008f10403961355", 4)
    assert (port.peer, port.peer_port) == ("005442ba00003080", 22)
    assert (port.width, port.speed, port.gbps, port.down) == ("4x", "SDR", 10.0, False)


def test_a_device_that_only_its_neighbour_names_is_there_and_marked():
    other = by_guid(SWITCH)["0008f10400410015"]
    assert (other.kind, other.listed, other.description) == ("switch", False, "SW-6IB4 Voltaire")
    (port,) = other.ports
    assert (port.number, port.peer, port.peer_port, port.gbps) == (1, "005442ba00003080", 10, 10.0)


def test_grouped_output_has_chassis_and_outer_ports():
    text = SWITCH.replace("3000\n", '3000\t\t# Chassis 2 ("big")\n').replace(
        "[10] ", "[10][ext 7] "
    )
    text = text.replace('[1]         # "SW', '[1][ext 3]         # "SW')
    text = "\nChassis 2 (guid 0x5442ba00003000)\n\n# Spine Nodes\n" + text + "\nNon-Chassis Nodes\n"
    found = parse(text)
    assert by_guid(text)["005442ba00003080"].chassis == "2"
    assert [p.number for p in by_guid(text)["005442ba00003080"].ports] == [10, 22]
    assert found.notes == ()


def test_a_router():
    text = SWITCH.replace("caguid", "rtguid").replace("Ca  ", "Rt  ").replace("H-0008", "R-0008")
    assert by_guid(text)["0008f10403961354"].kind == "router"


@pytest.mark.parametrize(
    "name", ['a "b" # c (1)', "", "x ", "MT4129 ConnectX7   Mellanox", "ü#[1]"]
)
def test_a_description_is_all_between_the_first_and_last_quote(name):
    found = by_guid(SWITCH.replace("MT23108 InfiniHost", name).replace("ISR9024 Voltaire", name))
    assert {d.description for d in found.values()} == {name, "SW-6IB4 Voltaire"}
    assert found["0008f10403961354"].ports[0].gbps == 10.0


def test_a_ports_report_has_port_guids_names_with_blanks_and_ports_without_a_cable():
    found = by_guid(REPORT)
    leaf, one, two = (
        found[g] for g in ("7cfe9003009ce5b0", "7cfe9003003b4bde", "7cfe9003003b4bee")
    )
    assert (leaf.kind, leaf.description, leaf.lid) == ("switch", " leaf 1 ", 1719)
    assert [(p.number, p.down, p.gbps) for p in leaf.ports] == [(12, True, None), (13, True, None)]
    assert (one.description, two.description) == ("o1 HCA-1", "o2 HCA-1")
    assert (one.lid, one.ports[0].guid, one.ports[0].gbps) == (134, one.guid, 100.0)
    assert parse(REPORT).form == "ports"


def test_a_list_knows_devices_and_no_links():
    text = 'Ca\t : 0xa088c20300003070 ports 1 devid 0x1021 vendid 0x2c9 "dgx04 mlx5_7"\n'
    text += 'Switch\t : 0xfc6a1c0300000700 ports 64 devid 0xd2f2 vendid 0x2c9 "MF0;leaf08:X/U1"\n'
    text += 'Router\t : 0xfc6a1c0300000701 ports 2 devid 0x1 vendid 0x2c9 "r"\n'
    found = parse(text)
    assert [d.kind for d in found.devices] == ["ca", "switch", "router"]
    assert found.form == "list"
    graph = build(found, {})
    assert [host.name for host in graph.hosts] == ["dgx04"]
    assert (graph.uncabled, graph.without_hosts) == ((), ())
    assert {p.code for p in problems(graph, {})} == {"unmatched_hosts"}


@pytest.mark.parametrize(
    ("width", "speed", "rate"),
    [
        ("4x", "SDR", 10),
        ("4x", "DDR", 20),
        ("4x", "QDR", 40),
        ("4x", "FDR10", 40),
        ("4x", "FDR", 56),
        ("4x", "EDR", 100),
        ("2x", "HDR", 100),
        ("4x", "HDR", 200),
        ("1x", "NDR", 100),
        ("4x", "NDR", 400),
        ("4x", "XDR", 800),
        ("8x", "SDR", 20),
        ("12x", "QDR", 120),
        ("4x", "???", None),
        ("??", "NDR", None),
        (None, None, None),
    ],
)
def test_rates(width, speed, rate):
    assert gbps(width, speed) == rate


def test_a_tool_older_than_its_links_is_read_by_the_codes_of_full_output():
    text = SWITCH.replace("1xQDR s=4 w=1 v=3 e=1", "4x??? s=4 w=2 v=3 e=4")
    port = by_guid(text)["005442ba00003080"].ports[0]
    assert (port.speed, port.gbps) == ("HDR", 200.0)
    assert by_guid(text.replace(" e=4", ""))["005442ba00003080"].ports[0].gbps is None


def test_a_lost_header_does_not_give_its_ports_to_the_device_before():
    lines = [line for line in SWITCH.splitlines() if not line.startswith("Ca ")]
    found = by_guid("\n".join(lines))
    assert len(found["005442ba00003080"].ports) == 2
    assert found["0008f10403961354"].ports[0].peer_port == 22


def test_garbage_is_counted_and_the_first_of_it_quoted():
    found = parse("hello\n" + SWITCH + "[1] nonsense\nx" + "y" * 10_000)
    assert len(found.devices) == 3
    assert found.notes == ("3 lines were not understood, first line 1: 'hello'",)


@pytest.mark.parametrize("text", ["", "\n\n", "\0\0", "{}", "# only a comment"])
def test_nothing_to_read_is_said(text):
    found = parse(text)
    assert (found.devices, found.form) == ((), None)
    assert found.notes[-1] == "no device in the text: the scan failed or saw nothing"


def test_colours_carriage_returns_and_indentation_do_not_matter():
    plain = parse(SWITCH).devices
    coloured = "".join(f"   \x1b[1;31m{line}\x1b[0m\r\n" for line in SWITCH.splitlines())
    assert parse(coloured).devices == plain


def test_one_text_twice_is_the_same_and_two_different_ones_are_told():
    assert parse(SWITCH * 2) == parse(SWITCH)
    moved = SWITCH.replace('"S-0008f10400410015"[1]', '"S-0008f10400410015"[2]')
    assert parse(SWITCH + moved).duplicates == ("005442ba00003080",)


def test_a_report_cut_inside_a_line_makes_no_device_up():
    for length in range(len(REPORT)):
        guids = {d.guid for d in parse(REPORT[:length]).devices}
        assert guids <= {"7cfe9003009ce5b0", "7cfe9003003b4bde", "7cfe9003003b4bee"}
        assert parse(REPORT[:length]).duplicates == ()


def test_limits_end_the_reading_with_a_note(monkeypatch):
    monkeypatch.setattr(ibnetdiscover, "MAX_DEVICES", 3)
    found = parse(by_rails().text())
    assert len(found.devices) == 3
    assert "more than 3 devices" in found.notes[0]
    monkeypatch.setattr(ibnetdiscover, "MAX_CHARS", 2**20)
    assert "cut after 1 MiB of 2" in parse("\n" * 2**21).notes[0]


@pytest.mark.parametrize(
    ("name", "form", "switches", "adapters", "ports"),
    [
        ("ibnetdiscover-sim-4dgx-8rail.txt", "topology", 10, 32, 96),
        ("ibnetdiscover-full-sim-4dgx-8rail.txt", "topology", 10, 32, 96),
        ("ibnetdiscover-p-sim-4dgx-8rail.txt", "ports", 10, 32, 672),
        ("ibnetdiscover-l-sim-4dgx-8rail.txt", "list", 10, 32, 0),
        ("ibnetdiscover-azure-ndv4.txt", "topology", 8, 11, 36),
        ("ibnetdiscover-gb200-superpod.txt", "topology", 40, 582, 2228),
        ("ibnetdiscover-l-gb200-superpod.txt", "list", 40, 582, 0),
        ("ibnetdiscover-single-ca-no-links.txt", "topology", 0, 1, 0),
        ("ibnetdiscover-p-edr.txt", "ports", 4, 3, 10),
        ("ibnetdiscover-p-hdr-odd-names.txt", "ports", 5, 2, 8),
    ],
)
def test_captures(captures, name, form, switches, adapters, ports):
    found = parse((captures / name).read_text())
    assert (found.form, found.notes, found.duplicates) == (form, (), ())
    kinds = [d.kind for d in found.devices]
    assert (kinds.count("switch"), kinds.count("ca")) == (switches, adapters)
    assert sum(len(d.ports) for d in found.devices) == ports


def test_a_failed_scan_tells_what_the_tool_said(captures):
    found = parse((captures / "ibnetdiscover-no-hardware.txt").read_text())
    assert found.devices == ()
    assert "iberror: failed: discover failed" in found.notes[0]


def test_full_output_says_the_same_as_plain_output(captures):
    plain = parse((captures / "ibnetdiscover-sim-4dgx-8rail.txt").read_text())
    assert plain == parse((captures / "ibnetdiscover-full-sim-4dgx-8rail.txt").read_text())


MADE = SWITCH + REPORT + by_rails(2, 2, 1).text()


@st.composite
def damaged(draw):
    """A scan with pieces cut out, put in again elsewhere, or replaced."""
    text = MADE
    for _ in range(draw(st.integers(1, 6))):
        at = draw(st.integers(0, len(text)))
        end = min(len(text), at + draw(st.integers(0, 80)))
        piece = draw(
            st.sampled_from(["", text[at:end] * 2, '"', "[", "(", "0" * 40, "\0", "é\u2028"])
        )
        text = text[:at] + piece + text[end:]
    return text


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.one_of(damaged(), st.text(max_size=200)))
def test_no_text_raises(text):
    found = parse(text)
    graph = build(found, {})
    assert all(isinstance(line, str) for line in to_text(to_map(graph)))
    assert all(p.text and p.count > 0 for p in problems(graph, {}))
    assert sum(len(h.ports) for h in graph.hosts) >= len(graph.hosts)
