"""`probe` and `doctor` on every captured machine: what a person reads in it is what counts.

The figures of CAPTURES were read from the files by eye. Machines that no capture shows are in
test_replay_made.py, tools that misbehave in test_replay_bad_tools.py.
"""

from __future__ import annotations

import os
import tarfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.agent import replay
from tests.agent.replay import REPOSITORY, Captured, Says

if TYPE_CHECKING:
    from collections.abc import Iterator

COLLECTION = Path(os.environ.get("LLMGW_CAPTURES", REPOSITORY.parent / "shared" / "captures"))
ZERO = "none"
"""State of cards whose NVSwitch is this machine's own, or that have no fabric at all."""
BRAKE, WIDTH, REPAIR = "**throttle_power_brake**", "pcie_width", "**repair_pending**"
MIG = [("3g.40gb", 40448), ("2g.20gb", 20096), ("1g.10gb", 9984), ("1g.10gb", 9984)]

# capture: cards, class, memory to plan with (total - reserved), findings, domain, driver
SMI: dict[str, tuple[int, str | None, int | None, list[str], str, str | None]] = {
    "a10-535.129.03.q.txt": (1, "A10", 22516, [REPAIR], ZERO, "535.129.03"),
    "a100-sxm4-v12.q-x.xml": (1, "A100", 81051, [], ZERO, "535.54.03"),
    "a100x4-555.42.02.q.txt": (4, "A100", 81157, [REPAIR], ZERO, "555.42.02"),
    "a10g.q-x.xml": (1, "A10G", 22593, [WIDTH], "unknown", "515.105.01"),
    "a40x10-550.127.05.q.txt": (10, "A40", 45403, [], ZERO, "550.127.05"),
    "dual_2080-v13.q-x.xml": (2, "RTX2080", 7786, [WIDTH] * 2, ZERO, "590.44.01"),
    "gb200-fabric-joined-healthy.q-part.txt": (
        1, "GB200", None, [], "joined b2daed23-0000-0000-0000-000000000000.1", None,
    ),
    "gtx-1070-ti.q-x.xml": (1, "GTX1070-Ti", 4096, [], "unknown", None),
    "gtx-1660-ti.q-x.xml": (1, None, 5912, [], "unknown", "418.43"),
    "h100-mig-linux-590.48.01.load-q.txt": (1, "H100", 81080, [], ZERO, "590.48.01"),
    "h100-mig-linux-590.48.01.q.txt": (1, "H100", 81080, [], ZERO, "590.48.01"),
    "h100x8-535.161.08.q.txt": (8, "H100", 81008, [BRAKE] * 8, ZERO, "535.161.08"),
    "h100x8-565.57.01.q.txt": (8, "H100", 81105, [], ZERO, "565.57.01"),
    "h200-linux-590.48.01.load-q.txt": (1, "H200", 143157, [], ZERO, "590.48.01"),
    "h200-linux-590.48.01.q.txt": (1, "H200", 143157, [], ZERO, "590.48.01"),
    "l4-550.90.07.q.txt": (1, "L4", 22478, [WIDTH], ZERO, "550.90.07"),
    "l40s-linux-595.80.q.txt": (1, "L40S", 45459, [], ZERO, "595.80"),
    "quadro-p400.q-x.xml": (1, "P400", 1998, [], "unknown", "418.43"),
    "rtx-3080-v12.q-x.xml": (1, "RTX3080", 10067, [], ZERO, "536.40"),
    "rtx-3090-v12.q-x.xml": (1, "RTX3090", 24260, [], ZERO, "525.147.05"),
    "rtx-4000-sff-ada-v13.q-x.xml": (1, "RTX4000-Ada", 20015, [], ZERO, "595.84"),
    "rtx2080s-linux-610.57.04.q.txt": (1, "RTX2080-SUPER", 7792, [], ZERO, "610.57.04"),
    "rtx2080s-windows-591.86.q.txt": (1, "RTX2080-SUPER", 7987, [], ZERO, "591.86"),
    "rtx4080s-linux-595.71.05.q.txt": (1, "RTX4080-SUPER", 15942, [], ZERO, "595.71.05"),
    "rtx4090x8-535.154.05.q.txt": (8, "RTX4090", 24218, [], ZERO, "535.154.05"),
    "rtx4090x8-550.127.05.q.txt": (8, "RTX4090", 24210, [], ZERO, "550.127.05"),
    "tesla-t4.q-x.xml": (1, "T4", 14972, [WIDTH], "unknown", "515.105.01"),
}  # fmt: skip
# capture: cards, class, memory, used, temperature of the first card
AMD: dict[str, tuple[int, str | None, int | None, int | None, float | None]] = {
    "mi100_rocm571.json": (6, "MI100", 32752, 6, 34.0),
    "mi300x-x4.rocm-smi-a.txt": (4, "MI300X", None, None, 35.0),
    "rx6700xt_rocm430.json": (1, None, 12272, 1547, 47.0),
    "rx6700xt_rocm612.json": (1, "RX6700", 12272, 1499, 47.0),
    "vega-20-WKS-GL-XE.json": (1, "MI50", 32752, 10, 38.0),
}
# capture: ports, active ones, of these InfiniBand
IB: dict[str, tuple[int, int, int]] = {
    "ibstat-a100-ib-8x200-plus-eth.txt": (9, 9, 8),
    "ibstat-h100-ib-some-down.txt": (12, 9, 8),
    "ibstat-h100-roce-12.txt": (12, 12, 0),
    "ibstat-no-hardware.txt": (0, 0, 0),
    "ibstatus-a100.txt": (9, 9, 8),
}
rows: list[tuple[str, ...]] = []


