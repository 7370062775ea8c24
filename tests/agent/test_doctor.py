"""The doctor on whole machines: with and without cards, drivers and limits, and how it is shown."""

from __future__ import annotations

from dataclasses import replace

import pytest

from agent import doctor
from agent.probes import card, smi
from agent.probes.host import Memory
from agent.probes.pci import Pci, PciDevice
from tests.agent.doctor_machines import (
    HOST,
    SIGNS,
    address,
    ask,
    cpu_only,
    expect,
    gpu,
    hgx,
    nvidia,
    results,
    tray,
    with_cards,
)

MISMATCH = "NVML: Driver/library version mismatch (18): have different versions"
SILENT = (
    "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver. Make sure that "
    "the latest NVIDIA driver is installed and running.\n"
)


def test_E04_cpu_only_node_passes_and_says_so():
    found = cpu_only()
    expect(found, "driver", "pass", "no GPU on the PCI bus: this is a CPU-only node")
    assert doctor.worst(doctor.checks(found)) == "pass"
    assert not {"gpu count", "gpu health", "nvlink", "imex", "infiniband"} & results(found).keys()


def test_E04_driver_files_but_nvml_fails():
    pci = Pci({address(0): nvidia(0)})
    error = smi.parse(SILENT, option="-q -x").error
    found = cpu_only(signs=SIGNS, pci=pci, gpus=card.Gpus(error=error))
    expect(found, "driver", "fail", "/dev/nvidiactl", "couldn't communicate", "modprobe nvidia")
    expect(found, "gpu count", "fail", "0 of 1", address(0))


def test_E04_driver_files_and_no_reason_is_no_success():
    for pci in (Pci(error="/sys: no devices"), cpu_only().pci):
        expect(cpu_only(signs=SIGNS, pci=pci), "driver", "fail", "no card answers", "dmesg")


def test_E04_card_on_pci_and_no_driver():
    found = cpu_only(pci=Pci({address(n): nvidia(n, None) for n in range(2)}))
    expect(found, "driver", "fail", "2 NVIDIA cards", address(1), "install NVIDIA's driver")
    expect(found, "gpu count", "fail", "0 of 2")


def test_E04_card_held_by_another_driver():
    found = cpu_only(pci=Pci({address(0): nvidia(0, "nouveau")}))
    expect(found, "driver", "fail", "held by nouveau", "blacklist nouveau")
    module = cpu_only(pci=Pci({address(0): nvidia(0)}))
    expect(module, "driver", "fail", "kernel module nvidia holds them", "--device")


@pytest.mark.parametrize("signs", [("/dev/dxg",), ("/usr/lib/wsl/lib/libnvidia-ml.so.1",), ()])
def test_E04_wsl_without_a_card(signs):
    host = replace(HOST, wsl=True, kernel="5.15.153.1-microsoft-standard-WSL2")
    found = cpu_only(host=host, signs=signs)
    expect(found, "driver", "fail", "in WSL", "driver in Windows")


def test_wsl_with_a_card_passes():
    cards = (gpu(0, persistence=False, pci_bus_id="0000:01:00.0"),)
    found = with_cards(cards, cpu_only(host=replace(HOST, wsl=True), pci=Pci(error="none")))
    found = replace(found, gpus=replace(found.gpus, driver_version="591.86", source="nvml"))
    expect(found, "driver", "pass", "591.86")
    expect(found, "gpu count", "pass", "WSL")
    assert ask(found, "persistence") is None


def test_cards_kept_for_virtual_machines():
    found = cpu_only(pci=Pci({address(0): nvidia(0, "vfio-pci")}), signs=SIGNS)
    expect(found, "driver", "warn", "kept for virtual machines", address(0))
    assert ask(found, "gpu count") is None


def test_tools_of_a_driver_on_a_node_without_cards():
    error = smi.parse(SILENT, option="-q -x").error
    expect(cpu_only(gpus=card.Gpus(error=error)), "driver", "warn", "CPU-only node", "remove")
    blind = cpu_only(gpus=card.Gpus(error=error), pci=Pci(error="/sys: no devices"))
    expect(blind, "driver", "fail", "not known", "modprobe nvidia")


def test_unknown_pci_without_a_sign_of_cards():
    found = cpu_only(pci=Pci(error="/sys/bus/pci/devices: no devices"))
    expect(found, "driver", "pass", "CPU-only node", "could not be read")
    assert "gpu count" not in {check.name for check in doctor.checks(found)}
    signs = replace(found, signs=("/dev/nvidiactl",))
    expect(signs, "gpu count", "warn", "no devices", "lspci")


def test_driver_that_works():
    expect(hgx(), "driver", "pass", "565.57.01", "CUDA 12.7", "nvml")
    error = "no library libnvidia-ml.so.1"
    by_smi = replace(hgx().gpus, source="nvidia-smi", error=error)
    expect(hgx(gpus=by_smi), "driver", "warn", "instead of NVML", error, "ldconfig")
    noted = replace(hgx().gpus, error="driver hung when asked for links of GPU 3")
    expect(hgx(gpus=noted), "driver", "warn", "hung when asked", "dmesg")


def unreachable(error: str):
    cards = tuple(card.Gpu(uuid=f"GPU-{n}", pci_bus_id=address(n)) for n in range(8))
    away = tuple(replace(one, problems=(f"unreachable: {error}",)) for one in cards)
    return with_cards(away, hgx(), gpus=card.Gpus(away, error=error))


