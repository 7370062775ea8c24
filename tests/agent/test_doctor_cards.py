"""Checks of cards: their number, health, memory errors, clocks, PCIe link."""

from __future__ import annotations

from dataclasses import replace

import pytest

from agent.health import Finding
from agent.probes import card
from agent.probes.pci import Pci, PciDevice
from agent.probes.services import Service
from tests.agent.doctor_machines import address, ask, cpu_only, expect, gpu, hgx, nvidia, with_cards


def broken(index: int = 3, **changes: object):
    """Eight cards of which one is different."""
    cards = tuple(gpu(n, **(changes if n == index else {})) for n in range(8))
    return with_cards(cards, hgx())


def test_all_cards_count():
    expect(hgx(), "gpu count", "pass", "8 cards answer")


def test_E07_lost_card_is_named():
    lost = card.Gpu(uuid="GPU-3", pci_bus_id=address(3), problems=("lost: GPU is lost (15)",))
    found = with_cards((*(gpu(n) for n in range(8) if n != 3), lost), hgx())
    expect(found, "gpu count", "fail", "7 of 8", address(3), "GPU is lost", "Xid 79")
    expect(found, "gpu health", "fail", address(3), "lost")
    expect(found, "driver", "pass")


def test_E20_card_on_the_bus_only():
    found = with_cards(tuple(gpu(n) for n in range(7)), hgx())
    expect(found, "gpu count", "fail", "7 of 8", address(7), "on the PCI bus only")


def test_E20_card_gone_from_the_bus_as_well():
    devices = {a: d for a, d in hgx().pci.devices.items() if a != address(7)}
    lost = card.Gpu(uuid="GPU-7", pci_bus_id=address(7), problems=("lost: the driver holds it",))
    found = with_cards((*(gpu(n) for n in range(7)), lost), hgx(), pci=Pci(devices))
    expect(found, "gpu count", "fail", "7 of 8", address(7))


def test_mig_parents_count_once():
    slices = tuple(card.MigDevice(f"MIG-{n}", n) for n in range(7))
    expect(broken(mig=True, slices=slices), "gpu count", "pass", "8 cards", "1 cut into 7 MIG")


def test_cards_of_other_drivers_only_warn():
    devices = {**hgx().pci.devices, address(9): nvidia(9, "nouveau")}
    expect(hgx(pci=Pci(devices)), "gpu count", "warn", address(9), "nouveau")


def test_cards_without_addresses_are_compared_by_number():
    cards = tuple(gpu(n, pci_bus_id=None) for n in range(8))
    expect(with_cards(cards, hgx()), "gpu count", "pass", "8 cards")
    expect(with_cards(cards[:7], hgx()), "gpu count", "fail", "7 of")


def test_parts_of_a_partitioned_card_are_no_extra_cards():
    parts = tuple(
        card.Gpu(uuid=None, index=n, vendor="amd", pci_bus_id="0000:05:00.0") for n in range(8)
    )
    device = PciDevice("0000:05:00.0", "1002", "74a1", "1200", driver="amdgpu")
    found = with_cards(parts, cpu_only(pci=Pci({device.address: device})))
    expect(found, "gpu count", "pass", "8 cards")


def test_count_without_pci():
    expect(hgx(pci=Pci(error="/sys: no devices")), "gpu count", "warn", "8 cards", "no devices")


def test_health():
    expect(hgx(), "gpu health", "pass", "8 cards, no findings")
    expect(broken(pcie=card.Pcie(5, 5, 8, 16)), "gpu health", "warn", "GPU 3", "x8 of x16")
    expect(broken(ecc=card.Ecc(uncorrected=2)), "gpu health", "fail", "GPU 3", "2 uncorrected")


def test_health_of_a_card_that_is_gone_is_told_under_its_key():
    finding = Finding("xid_79", "reset", "the card fell off the bus; reboot", "Xid 79")
    found = hgx(findings={"GPU-gone": (finding,)})
    expect(found, "gpu health", "fail", "GPU-gone", "xid_79", "reboot")


def test_unhealthy_ones_come_first_and_cards_of_one_finding_together():
    narrow = {"pcie": card.Pcie(5, 5, 8, 16)}
    cards = (gpu(0, **narrow), gpu(1, **narrow), gpu(2, recovery_action="GPU Reset"))
    check = expect(with_cards(cards, hgx()), "gpu health", "fail", "GPUs 0, 1: pcie_width")
    assert check.evidence.startswith("GPU 2: recovery_action")


def test_ecc():
    expect(hgx(), "ecc", "pass", "on for 8 of 8")
    expect(broken(ecc=card.Ecc(enabled=False)), "ecc", "warn", "GPU 3", "-e 1")
    bad = broken(ecc=card.Ecc(enabled=True, uncorrected=4))
    expect(bad, "ecc", "fail", "GPU 3: 4 uncorrected", "--gpu-reset --id 3")


@pytest.mark.parametrize("name", ["NVIDIA GeForce RTX 4090", "NVIDIA RTX A6000", "Quadro P400"])
def test_cards_that_come_with_ecc_off(name):
    found = with_cards((gpu(0, name=name, ecc=card.Ecc(enabled=False)),), hgx())
    assert ask(found, "ecc") is None
    server = "NVIDIA RTX PRO 6000 Blackwell Server Edition"
    off = with_cards((gpu(0, name=server, ecc=card.Ecc(enabled=False)),), hgx())
    expect(off, "ecc", "warn", "GPU 0")


def test_a10_with_pending_remap():
    a10 = gpu(0, name="NVIDIA A10", repair=card.Repair(0, 4, pending=True, failed=False))
    found = with_cards((a10,), hgx(pci=Pci({address(0): nvidia(0)})))
    expect(found, "row remaps", "fail", "pending on GPU 0", "--gpu-reset --id 0")
    expect(found, "gpu health", "fail", "repair_pending")


def test_remaps():
    expect(hgx(), "row remaps", "pass", "8 cards asked")
    expect(broken(repair=card.Repair(failed=True)), "row remaps", "fail", "GPU 3", "replaced")
    unknown = with_cards((gpu(0, repair=card.Repair()),), hgx())
    assert ask(unknown, "row remaps") is None


def test_persistence():
    expect(hgx(), "persistence", "pass", "8 cards")
    service = {"nvidia-persistenced": Service("nvidia-persistenced", "inactive")}
    off = replace(broken(persistence=False), services=service)
    expect(off, "persistence", "warn", "GPU 3", "inactive", "systemctl enable --now")
    assert ask(with_cards((gpu(0, persistence=None),), hgx()), "persistence") is None


def test_throttling():
    expect(broken(throttle=("sw_power_cap",)), "throttling", "pass", "41 C")
    expect(broken(throttle=("hw_thermal",)), "throttling", "warn", "GPU 3", "hw_thermal", "fans")
    expect(broken(throttle=("hw_power_brake",)), "throttling", "warn", "power supplies")
    assert ask(with_cards((gpu(0, throttle=None),), hgx()), "throttling") is None


def test_pcie():
    expect(hgx(), "pcie", "pass", "8 cards (x16)")
    expect(broken(pcie=card.Pcie(5, 5, 4, 16)), "pcie", "warn", "GPU 3: x4 of x16", "reseat")
    assert ask(with_cards((gpu(0, pcie=card.Pcie(5, 5)),), hgx()), "pcie") is None


def test_xid_log():
    expect(hgx(), "xid log", "pass")
    error = "kernel log not readable: /dev/kmsg: Operation not permitted"
    expect(hgx(kernel_log_error=error), "xid log", "warn", error, "root")
    assert ask(cpu_only(kernel_log_error=error), "xid log") is None