@pytest.fixture
def captures() -> Path:
    if not COLLECTION.is_dir():
        pytest.skip(f"no captures at {COLLECTION}; set LLMGW_CAPTURES to replay them")
    return COLLECTION


@pytest.fixture(scope="module", autouse=True)
def markdown() -> Iterator[None]:
    """The table of all captures where LLMGW_REPLAY_TABLE names a file for it."""
    yield
    if place := os.environ.get("LLMGW_REPLAY_TABLE"):
        Path(place).write_text(replay.table(rows))


def with_smi(made: Captured, captures: Path, name: str) -> Captured:
    """nvidia-smi as captured: one form of -q, and -L, topo and nvlink where they were kept."""
    stem = name.partition(".q")[0].removesuffix(".load-q.txt")
    told = {
        "-q -x" if name.endswith(".xml") else "-q": captures / "nvidia-smi" / name,
        "-L": captures / "nvidia-smi" / f"{stem}.L.txt",
        "topo -m": captures / "nvidia-topo" / f"{stem}.topo-m.txt",
        "nvlink -s": captures / "nvidia-topo" / f"{stem}.nvlink-s.txt",
    }
    says = {words: Says(file) for words, file in told.items() if file.is_file()}
    return made.tool("nvidia-smi", says)


def probed(name: str, made: Captured) -> dict[str, Any]:
    found = made.probe()
    rows.append(replay.row(name, found))
    return found


def whole_cards(found: dict[str, Any]) -> list[dict[str, Any]]:
    return [card for card in found["gpus"] if "parent" not in card]


@pytest.mark.parametrize("name", SMI)
def test_E01_nvidia_smi_as_captured(tmp_path, captures, name):
    count, kind, memory, told, domain, driver = SMI[name]
    made = with_smi(Captured(tmp_path), captures, name)
    found = probed(name, made)
    cards = whole_cards(found)
    assert [card.get("class") for card in cards] == [kind] * count
    assert [card.get("memory_mib") for card in cards][:1] == [memory]
    assert replay.findings(found) == told
    assert replay.domain(found) == domain
    assert {card.get("driver_version") for card in cards} == {driver}
    assert len({card["uuid"] for card in found["gpus"]}) == len(found["gpus"])
    checks = made.doctor()
    grave = any(word.startswith("**") for word in told)
    assert checks["gpu health"]["result"] == ("fail" if grave else "warn" if told else "pass")
    assert checks["driver"]["result"] == "warn", "nvidia-smi instead of NVML"


