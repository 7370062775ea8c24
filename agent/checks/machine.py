"""What several checks ask of a `Found`: which cards answer, which are on PCI, is this WSL. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from agent.probes.card import Gpu
    from agent.probes.found import Found
    from agent.probes.pci import PciDevice, Vendor

HANDED_ON: Final = frozenset({"vfio-pci", "pci-stub", "pciback", "xen-pciback"})
"""Kernel drivers that keep a card for a virtual machine: it is not this host's to use."""
_OUT_OF_REACH: Final = ("lost", "missing", "unreachable", "no access")


def answers(gpu: Gpu) -> bool:
    """Whether the driver told anything of the card itself."""
    if any(problem.startswith(_OUT_OF_REACH) for problem in gpu.problems):
        return False
    return not gpu.problems or gpu.uuid is not None or gpu.memory_mib is not None


def answering(found: Found, vendor: Vendor | None = None) -> tuple[Gpu, ...]:
    """Cards that answer, of one vendor or all."""
    return tuple(g for g in found.gpus.cards if vendor in (None, g.vendor) and answers(g))


def on_pci(found: Found, vendor: Vendor | None = None) -> tuple[PciDevice, ...]:
    """Cards on the PCI bus that are for this host."""
    return tuple(d for d in found.pci.accelerators(vendor) if d.driver not in HANDED_ON)


def handed_on(found: Found, vendor: Vendor | None = None) -> tuple[PciDevice, ...]:
    """Cards on the PCI bus that are kept for virtual machines."""
    return tuple(d for d in found.pci.accelerators(vendor) if d.driver in HANDED_ON)


def pci_known(found: Found) -> bool:
    """Whether the PCI bus could be looked at."""
    return bool(found.pci.devices)


def in_wsl(found: Found) -> bool:
    """Linux inside Windows, where the driver is Windows' own and PCI shows no card."""
    told = found.host is not None and bool(found.host.wsl)
    return told or any(sign.startswith(("/dev/dxg", "/usr/lib/wsl")) for sign in found.signs)
