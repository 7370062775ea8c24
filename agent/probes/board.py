"""What kind of machine it is: sockets, cores and threads, its last boot, real or virtual.

Called by host.py. Pure functions over kernel files, then readers; nothing here raises.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from agent.probes import values

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from agent.probes.root import Root

CPUS: Final = "/sys/devices/system/cpu"
DMI: Final = "/sys/class/dmi/id"
MAX_CPUS: Final = 8192
MAX_CPUINFO: Final = 8 * 2**20
"""Characters read of /proc/cpuinfo: 1024 CPUs are about 1.6 MiB."""

_UUID: Final = re.compile(r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}")
_VIRTUAL: Final = re.compile(
    r"\b(kvm|qemu|vmware|virtualbox|innotek|xen|hvm|bochs|openstack|parallels|virtual machine"
    r"|google compute engine|alibaba cloud ecs|nutanix|ovirt|bhyve|firecracker|amazon ec2)\b",
    re.IGNORECASE,
)
_EMPTY: Final = re.compile(
    r"|to be filled.*|default string|system manufacturer|system product name|not specified|none",
    re.IGNORECASE,
)
"""What firmware says when nobody filled it in."""
_METAL: Final = re.compile(r"\bmetal\b|baremetal|bare metal", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Layout:
    """Processors as hardware. `cores` counts all sockets; `offline` are present but switched off.

    `smt` is whether cores run more than one thread now.
    """

    sockets: int | None = None
    cores: int | None = None
    cores_per_socket: int | None = None
    smt: bool | None = None
    offline: int | None = None


@dataclass(frozen=True, slots=True)
class Place:
    """Where one CPU is: its socket, and a name of its core that is unique in the machine."""

    socket: int | None
    core: str


def layout(places: Iterable[Place], smt: bool | None = None, offline: int | None = None) -> Layout:
    """Sockets and cores of CPUs. Kernels that do not know a socket number write -1 for all."""
    cores: dict[str, int | None] = {}
    cpus = 0
    for place in places:
        cores[place.core] = place.socket
        cpus += 1
    per_socket: dict[int, int] = {}
    for socket in cores.values():
        if socket is not None and socket >= 0:
            per_socket[socket] = per_socket.get(socket, 0) + 1
    if smt is None and cores:
        smt = cpus > len(cores)
    return Layout(
        sockets=len(per_socket) or None,
        cores=len(cores) or None,
        # A socket with cores switched off has fewer: the fullest one tells how it is built.
        cores_per_socket=max(per_socket.values(), default=None),
        smt=smt,
        offline=offline,
    )


def parse_places(cpuinfo: str) -> tuple[Place, ...]:
    """Sockets and cores from /proc/cpuinfo, which x86 kernels tell there; empty elsewhere."""
    found: list[Place] = []
    stanza: dict[str, str] = {}
    for line in [*cpuinfo[:MAX_CPUINFO].splitlines(), "processor:"]:
        key, colon, value = line.partition(":")
        key = key.strip()
        if key == "processor" and colon and len(found) < MAX_CPUS:
            place = _place(stanza)
            found += [place] if place else []
            stanza = {}
        if key in {"physical id", "core id"}:
            stanza[key] = value.strip()
    return tuple(found)


def _place(stanza: Mapping[str, str]) -> Place | None:
    socket, core = values.whole(stanza.get("physical id")), values.whole(stanza.get("core id"))
    return None if socket is None or core is None else Place(socket, f"{socket}:{core}")


def read_layout(root: Root, cpuinfo: str) -> Layout:
    """The layout from sysfs, else from cpuinfo. Blocking, quick: three small files a CPU."""
    places = [
        place for cpu in _cpus(root) if (place := _read_place(root, f"{CPUS}/cpu{cpu}/topology"))
    ]
    active = values.whole(root.read(f"{CPUS}/smt/active", 64))
    smt = None if active not in (0, 1) else bool(active)
    present = values.cpu_list(root.read(f"{CPUS}/present", 65536))
    online = values.cpu_list(root.read(f"{CPUS}/online", 65536))
    # The kernel's own list of offline CPUs also names those that could be plugged in one day.
    offline = len(present - online) if present and online else None
    return layout(places or parse_places(cpuinfo), smt, offline)


def _cpus(root: Root) -> list[int]:
    names = (re.fullmatch(r"cpu([0-9]{1,6})", name) for name in root.names(CPUS))
    return sorted(int(match[1]) for match in names if match)[:MAX_CPUS]


def _read_place(root: Root, folder: str) -> Place | None:
    """Threads of a core list each other: that list names the core on every architecture."""
    names = ("core_cpus_list", "thread_siblings_list")
    siblings = next((text for name in names if (text := root.read(f"{folder}/{name}", 4096))), "")
    if not siblings.strip():
        return None  # offline: the kernel takes the folder away
    return Place(values.whole(root.read(f"{folder}/physical_package_id", 64)), siblings.strip())


def parse_boot_id(text: str | None) -> str | None:
    """The random name of this boot; another one means that the machine was restarted."""
    word = (text or "")[:64].strip().lower()
    return word if _UUID.fullmatch(word) else None


def parse_boot_time(stat: str) -> int | None:
    """`btime` of /proc/stat: the boot in seconds since 1970 by the machine's own clock."""
    match = re.search(r"^btime ([0-9]{1,12})$", stat, re.MULTILINE)
    return int(match[1]) or None if match else None


def virtual(flags: Iterable[str], product: str | None) -> bool | None:
    """Whether it is a virtual machine. None: no sign of either.

    An x86 CPU says so itself, which also tells a cloud's metal machines from its virtual ones.
    """
    known = frozenset(flags)
    if "hypervisor" in known:
        return True
    if "lm" in known or "fpu" in known:
        return False
    if product is None:
        return None
    return _VIRTUAL.search(product) is not None and _METAL.search(product) is None


def product(vendor: str | None, name: str | None) -> str | None:
    """The machine's maker and model as one text; fields nobody filled in are left out."""
    texts = [(text or "").strip()[:128] for text in (vendor, name)]
    kept = [text for text in texts if not _EMPTY.fullmatch(text)]
    if len(kept) == 2 and kept[1].lower().startswith(kept[0].lower()):
        kept = kept[1:]
    return " ".join(kept) or None


def read_product(root: Root) -> str | None:
    """What the firmware says the machine is; on ARM without DMI the device tree. Blocking."""
    told = product(root.read(f"{DMI}/sys_vendor", 512), root.read(f"{DMI}/product_name", 512))
    return told or product(None, (root.read("/proc/device-tree/model", 512) or "").strip("\x00"))


def wsl(kernel: str | None) -> bool | None:
    """Whether it is Linux inside Windows: there the driver lives in /usr/lib/wsl/lib."""
    if kernel is None:
        return None
    return re.search(r"microsoft(-standard)?(-wsl2?)?\+?$|-wsl2", kernel, re.IGNORECASE) is not None
