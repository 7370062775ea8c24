"""NVML in a child that loses cards, crashes and hangs: each costs only itself (E07, E01)."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import trio

from agent.probes import gpus, inventory, nvml
from agent.probes.card import Gpu, Gpus, Process
from agent.probes.root import Root

CHILD = Path(__file__).parent / "fake_nvml" / "child.py"
INFORMATION = "Model: \t NVIDIA H100 80GB HBM3\nGPU UUID: \t {uuid}\nBus Location: \t {bus}\n"


def child(**scenario: object) -> tuple[str, ...]:
    return (sys.executable, str(CHILD), json.dumps(scenario))


async def test_all_fields_of_a_card():
    found, works = await nvml.read(Root(), child=child(count=2))
    assert works
    assert (found.driver_version, found.cuda_version, found.error) == ("590.48.01", "13.1", None)
    card = found.cards[1]
    assert (card.index, card.pci_bus_id, card.name) == (1, "0001:1b:00.0", "NVIDIA H100 80GB HBM3")
    assert (card.memory_mib, card.memory_used_mib) == (81559 - 551, 1000)
    assert (card.utilization_percent, card.temperature_c, card.power_w) == (7, 36, 66.92)
    assert (card.mig, card.processes, card.problems) == (False, (), ())


async def test_fast_leaves_out_what_does_not_change():
    found, _ = await nvml.read(Root(), fast=True, child=child())
    assert found.cards[0].uuid
    assert found.cards[0].name is None
    assert found.cards[0].power_w == 66.92


async def test_old_driver_has_no_reserved_memory():
    found, _ = await nvml.read(Root(), child=child(old=True))
    assert found.cards[0].memory_mib == 81559


@pytest.mark.parametrize("call", ["handle", "memory", "mig", "uuid", "*"])
async def test_E07_one_lost_gpu_of_eight_costs_itself(call):
    found, works = await nvml.read(Root(), child=child(count=8, fail={"3": {call: 15}}))
    assert works
    assert [card.index for card in found.cards if not card.problems] == [0, 1, 2, 4, 5, 6, 7]
    [problem] = found.cards[3].problems
    assert "GPU is lost" in problem


@pytest.mark.slow
async def test_E07_a_driver_call_that_crashes_costs_its_card():
    found, works = await nvml.read(
        Root(), child=child(count=8, crash={"3": "power", "6": "handle"})
    )
    assert works
    assert [card.index for card in found.cards if card.problems] == [3, 6]
    assert len(found.cards) == 8
    assert "crashed" in found.cards[3].problems[0]
    assert "signal 11" in found.cards[3].problems[0]
    assert "power_mw" in found.cards[3].problems[0]
    assert found.cards[3].temperature_c == 36, "what was answered before the crash is kept"


@pytest.mark.slow
async def test_E07_a_driver_call_that_hangs_costs_its_card():
    with trio.fail_after(10):
        found, works = await nvml.read(
            Root(), child=child(count=4, hang={"1": "utilization"}), run_timeout_s=1.0
        )
    assert works
    assert [card.index for card in found.cards if not card.problems] == [0, 2, 3]
    assert found.cards[1].problems == ("driver hung when asked for utilization_percent",)


@pytest.mark.slow
async def test_E07_many_hanging_cards_stay_within_the_deadline():
    hang = {str(index): "memory" for index in range(8)}
    with trio.fail_after(8):
        found, _ = await nvml.read(
            Root(), child=child(count=8, hang=hang), run_timeout_s=0.7, timeout_s=2.0
        )
    assert found.error == "NVML: not all GPUs answered within 2 s"


async def test_E07_lost_card_is_named_by_the_kernel(machine):
    files = {
        f"{gpus.PROC_GPUS}/000{n}:1b:00.0/information": INFORMATION.format(
            uuid="GPU-????????-????" if n == 1 else f"GPU-{n:08d}-aaaa-bbbb-cccc-0123456789ab",
            bus=f"000{n}:1b:00.0",
        )
        for n in range(3)
    }
    numa = {"/sys/bus/pci/devices/0000:1b:00.0/numa_node": "1\n"}
    lost = child(count=3, fail={"1": {"*": 15}})
    reports, error = await inventory.gpu_facts(machine(files | numa), child=lost)
    assert error is None
    assert [(r["uuid"], r["healthy"]) for r in reports] == [
        ("GPU-00000000-aaaa-bbbb-cccc-0123456789ab", True),
        ("PCI-0001:1b:00.0", False),
        ("GPU-00000002-aaaa-bbbb-cccc-0123456789ab", True),
    ]
    assert reports[1]["class"] == "H100"
    assert reports[0]["numa"] == 1


async def test_E07_card_that_only_the_kernel_lists_is_reported_lost(machine):
    files = {
        f"{gpus.PROC_GPUS}/000{n}:1b:00.0/information": INFORMATION.format(
            uuid=f"GPU-{n:08d}-aaaa-bbbb-cccc-0123456789ab", bus=f"000{n}:1b:00.0"
        )
        for n in range(8)
    }
    reports, _ = await inventory.gpu_facts(machine(files), child=child(count=7))
    assert [r["uuid"][:12] for r in reports if not r["healthy"]] == ["GPU-00000007"]
    assert len(reports) == 8


@pytest.mark.parametrize("code", [3, 4, 15, 999])
@pytest.mark.parametrize(
    "call", ["memory", "utilization", "temperature", "power", "processes", "name", "ecc", "pci"]
)
async def test_E01_each_field_may_be_unknown_on_its_own(call, code):
    found, _ = await nvml.read(Root(), child=child(count=2, fail={"0": {call: code}}))
    whole, broken = found.cards[1], found.cards[0]
    missing = {
        name
        for name in Gpu.__slots__
        if getattr(broken, name) is None and getattr(whole, name) is not None
    }
    assert len(missing) == {"memory": 2, "ecc": 0}.get(call, 1)
    assert (not broken.problems) == (code in {3, 4})


@pytest.mark.parametrize("value", [[0, 0, 0], [2**64 - 1, 2**64 - 1, 0], [-1, -1, -1]])
async def test_E01_memory_without_sense_is_unknown_never_zero(value):
    found, _ = await nvml.read(Root(), child=child(values={"0": {"memory": value}}))
    assert found.cards[0].memory_mib is None


async def test_memory_repairs_make_a_card_unhealthy():
    broken = {"0": {"remapped": [0, 4, 1, 0]}, "1": {"remapped": [0, 4, 0, 1]}, "2": {"ecc": 2}}
    found, _ = await nvml.read(Root(), child=child(count=4, values=broken))
    assert [not card.problems for card in found.cards] == [False, False, False, True]
    assert "reset" in found.cards[0].problems[0]
    assert "replace" in found.cards[1].problems[0]
    assert "2 uncorrectable" in found.cards[2].problems[0]


async def test_missing_library_is_no_error():
    found, works = await nvml.read(Root(), child=child(init=12))
    assert (found, works) == (Gpus(), False)


async def test_driver_mismatch_says_why_for_every_card_the_kernel_holds(machine):
    information = INFORMATION.format(uuid="GPU-00000000-aaaa", bus="0000:1b:00.0")
    root = machine({f"{gpus.PROC_GPUS}/0000:1b:00.0/information": information})
    reports, error = await inventory.gpu_facts(root, child=child(init=18))
    assert error == "RM mismatch"
    assert reports[0]["problems"] == ["RM mismatch"]


async def test_E07_card_without_any_name_is_told_as_the_reason(machine):
    lost = child(count=2, fail={"1": {"*": 15}})
    reports, error = await inventory.gpu_facts(machine({}), child=lost)
    assert len(reports) == 1
    assert "GPU 1 has neither UUID nor address" in error
    assert "GPU is lost" in error


async def test_child_that_is_no_python_falls_back():
    found, works = await nvml.read(Root(), child=("/bin/sh", "-c", "echo nonsense; exit 3"))
    assert not works
    assert "crashed" in found.error


def test_foreign_memory():
    card = Gpu(memory_used_mib=1000, processes=(Process(1, 100), Process(2, 300)))
    assert gpus.foreign_memory(card, {1}) == 300
    assert gpus.foreign_memory(card, {1, 2}) == 0
    assert gpus.foreign_memory(Gpu(memory_used_mib=5), {1}) is None
    hidden = Gpu(memory_used_mib=1000, processes=(Process(1, 100), Process(2)))
    assert gpus.foreign_memory(hidden, {1}) == 900
    assert gpus.foreign_memory(Gpu(processes=(Process(2),)), {1}) is None


async def test_fast_facts_tell_foreign_use():
    one = {"0": {"processes": [[11, 400 * 2**20], [12, 500 * 2**20]]}}
    facts = await inventory.fast_facts(Root(), {11}, child=child(values=one))
    assert facts.gpus == [
        {
            "uuid": "GPU-00000000-aaaa-bbbb-cccc-0123456789ab",
            "memory_used_mib": 1000,
            "memory_foreign_mib": 500,
            "utilization_percent": 7.0,
            "temperature_c": 36.0,
            "power_w": 66.92,
        }
    ]


async def test_conversation_answers_many_questions_with_one_child():
    async with nvml.converse(child(count=2, later=3)) as link:
        first, _ = await nvml.read(Root(), fast=True, child=link)
        pid = link.pid
        second, _ = await nvml.read(Root(), fast=True, child=link)
        assert (len(first.cards), second) == (2, first)
        full, _ = await nvml.read(Root(), child=link)
        assert len(full.cards) == 3, "a full question opens the driver anew"
        assert full.cards[0].name
        assert link.pid == pid
    assert link.pid is None


@pytest.mark.slow
async def test_E07_conversation_survives_a_crash_and_a_hang():
    broken = child(count=4, crash={"1": "power"}, hang={"2": "memory"})
    async with nvml.converse(broken) as link:
        for _ in range(2):
            with trio.fail_after(10):
                found, works = await nvml.read(Root(), child=link, run_timeout_s=0.8)
            assert works
            assert [card.index for card in found.cards if not card.problems] == [0, 3]
            assert "signal 11" in found.cards[1].problems[0]
            assert "hung" in found.cards[2].problems[0]


async def test_E10_library_is_loaded_anew_after_a_mismatch():
    async with nvml.converse(child(init=18)) as link:
        for _ in range(2):
            found, works = await nvml.read(Root(), fast=True, child=link)
            assert (found.error, works) == ("RM mismatch", False)


async def test_child_ends_with_its_parent():
    async with nvml.converse(child()) as link:
        await nvml.read(Root(), child=link)
        process = link._process
        await process.stdin.aclose()
        with trio.fail_after(5):
            assert await process.wait() == 0


async def test_real_library_on_this_machine():
    found, works = await nvml.read(Root())
    assert works or not found.cards
