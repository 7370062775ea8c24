"""NVML in a child that loses cards, crashes and hangs: each costs only itself."""

from __future__ import annotations

import json
import sys
from dataclasses import fields, replace

import pytest
import trio

from agent.probes import gpus, inventory, nvml
from agent.probes.card import Clocks, Ecc, Fabric, Gpu, Gpus, Pcie, Repair
from agent.probes.nvml_facts import ASIDE
from agent.probes.nvml_fields import FAST, SLOW
from agent.probes.root import Root
from tests.agent.probes.nvml_fake import ZERO, child, kernel_list, uuid

LOADED = {"/proc/driver/nvidia/version": "NVRM version: 590.48.01\n"}
ALL = tuple({**FAST, **SLOW})
SILENT = {"addressing", "bus_type", "c2c", "numa_memory", "recovery_action"} | {
    name for name in ALL if name.startswith("retired")
}
"""Fields that this card has nothing to tell in."""


async def test_all_fields_of_a_card():
    found, works = await nvml.read(Root(), child=child(count=2))
    assert works
    assert (found.driver_version, found.cuda_version, found.error) == ("590.48.01", "13.1", None)
    assert found.source == "nvml"
    card = found.cards[1]
    links = card.nvlinks
    assert len(links) == 18
    assert (links[17].link, links[17].active, links[17].gb_per_s) == (17, True, 26.562)
    assert (links[0].peer, links[0].peer_bus_id) == ("switch", "0000:86:00.0")
    assert replace(card, nvlinks=None) == Gpu(
        uuid=uuid(1),
        index=1,
        name="NVIDIA H100 80GB HBM3",
        pci_bus_id="0001:1b:00.0",
        memory_mib=81559 - 551,
        memory_used_mib=1000,
        memory_kind="dedicated",
        utilization_percent=7,
        temperature_c=36,
        power_w=66.92,
        power_limit_w=700,
        clocks=Clocks(1980, 1980, 2619, 2619),
        throttle=(),
        pcie=Pcie(5, 5, 16, 16),
        persistence=True,
        ecc=Ecc(True, 0, 0, 0, 0),
        repair=Repair(0, 0, False, False),
        fabric=Fabric("completed", "Success", ZERO, 0, "full", "healthy"),
        numa=0,
        cpu_affinity="0-55,112-167",
        paths={"0": "NV18"},
        mig=False,
        processes=(),
    )


async def test_fast_leaves_out_what_does_not_change():
    found, _ = await nvml.read(Root(), fast=True, child=child())
    [card] = found.cards
    assert (card.uuid, card.power_w, card.throttle) == (uuid(0), 66.92, ())
    assert card.memory_kind == "dedicated"
    assert (card.nvlinks, card.persistence, card.fabric.state, card.paths) == (None, None, None, {})


@pytest.mark.parametrize("code", [2, 13, 25])
async def test_old_driver_has_no_reserved_memory(code):
    found, _ = await nvml.read(Root(), child=child(old=code))
    assert found.cards[0].memory_mib == 81559


@pytest.mark.parametrize("call", ["handle", "memory", "mig", "uuid", "fabric", "nvlinks", "*"])
async def test_E07_one_lost_gpu_of_eight_costs_itself(call):
    found, works = await nvml.read(Root(), child=child(count=8, fail={"3": {call: 15}}))
    assert works
    assert [card.index for card in found.cards if not card.problems] == [0, 1, 2, 4, 5, 6, 7]
    [problem] = found.cards[3].problems
    assert problem.startswith("lost: driver says 'GPU is lost'")


async def test_E07_lost_on_topology_costs_only_its_pairs():
    lost = {f"{min(3, n)}:{max(3, n)}": {"pair": 15} for n in range(8) if n != 3}
    no_links = {str(n): {"nvlinks": []} for n in range(8)}
    found, works = await nvml.read(Root(), child=child(count=8, fail=lost, values=no_links))
    assert works
    assert [card.problems for card in found.cards] == [()] * 8
    assert found.cards[3].paths == {}
    assert found.cards[0].paths == {str(n): "SYS" for n in (1, 2, 4, 5, 6, 7)}