def test_every_capture_of_nvidia_smi_has_a_row(captures):
    files = {file.name for file in (captures / "nvidia-smi").iterdir()}
    assert {n for n in files if n.endswith((".xml", "q.txt", "q-part.txt"))} <= set(SMI)
    amd = {file.name for file in (captures / "amd").iterdir()}
    assert amd - set(AMD) == {"mi300x.rocm-smi.txt"}, "a page without sizes, UUIDs and addresses"


@pytest.mark.parametrize(
    ("name", "absent"),
    [
        ("h100-mig-linux-590.48.01.q.txt", ["utilization_percent"]),
        ("gtx-1070-ti.q-x.xml", ["power_w", "memory_foreign_mib"]),
        ("gb200-fabric-joined-healthy.q-part.txt", ["memory_used_mib", "temperature_c"]),
    ],
)
def test_E01_what_a_capture_does_not_say_is_left_out_and_not_zero(tmp_path, captures, name, absent):
    found = with_smi(Captured(tmp_path), captures, name).probe()
    use = {document["uuid"]: document for document in found["gpu_use"]}
    for card in whole_cards(found):
        assert not set(absent) & set(use.get(card["uuid"], {}))
        assert card.get("memory_mib") != 0


def test_E19_slices_of_a_card_with_their_uuids(tmp_path, captures):
    name = "h100-mig-linux-590.48.01.q.txt"
    found = with_smi(Captured(tmp_path), captures, name).probe()
    slices = [card for card in found["gpus"] if "parent" in card]
    assert [(part["mig_profile"], part["memory_mib"]) for part in slices] == MIG
    assert all(part["uuid"].startswith("MIG-") for part in slices)
    assert [part["class"] for part in slices] == [f"H100-{profile}" for profile, _ in MIG]


def test_E19_slices_without_uuids_are_not_reported_but_named(tmp_path, captures):
    found = with_smi(Captured(tmp_path), captures, "a100-sxm4-v12.q-x.xml").probe()
    assert len(found["gpus"]) == 1
    assert all("uuid" in document for document in found["gpu_use"])
    assert "the UUIDs of 4 MIG devices are not known" in found["host"]["warnings"][0]


def test_wiring_of_a_dgx_with_its_cards_and_ports(tmp_path, captures):
    made = Captured(tmp_path).tool(
        "nvidia-smi",
        {
            "-q": Says(captures / "nvidia-smi/h100x8-565.57.01.q.txt"),
            "topo -m": Says(captures / "nvidia-topo/h100x8-dgx-mlx5-columns.topo-m.txt"),
        },
    )
    cards = probed("h100x8-565.57.01 + dgx topo", made)["gpus"]
    assert {card["paths"][str((at + 1) % 8)] for at, card in enumerate(cards)} == {"NV18"}
    nearest = [card["nearest_nic"] for card in cards]
    assert nearest == [
        "mlx5_0",
        "mlx5_1",
        "mlx5_2",
        "mlx5_3",
        "mlx5_4",
        "mlx5_5",
        "mlx5_6",
        "mlx5_7",
    ]
    assert {card["nic_path"] for card in cards} == {"PIX"}
    assert [card["numa"] for card in cards] == [0] * 4 + [1] * 4


