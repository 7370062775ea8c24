"""`ibstat` and `ibstatus`: real outputs of four machines, panics in the middle, anything at all."""

from __future__ import annotations

import shlex
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agent.probes import ib, ibstat
from agent.probes.root import Root, ToolResult

STANZA = """CA 'mlx5_0'
\tCA type: MT4129
\tNumber of ports: 1
\tFirmware version: 28.39.1002
\tHardware version: 0
\tNode GUID: 0x946dae0300cde72c
\tSystem image GUID: 0x946dae0300cde72c
\tPort 1:
\t\tState: Initializing
\t\tPhysical state: LinkUp
\t\tRate: 400
\t\tBase lid: 65535
\t\tLMC: 0
\t\tSM lid: 334
\t\tCapability mask: 0xa751e848
\t\tPort GUID: 0x46dae0300cde72d
\t\tLink layer: InfiniBand
"""
PANIC = "ibpanic: [1323906] main: stat of IB device 'mlx5_8' failed: No such file or directory\n"
STATUS = """Infiniband device 'mlx5_0' port 1 status:
\tdefault gid:\t fe80:0000:0000:0000:0015:5dff:fd34:11eb
\tbase lid:\t 0x33bf
\tsm lid:\t\t 0x1
\tstate:\t\t 4: ACTIVE
\tphys state:\t 5: LinkUp
\trate:\t\t 200 Gb/sec (4X HDR)
\tlink_layer:\t InfiniBand

Infiniband device 'mlx5_8' port 1 status:
\tdefault gid:\t unknown
\tbase lid:\t 0x0
\tsm lid:\t\t 0x0
\tstate:\t\t 4: ACTIVE
\tphys state:\t 5: LinkUp
\trate:\t\t 40 Gb/sec (4X QDR)
\tlink_layer:\t Ethernet
"""
INITIALIZING = ibstat.Printed(
    hca="mlx5_0",
    port=1,
    link_layer="InfiniBand",
    state="INIT",
    phys_state="LinkUp",
    rate_gbps=400.0,
    node_guid="946dae0300cde72c",
    port_guid="046dae0300cde72d",
    lid=65535,
    sm_lid=334,
    firmware="28.39.1002",
)


def prints(text: str) -> str:
    return f"printf %s {shlex.quote(text)}"


@pytest.mark.parametrize(
    "text",
    [
        STANZA,
        STANZA.replace("\t", ""),
        STANZA.replace("\t", "        ").replace("\n", "\r\n"),
        f"\x1b[1m{STANZA}\x1b[0m",
        STANZA + PANIC,
        f"some banner: of a wrapper\n{STANZA}CA 'mlx5_1'\n\tCA type: MT4125\n",
    ],
)
def test_a_stanza_in_its_disguises(text):
    assert ibstat.parse(text) == (INITIALIZING,)


def test_a_card_with_two_ports_and_one_cut_off():
    two = STANZA + STANZA.partition("\tPort 1:")[2].join(["\tPort 2:", ""])
    assert [(port.port, port.node_guid) for port in ibstat.parse(two)] == [
        (1, "946dae0300cde72c"),
        (2, "946dae0300cde72c"),
    ]
    (cut,) = ibstat.parse(STANZA[: STANZA.index("Base lid")])
    assert (cut.state, cut.lid, cut.link_layer) == ("INIT", None, None)


def test_ibstatus_has_the_gid():
    first, second = ibstat.parse_ibstatus(STATUS)
    assert first == ibstat.Printed(
        hca="mlx5_0",
        port=1,
        link_layer="InfiniBand",
        state="ACTIVE",
        phys_state="LinkUp",
        rate_gbps=200.0,
        port_guid="00155dfffd3411eb",
        lid=0x33BF,
        sm_lid=1,
        gid_prefix="fe80000000000000",
    )
    assert (second.link_layer, second.port_guid, second.lid) == ("Ethernet", None, 0)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("400 Gb/sec (4X NDR)", 400.0),
        ("2.5 Gb/sec (1X SDR)", 2.5),
        ("10 Gb/sec (4X)", 10.0),
        ("25", 25.0),
        ("0", None),
        ("fast", None),
        (None, None),
    ],
)
def test_rates(text, value):
    assert ibstat.rate(text) == value


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("4: ACTIVE", "ACTIVE"),
        ("Active", "ACTIVE"),
        ("5: ACTIVE_DEFER", "ACTIVE_DEFER"),
        ("Initializing", "INIT"),
        ("2: INIT", "INIT"),
        ("Down", "DOWN"),
        ("???", None),
        ("9: <unknown>", None),
    ],
)
def test_states(text, value):
    assert ibstat.state(text) == value


def test_physical_states_are_one_word():
    texts = ("7: Phy Test", "PhyTest", "2: Polling", "5: LinkUp", "0: <unknown>")
    assert [ibstat.phys_state(text) for text in texts] == [
        "PhyTest",
        "PhyTest",
        "Polling",
        "LinkUp",
        None,
    ]


async def test_a_machine_of_which_only_ibstat_is_known(machine):
    found = await ib.read(machine({}, {"ibstat": prints(STANZA)}), {"mlx5_0": "pod"})
    (port,) = found.ports
    assert found.error is None
    assert (port.lid, port.active, port.fabric) == (65535, False, "pod")