@pytest.mark.slow
async def test_E07_a_driver_call_that_crashes_costs_its_card():
    found, works = await nvml.read(
        Root(), child=child(count=8, crash={"3": "power_mw", "6": "handle"})
    )
    assert works
    assert [card.index for card in found.cards if card.problems] == [3, 6]
    assert len(found.cards) == 8
    for part in ("crashed", "signal 11", "power_mw"):
        assert part in found.cards[3].problems[0]
    assert found.cards[3].temperature_c == 36, "what was answered before the crash is kept"
    assert set(found.cards[0].paths) == {"1", "2", "4", "5", "7"}, "the others have their paths"


@pytest.mark.slow
async def test_E07_a_crash_on_topology_costs_one_pair():
    crash = {"0:2": "pair"}
    found, works = await nvml.read(
        Root(),
        child=child(count=4, crash=crash, values={str(n): {"nvlinks": []} for n in range(4)}),
    )
    assert works
    assert [card.problems for card in found.cards] == [()] * 4
    assert "asked for the path of GPUs 0 and 2" in found.error
    assert found.cards[0].paths == {"1": "SYS", "3": "SYS"}
    assert found.cards[2].paths == {"1": "SYS", "3": "SYS"}


@pytest.mark.slow
@pytest.mark.parametrize("field", ["fabric", "nvlinks", "cpu_affinity"])
async def test_E16_a_crash_in_a_side_question_is_never_fatal(field):
    found, works = await nvml.read(Root(), child=child(count=2, crash={"0": field}))
    assert works
    assert [card.problems for card in found.cards] == [(), ()]
    assert f"asked for {field} of GPU 0" in found.error
    assert found.cards[0].memory_mib == found.cards[1].memory_mib
    assert found.cards[0].mig is False, "questions behind it are asked all the same"


@pytest.mark.slow
async def test_E07_a_driver_call_that_hangs_costs_its_card():
    with trio.fail_after(60):
        found, works = await nvml.read(
            Root(), child=child(count=4, hang={"1": "utilization_percent"}), run_timeout_s=3.0
        )
    assert works
    assert [card.index for card in found.cards if not card.problems] == [0, 2, 3]
    assert found.cards[1].problems == ("driver hung when asked for utilization_percent",)


@pytest.mark.slow
async def test_E07_many_hanging_cards_stay_within_the_deadline():
    hang = {str(index): "memory" for index in range(8)}
    with trio.fail_after(20):
        found, _ = await nvml.read(
            Root(), child=child(count=8, hang=hang), run_timeout_s=3.0, timeout_s=7.0
        )
    assert found.error == "NVML: not all GPUs answered within 7 s"
    assert len(found.cards) == 8
    assert "hung" in found.cards[0].problems[0]
    assert found.cards[7].problems == (f"unreachable: not asked: {found.error}",)


@pytest.mark.slow
async def test_E07_crashes_without_end_are_told(machine):
    crash = {str(index): "memory" for index in range(10)}
    root = machine(kernel_list(*range(10)))
    found = await inventory.read_gpus(root, child=child(count=10, crash=crash))
    assert found.error == "NVML: not all GPUs asked: the probe ended early 8 times"
    assert len(found.cards) == 10
    assert not any("lost" in problem for card in found.cards for problem in card.problems)
    assert found.cards[9].uuid == uuid(9), "named by the kernel"


async def test_E07_lost_card_is_named_by_the_kernel(machine):
    numa = {"/sys/bus/pci/devices/0000:1b:00.0/numa_node": "1\n"}
    root = machine(kernel_list(0, 1, 2, lost=(1,)) | numa)
    lost = child(count=3, fail={"1": {"*": 15}})
    found = await inventory.read_gpus(root, child=lost)
    assert [(c.uuid, c.pci_bus_id, bool(c.problems)) for c in found.cards] == [
        (uuid(0), "0000:1b:00.0", False),
        (None, "0001:1b:00.0", True),
        (uuid(2), "0002:1b:00.0", False),
    ]
    assert found.cards[1].name == "NVIDIA H100 80GB HBM3"
    assert [card.numa for card in found.cards] == [1, None, 0], "sysfs first, then the driver"


