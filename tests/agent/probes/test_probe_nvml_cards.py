"""NVML's facts as cards: shared memory, fabrics, links, repairs and MIG (E02, E16, E19, E20)."""

from __future__ import annotations

import json
import re
from ctypes import memmove
from pathlib import Path

import pynvml
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agent.probes import gpus, inventory, nvml, nvml_fields
from agent.probes.card import ZERO_UUID, Fabric, Gpu, MigDevice, NvLink, Process, Repair
from agent.probes.nvml_facts import Answers
from agent.probes.root import Root
from tests.agent.probes.nvml_fake import child, kernel_list, uuid

GIB = 2**30
CLUSTER = "8cd0a0f0-1c0b-4a2f-9f6d-0a1b2c3d4e5f"
CHILD_FILES = ("nvml_child", "nvml_fields", "nvml_slices", "nvml_watch")


async def cards(**scenario: object) -> tuple[Gpu, ...]:
    """The cards of a scenario, all of which must be found."""
    found, works = await nvml.read(Root(), child=child(**scenario))
    assert works
    assert len(found.cards) == scenario.get("count", 1)
    return found.cards


async def test_E02_both_driver_variants_of_a_unified_card_give_the_same_row():
    spark = {"name": "NVIDIA GB10", "addressing": 2, "nvlinks": []}
    [silent] = await cards(values={"0": spark}, fail={"0": {"memory": 3}})
    ram = [128 * GIB, 60 * GIB, 0]
    [claims_ram] = await cards(values={"0": spark | {"memory": ram}})
    assert silent == claims_ram
    assert (silent.memory_kind, silent.memory_mib, silent.memory_used_mib) == (
        "unified",
        None,
        None,
    )
    assert not silent.problems


@pytest.mark.parametrize("hint", [{"addressing": 2}, {"bus_type": 3}, {"c2c": 1}])
async def test_E02_unified_card_of_an_unknown_name(hint):
    values = {"0": {"name": "NVIDIA XB20", **hint}}
    [card] = await cards(values=values, fail={"0": {"memory": 3}})
    assert (card.memory_kind, card.memory_mib) == ("unified", None)
    [refused] = await cards(values=values, fail={"0": {"memory": 4}})
    assert refused.memory_kind is None, "not being told is no word on the kind"


async def test_coherent_card_is_a_numa_node_of_its_own():
    grace = {"name": "NVIDIA GH200 480GB", "addressing": 2, "c2c": 1, "numa_memory": 2}
    [card] = await cards(values={"0": grace})
    assert (card.memory_kind, card.numa_memory, card.numa) == ("coherent", 2, 0)
    assert card.memory_mib == 81008
    [driver_managed] = await cards(values={"0": grace | {"addressing": 0, "numa_memory": None}})
    assert driver_managed.memory_kind == "dedicated"


async def test_E16_fabric_states_of_a_machine_without_a_domain():
    def told(state: int, **more: object) -> dict[str, object]:
        base = {"status": 0, "uuid": ZERO_UUID, "clique": 0, "mask": 0, "summary": 0}
        return {"fabric": base | {"state": state} | more}

    found = await cards(
        count=6,
        values={
            "0": told(2),
            "1": told(0),
            "2": told(3, status=999),
            "3": told(3),
            "4": told(1),
        },
        fail={"5": {"fabric": 3}},
    )
    assert [card.fabric.state for card in found] == [
        "in_progress",
        "not_supported",
        "completed",
        "completed",
        "not_started",
        "not_supported",
    ]
    assert [card.fabric.joined for card in found] == [False] * 6
    assert found[0].fabric == Fabric("in_progress"), "nothing else means anything yet"
    assert found[2].fabric.status == "Unknown Error"
    assert found[3].fabric == Fabric("completed", "Success", ZERO_UUID, 0)
    assert not any(card.problems for card in found)


@pytest.mark.parametrize("version", [1, 2, 3])
async def test_E16_two_cliques_of_a_rack_with_each_version_of_the_call(version):
    joined = {"state": 3, "status": 0, "uuid": CLUSTER, "mask": 0x1A21A, "summary": 2}
    values = {str(n): {"fabric": joined | {"clique": 32766 - n % 2}} for n in range(4)}
    found = await cards(count=4, values=values, fabric_version=version)
    assert {card.fabric.cluster_uuid for card in found} == {CLUSTER}
    assert [card.fabric.clique for card in found] == [32766, 32765, 32766, 32765]
    assert all(card.fabric.joined for card in found)
    assert found[0].fabric.bandwidth == ("full" if version > 1 else None)
    assert found[0].fabric.health == ("unhealthy" if version > 2 else None)