async def test_what_ibstat_leaves_out_after_a_panic_comes_from_ibstatus(machine):
    tools = {"ibstat": f"{prints(STANZA)}\n{prints(PANIC)} >&2\nexit 255"}
    found = await ib.read(machine({}, tools), {})
    assert [port.hca for port in found.ports] == ["mlx5_0"]
    assert "exit status 255" in found.error
    assert "stat of IB device 'mlx5_8' failed" in found.error
    tools["ibstatus"] = prints(STATUS)
    found = await ib.read(machine({}, tools), {})
    assert [(port.hca, port.state) for port in found.ports] == [
        ("mlx5_0", "INIT"),  # as ibstat said it
        ("mlx5_8", "ACTIVE"),
    ]


@pytest.mark.parametrize(
    "words", ["No devices", "device '*': sys files not found (/sys/class/infiniband/*/ports)"]
)
async def test_no_card_is_no_error(machine, words):
    tools = {"ibstatus": f"{prints(f'Fatal error:  {words}')}; exit 255"}
    assert await ib.read(machine({}, tools), {}) == ib.Ports()


async def test_a_tool_that_cannot_run_says_why(machine):
    tools = {"ibstat": "echo 'ibstat: error while loading libibumad.so.3' >&2; exit 127"}
    found = await ib.read(machine({}, tools), {})
    assert "exit status 127: ibstat: error while loading" in found.error


async def test_a_hanging_ibstat_says_so(machine, monkeypatch):
    monkeypatch.setattr(ib, "TOOL_TIMEOUT_S", 0.2)
    found = await ib.read(machine({}, {"ibstat": "exec sleep 600"}), {})
    assert found.ports == ()
    assert "no answer within 0.2 s" in found.error


def test_a_missing_tool_is_no_failure():
    assert ibstat.failure(ToolResult(error="ibstat: no such program in PATH")) is None


async def test_no_hardware(captures, machine):
    text = (captures / "infiniband/ibstat-no-hardware.txt").read_text()
    assert ibstat.parse(text) == ()
    assert await ib.read(machine({}, {"ibstat": "exit 0"}), {}) == ib.Ports()


async def replay(captures, machine, name: str) -> dict[str, ib.IbPort]:
    root: Root = machine({}, {"ibstat": f"cat {shlex.quote(str(captures / 'infiniband' / name))}"})
    found = await ib.read(root, {})
    assert found.error is None
    return {port.hca: port for port in found.ports}


async def test_h100_with_some_ports_down(captures, machine):
    ports = await replay(captures, machine, "ibstat-h100-ib-some-down.txt")
    assert len(ports) == 12
    down = {name for name, port in ports.items() if port.state == "DOWN"}
    assert down == {"mlx5_2", "mlx5_7", "mlx5_8"}
    assert {ports[name].phys_state for name in down} == {"Disabled"}
    assert {ports[name].link_layer for name in down} == {"Ethernet"}
    rails = [port for port in ports.values() if port.link_layer == "InfiniBand"]
    assert len(rails) == 8
    assert all(port.active and port.rate_gbps == 400 and port.sm_lid == 334 for port in rails)
    assert ports["mlx5_10"].lid == 828
    assert ports["mlx5_1"].port_guid == "966daefffec2b690"


async def test_h100_with_roce_only(captures, machine):
    ports = await replay(captures, machine, "ibstat-h100-roce-12.txt")
    assert len(ports) == 12
    assert {port.link_layer for port in ports.values()} == {"Ethernet"}
    assert all(port.active and port.lid == 0 for port in ports.values())
    assert sorted(port.rate_gbps for port in ports.values()) == [100.0] * 4 + [400.0] * 8
    assert ports["mlx5_1"].port_guid is None
    assert ports["mlx5_1"].node_guid == "e8ebd303003307da"


async def test_a100_with_eight_rails_and_ethernet(captures, machine):
    ports = await replay(captures, machine, "ibstat-a100-ib-8x200-plus-eth.txt")
    assert len(ports) == 9
    assert (ports["mlx5_0"].link_layer, ports["mlx5_0"].firmware) == ("Ethernet", "22.35.2302")
    assert (ports["mlx5_8"].lid, ports["mlx5_8"].sm_lid) == (1396, 83)
    assert ports["mlx5_8"].port_guid == "4c1037318e9cd20a"


def test_a100_in_a_virtual_machine(captures):
    text = (captures / "infiniband/ibstatus-a100.txt").read_text()
    ports = ibstat.parse_ibstatus(text)
    assert [port.hca for port in ports] == [f"mlx5_{n}" for n in range(9)]
    assert [port.lid for port in ports[:2]] == [0x33BF, 0x33BE]
    assert ports[8].link_layer == "Ethernet"


def test_large_input_takes_no_time():
    for text in ("\n" * 50_000_000, "CA 'x'\nPort 1:\n" * 3_000_000, "Port GUID: 0x" * 4_000_000):
        began = time.process_time()
        assert len(ibstat.parse(text)) <= ibstat.MAX_PORTS
        assert len(ibstat.parse_ibstatus(text)) <= ibstat.MAX_PORTS
        assert time.process_time() - began < 2


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_mutated_output_is_an_answer(data):
    text = data.draw(st.sampled_from([STANZA + PANIC, STATUS, STANZA * 2]))
    at = data.draw(st.integers(0, len(text)))
    end = data.draw(st.integers(at, min(len(text), at + 60)))
    mutated = text[:at] + data.draw(st.text(max_size=30)) + text[end:]
    for port in (*ibstat.parse(mutated), *ibstat.parse_ibstatus(mutated)):
        assert port.rate_gbps is None or port.rate_gbps > 0
        assert port.node_guid is None or len(port.node_guid) == 16
