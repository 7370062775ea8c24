"""The doctor behind the real probes, on machines made of files and tools, and on captured ones."""

from __future__ import annotations

import os
import stat
from dataclasses import replace
from pathlib import Path

import pytest

from agent import doctor, health
from agent.probes import ib, ibstat, inventory, smi
from agent.probes.root import Root
from tests.agent.doctor_machines import cpu_only, expect, hgx, with_cards, with_ports

REPOSITORY = Path(__file__).resolve().parents[2]
CPUINFO = "processor\t: 0\nvendor_id\t: GenuineIntel\nmodel name\t: Xeon\nflags\t\t: lm avx2\n"
BASE = {
    "/proc/cpuinfo": CPUINFO,
    "/proc/meminfo": "MemTotal: 65536000 kB\nMemAvailable: 60000000 kB\n",
    "/proc/sys/kernel/osrelease": "6.8.0-45-generic\n",
    "/sys/bus/pci/devices/0000:00:00.0/vendor": "0x8086\n",
    "/sys/bus/pci/devices/0000:00:00.0/class": "0x060000\n",
}
CARD = {
    "/sys/bus/pci/devices/0000:3b:00.0/vendor": "0x10de\n",
    "/sys/bus/pci/devices/0000:3b:00.0/device": "0x2330\n",
    "/sys/bus/pci/devices/0000:3b:00.0/class": "0x030200\n",
}
LOADED = {"/proc/driver/nvidia/version": "NVRM version: 550.54\n", "/dev/nvidiactl": ""}
WSL = {
    "/proc/sys/kernel/osrelease": "5.15.153.1-microsoft-standard-WSL2\n",
    "/dev/dxg": "",
}
SAYS_NO = "echo 'Failed to initialize NVML: Driver/library version mismatch'; exit 18"


@pytest.fixture
def captures() -> Path:
    folder = Path(os.environ.get("LLMGW_CAPTURES", REPOSITORY.parent / "shared" / "captures"))
    if not folder.is_dir():
        pytest.skip(f"no captures at {folder}; set LLMGW_CAPTURES to replay them")
    return folder


def machine(folder: Path, files: dict[str, str], tools: dict[str, str]) -> Root:
    for path, text in files.items():
        place = folder / "root" / path.lstrip("/")
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(text)
    binaries = folder / "bin"
    binaries.mkdir()
    for name, script in tools.items():
        tool = binaries / name
        tool.write_text(f"#!/bin/sh\n{script}\n")
        tool.chmod(tool.stat().st_mode | stat.S_IXUSR)
    return Root(prefix=folder / "root", path=str(binaries))


@pytest.mark.parametrize(
    ("files", "tools", "result", "words"),
    [
        ({**CARD, **LOADED}, {"nvidia-smi": SAYS_NO}, "fail", "mismatch"),
        ({**CARD, **LOADED}, {}, "fail", "no card answers"),
        (LOADED, {"nvidia-smi": SAYS_NO}, "fail", "mismatch"),
        (CARD, {}, "fail", "install NVIDIA's driver"),
        (WSL, {}, "fail", "in WSL"),
        ({}, {}, "pass", "CPU-only node"),
    ],
)
async def test_E04_probed_machines(tmp_path, files, tools, result, words):
    root = machine(tmp_path, {**BASE, **files}, tools)
    found = await inventory.look(root, inventory.ProbeConfig())
    expect(found, "driver", result, words)
    whole = doctor.checks(found)
    assert (doctor.worst(whole) == "fail") == (result == "fail"), doctor.to_text(whole)


def replay(text: str):
    """What nvidia-smi printed on a machine of which nothing else is known."""
    told = smi.parse(text)
    return with_cards(told.cards, cpu_only(gpus=told))


def test_captured_errors(captures):
    said = {
        "err-driver-not-running.txt": "modprobe nvidia",
        "err-version-mismatch.txt": "modprobe nvidia",
        "err-gpu-lost.txt": "Xid 79",
    }
    for name, remedy in said.items():
        told = smi.parse((captures / "nvidia-smi" / name).read_text(errors="replace"))
        found = with_cards(told.cards, hgx(), gpus=told)
        expect(found, "driver", "fail", remedy)
        expect(found, "gpu count", "fail", "0 of ")


@pytest.mark.parametrize(
    ("name", "index"), [("a10-535.129.03.q.txt", 0), ("a100x4-555.42.02.q.txt", 1)]
)
def test_captured_pending_remaps(captures, name, index):
    found = replay((captures / "nvidia-smi" / name).read_text())
    expect(found, "row remaps", "fail", f"pending on GPU {index}", f"--id {index}")
    expect(found, "gpu health", "fail", f"GPU {index}: repair_pending")


@pytest.mark.parametrize(
    "name",
    ["h100x8-565.57.01.q.txt", "h200-linux-590.48.01.q.txt", "rtx4090x8-550.127.05.q.txt"],
)
def test_captured_healthy_cards(captures, name):
    found = replay((captures / "nvidia-smi" / name).read_text())
    assert not any(health.findings_of(gpu) for gpu in found.gpus.cards)
    told = {check.name: check.result for check in doctor.checks(found)}
    assert told.pop("driver") == "warn"  # nvidia-smi was asked, not NVML
    assert set(told.values()) == {"pass"}, told


def test_captured_gb200_is_joined(captures):
    text = (captures / "nvidia-smi" / "gb200-fabric-joined-healthy.q-part.txt").read_text()
    found = replay(text)
    key = found.domain.key
    assert key is not None
    expect(found, "nvlink domain", "pass", key)
    expect(found, "fabric manager", "pass", "not needed")
    expect(found, "imex", "warn", "no sign of IMEX")


def test_captured_infiniband(captures):
    printed = ibstat.parse((captures / "infiniband" / "ibstat-h100-ib-some-down.txt").read_text())
    names = ("hca", "port", "link_layer", "state", "phys_state", "rate_gbps", "lid", "sm_lid")
    ports = [ib.IbPort(**{name: getattr(one, name) for name in names}) for one in printed]
    expect(with_ports(*ports), "infiniband", "pass", "8 of 8 ports active at 400 Gb/s")
    expect(with_ports(*ports), "roce", "warn", "1 of 4", "3 switched off", "mlx5_1/1")
    halved = [replace(one, state="DOWN", phys_state="Polling") for one in ports[::2]] + ports[1::2]
    expect(with_ports(*halved), "infiniband", "warn", "mlx5_0/1 DOWN Polling")