async def test_faults_of_a_fabric():
    mask = 1 | 1 << 2 | 1 << 4 | 1 << 6 | 5 << 8 | 2 << 12 | 2 << 14
    told = {"state": 3, "status": 0, "uuid": CLUSTER, "clique": 1, "mask": mask, "summary": 3}
    [card] = await cards(values={"0": {"fabric": told}})
    assert (card.fabric.bandwidth, card.fabric.health) == ("degraded", "limited")
    assert card.fabric.faults == (
        "route_unhealthy",
        "route_recovery",
        "access_timeout_recovery",
        "incorrect configuration: insufficient NVLinks",
        "no partition assigned",
        "fabric manager disconnected",
    )


async def test_old_driver_knows_no_fabric():
    [card] = await cards(fail={"0": {"fabric": 13}})
    assert card.fabric == Fabric()
    assert card.fabric.joined is None


async def test_paths_over_bridges_and_pci():
    bus = [f"0000000{n}:1B:00.0" for n in range(3)]
    pair = [0] * 4
    values = {
        "0": {"nvlinks": [1, 1, 1, 0], "link_types": pair, "link_peers": [bus[1]] * 4},
        "1": {"nvlinks": [1, 1, 1, 0], "link_types": pair, "link_peers": [bus[0]] * 4},
        "2": {"nvlinks": []},
        "0:2": {"pair": 10},
        "1:2": {"pair": 30},
    }
    one, two, three = await cards(count=3, values=values)
    assert one.paths == {"1": "NV3", "2": "PIX"}
    assert two.paths == {"0": "NV3", "2": "PHB"}
    assert three.paths == {"0": "PIX", "1": "PHB"}
    assert one.nvlinks[0] == NvLink(0, True, 26.562, "gpu", "0001:1b:00.0")
    assert one.nvlinks[3] == NvLink(3, False, None, "gpu", "0001:1b:00.0")
    assert three.nvlinks == ()


async def test_paths_over_switches_count_the_links_that_are_up():
    rack = {"link_types": [255] * 36, "link_peers": ["00000000:00:00.0"] * 36}
    values = {"0": {"nvlinks": [1] * 17 + [0], **rack}, "1": rack}
    one, two = await cards(count=2, values=values)
    assert one.paths == {"1": "NV17"}
    assert two.paths == {"0": "NV17"}
    assert one.nvlinks[0] == NvLink(0, True, 26.562)


async def test_a_link_that_fails_is_unknown_and_the_others_are_told():
    [card] = await cards(fail={"0": {"link_types": 999, "link_peers": 3, "speed": 3}})
    assert len(card.nvlinks) == 18
    assert card.nvlinks[0] == NvLink(0, True)


async def test_repairs_errors_and_what_the_driver_asks_for():
    found = await cards(
        count=4,
        values={
            "0": {"remapped": [1, 4, 1, 0], "recovery_action": [0, 1]},
            "1": {"remapped": [0, 4, 0, 1], "recovery_action": [0, 5]},
            "2": {"retired_corrected": 2, "retired_uncorrected": 1, "retired_pending": 1},
            "3": {"uncorrected": 2, "corrected_aggregate": 9, "recovery_action": [3, 7]},
        },
        fail={"2": {"remapped": 3}},
    )
    assert found[0].repair == Repair(1, 4, True, False)
    assert found[1].repair == Repair(0, 4, False, True)
    assert found[2].repair == Repair(2, 1, True)
    assert (found[3].ecc.uncorrected, found[3].ecc.corrected_aggregate) == (2, 9)
    actions = [card.recovery_action for card in found]
    assert actions == ["GPU Reset", "Recover IMEX Domain", None, None]
    assert not any(card.problems for card in found), "health.py judges these"


async def test_throttle_reasons():
    masks = {str(n): {"throttle": mask} for n, mask in enumerate((0x1 | 0x2 | 0x100, 0xFC, 0x4))}
    found = await cards(count=3, values=masks)
    assert found[0].throttle == ()
    assert set(found[1].throttle) == {
        "hw_thermal",
        "sw_thermal",
        "hw_power_brake",
        "hw_slowdown",
        "sw_power_cap",
        "sync_boost",
    }
    assert found[2].throttle == ("sw_power_cap",)


def slice_of(number: int, gi: int, **more: object) -> dict[str, object]:
    base = {"uuid": f"MIG-{number:08d}-0000-0000-0000-000000000000", "gi": gi, "ci": 0}
    return base | {"memory": [9984 * 2**20, 9 * 2**20, 0]} | more