def test_E16_a_gb200_tray_of_four_with_imex_and_lspci(tmp_path, captures):
    part = (captures / "nvidia-smi/gb200-fabric-joined-healthy.q-part.txt").read_text()
    addresses = ("0008:01:00.0", "0009:01:00.0", "0018:01:00.0", "0019:01:00.0")
    text = "".join(part.replace("00000000:01:00.0", f"0000{a}") + "\n" for a in addresses)
    topo = captures / "nvidia-topo"
    made = Captured(tmp_path).tool(
        "nvidia-smi",
        {
            "-q": Says(text),
            "topo -m": Says(topo / "gb200x4-all-sys-nics.topo-m.txt"),
            "topo -p2p r": Says(topo / "gb200x4.topo-p2p-ok.txt"),
        },
    )
    made.tool("lspci", Says(topo / "gb200-nvl72-tray.lspci.txt"))
    up = Says(captures / "imex/imex-ctl-N-gb200-18-nodes-up.txt")
    made.tool("nvidia-imex-ctl", {"-q": Says("READY\n"), "*": up})
    found = probed("gb200 q-part x4 + topo + lspci + imex", made)
    assert replay.domain(found) == "joined b2daed23-0000-0000-0000-000000000000.1"
    assert [card["paths"]["3"] for card in found["gpus"][:3]] == ["NV18"] * 3
    assert found["host"]["machine"]["pci_accelerators"] == {"nvidia": 4}
    assert len(found["host"]["imex"]["nodes"]) == 18
    assert found["host"]["imex"]["domain_state"] == "UP"
    checks = made.doctor()
    wanted = ("gpu count", "nvlink domain", "p2p", "fabric manager", "imex")
    assert [checks[name]["result"] for name in wanted] == ["pass"] * 5


@pytest.mark.parametrize("name", AMD)
def test_amd_as_captured(tmp_path, captures, name):
    count, kind, memory, used, temperature = AMD[name]
    made = Captured(tmp_path).tool("rocm-smi", Says(captures / "amd" / name))
    found = probed(name, made)
    assert [card.get("class") for card in found["gpus"]] == [kind] * count
    assert {card.get("memory_mib") for card in found["gpus"]} == {memory}
    use = next(iter(found["gpu_use"]), {})
    assert (use.get("memory_used_mib"), use.get("temperature_c")) == (used, temperature)
    assert made.doctor()["driver"]["result"] == "pass"


@pytest.mark.parametrize("name", IB)
def test_ports_by_ibstat_as_captured(tmp_path, captures, name):
    count, active, of_ib = IB[name]
    tool = "ibstatus" if name.startswith("ibstatus") else "ibstat"
    made = Captured(tmp_path).tool(tool, Says(captures / "infiniband" / name))
    found = probed(name, made)
    ports = found["ports"]
    assert (len(ports), sum(port["active"] for port in ports)) == (count, active)
    up = [port for port in ports if port["active"]]
    assert sum(port["link_layer"] == "InfiniBand" for port in up) == of_ib
    assert all("rate_gbps" not in port for port in ports if port["state"] == "DOWN")
    assert found["host"]["warnings"] == []


@pytest.mark.parametrize(
    ("name", "code", "key", "words"),
    [
        ("sminfo-sim-master.txt", 0, "ib:fc6a1c0300000000", None),
        ("sminfo-no-sm.txt", 255, None, "no subnet manager answers"),
        ("sminfo-no-hardware.txt", 255, None, "ib_umad is not loaded"),
    ],
)
def test_subnet_manager_as_captured(tmp_path, captures, name, code, key, words):
    made = Captured(tmp_path)
    made.tool("ibstat", Says(captures / "infiniband/ibstat-h100-ib-some-down.txt"))
    made.tool("sminfo", Says(captures / "infiniband" / name, code=code))
    ports = [p for p in probed(f"ibstat-h100-ib + {name}", made)["ports"] if p["active"]]
    ib = [port for port in ports if port["link_layer"] == "InfiniBand"]
    assert {port.get("key") for port in ib} == {key}
    assert words is None or all(words in port["sm_error"] for port in ib)


def test_ports_by_sysfs_as_captured(tmp_path, captures):
    made = Captured(tmp_path)
    with tarfile.open(captures / "sysfs/h100-class-infiniband.tar.gz") as archive:
        archive.extractall(made.root, filter="data")
    ports = probed("sysfs h100-class-infiniband", made)["ports"]
    assert sum(port["active"] for port in ports) == 9
    assert [p["hca"] for p in ports if p["link_layer"] == "Ethernet"] == ["mlx5_bond_0"]


