"""AMD cards from amd-smi, rocm-smi and the kernel, in the spellings of their versions."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agent.probes import amd, amd_json, amd_smi, amd_sysfs, gpus, rocm_smi
from agent.probes.amd_smi import Documents
from agent.probes.card import Ecc, Gpu, Pcie, Process

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from agent.probes.root import Root

STATIC = {
    "gpu": 0,
    "asic": {"market_name": "AMD Instinct MI300X", "device_id": "0x74a1", "asic_serial": "0xABC"},
    "bus": {
        "bdf": "0000:0C:00.0",
        "max_pcie_width": 16,
        "max_pcie_speed": {"value": 32, "unit": "GT/s"},
    },
    "limit": {
        "socket_power": {"value": 700, "unit": "W"},
        "max_power": {"value": 750, "unit": "W"},
    },
    "driver": {"name": "amdgpu", "version": "6.8.5"},
    "ras": {"ecc_block_state": {"UMC": "ENABLED", "VCN": "DISABLED"}},
    "numa": {"node": 1, "affinity": "NONE"},
    "vram": {"type": "HBM3", "size": {"value": 196592, "unit": "MB"}},
}
METRIC = {
    "gpu": 0,
    "usage": {"gfx_activity": {"value": 73, "unit": "%"}},
    "power": {"socket_power": {"value": 142, "unit": "W"}, "throttle_status": "N/A"},
    "clock": {
        "gfx_0": {"clk": {"value": 132, "unit": "MHz"}, "max_clk": {"value": 2100, "unit": "MHz"}},
        "gfx_1": {"clk": {"value": 140, "unit": "MHz"}, "max_clk": {"value": 2100, "unit": "MHz"}},
        "mem_0": {"clk": {"value": 900, "unit": "MHz"}, "max_clk": "N/A"},
    },
    "temperature": {"edge": "N/A", "hotspot": {"value": 61, "unit": "C"}},
    "pcie": {"width": 16, "speed": {"value": 32, "unit": "GT/s"}},
    "ecc": {"total_correctable_count": 3, "total_uncorrectable_count": 1},
    "mem_usage": {
        "total_vram": {"value": 196592, "unit": "MB"},
        "used_vram": {"value": 283, "unit": "MB"},
    },
    "throttle": {
        "prochot_violation_status": "NOT ACTIVE",
        "socket_thermal_violation_status": "ACTIVE",
        "vr_thermal_violation_status": "ACTIVE",
        "hbm_thermal_violation_status": "N/A",
    },
}
PROCESS = {
    "gpu": 0,
    "process_list": [
        {"process_info": {"pid": 77, "memory_usage": {"vram_mem": {"value": 2**30, "unit": "B"}}}},
        {"process_info": {"pid": 78, "memory_usage": {"vram_mem": "N/A"}}},
    ],
}
WARNING = "WARNING: User is missing the following required groups: render, video\n"


def documents(**parts: object) -> Documents:
    return Documents(**{name: json.dumps(part) for name, part in parts.items()})


def test_all_documents_make_one_card():
    found = amd_smi.parse(
        documents(static={"gpu_data": [STATIC]}, metric=[METRIC], process=[PROCESS])
    )
    [card] = found.cards
    assert (found.driver_version, found.source, found.error) == ("6.8.5", "amd-smi", None)
    assert (card.vendor, card.index, card.name) == ("amd", 0, "AMD Instinct MI300X")
    assert (card.uuid, card.pci_bus_id) == ("GPU-0000000000000abc", "0000:0c:00.0")
    assert (card.memory_mib, card.memory_used_mib) == (196592, 283)
    assert (card.utilization_percent, card.temperature_c, card.power_w) == (73, 61, 142)
    assert (card.power_limit_w, card.numa) == (700, 1)
    assert (card.clocks.sm, card.clocks.sm_max, card.clocks.memory_max) == (140, 2100, None)
    assert card.ecc == Ecc(enabled=True, corrected=3, uncorrected=1)
    assert card.pcie == Pcie(5, 5, 16, 16)
    assert card.throttle == ("hw_thermal",)
    assert card.processes == (Process(77, 1024), Process(78, None))


def test_older_and_newer_shapes_of_values():
    old = {"gpu": 1, "usage": {"gfx_activity": "50 %"}, "power": {"average_socket_power": "90 W"}}
    new = {"gpu": 0, "power": {"current_socket_power": 41.5}, "temperature": {"edge": 40}}
    limits = {"gpu": 0, "limit": {"ppt0": {"socket_power_limit": {"value": 1000, "unit": "W"}}}}
    found = amd_smi.parse(documents(static=[limits], metric=[old, new]))
    first, second = found.cards
    assert (first.power_w, first.temperature_c, first.power_limit_w) == (41.5, 40, 1000)
    assert (second.index, second.utilization_percent, second.power_w) == (1, 50, 90)
    assert first.processes is None


def test_uuid_in_each_of_its_forms():
    def uuid(listed: dict[str, str], serial: str = "N/A") -> str | None:
        static = {"gpu": 0, "asic": {"asic_serial": serial}}
        return (
            amd_smi.parse(documents(listed=[{"gpu": 0, **listed}], static=[static])).cards[0].uuid
        )

    own = "deff740f-0000-1000-8082-87300da37c72"
    assert uuid({"uuid": own}) == "GPU-de8287300da37c72"
    assert uuid({"uuid": own, "hip_uuid": "GPU-76A08c022586fed6"}) == "GPU-76a08c022586fed6"
    assert uuid({"uuid": own}, "0x8D1457E2C20F59D2") == "GPU-8d1457e2c20f59d2"
    assert uuid({"uuid": "N/A"}, "0x0") is None


@pytest.mark.parametrize(
    "value", ["N/A", None, "", [], {}, {"value": "N/A", "unit": ""}, "ERR!", True]
)
@pytest.mark.parametrize("field", ["usage", "power", "temperature", "mem_usage", "ecc", "clock"])
def test_E02_a_value_that_is_none_costs_no_other(field: str, value: object):
    whole = amd_smi.parse(documents(static=[STATIC], metric=[METRIC])).cards[0]
    parts = METRIC[field]
    assert isinstance(parts, dict)
    for part in (value, dict.fromkeys(parts, value)):
        broken = documents(static=[STATIC], metric=[{**METRIC, field: part}])
        [card] = amd_smi.parse(broken).cards
        assert (card.uuid, card.memory_mib, card.name) == (whole.uuid, 196592, whole.name)
    assert (field != "mem_usage") == (card.memory_used_mib == 283)
    assert (field != "ecc") == (card.ecc.uncorrected == 1)


def test_apu_gfx_list_and_block_list():
    blocks = [{"block": "GFX", "status": "ENABLED"}, {"block": "UMC", "status": "DISABLED"}]
    static = {**STATIC, "ras": {"ecc_block_state": blocks}}
    [card] = amd_smi.parse(documents(static=[static])).cards
    assert card.ecc.enabled is False


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "no output"),
        ("[]", "no cards"),
        ('[\n  {"gpu": 0, "asic": {', "not readable: ["),
        ("AMDSMI_STATUS_DRIVER_NOT_LOADED", "AMDSMI_STATUS_DRIVER_NOT_LOADED"),
        ("[" * 100_000, "not readable: "),
        ('{"gpu": ' + "9" * 10_000 + "}", "not readable: "),
    ],
)
def test_no_document_says_why(text: str, why: str):
    found = amd_smi.parse(Documents(static=text))
    assert found.cards == ()
    assert why in (found.error or "")
    assert rocm_smi.parse(text).error is not None


ROCM = {
    "card1": {"Unique ID": "0x2f048617326b1ea", "Card Series": "0x1002", "Device ID": "0x740f"},
    "card0": {
        "Unique ID": "N/A",
        "Card series": "Arcturus GL-XL [Instinct MI100]",
        "Temperature (Sensor edge) (C)": "31.0",
        "Temperature (Sensor junction) (C)": "34.0",
        "VRAM Total Memory (B)": "34342961152",
        "VRAM Total Used Memory (B)": "6782976",
        "GPU use (%)": "7",
        "Average Graphics Package Power (W)": "39.0",
        "sclk clock speed:": "(300Mhz)",
        "pcie clock level": "0 (8.0GT/s x16)",
        "PCI Bus": "0000:1E:00.0",
        "(Topology) Numa Node": "-1",
    },
    "system": {"Driver version": "6.2.4"},
}


def test_rocm_smi_json():
    found = rocm_smi.parse(WARNING + json.dumps(ROCM))
    first, second = found.cards
    assert (found.driver_version, found.source) == ("6.2.4", "rocm-smi")
    assert (first.index, first.uuid, first.name) == (0, None, "Instinct MI100")
    assert (first.memory_mib, first.memory_used_mib, first.utilization_percent) == (32752, 6, 7)
    assert (first.temperature_c, first.power_w, first.clocks.sm) == (34, 39, 300)
    assert (first.pci_bus_id, first.pcie, first.numa) == ("0000:1e:00.0", Pcie(3, None, 16), None)
    assert (second.uuid, second.name) == ("GPU-02f048617326b1ea", "Instinct MI210")


def test_rocm_captures(captures: Path):
    def read(name: str) -> tuple[Gpu, ...]:
        found = rocm_smi.parse((captures / "amd" / name).read_text())
        assert found.error is None
        assert found.driver_version is not None
        return found.cards

    six = read("mi100_rocm571.json")
    assert {(card.name, card.memory_mib) for card in six} == {("Instinct MI100", 32752)}
    assert [card.index for card in six] == [0, 1, 2, 3, 4, 5]
    for name in ("rx6700xt_rocm430.json", "rx6700xt_rocm612.json"):
        [card] = read(name)
        assert (card.memory_mib, card.temperature_c, card.power_w) == (12272, 47, 6)
    [vega] = read("vega-20-WKS-GL-XE.json")
    assert (vega.uuid, vega.name) == ("GPU-02f048617326b1ea", "Radeon Instinct MI50 32GB")
    four = read("mi300x-x4.rocm-smi-a.txt")
    assert (len(four), four[0].pci_bus_id) == (4, "0000:26:00.0")
    assert (four[0].power_w, four[0].power_limit_w) == (133, 750)
    assert "rocm-smi: " in (
        rocm_smi.parse((captures / "amd/mi300x.rocm-smi.txt").read_text()).error or ""
    )


DEVICE = "/sys/class/drm/card1/device"
KERNEL = {
    f"{DEVICE}/vendor": "0x1002\n",
    f"{DEVICE}/device": "0x74a1\n",
    f"{DEVICE}/unique_id": "abc\n",
    f"{DEVICE}/uevent": "DRIVER=amdgpu\nPCI_SLOT_NAME=0000:0c:00.0\n",
    f"{DEVICE}/mem_info_vram_total": "206141652992\n",
    f"{DEVICE}/mem_info_vram_used": "296747008\n",
    f"{DEVICE}/gpu_busy_percent": "4\n",
    f"{DEVICE}/numa_node": "0\n",
    f"{DEVICE}/local_cpulist": "0-47\n",
    f"{DEVICE}/current_link_width": "8\n",
    f"{DEVICE}/max_link_width": "16\n",
    f"{DEVICE}/max_link_speed": "32.0 GT/s PCIe\n",
    f"{DEVICE}/hwmon/hwmon3/temp1_input": "36000\n",
    f"{DEVICE}/hwmon/hwmon3/temp1_label": "edge\n",
    f"{DEVICE}/hwmon/hwmon3/temp2_input": "41000\n",
    f"{DEVICE}/hwmon/hwmon3/temp2_label": "junction\n",
    f"{DEVICE}/hwmon/hwmon3/power1_input": "121000000\n",
    f"{DEVICE}/ras/umc_err_count": "ue: 1\nce: 5\n",
    f"{DEVICE}/ras/gfx_err_count": "ue: 0\nce: 2\n",
    "/sys/class/drm/card0/device/vendor": "0x1a03\n",
    "/sys/class/drm/card1-DP-1/status": "x\n",
    "/sys/module/amdgpu/version": "6.8.5\n",
}


async def test_kernel_stands_in_for_missing_tools(machine: Callable[..., Root]):
    found = await amd.read(machine(KERNEL))
    [card] = found.cards
    assert (found.source, found.driver_version) == ("sysfs", "6.8.5")
    assert (found.error or "").startswith("amd-smi, rocm-smi: no such program")
    assert (card.index, card.uuid, card.name) == (0, "GPU-0000000000000abc", "Instinct MI300X")
    assert (card.memory_mib, card.memory_used_mib, card.utilization_percent) == (196592, 283, 4)
    assert (card.temperature_c, card.power_w) == (41, 121)
    assert (card.ecc.corrected, card.ecc.uncorrected) == (7, 1)
    assert card.pcie == Pcie(None, 5, 8, 16)
    assert (card.numa, card.cpu_affinity, card.pci_bus_id) == (0, "0-47", "0000:0c:00.0")
    assert (await amd.read_fast(machine(KERNEL))).cards[0].power_w == 121


def tool(**parts: object) -> str:
    cases = "".join(
        f"{name}) cat <<'EOF'\n{WARNING}{json.dumps(p)}\nEOF\n;;\n" for name, p in parts.items()
    )
    return f'case "$1" in\n{cases}*) exit 1;;\nesac\nexit 2'


async def test_kernel_completes_what_amd_smi_leaves_out(machine: Callable[..., Root]):
    static = {**STATIC, "numa": "N/A", "asic": {"market_name": "N/A"}}
    root = machine(KERNEL, {"amd-smi": tool(static=[static], metric=[{"gpu": 0}])})
    found = await amd.read(root)
    [card] = found.cards
    assert (found.source, found.error) == ("amd-smi", None)
    assert (card.uuid, card.name, card.numa) == ("GPU-0000000000000abc", "Instinct MI300X", 0)
    assert (card.temperature_c, card.cpu_affinity, card.ecc.uncorrected) == (41, "0-47", 1)
    assert card.ecc.enabled is True


async def test_E07_a_card_that_amd_smi_leaves_out_is_named(machine: Callable[..., Root]):
    other = {**STATIC, "bus": {"bdf": "0000:22:00.0"}, "asic": {"asic_serial": "0xdef"}}
    script = {"amd-smi": tool(static=[other])}
    node = {
        "/sys/bus/pci/devices/0000:0c:00.0/drm/card1/dev": "226:1\n",
        "/dev/dri/card1": "",
    }
    there, lost = (await amd.read(machine(KERNEL | node, script))).cards
    assert (there.pci_bus_id, there.problems) == ("0000:22:00.0", ())
    assert lost.problems == ("lost: the kernel holds 0000:0c:00.0 but amd-smi does not show it",)


async def test_card_of_another_container_is_not_lost(machine: Callable[..., Root]):
    other = {**STATIC, "bus": {"bdf": "0000:22:00.0"}}
    found = await amd.read(machine(KERNEL, {"amd-smi": tool(static=[other])}))
    assert [card.pci_bus_id for card in found.cards] == ["0000:22:00.0"]


async def test_rocm_smi_stands_in_for_amd_smi(machine: Callable[..., Root]):
    aborts = f"case \"$*\" in *-a*) kill -6 $$;; *) echo '{json.dumps(ROCM)}';; esac"
    broken = "echo 'driver not loaded' >&2; exit 255"
    found = await amd.read(machine({}, {"amd-smi": broken, "rocm-smi": aborts}))
    assert (found.source, len(found.cards)) == ("rocm-smi", 2)
    nothing = await amd.read(machine({}, {"amd-smi": broken, "rocm-smi": broken}))
    assert nothing.cards == ()
    assert "driver not loaded" in (nothing.error or "")


async def test_hanging_tool_ends_with_a_reason(machine: Callable[..., Root]):
    found = await amd.read(machine(KERNEL, {"amd-smi": "sleep 60", "rocm-smi": "sleep 60"}), 0.2)
    assert "no answer within" in (found.error or "")
    assert [card.name for card in found.cards] == ["Instinct MI300X"]


async def test_no_amd_no_reason(machine: Callable[..., Root]):
    found = await amd.read(machine({}))
    assert (found.cards, found.error, found.source) == ((), None, None)


async def test_kernel_capture(captures: Path, machine: Callable[..., Root]):
    text = (captures / "sysfs/procfs-amdgpu-drm.ttar").read_text()
    files: dict[str, str] = {}
    for entry in text.split("# ttar - - - - - - - - - - - - - - - - - - - -\n"):
        head, _, rest = entry.partition("\nLines: ")
        lines = rest.splitlines()
        if lines and lines[0].isdecimal():
            name = head.removeprefix("Path: fixtures")
            files[name] = "\n".join(lines[1 : int(lines[0]) + 1]) + "\n"
    [card] = (await amd.read(machine(files))).cards
    assert (card.uuid, card.memory_mib) == ("GPU-0123456789abcdef", 8176)
    assert (card.memory_used_mib, card.utilization_percent, card.numa) == (1421, 4, None)
    assert card.pcie == Pcie(3, 3, 16, 16)


def test_parts_of_one_card_do_not_share_a_uuid():
    parts = gpus.unlike([Gpu(uuid="GPU-1"), Gpu(uuid="GPU-1"), Gpu(), Gpu()])
    assert [part.uuid for part in parts] == ["GPU-1", None, None, None]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("Arcturus GL-XL [Instinct MI100]", "Instinct MI100"),
        ("Navi 22 [Radeon RX 6700/6700 XT / 6800M]", "Radeon RX 6700"),
        ("AMD Instinct MI300X OAM", "AMD Instinct MI300X OAM"),
        ("0x1002", None),
        ("N/A", None),
        ("", None),
    ],
)
def test_names(name: str, expected: str | None):
    assert amd_sysfs.product_name(name) == expected


TEXTS = [
    WARNING + json.dumps([STATIC, {**STATIC, "gpu": 1}], indent=4),
    json.dumps({"gpu_data": [METRIC]}, indent=1),
    json.dumps(ROCM, indent=2),
    json.dumps([PROCESS]),
]
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from([*METRIC, *STATIC, "value", "unit", "pid"]), inner, max_size=4
        )
    ),
    max_leaves=12,
)


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(TEXTS), st.text(max_size=40), st.integers(0, 1500), st.integers(0, 1500))
def test_fuzz_text(text: str, noise: str, start: int, end: int):
    mutated = text[:start] + noise + text[end:]
    parsed = amd_smi.parse(Documents(mutated, mutated, mutated, mutated))
    assert parsed.cards or parsed.error
    parsed = rocm_smi.parse(mutated)
    assert parsed.cards or parsed.error


@settings(max_examples=80, deadline=None)
@given(JSON, JSON)
def test_fuzz_values(one: object, other: object):
    text = json.dumps([one, {"gpu": 0, "process_list": [other], "ecc": other, "usage": one}])
    amd_smi.parse(Documents(text, text, text, text))
    rocm_smi.parse(json.dumps({"card0": one, "card1": {"Unique ID": other}, "system": other}))


def test_huge_output_is_bounded():
    many = "[" + ",".join(f'{{"gpu": {i}}}' for i in range(300_000)) + "]"
    assert len(amd_smi.parse(Documents(static=many)).cards) == amd_smi.MAX_CARDS
    assert rocm_smi.parse("GPU[0]\t\t: a: b\n" * 200_000).cards[0].index == 0
    assert amd_json.document("[\n" * 5_000_000) is None