async def test_mig_devices_with_their_own_memory_and_profile():
    layout = [
        slice_of(0, 2, slices=3, size=40448, memory=[40448 * 2**20, 11091 * 2**20, 0]),
        None,
        slice_of(1, 9, name="NVIDIA H100 80GB HBM3 MIG 1g.10gb"),
    ]
    [card] = await cards(
        values={"0": {"mig": [1, 1], "processes": [[7, 100 * 2**20, 2], [7, 50 * 2**20, 9]]}},
        mig={"0": [layout]},
        fail={"0": {"utilization_percent": 3, "nvlinks": 3}},
    )
    assert card.mig is True
    assert card.slices == (
        MigDevice(layout[0]["uuid"], 0, 2, 0, "3g.40gb", 40448, 11091, 16),
        MigDevice(layout[2]["uuid"], 2, 9, 0, "1g.10gb", 9984, 9, 16),
    )
    assert card.processes == (Process(7, 150),), "each instance's memory once"
    assert card.nvlinks is None, "the driver does not speak of links with MIG"


async def test_compute_instances_share_the_memory_of_their_gpu_instance():
    shared = {"slices": 3, "size": 40448, "memory": [40448 * 2**20, 2**30, 0]}
    layout = [slice_of(n, 1, ci=n, parts=1 + n, **shared) for n in range(2)]
    [card] = await cards(values={"0": {"mig": [1, 1]}}, mig={"0": [layout]})
    assert [device.memory_mib for device in card.slices] == [20224, 20224]
    assert [device.profile for device in card.slices] == ["1c.3g.40gb", "2c.3g.40gb"]


async def test_processes_of_mig_devices_when_the_card_may_not_tell():
    [card] = await cards(
        values={"0": {"mig": [1, 1]}, "0/0": {"processes": [[7, 2**30, 1]]}},
        mig={"0": [[slice_of(0, 1), slice_of(1, 2)]]},
        fail={"0": {"processes": 4}, "0/1": {"processes": 4}},
    )
    assert card.processes == (Process(7, 1024),)


async def test_E19_layout_that_changes_while_it_is_read():
    seven = [slice_of(n, 7 + n) for n in range(7)]
    two = [slice_of(20 + n, 1 + n, slices=3, size=40448) for n in range(2)]
    half_gone = [seven[0], None, None, *two]
    scenario = {
        "values": {"0": {"mig": [1, 1]}},
        "mig": {"0": [seven, seven, half_gone, two, two, two]},
    }
    async with nvml.converse(child(**scenario)) as link:
        first, _ = await nvml.read(Root(), child=link)
        second, works = await nvml.read(Root(), child=link)
    assert works
    assert [device.uuid for device in first.cards[0].slices] == [d["uuid"] for d in seven]
    assert [device.uuid for device in second.cards[0].slices] == [d["uuid"] for d in two]
    assert not second.cards[0].problems


async def test_E20_a_card_that_vanishes_without_a_word_and_one_more_later(machine):
    pci = {
        f"/sys/bus/pci/drivers/nvidia/{n:04x}:1b:00.0/driver_override": "(null)\n" for n in range(8)
    } | {f"/sys/bus/pci/devices/{n:04x}:1b:00.0/class": "0x030200\n" for n in range(8)}
    switch = {
        "/sys/bus/pci/drivers/nvidia/0000:86:00.0/x": "",
        "/sys/bus/pci/devices/0000:86:00.0/class": "0x068000\n",
    }
    root = machine(kernel_list(*range(8)) | pci | switch)
    async with nvml.converse(child(count=8, later=7)) as link:
        before = await inventory.read_gpus(root, child=link)
        assert not any(card.problems for card in before.cards)
        after = await inventory.read_gpus(root, child=link)
    assert len(after.cards) == 8
    assert [card.uuid for card in after.cards if card.problems] == [uuid(7)]
    assert after.cards[7].problems[0].startswith("lost: the driver holds 0007:1b:00.0")
    async with nvml.converse(child(count=7, later=9)) as link:
        await inventory.read_gpus(root, child=link)
        grown = await inventory.read_gpus(root, child=link)
    assert [bool(card.problems) for card in grown.cards] == [False] * 9


async def test_E20_a_card_that_only_pci_still_shows(machine):
    address = "0007:1b:00.0"
    files = {
        f"/sys/bus/pci/drivers/nvidia/{address}/x": "",
        f"/sys/bus/pci/devices/{address}/class": "0x030200\n",
    }
    root = machine(kernel_list(*range(7)) | files)
    found = await inventory.read_gpus(root, child=child(count=7))
    assert [gpus.key(card) for card in found.cards if card.problems] == [f"PCI-{address}"]