@pytest.mark.parametrize("code", [3, 4, 13, 15, 18, 25, 999])
async def test_E01_each_field_may_be_unknown_on_its_own(code):
    """Card n lacks field n; the last one lacks none. Nothing else may change."""
    missing = {str(at): {name: code} for at, name in enumerate(ALL)}
    found, works = await nvml.read(Root(), child=child(count=len(ALL) + 1, fail=missing))
    assert works
    assert len(found.cards) == len(ALL) + 1
    whole = unnamed(found.cards[-1])
    for card, name in zip(found.cards, ALL, strict=False):
        if name == "slices":  # not asked for without MIG
            continue
        changed = differences(card, whole) - {"problems"}
        extra = {"memory": {"memory_mib", "memory_used_mib", "memory_kind"}}.get(name, set())
        assert len(changed - extra) <= 1, (name, changed)
        assert changed or name in SILENT, name
        assert card.memory_kind == (None if name == "memory" else "dedicated")
        sick = code == 15 or (code == 999 and name not in ASIDE)
        assert bool(card.problems) == sick, name


def differences(one: Gpu, two: Gpu) -> set[str]:
    return {f.name for f in fields(Gpu) if getattr(unnamed(one), f.name) != getattr(two, f.name)}


def unnamed(card: Gpu) -> Gpu:
    """Without what tells cards apart; paths hang on the links of the others as well."""
    return replace(
        card,
        uuid=card.uuid and "",
        index=0,
        pci_bus_id=card.pci_bus_id and "",
        paths={},
    )


@pytest.mark.parametrize("value", [[0, 0, 0], [2**64 - 1, 2**64 - 1, 0], [-1, -1, -1]])
async def test_E01_memory_without_sense_is_unknown_never_zero(value):
    found, _ = await nvml.read(Root(), child=child(values={"0": {"memory": value}}))
    assert found.cards[0].memory_mib is None


async def test_missing_library_is_no_error():
    found, works = await nvml.read(Root(), child=child(init=12))
    assert (found, works) == (Gpus(), False)


async def test_E07_card_without_any_name_is_kept_with_its_number(machine):
    lost = child(count=2, fail={"1": {"*": 15}})
    found = await inventory.read_gpus(machine({}), child=lost)
    assert [gpus.key(card) for card in found.cards] == [uuid(0), None]
    assert (found.cards[1].index, len(found.cards[1].problems)) == (1, 1)


async def test_child_that_is_no_python_falls_back():
    found, works = await nvml.read(Root(), child=("/bin/sh", "-c", "echo nonsense; exit 3"))
    assert not works
    assert "crashed" in found.error


async def test_E10_mismatch_keeps_cards_out_of_reach_and_says_why(machine):
    root = machine(kernel_list(0) | LOADED)
    found = await inventory.read_gpus(root, child=child(init=18))
    [card] = found.cards
    assert card.uuid == uuid(0)
    assert card.problems[0].startswith("unreachable: NVML: RM mismatch: the driver's library")
    assert "rebooted" in found.error


async def test_E10_library_is_opened_anew_when_the_mismatch_heals(tmp_path):
    scenario = tmp_path / "scenario.json"
    scenario.write_text(json.dumps({"count": 2}))
    async with nvml.converse(child(file=str(scenario))) as link:
        before, works = await nvml.read(Root(), child=link)
        assert works
        scenario.write_text(json.dumps({"init": 18}))
        for _ in range(2):
            found, works = await nvml.read(Root(), child=link)
            assert (found.cards, works) == ((), False)
            assert found.error.startswith("NVML: RM mismatch: ")
        scenario.write_text(json.dumps({"count": 2, "driver": "610.57.04"}))
        after, works = await nvml.read(Root(), child=link)
        assert works
        assert (before.driver_version, after.driver_version) == ("590.48.01", "610.57.04")
        assert after.cards == before.cards