def test_E10_version_mismatch_asks_for_a_reload():
    expect(unreachable(MISMATCH), "driver", "fail", "mismatch", "modprobe nvidia", "reboot")


def test_E11_container_that_lost_its_devices_is_no_lost_card():
    error = "NVML: Unknown Error (999): this process cannot open /dev/nvidiactl (not permitted)"
    found = unreachable(error)
    expect(found, "driver", "fail", "/dev/nvidiactl", "in a container restart it", "--device")
    expect(found, "gpu count", "fail", "0 of 8", "unreachable", "the check `driver` first")


def test_permission_and_other_reasons_have_their_remedies():
    said = {
        "NVML: Insufficient Permissions (4)": "ls -l /dev/nvidia",
        "NVML: library not found: libnvidia-ml.so.1": "same version",
        "nvidia-smi -q -x: not finished within 20 s; killed": "needs a reboot",
        "NVML: something new": "nvidia-smi` by hand",
    }
    for error, words in said.items():
        expect(unreachable(error), "driver", "fail", error, words)


def test_only_card_lost():
    lost = card.Gpu(pci_bus_id=address(0), problems=("lost: nvidia-smi says 'Unknown Error'",))
    error = "nvidia-smi -q -x: Unable to determine the device handle: Unknown Error"
    found = with_cards((lost,), hgx(), gpus=card.Gpus((lost,), error=error))
    expect(found, "driver", "fail", "no card answers", "Xid 79")


def amd(**changes: object):
    cards = tuple(
        card.Gpu(uuid=f"0x{n}", index=n, vendor="amd", name="MI300X", pci_bus_id=address(n))
        for n in range(2)
    )
    devices = {
        address(n): PciDevice(address(n), "1002", "74a1", "1200", driver="amdgpu") for n in range(2)
    }
    base = cpu_only(pci=Pci(devices), gpus=card.Gpus((), "6.10.5", source="amd-smi"))
    return with_cards(cards, base, **changes)


def test_amd_cards():
    expect(amd(), "driver", "pass", "AMD driver 6.10.5", "amd-smi")
    expect(amd(), "gpu count", "pass", "2 cards")
    by_kernel = replace(amd().gpus, source="sysfs", error="amd-smi: no such program in PATH")
    expect(amd(gpus=by_kernel), "driver", "warn", "no such program", "install amd-smi")
    silent = card.Gpus(error="amd-smi: Driver not initialized")
    expect(amd(gpus=silent), "driver", "fail", "not initialized", "modprobe amdgpu")
    bare = {a: replace(d, driver=None) for a, d in amd().pci.devices.items()}
    missing = amd(pci=Pci(bare), gpus=card.Gpus())
    expect(missing, "driver", "fail", "without the driver amdgpu", "amdgpu-install")


def test_amd_beside_nvidia_and_amd_tools_alone():
    both = hgx()
    cards = (*both.gpus.cards, *amd().gpus.cards)
    expect(with_cards(cards, both), "driver", "pass", "565.57.01", "AMD")
    tools = cpu_only(gpus=card.Gpus(error="amd-smi: ERROR:root:Driver not initialized"))
    expect(tools, "driver", "warn", "no AMD card", "remove AMD's tools")


def test_healthy_machines_pass_everything():
    for found in (cpu_only(), hgx(), tray(), amd()):
        assert doctor.worst(doctor.checks(found)) == "pass", doctor.to_text(doctor.checks(found))


def test_E13_limited_container_shows_both_figures():
    usable = Memory(8192, 6000)
    found = cpu_only(usable=usable, cpus=1.5)
    expect(found, "memory limit", "pass", "8.0 GiB", "256.0 GiB")
    expect(found, "cpu limit", "pass", "1.5 of 64 cores")


def test_text_has_failures_first_with_their_remedies():
    found = hgx(gpus=replace(hgx().gpus, source="nvidia-smi"))
    cards = (gpu(0, repair=card.Repair(pending=True)), *hgx().gpus.cards[1:])
    found = with_cards(cards, found)
    text = doctor.to_text(doctor.checks(found), colour=False)
    lines = text.splitlines()
    assert [line[:4] for line in lines if line[:1].strip()][:3] == ["fail", "fail", "warn"]
    assert lines[1].strip().startswith("-> ")
    failed, warned = text.count("\nfail") + 1, text.count("\nwarn")
    assert lines[-1].startswith(f"{failed} failed, {warned} warning, ")
    assert "\x1b" not in text
    assert "\x1b[31mfail\x1b[0m" in doctor.to_text(doctor.checks(found), colour=True)


def test_text_of_nothing():
    assert doctor.to_text(()) == "\n0 failed, 0 warnings, 0 passed"
    assert doctor.worst(()) == "pass"


def test_documents_leave_out_what_is_not_there():
    checks = (doctor.Check("cpu", "pass", "fine"), doctor.Check("disk", "warn", "full", "empty it"))
    assert doctor.to_documents(checks) == [
        {"name": "cpu", "result": "pass", "evidence": "fine"},
        {"name": "disk", "result": "warn", "evidence": "full", "remedy": "empty it"},
    ]
    assert len(doctor.to_documents(checks * 80)) == 100
