"""PCI devices from sysfs: accelerators per vendor, NVSwitches, and how far two devices are apart.

Called by agent/probes/inventory.py and wiring.py; the doctor counts cards with it, because PCI
shows one that its driver has lost. Without PCI in sysfs `lspci` is read, which has no tree.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, field
from functools import partial
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal

from agent.probes import values
from agent.probes.root import bounded

if TYPE_CHECKING:
    from collections.abc import Mapping

    from agent.probes.root import Root

DEVICES: Final = "/sys/bus/pci/devices"
NODES: Final = "/sys/devices/system/node"
MAX_DEVICES: Final = 8192
"""Virtual functions of network cards come in thousands."""
SYSFS_TIMEOUT_S: Final = 10.0
LSPCI_TIMEOUT_S: Final = 10.0
LINE_LIMIT: Final = 1000

Vendor = Literal["nvidia", "amd"]
Distance = Literal["PIX", "PXB", "PHB", "NODE", "SYS"]

NVIDIA, AMD, AMD_CPU, MELLANOX = "10de", "1002", "1022", "15b3"
_CLASSES: Final[Mapping[str, tuple[Vendor, frozenset[str]]]] = {
    NVIDIA: ("nvidia", frozenset({"0300", "0302"})),
    AMD: ("amd", frozenset({"0300", "0380", "1200"})),
}
_DISPLAYS: Final = frozenset({"0300", "0380"})
_BOARD_DISPLAYS: Final = frozenset({"515e", "5969", "4752"})
"""ES1000 and Rage XL: displays soldered to old servers, of AMD's vendor number but no computers."""
_ADDRESS: Final = re.compile(r"[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")
_HOST_BRIDGE: Final = re.compile(r"pci[0-9a-f]{4,8}:[0-9a-f]{2}")
_LSPCI: Final = re.compile(
    r"((?:[0-9a-fA-F]{4,8}:)?[0-9a-fA-F]{2}:[0-9a-fA-F]{2}\.[0-7]) "
    r"([^\[\]:]{1,60}?)(?: \[([0-9a-fA-F]{4})\])?: (.{1,400})"
)
_IDS: Final = re.compile(r"\[([0-9a-fA-F]{4}):([0-9a-fA-F]{4})\]")
_DEVICE_WORD: Final = re.compile(r"Device ([0-9a-fA-F]{4})\b")
_CLASS_WORDS: Final[Mapping[str, str]] = {
    "3d controller": "0302",
    "vga compatible controller": "0300",
    "display controller": "0380",
    "processing accelerators": "1200",
    "bridge": "0680",
    "pci bridge": "0604",
    "infiniband controller": "0207",
    "ethernet controller": "0200",
}
_VENDOR_WORDS: Final = (
    ("nvidia corporation", NVIDIA),
    ("advanced micro devices, inc. [amd/ati]", AMD),
    ("advanced micro devices, inc. [amd]", AMD_CPU),
    ("mellanox technologies", MELLANOX),
)


@dataclass(frozen=True, slots=True)
class PciDevice:
    """One function. Vendor, device and class are four hex digits, `class_` without the interface.

    `host_bridge` (`pci0000:16`) and `parents` (addresses of the bridges above, from the host bridge
    down) are None when the tree is unknown. `virtual` marks an SR-IOV function whose physical one
    is on this machine. `driver` is the kernel module that holds it, None for none or unknown.
    """

    address: str
    vendor: str | None = None
    device: str | None = None
    class_: str | None = None
    numa: int | None = None
    cpus: str | None = None
    """CPUs near it as a kernel list: `0-63,128-191`."""
    host_bridge: str | None = None
    parents: tuple[str, ...] | None = None
    driver: str | None = None
    virtual: bool = False