async def test_E10_mismatch_in_the_middle_starts_a_new_child():
    async with nvml.converse(child(count=1, system=18)) as link:
        found, works = await nvml.read(Root(), fast=True, child=link)
        assert works
        assert found.cards[0].memory_mib, "a mismatch costs the field that it hit"
        assert link.pid is None
    every = {str(n): {"handle": 18} for n in range(2)}
    found, works = await nvml.read(Root(), child=child(count=2, fail=every))
    assert (found.cards, works) == ((), False)
    assert "different versions" in found.error


@pytest.mark.parametrize(
    "scenario",
    [
        {"init": 999},
        {"init": 4},
        {"count": 2, "fail": {"0": {"handle": 999}, "1": {"handle": 999}}},
    ],
)
async def test_E11_lost_access_is_no_hardware_fault(machine, scenario):
    root = machine(kernel_list(0, 1) | LOADED)
    found = await inventory.read_gpus(root, child=child(control="/dev/absent", **scenario))
    assert "cannot open /dev/nvidiactl (No such file or directory)" in found.error
    assert "restart the agent's container" in found.error
    assert [card.uuid for card in found.cards] == [uuid(0), uuid(1)]
    for card in found.cards:
        assert card.problems[0].startswith("unreachable: ")


async def test_E11_unknown_error_of_all_cards_with_access_is_theirs():
    lost = {str(n): {"handle": 999} for n in range(2)}
    found, works = await nvml.read(Root(), child=child(count=2, fail=lost))
    assert works
    assert ["Unknown Error" in card.problems[0] for card in found.cards] == [True, True]
    found, works = await nvml.read(Root(), child=child(init=999))
    assert not works
    assert found.error == "NVML: Unknown Error: look for NVRM and Xid lines in dmesg"


async def test_fast_cards_tell_foreign_use():
    one = {"0": {"processes": [[11, 400 * 2**20], [12, 500 * 2**20]]}}
    found, _ = await nvml.read(Root(), fast=True, child=child(values=one))
    assert found.cards[0].memory_used_mib == 1000
    assert gpus.foreign_memory(found.cards[0], {11}) == 500


async def test_conversation_answers_many_questions_with_one_child():
    async with nvml.converse(child(count=2, later=3)) as link:
        first, _ = await nvml.read(Root(), fast=True, child=link)
        pid = link.pid
        second, _ = await nvml.read(Root(), fast=True, child=link)
        assert (len(first.cards), second) == (2, first)
        full, _ = await nvml.read(Root(), child=link)
        assert len(full.cards) == 3, "a full question opens the driver anew"
        assert full.cards[0].persistence
        assert link.pid == pid
    assert link.pid is None


@pytest.mark.slow
async def test_E07_conversation_survives_a_crash_and_a_hang():
    broken = child(count=4, crash={"1": "power_mw"}, hang={"2": "memory"})
    async with nvml.converse(broken) as link:
        for _ in range(2):
            with trio.fail_after(60):
                found, works = await nvml.read(Root(), child=link, run_timeout_s=3.0)
            assert works
            assert [card.index for card in found.cards if not card.problems] == [0, 3]
            assert "signal 11" in found.cards[1].problems[0]
            assert "hung" in found.cards[2].problems[0]


async def test_child_ends_with_its_parent():
    async with nvml.converse(child()) as link:
        await nvml.read(Root(), child=link)
        process = link._process
        await process.stdin.aclose()
        with trio.fail_after(60):
            assert await process.wait() == 0


async def test_child_stays_light():
    """It lives as long as the agent: nothing but the standard library and the binding."""
    code = "import sys, agent.probes.nvml_child; print(*sorted(sys.modules))"
    result = await Root().run([sys.executable, "-c", code], 60, cwd=nvml.HOME)
    heavy = {"trio", "pydantic", "structlog", "asyncio", "xml", "agent.probes.values"}
    assert "agent.probes.nvml_fields" in result.stdout.split()
    assert not heavy & set(result.stdout.split())


async def test_real_library_on_this_machine():
    found, works = await nvml.read(Root())
    assert works or not found.cards