@pytest.mark.parametrize(
    ("name", "ports", "cards"), [("procfs-infiniband", 4, 0), ("procfs-amdgpu-drm", 0, 1)]
)
def test_sysfs_archives_as_captured(tmp_path, captures, name, ports, cards):
    made = Captured(tmp_path)
    unpack(captures / "sysfs" / f"{name}.ttar", made)
    found = probed(f"sysfs {name}", made)
    assert (len(found["ports"]), len(found["gpus"])) == (ports, cards)
    if cards:
        assert found["gpus"][0]["memory_mib"] == 8176
        assert found["gpu_use"][0]["memory_used_mib"] == 1421
    else:
        assert {p["link_layer"] for p in found["ports"]} == {"InfiniBand", "OmniPath"}


def unpack(archive: Path, made: Captured) -> None:
    """A .ttar: `Path:` and `Lines:` with that many lines, or `SymlinkTo:`."""
    lines = iter(archive.read_text().splitlines())
    path = ""
    for line in lines:
        word, _, value = line.partition(": ")
        if word in ("Path", "Directory"):
            path = value.removeprefix("fixtures/")
        elif word == "SymlinkTo":
            made.link(path, value)
        elif word == "Lines":
            made.file(path, "".join(f"{next(lines)}\n" for _ in range(int(value))))


@pytest.mark.parametrize(
    ("cpu", "model", "arch", "avx2"),
    [
        ("rhel7-haswell", "E5-2680 v3", "x86_64", True),
        ("rhel7-ivybridge", "E5-2650 v2", "x86_64", False),
        ("scientific7-k10", "Opteron(tm) Processor 6136", "x86_64", False),
        ("rhel7-x86_64_v3", "Intel", "x86_64", True),
        ("rocky9-zen5", "Ryzen 9 9950X", "x86_64", True),
        ("rhel8-power9", "POWER9", "ppc64le", None),
        ("rhel9-neoverse_v2", "", "aarch64", None),
    ],
)
def test_processors_as_captured(tmp_path, captures, cpu, model, arch, avx2):
    made = Captured(tmp_path).file("/proc/cpuinfo", captures / f"proc/cpuinfo-{cpu}")
    made.file("/proc/meminfo", captures / "proc/meminfo-16g")
    made.file("/etc/os-release", captures / "proc/os-release-rocky")
    host = made.probe()["host"]
    assert model in host.get("cpu_model", "")
    assert host["arch"] == arch
    assert any("AVX2" in warning for warning in host["warnings"]) is (avx2 is False)
    assert made.doctor()["cpu"]["result"] == ("warn" if avx2 is False else "pass")


@pytest.mark.parametrize(
    ("name", "total", "available"),
    [
        ("16g", 15822, 13888),
        ("hugepages", 257838, 253921),
        ("procfs", 15299, None),  # an old kernel: what is available is estimated
        ("missing-fields", 15822, 13888),
    ],
)
def test_E14_memory_as_captured(tmp_path, captures, name, total, available):
    made = Captured(tmp_path).file("/proc/meminfo", captures / f"proc/meminfo-{name}")
    host = made.probe()["host"]
    assert host["memory_host_mib"] == host["memory_effective_mib"] == total
    assert available is None or host["memory_available_mib"] == available
    assert 0 < host["memory_available_mib"] < total
    assert made.doctor()["memory limit"]["result"] == "pass"


@pytest.mark.parametrize(
    "name", ["k8s-lxc-node.txt", "nfs-proc26231", "pid1-desktop", "parallel-fs.synthetic.txt"]
)
def test_mounts_as_captured(tmp_path, captures, name):
    made = Captured(tmp_path).file("/proc/self/mountinfo", captures / f"proc/mountinfo-{name}")
    disks = made.probe()["disks"]
    assert len({(disk["mount"]) for disk in disks}) == len(disks) > 0
    shared = [disk for disk in disks if disk["filesystem"].startswith(("nfs", "lustre", "ceph"))]
    assert all(disk["kind"] == "shared" for disk in shared)