@dataclass(frozen=True, slots=True)
class Pci:
    """All devices of a machine by address; `error` says why there may be more."""

    devices: Mapping[str, PciDevice] = field(default_factory=dict)
    error: str | None = None
    source: Literal["sysfs", "lspci"] | None = None

    def accelerators(self, vendor: Vendor | None = None) -> tuple[PciDevice, ...]:
        """Cards to compute with, of one vendor or all, in order of address."""
        cpu_slots = {_slot(d.address) for d in self.devices.values() if d.vendor == AMD_CPU}
        return tuple(
            device
            for device in self.devices.values()
            if (kind := accelerator_vendor(device)) is not None
            and vendor in (None, kind)
            and not (device.class_ in _DISPLAYS and _slot(device.address) in cpu_slots)
        )

    def accelerator_counts(self) -> dict[str, int]:
        """Cards per vendor: `{"nvidia": 8}`; a vendor without any is left out."""
        return dict(Counter(filter(None, map(accelerator_vendor, self.accelerators()))))

    def nvswitches(self) -> tuple[PciDevice, ...]:
        """NVSwitch bridges that this machine sees; in an NVL72 rack they sit in other trays."""
        return tuple(d for d in self.devices.values() if d.vendor == NVIDIA and d.class_ == "0680")

    def distance(self, a: str | None, b: str | None) -> Distance | None:
        """How two addresses (any spelling) reach each other; None when that is unknown."""
        first = self.devices.get(values.pci_bus_id(a) or "")
        second = self.devices.get(values.pci_bus_id(b) or "")
        return distance(first, second) if first and second else None


def accelerator_vendor(device: PciDevice) -> Vendor | None:
    """Who made the card to compute with that this device is; None when it is none.

    An AMD display counts: only `Pci.accelerators` sees the other functions of its slot, by which it
    tells the display of an AMD processor (its security processor and USB share the slot).
    """
    vendor, classes = _CLASSES.get(device.vendor or "", (None, frozenset()))
    if vendor is None or device.class_ not in classes or device.virtual:
        return None
    return None if device.vendor == AMD and device.device in _BOARD_DISPLAYS else vendor


def distance(a: PciDevice, b: PciDevice) -> Distance | None:
    """PIX: one switch between; PXB: several; PHB: the host bridge; NODE: two of one NUMA node; SYS.

    A switch is two bridges, its upper port being common to both devices, so each may have one more
    bridge (its own lower port) above it. Functions of one card are PIX.
    """
    tree = a.host_bridge is not None and b.host_bridge is not None
    if tree and a.host_bridge == b.host_bridge and a.parents is not None and b.parents is not None:
        pairs = zip(a.parents, b.parents, strict=False)
        common = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
        if common == 0:
            return "PIX" if _slot(a.address) == _slot(b.address) else "PHB"
        own = max(len(a.parents), len(b.parents)) - common
        return "PIX" if own <= 1 else "PXB"
    if a.numa is None or b.numa is None:
        return None
    if a.numa != b.numa:
        return "SYS"
    return "NODE" if tree else None


def _slot(address: str) -> str:
    return address.rpartition(".")[0]


def parse_tree(path: str) -> tuple[str | None, tuple[str, ...] | None]:
    """Host bridge and bridges above a device, from its path below /sys/devices.

    `.../pci0000:00/0000:00:01.0/0000:01:00.0` is `("pci0000:00", ("0000:00:01.0",))`. Behind a
    volume management device (VMD) or a Hyper-V bus the last host bridge counts.
    """
    parts = path[-4096:].rstrip("/").split("/")
    bridges = [at for at, part in enumerate(parts) if _HOST_BRIDGE.fullmatch(part)]
    if not bridges:
        return None, None
    below = [part for part in parts[bridges[-1] + 1 :] if _ADDRESS.fullmatch(part)]
    return (parts[bridges[-1]], tuple(below[:-1])) if below else (None, None)


