"""The subnet manager behind each port, or the reason why it is not known."""

from __future__ import annotations

import shlex
from dataclasses import replace

import pytest
import trio
from hypothesis import given, settings
from hypothesis import strategies as st

from agent.probes import sminfo
from agent.probes.ib import IbPort
from agent.probes.root import ToolResult
from agent.probes.sminfo import SmInfo

ANSWER = (
    "sminfo: sm lid 7 sm guid 0xfc6a1c0300000000, activity count 1182 priority 14 state 3"
    " SMINFO_MASTER\n"
)
NO_SM = "ibwarn: [77] mad_rpc: _do_madrpc failed; dport (Lid 7)\nsminfo: iberror: failed: query\n"
NO_UMAD = "ibwarn: [5702] mad_rpc_open_port: can't open UMAD port (mlx5_0:1)\n"
NO_MODULE = (
    "ibwarn: [5702] get_abi_version: can't read ABI version from"
    " /sys/class/infiniband_mad/abi_version (No such file or directory):"
    f" is ib_umad module loaded?\n{NO_UMAD}"
)
IB = IbPort("mlx5_0", 1, "InfiniBand", "ACTIVE", "LinkUp", lid=3, sm_lid=7)
ROCE = IbPort("mlx5_9", 1, "Ethernet", "ACTIVE", "LinkUp", netdev="ens1", network="10.1.0.0/16")


def says(text: str, code: int = 255) -> str:
    return f"printf %s {shlex.quote(text)} >&2; exit {code}"


def test_the_master_answers():
    assert sminfo.parse(ANSWER) == SmInfo(7, "fc6a1c0300000000", 1182, 14, "MASTER")
    found = sminfo.answer(IB, ToolResult(ANSWER, exit_code=0))
    assert (found.sm_guid, found.sm_error) == ("fc6a1c0300000000", None)
    assert found.physical == "SM fc6a1c0300000000 (LID 7)"
    assert found.key == "ib:fc6a1c0300000000"


@pytest.mark.parametrize(
    ("text", "info"),
    [
        ("sm lid 1 sm guid 0x2c9, activity count 0 priority 0 state 2 X", "STANDBY"),
        ("sm lid 1 sm guid 0x2c9, activity count 0 priority 0 state 9 SMINFO_NEW", "NEW"),
        ("\x1b[1msminfo: sm lid 1 sm guid 0x2c9\x1b[0m", None),
        ("sm lid 1 sm guid 0x0000000000000000, activity", ""),
        ("sm lid one", ""),
        ("", ""),
    ],
)
def test_other_answers(text, info):
    found = sminfo.parse(text)
    assert (found.state if found else "") == info
    assert found is None or found.guid == "00000000000002c9"


def test_a_standby_manager_is_no_identity():
    text = ANSWER.replace("state 3 SMINFO_MASTER", "state 2 SMINFO_STANDBY")
    found = sminfo.answer(IB, ToolResult(text, exit_code=0))
    assert found.sm_guid is None
    assert "LID 7 is STANDBY, not MASTER" in found.sm_error


@pytest.mark.parametrize(
    ("script", "words"),
    [
        (None, "sminfo is not installed: install the package infiniband-diags"),
        (says(NO_SM), "no subnet manager answers"),
        (says(NO_UMAD), "cannot open /dev/infiniband/umad*: run the agent as root"),
        (says("sminfo: Permission denied\n"), "run the agent as root"),
        (says(NO_MODULE), "modprobe ib_umad"),
        (says("ibpanic: [9] main: strange\n"), "sminfo on mlx5_0/1: ibpanic: main: strange"),
        ("exit 3", "exit status 3"),
        ("echo hello", "output not understood"),
        ("kill -SEGV $$", "ended by signal 11"),
    ],
)
async def test_every_failure_says_what_to_do(machine, script, words):
    root = machine({}, {} if script is None else {"sminfo": script})
    (found,) = await sminfo.identify(root, [IB])
    assert found.sm_guid is None
    assert words in found.sm_error
    assert found.active


async def test_a_good_answer_with_a_bad_exit_code_is_used(machine):
    root = machine({}, {"sminfo": f"printf %s {shlex.quote(ANSWER)}; {says(NO_UMAD)}"})
    (found,) = await sminfo.identify(root, [IB])
    assert (found.key, found.sm_error) == ("ib:fc6a1c0300000000", None)


