"""`probe` and `doctor` on machines that no capture shows, written by the published formats."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.agent import made_smi, replay
from tests.agent.made_smi import RACK, ZEROS, card, fabric
from tests.agent.replay import Captured, Says

H200 = "NVIDIA H200"
GB10_MEMORY = "MemTotal: 125512604 kB\nMemFree: 9 kB\nMemAvailable: 65000000 kB\n"
NAMES = {
    "NVIDIA H20": "H20",
    "NVIDIA L20": "L20",
    "NVIDIA A800-SXM4-80GB": "A800",
    "NVIDIA H800": "H800",
    "NVIDIA B200": "B200",
    "NVIDIA B300 SXM6 AC": "B300",
    "NVIDIA GB300": "GB300",
    "NVIDIA GH200 480GB": "GH200",
    "NVIDIA H100 NVL": "H100",
    "NVIDIA RTX PRO 6000 Blackwell Server Edition": "RTXPRO6000",
    "NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition": "RTXPRO6000",
    "NVIDIA RTX 6000 Ada Generation": "RTX6000-Ada",
    "NVIDIA RTX A6000": "RTXA6000",
    "NVIDIA GeForce RTX 5090": "RTX5090",
    "NVIDIA GeForce RTX 4090 D": "RTX4090-D",
    "NVIDIA GeForce GT 1030": "GT1030",
    "Tesla V100-SXM2-32GB": "V100",
    "Quadro RTX 8000": "RTX8000",
    "NVIDIA TITAN RTX": "TITANRTX",
}


def machine(tmp_path: Any, cards: list[made_smi.Section], form: str = "-q") -> Captured:
    out = made_smi.xml(cards) if form == "-q -x" else made_smi.text(cards)
    return Captured(tmp_path).tool("nvidia-smi", {form: Says(out)})


@pytest.mark.parametrize("form", ["-q", "-q -x"])
def test_products_without_a_capture(tmp_path, form):
    cards = [card(at, name, 97871, 500) for at, name in enumerate(NAMES)]
    found = machine(tmp_path, cards, form).probe()
    assert {c["name"]: c["class"] for c in found["gpus"]} == NAMES
    assert {c["memory_mib"] for c in found["gpus"]} == {97371}
    assert replay.findings(found) == []


VALUES = (
    "N/A",
    "[N/A]",
    "[Not Supported]",
    "",
    "ERR!",
    "[Unknown Error]",
    "Insufficient Permissions",
)


@pytest.mark.parametrize("word", VALUES)
def test_E01_any_spelling_of_no_value_costs_that_value_only(tmp_path, word):
    odd = card(
        0, H200, word, word, Utilization={"GPU": word}, Temperature={"GPU Current Temp": word},
        GPU_Power_Readings={"Instantaneous Power Draw": word},
    )  # fmt: skip
    found = machine(tmp_path, [odd, card(1, H200, 143771, 614)]).probe()
    first, second = found["gpus"]
    assert "memory_mib" not in first
    assert second["memory_mib"] == 143157
    use = found["gpu_use"][0]
    assert not {"utilization_percent", "temperature_c", "power_w"} & set(use)
    broken = word in ("ERR!", "[Unknown Error]")
    assert bool(first["findings"]) is broken, "only an error says something about health"


@pytest.mark.parametrize("name", ["NVIDIA GB10", "NVIDIA Thor", "NVIDIA Jetson AGX Orin"])
@pytest.mark.parametrize("total", ["N/A", "Not Supported", 122570])
def test_E02_cards_that_share_the_hosts_memory(tmp_path, name, total):
    pci = {"Bus Id": "0000000F:01:00.0"}
    made = machine(tmp_path, [card(0, name, total, "N/A", PCI=pci)])
    found = made.file("/proc/meminfo", GB10_MEMORY).probe()
    [seen] = found["gpus"]
    assert (seen["memory_kind"], seen["memory_mib"]) == ("unified", 116442)
    assert seen["pci_bus_id"] == "000f:01:00.0"
    assert found["gpu_use"][0]["memory_used_mib"] == 59094
    assert found["host"]["memory_available_mib"] == 63476


def test_E02_without_the_hosts_memory_there_is_no_figure(tmp_path):
    [seen] = machine(tmp_path, [card(0, "NVIDIA GB10", "N/A")]).probe()["gpus"]
    assert seen["memory_kind"] == "unified"
    assert "memory_mib" not in seen


def test_E07_a_card_lost_in_the_middle_leaves_the_others(tmp_path):
    cards = [card(at, H200, 143771, 614) for at in range(8)]
    line = "Unable to determine the device handle for GPU0000:13:00.0: Unknown Error\n"
    made = Captured(tmp_path)
    left = made_smi.xml([c for at, c in enumerate(cards) if at != 3])
    made.tool("nvidia-smi", {"-q -x": Says(line + left, code=15)})
    for at, one in enumerate(cards):
        about = f"Model: {H200}\nGPU UUID: {one['GPU UUID']}\nBus Location: 0000:1{at}:00.0\n"
        made.file(f"/proc/driver/nvidia/gpus/0000:1{at}:00.0/information", about)
    found = made.probe()
    by_uuid = {c["uuid"]: [f["code"] for f in c["findings"]] for c in found["gpus"]}
    assert by_uuid == {c["GPU UUID"]: ["lost"] if at == 3 else [] for at, c in enumerate(cards)}
    checks = made.doctor()
    assert checks["gpu count"]["result"] == "fail"
    assert checks["gpu count"]["evidence"].startswith("7 of 8 cards answer")


@pytest.mark.parametrize(
    "said",
    [
        "Unable to determine the device handle for GPU0000:13:00.0: Unknown Error",
        "Unable to determine the device handle for GPU 0000:13:00.0: GPU is lost.  "
        "Reboot the system to recover this GPU",
        "Unable to determine the device handle for GPU3: 0000:13:00.0: Unknown Error",
    ],
)
def test_E07_only_the_line_about_the_lost_card_is_printed(tmp_path, said):
    made = Captured(tmp_path).tool("nvidia-smi", Says(f"{said}\n", code=15))
    found = made.probe()
    assert [(c["uuid"], c["findings"][0]["code"]) for c in found["gpus"]] == [
        ("PCI-0000:13:00.0", "lost")
    ]
    assert made.doctor()["gpu count"]["result"] == "fail"


def test_E20_a_card_that_the_tool_does_not_show_any_more(tmp_path):
    made = machine(tmp_path, [card(0, H200, 143771), card(2, H200, 143771)])
    for at in range(3):
        place = f"/sys/bus/pci/devices/0000:1{at}:00.0"
        made.file(f"{place}/vendor", "0x10de\n").file(f"{place}/class", "0x030200\n")
        made.link(f"/sys/bus/pci/drivers/nvidia/0000:1{at}:00.0", f"../../devices/0000:1{at}:00.0")
    lost = [c for c in made.probe()["gpus"] if c["findings"]]
    assert [c["uuid"] for c in lost] == ["PCI-0000:11:00.0"]
    assert made.doctor()["gpu count"]["result"] == "fail"


@pytest.mark.parametrize(
    ("out", "code", "words"),
    [
        ("Failed to initialize NVML: Driver/library version mismatch\n", 18, "reload its kernel"),
        ("Failed to initialize NVML: Unknown Error\n", 255, "restart the container"),
        (
            "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver.\n",
            9,
            "load",
        ),
        ("No devices were found\n", 6, "lspci"),
    ],
)
def test_E10_E11_a_driver_out_of_reach_writes_no_card_off(tmp_path, out, code, words):
    made = Captured(tmp_path).tool("nvidia-smi", Says(out, code=code))
    about = "GPU UUID: GPU-00000000-aaaa-4bbb-8ccc-0123456789ab\nBus Location: 0000:10:00.0\n"
    made.file("/proc/driver/nvidia/gpus/0000:10:00.0/information", about)
    found = made.probe()
    assert words in found["host"]["warnings"][0]
    assert [f["code"] for f in found["gpus"][0]["findings"]] == ["probe"], "not lost: unreachable"
    checks = made.doctor()
    assert checks["driver"]["result"] == "fail"
    assert checks["driver"]["remedy"]


JOINED = fabric("Completed", "Success", RACK, 32766)
LOCAL = fabric("Completed", "Success", ZEROS, 0)
WAITS = fabric("In Progress", "N/A", ZEROS, 0)
FABRICS = {
    "rack": ([JOINED] * 4, f"joined {RACK}.32766", []),
    "HGX": ([LOCAL] * 4, "none", []),
    "waits": ([WAITS] * 4, "in_progress", ["**fabric_in_progress**"] * 4),
    "failed": (
        [fabric("Completed", "Unknown Error", ZEROS, 0)] * 4, "none", ["**fabric_failed**"] * 4,
    ),
    "not supported": ([fabric("N/A", "N/A")] * 4, "none", []),
    "no section": ([None] * 4, "unknown", []),
    "two cliques": (
        [JOINED, JOINED, fabric("Completed", "Success", RACK, 2), JOINED], "inconsistent", [],
    ),
    "one waits": ([JOINED, JOINED, WAITS, JOINED], "partial", ["**fabric_in_progress**"]),
}  # fmt: skip


@pytest.mark.parametrize("form", ["-q", "-q -x"])
@pytest.mark.parametrize("case", FABRICS)
def test_E16_domains_of_four_cards(tmp_path, case, form):
    sections, verdict, told = FABRICS[case]
    cards = [card(at, "NVIDIA GB300", 284208, Fabric=one) for at, one in enumerate(sections)]
    made = machine(tmp_path, cards, form)
    found = made.probe()
    assert replay.domain(found) == verdict
    assert replay.findings(found) == told
    checks = made.doctor()
    good = case in ("rack", "HGX", "not supported", "no section")
    assert checks["gpu health"]["result"] == ("fail" if told else "pass")
    assert good or checks["nvlink domain"]["result"] == "fail"


def test_E17_two_owners_of_imex_are_named(tmp_path):
    made = machine(tmp_path, [card(0, "NVIDIA GB300", 284208, Fabric=JOINED)])
    made.tool("nvidia-imex-ctl", Says("READY\n"))
    unit = "Id=nvidia-imex.service\nLoadState=loaded\nActiveState=active\n"
    made.tool("systemctl", Says(unit))
    made.file("/proc/77/comm", "nvidia-imex\n").file("/proc/77/status", "PPid:\t1\n")
    pod = "0::/kubepods.slice/pod11111111_2222_3333_4444_555555555555/cri-1.scope\n"
    made.file("/proc/77/cgroup", pod)
    found = made.probe()
    assert "systemd nvidia-imex.service" in found["host"]["imex"]["owner"]
    assert "pod 11111111-2222" in found["host"]["imex"]["owner"]
    assert made.doctor()["imex"]["result"] == "fail"


def test_cards_that_share_a_uuid_are_told_apart(tmp_path):
    same = {"GPU_UUID": "GPU-12345678-aaaa-bbbb-cccc-0123456789ab"}
    found = machine(tmp_path, [card(at, H200, 143771, **same) for at in range(2)]).probe()
    names = [c["uuid"] for c in found["gpus"]]
    assert names == [same["GPU_UUID"], "PCI-0000:11:00.0"]
    assert [use["uuid"] for use in found["gpu_use"]] == names


def test_E13_limits_of_a_container_beside_the_hosts(tmp_path):
    made = Captured(tmp_path)
    made.file("/proc/meminfo", "MemTotal: 268435456 kB\nMemAvailable: 200000000 kB\n")
    made.file(
        "/proc/cpuinfo", "".join(f"processor\t: {cpu}\nflags\t: avx2\n\n" for cpu in range(64))
    )
    made.file("/proc/self/cgroup", "0::/pod/box\n")
    made.file("/proc/self/mountinfo", "30 1 0:26 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n")
    group = "/sys/fs/cgroup/pod"
    made.file("/sys/fs/cgroup/cgroup.controllers", "cpu memory\n")
    made.file(f"{group}/memory.max", f"{8 * 2**30}\n").file(f"{group}/memory.current", "0\n")
    made.file(f"{group}/box/memory.max", "max\n").file(f"{group}/box/memory.current", "0\n")
    made.file(f"{group}/box/cpu.max", "200000 100000\n")
    host = made.probe()["host"]
    assert (host["memory_host_mib"], host["memory_effective_mib"]) == (262144, 8192)
    assert (host["cpus_host"], host["cpus_effective"]) == (64, 2.0)


MI355X = {
    "static": [
        {
            "gpu": at,
            "asic": {"market_name": "AMD Instinct MI355X", "vendor_id": "0x1002",
                     "asic_serial": f"0x{at + 1:016x}"},
            "bus": {"bdf": f"0000:{at + 5:02x}:00.0", "max_pcie_width": 16},
            "vram": {"type": "HBM3E", "size": {"value": 294896, "unit": "MB"}},
            "driver": {"name": "amdgpu", "version": "6.14.14"},
        }
        for at in range(2)
    ],
    "list": [{"gpu": at, "bdf": f"0000:{at + 5:02x}:00.0"} for at in range(2)],
    "metric": [
        {
            "gpu": at,
            "usage": {"gfx_activity": {"value": 7, "unit": "%"}},
            "temperature": {"hotspot": {"value": 51, "unit": "C"}, "edge": "N/A"},
            "mem_usage": {"total_vram": {"value": 294896, "unit": "MB"},
                          "used_vram": {"value": 283, "unit": "MB"}},
            "ecc": {"total_correctable_count": 0, "total_uncorrectable_count": at},
        }
        for at in range(2)
    ],
    "process": [{"gpu": at, "process_list": "N/A"} for at in range(2)],
}  # fmt: skip


def test_an_amd_machine_by_amd_smi_beside_an_nvidia_card(tmp_path):
    made = machine(tmp_path, [card(0, "NVIDIA L4", 23034, 556)])
    made.tool("amd-smi", {f"{k} --json": Says(json.dumps(v)) for k, v in MI355X.items()})
    found = made.probe()
    assert [(c["vendor"], c["class"], c["memory_mib"]) for c in found["gpus"]] == [
        ("nvidia", "L4", 22478), ("amd", "MI355X", 294896), ("amd", "MI355X", 294896),
    ]  # fmt: skip
    assert found["gpus"][0]["driver_version"] == "580.95.05"
    assert replay.findings(found) == ["**ecc_uncorrected**"]
    use = found["gpu_use"][1]
    assert (use["memory_used_mib"], use["utilization_percent"], use["temperature_c"]) == (
        283,
        7,
        51,
    )
    assert replay.domain(found) == "none"


HEADERS = {
    "underlined": "\x1b[4m\tGPU0\tGPU1\tNIC0\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\x1b[0m",
    "with a note": "Note: x\n\tGPU0\tGPU1\tNIC0\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID",
    "by blanks": "        GPU0    GPU1    NIC0    CPU Affinity    NUMA Affinity   GPU NUMA ID",
}


@pytest.mark.parametrize("kind", HEADERS)
def test_odd_matrices(tmp_path, kind):
    body = (
        "\nGPU0\t X \tNV18\tPXB\t0-35\t0\t\tN/A\nGPU1\tNV18\t X \tSYS\t36-71\t1\t\tN/A\n"
        "NIC0\tPXB\tSYS\t X \n\nLegend:\n\n  X    = Self\n\nNIC Legend:\n\n  NIC0: mlx5_bond_0\n"
    )
    text = HEADERS[kind] + (body.replace("\t", "    ") if kind == "by blanks" else body)
    made = machine(tmp_path, [card(at, H200, 143771) for at in range(2)])
    out = Says(made_smi.text([card(at, H200, 143771) for at in range(2)]))
    made.tool("nvidia-smi", {"-q": out, "topo -m": Says(text)})
    first = made.probe()["gpus"][0]
    assert first["paths"] == {"1": "NV18", "mlx5_bond_0": "PXB"}


def test_ibstat_with_two_ports_to_a_card_and_a_panic_at_the_end(tmp_path):
    text = (
        "CA 'ibp1s0'\n    CA type: MT4123\n    Number of ports: 2\n"
        "    Node GUID: 0x0c42a10300aa0000\n"
        "    Port 1:\n        State: Initializing\n        Physical state: LinkUp\n"
        "        Rate: 200\n        Base lid: 65535\n        SM lid: 0\n"
        "        Port GUID: 0x0c42a10300aa0000\n        Link layer: InfiniBand\n"
        "    Port 2:\n        State: Down\n        Physical state: Polling\n        Rate: 10\n"
        "        Base lid: 0\n        SM lid: 0\n        Link layer: InfiniBand\n"
        "ibpanic: [4711] main: stat of IB device 'mlx5_8' failed: No such device\n"
    )
    made = Captured(tmp_path).tool("ibstat", Says(text, code=255))
    found = made.probe()
    assert [(p["port"], p["state"], p["active"], p.get("rate_gbps")) for p in found["ports"]] == [
        (1, "INIT", False, 200.0), (2, "DOWN", False, None),
    ]  # fmt: skip
    assert "mlx5_8" in found["host"]["warnings"][0]
    assert made.doctor()["infiniband"]["result"] in ("warn", "fail")