def test_foreign_memory():
    card = Gpu(memory_used_mib=1000, processes=(Process(1, 100), Process(2, 300)))
    assert gpus.foreign_memory(card, {1}) == 300
    assert gpus.foreign_memory(card, {1, 2}) == 0
    assert gpus.foreign_memory(Gpu(memory_used_mib=5), {1}) is None
    hidden = Gpu(memory_used_mib=1000, processes=(Process(1, 100), Process(2)))
    assert gpus.foreign_memory(hidden, {1}) == 900
    assert gpus.foreign_memory(Gpu(processes=(Process(2),)), {1}) is None


@pytest.mark.parametrize(
    ("name", "shared"),
    [
        ("NVIDIA GB10", True),
        ("Orin (nvgpu)", True),
        ("NVIDIA Tegra234", True),
        ("NVIDIA Thor", True),
        ("NVIDIA GB200", False),
        ("NVIDIA GH200 480GB", False),
        (None, False),
    ],
)
def test_names_of_processors_with_a_built_in_gpu(name, shared):
    assert gpus.shares_host_memory(name) is shared


def test_cpu_words():
    assert gpus.cpu_words({0, 1, 2, 8, 10, 11}) == "0-2,8,10-11"
    assert gpus.cpu_words(set()) == ""


def test_every_call_exists_in_the_real_binding():
    """A misspelt name would only ever cost its field, and nobody would notice."""
    home = Path(nvml.__file__).parent
    texts = [(home / f"{name}.py").read_text() for name in CHILD_FILES]
    names = {name for text in texts for name in re.findall(r"\b(?:nvml|n)\.([nN][vV]\w+)", text)}
    names |= {name for text in texts for name in re.findall(r'"((?:c_)?nvml\w+)"', text)}
    assert len(names) > 40
    assert sorted(name for name in names if not hasattr(pynvml, name)) == [], "unknown to pynvml"


def test_structures_fit_the_real_binding(monkeypatch):
    """The real binding, with a function of ours where the driver's library would be."""
    wanted = bytes.fromhex(CLUSTER.replace("-", ""))

    def fill(_handle: object, reference: object) -> int:
        info = reference._obj
        memmove(info.clusterUuid, wanted, 16)
        info.state, info.status, info.cliqueId, info.healthMask = 3, 0, 32766, 2
        info.healthSummary = 1
        return 0

    def values(_handle: object, count: object, reference: object) -> int:
        for answer in reference._obj:
            answer.valueType, answer.nvmlReturn, answer.value.uiVal = 1, 0, 26562
        return 0 if count.value else 1

    calls = {"nvmlDeviceGetGpuFabricInfoV": fill, "nvmlDeviceGetFieldValues": values}
    monkeypatch.setattr(pynvml, "_nvmlGetFunctionPointer", calls.__getitem__)
    told = nvml_fields.fabric(pynvml, None)
    assert (told["uuid"], told["clique"], told["mask"], told["summary"]) == (CLUSTER, 32766, 2, 1)
    assert told["status"] == "Success"
    assert nvml_fields.recovery_action(pynvml, None) == 26562
    answers = pynvml.nvmlDeviceGetFieldValues(None, [(164, 0), (164, 1)])
    assert [nvml_fields.field_value(answer) for answer in answers] == [26562, 26562]


NAMES = st.sampled_from([*nvml_fields.FAST, *nvml_fields.SLOW, "handle", "", "x"])
SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20)
KEYS = st.sampled_from(["total", "used", "state", "uuid", "mask", "gi", "memory", "link", "bus"])
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(KEYS, inner, max_size=3),
    max_leaves=4,
)
LINES = st.fixed_dictionaries(
    {},
    optional={
        "gpu": st.integers(-1, 300) | VALUES,
        "pair": st.lists(st.integers(-1, 3), max_size=3) | VALUES,
        "level": VALUES,
        "field": NAMES | VALUES,
        "value": VALUES,
        "failed": VALUES,
        "code": st.sampled_from([3, 15, 18, 999]) | VALUES,
        "begin": st.booleans(),
        "end": st.booleans(),
        "error": VALUES,
        "count": VALUES,
    },
)


@settings(max_examples=60, deadline=None)
@given(st.lists(LINES, max_size=6), st.text(max_size=40))
def test_any_lines_of_a_child_give_cards_and_no_error(lines, noise):
    answers = Answers()
    text = "\n".join([*(json.dumps(line) for line in lines), noise, "[" * 2000])
    answers.take(text)
    answers.blame("hung")
    found = nvml.gpus(answers, loaded=True)
    assert len(found.cards) <= len(lines)
    for card in found.cards:
        assert card.memory_mib is None or card.memory_mib > 0
    assert all(isinstance(word, str) for word in answers.words(fast=False))