async def test_rails_may_have_their_own_managers(machine):
    script = 'n=${2#mlx5_}; echo "sminfo: sm lid $4 sm guid 0xfc6a1c030000000$n, state 3"'
    ports = [replace(IB, hca=f"mlx5_{n}", port=n + 1, sm_lid=None) for n in range(3)]
    found = await sminfo.identify(machine({}, {"sminfo": script}), ports)
    assert [(port.hca, port.sm_guid[-1], port.sm_lid) for port in found] == [
        ("mlx5_0", "0", 1),
        ("mlx5_1", "1", 2),
        ("mlx5_2", "2", 3),
    ]


async def test_ports_that_hang_are_given_up(machine, monkeypatch):
    monkeypatch.setattr(sminfo, "TIMEOUT_S", 0.3)
    ports = [replace(IB, hca=f"mlx5_{n}") for n in range(6)]
    found = await sminfo.identify(machine({}, {"sminfo": "exec sleep 600"}), ports)
    assert all("no answer within 0.3 s" in port.sm_error for port in found)


async def test_ports_are_asked_side_by_side(machine, monkeypatch, tmp_path):
    """Each answer waits until all six are asked for: one after the other none would come."""
    monkeypatch.setattr(sminfo, "TIMEOUT_S", 15.0)
    came = tmp_path / "came"
    meet = f"echo x >> {came}; while [ $(wc -l < {came}) -lt 6 ]; do sleep 0.05; done"
    ports = [replace(IB, hca=f"mlx5_{n}") for n in range(6)]
    found = await sminfo.identify(machine({}, {"sminfo": f"{meet}; {says(NO_SM)}"}), ports)
    assert not [port.sm_error for port in found if "no answer within" in port.sm_error]


async def test_only_active_infiniband_is_asked(machine, tmp_path):
    root = machine({}, {"sminfo": f"echo $2 >> {tmp_path}/asked; {says(NO_SM)}"})
    ports = [
        ROCE,
        replace(ROCE, network=None),
        replace(IB, hca="mlx5_1", state="DOWN", phys_state="Polling"),
        replace(IB, hca="mlx5_2", state="INIT", lid=65535),
        replace(IB, hca="hfi1_0", link_layer="OmniPath"),
        replace(IB, hca="irdma0", link_layer="iWARP"),
        replace(IB, hca="what", link_layer=None),
        IB,
    ]
    found = await sminfo.identify(root, ports)
    assert (tmp_path / "asked").read_text() == "mlx5_0\n"
    assert [port.hca for port in found] == [port.hca for port in ports]
    errors = [port.sm_error or "" for port in found]
    assert errors[0] == ""
    assert "no RoCE v2 address in a known network: give ens1 an IP address" in errors[1]
    assert errors[2] == "mlx5_1/1 is DOWN, Polling: see to its cable and switch port"
    assert "no LID yet: see that a subnet manager runs" in errors[3]
    assert "declare the fabric" in errors[4]
    assert errors[5:7] == ["", ""]


async def test_no_more_ports_are_asked_than_is_bearable(machine, monkeypatch):
    monkeypatch.setattr(sminfo, "MAX_ASKED", 2)
    ports = [replace(IB, hca=f"mlx5_{n}") for n in range(3)]
    with trio.fail_after(60):
        found = await sminfo.identify(machine({}, {"sminfo": says(NO_SM)}), ports)
    assert ["not asked" in port.sm_error for port in found] == [False, False, True]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("sminfo-no-hardware.txt", "modprobe ib_umad"),
        ("sminfo-no-sm.txt", "no subnet manager answers"),
        ("sminfo-sim-master.txt", None),
    ],
)
async def test_captured_answers(captures, machine, name, words):
    script = f"cat {shlex.quote(str(captures / 'infiniband' / name))}"
    (found,) = await sminfo.identify(machine({}, {"sminfo": script}), [replace(IB, sm_lid=1)])
    if words is None:
        assert (found.physical, found.sm_error) == ("SM fc6a1c0300000000 (LID 1)", None)
    else:
        assert words in found.sm_error


@settings(max_examples=100, deadline=None)
@given(st.text(max_size=80), st.integers(0, len(ANSWER)), st.integers(0, len(ANSWER)))
def test_mutated_answers_are_answers(noise, at, to):
    found = sminfo.answer(IB, ToolResult(ANSWER[:at] + noise + ANSWER[to:], NO_SM, 1))
    assert (found.sm_guid is None) == (found.sm_error is not None)