def parse_lspci(text: str) -> Pci:
    """Devices of `lspci`, with numbers (`-nn`) or by the words that name the vendors we know.

    Has neither NUMA nodes nor a tree.
    """
    devices: dict[str, PciDevice] = {}
    for line in values.plain(text[: MAX_DEVICES * 200]).splitlines():
        match = _LSPCI.match(line[:LINE_LIMIT])
        if match is None or (address := values.pci_bus_id(match[1])) is None:
            continue
        ids = _IDS.findall(match[4])
        vendor, device = ids[-1] if ids else _named_ids(match[4])
        devices[address] = PciDevice(
            address=address,
            vendor=vendor.lower() if vendor else None,
            device=device.lower() if device else None,
            class_=(match[3] or _CLASS_WORDS.get(match[2].strip().lower(), "")).lower() or None,
        )
        if len(devices) >= MAX_DEVICES:
            break
    return Pci(devices, None if devices else "lspci: no device in its output", "lspci")


def _named_ids(text: str) -> tuple[str | None, str | None]:
    lower = text.lower()
    vendor = next((number for words, number in _VENDOR_WORDS if lower.startswith(words)), None)
    device = _DEVICE_WORD.search(text)
    return vendor, device[1] if device else None


def read_sysfs(root: Root) -> Pci:
    """All PCI devices of sysfs. Blocking: some hundred small files, milliseconds."""
    names = [name for name in root.names(DEVICES) if _ADDRESS.fullmatch(name)]
    if not names:
        return Pci(error=f"{DEVICES}: no devices")
    only_node = _only_node(root)
    devices = (_read_device(root, name, only_node) for name in names[:MAX_DEVICES])
    return Pci(
        {device.address: device for device in devices},
        f"{DEVICES}: {len(names)} devices, only {MAX_DEVICES} read"
        if len(names) > MAX_DEVICES
        else None,
        "sysfs",
    )


def _read_device(root: Root, address: str, only_node: int | None) -> PciDevice:
    place = f"{DEVICES}/{address}"
    numa = values.whole(root.read(f"{place}/numa_node", 64))
    host_bridge, parents = parse_tree(_path(root, place))
    return PciDevice(
        address=address,
        vendor=_hex(root.read(f"{place}/vendor", 64), 4),
        device=_hex(root.read(f"{place}/device", 64), 4),
        class_=(_hex(root.read(f"{place}/class", 64), 6) or "")[:4] or None,
        numa=numa if numa is not None and numa >= 0 else only_node,
        cpus=_cpus(root.read(f"{place}/local_cpulist", 4096)),
        host_bridge=host_bridge,
        parents=parents,
        driver=Path(root.link(f"{place}/driver") or "").name or None,
        virtual=root.exists(f"{place}/physfn") or root.link(f"{place}/physfn") is not None,
    )


def _path(root: Root, place: str) -> str:
    """Where a device really is. In a captured machine the link may lead nowhere: its text tells."""
    text = root.link(place)
    if text and parse_tree(text)[0] is not None:
        return text
    try:
        return str(root.at(place).resolve()) if text else ""
    except (OSError, RuntimeError, ValueError):
        return ""


def _hex(text: str | None, digits: int) -> str | None:
    match = re.fullmatch(r"(?:0x)?([0-9a-fA-F]{1,8})", (text or "").strip())
    return match[1].lower().zfill(digits) if match else None


def _cpus(text: str | None) -> str | None:
    stripped = (text or "").strip()
    return stripped if values.cpu_list(stripped) else None


def _only_node(root: Root) -> int | None:
    """The machine's NUMA node if there is but one: the kernel writes -1 for devices then."""
    nodes = [name[4:] for name in root.names(NODES) if re.fullmatch(r"node[0-9]{1,5}", name)]
    return int(nodes[0]) if len(nodes) == 1 else None


async def read(root: Root) -> Pci:
    """PCI devices of the machine: sysfs, else `lspci -Dnn`; says why when there is neither."""
    found = await bounded(partial(read_sysfs, root), key="pci", timeout_s=SYSFS_TIMEOUT_S)
    if found is None:
        return Pci(error=f"{DEVICES}: not read within {SYSFS_TIMEOUT_S:g} s")
    if found.devices:
        return found
    result = await root.run(["lspci", "-Dnn"], LSPCI_TIMEOUT_S)
    listed = parse_lspci(result.stdout)
    if listed.devices:
        return listed
    return Pci(error=f"{found.error}; {result.error or listed.error}")
