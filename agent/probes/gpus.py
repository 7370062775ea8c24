"""What follows from cards and the kernel's list: classes, foreign memory, names of lost cards.

Called by inventory.py with the cards of card.py, whoever told of them. Pure but for the two reads.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from agent.probes import values
from agent.probes.card import Gpu

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence

    from agent.probes.root import Root

PROC_GPUS: Final = "/proc/driver/nvidia/gpus"
PCI_DRIVER: Final = "/sys/bus/pci/drivers/nvidia"
MAX_GPUS: Final = 256
DRIVER_MIB: Final = 1024
"""What a driver may use of a card for itself and in contexts that it lists under no process."""
_BRANDS: Final = frozenset(
    {"nvidia", "geforce", "tesla", "quadro", "grid", "amd", "ati", "radeon", "instinct"}
)
_FAMILIES: Final = frozenset({"rtx", "gtx", "gt", "cmp", "titan", "rx", "pro"})
_SUFFIXES: Final = frozenset({"ti", "super", "d", "ada"})
_ON_CHIP: Final = frozenset({"gb10", "n1", "n1x", "thor", "orin", "xavier", "nvgpu", "jetson"})
"""Words in names of processors with a built-in GPU; Tegra names carry a number behind it."""


@dataclass(frozen=True, slots=True)
class KernelGpu:
    """A card as the driver's own list in /proc names it: there even when it fell off the bus."""

    pci_bus_id: str
    uuid: str | None = None
    name: str | None = None
    index: int | None = None


def gpu_class(name: str | None) -> str | None:
    """The short word that pools select by, derived from a product name.

    The rule: drop brand words (NVIDIA, GeForce, Tesla, Quadro, GRID, AMD, Radeon, Instinct); the
    class is the next word up to its first dash (`A100-SXM4-80GB` -> `A100`, `AMD Instinct MI300X`
    -> `MI300X`). Consumer and workstation families are no model on their own, so RTX, GTX, GT, CMP,
    TITAN, RX and PRO take the model's number with them and, behind a dash, what follows of Ti,
    SUPER, D and Ada (`GeForce RTX 2080 SUPER` -> `RTX2080-SUPER`, `RTX 4000 SFF Ada`
    -> `RTX4000-Ada`, `RTX PRO 6000 Blackwell` -> `RTXPRO6000`). Memory size and form are not part
    of it. `Graphics Device`, a card the driver does not know, has none.
    """
    words = re.findall(r"[A-Za-z0-9][A-Za-z0-9.-]*", (name or "")[:200])
    while words and words[0].lower() in _BRANDS:
        words.pop(0)
    if not words or words[0].lower() in {"graphics", "device", "n"}:
        return None
    family = words.pop(0).split("-")[0]
    if family.lower() not in _FAMILIES or not words:
        return family or None
    if words[0].lower() == "pro":
        family += words.pop(0).upper()
    model = family + (words.pop(0) if words else "")
    rest = [word for word in words if word.lower() in _SUFFIXES]
    return "-".join([model, *rest])


def shares_host_memory(name: str | None) -> bool:
    """Whether a card of this name has no memory of its own (GB10, Jetson).

    The name decides because drivers differ: some have no memory for such a card, others claim all
    of the host's (case E02).
    """
    words = re.findall(r"[a-z0-9]+", (name or "")[:200].lower())
    return any(word in _ON_CHIP or word.startswith("tegra") for word in words)


def plannable(total_mib: int | None, reserved_mib: int | None) -> int | None:
    """Memory to plan with: the driver keeps `reserved` for itself. A total of 0 is unknown."""
    if not total_mib:
        return None
    return total_mib - reserved_mib if reserved_mib and reserved_mib < total_mib else total_mib


def cpu_words(cpus: Collection[int]) -> str:
    """CPU numbers as the kernel lists them: `0-63,128-191`."""
    ranges: list[list[int]] = []
    for cpu in sorted(cpus):
        if ranges and ranges[-1][1] == cpu - 1:
            ranges[-1][1] = cpu
        else:
            ranges.append([cpu, cpu])
    return ",".join(f"{low}-{high}" if low != high else str(low) for low, high in ranges)


def foreign_memory(gpu: Gpu, own_pids: Collection[int]) -> int | None:
    """MiB held by others than our processes; None when that cannot be told.

    A foreign process that does not show its memory is charged with all that ours do not explain.
    Memory in use that no process explains is nobody's to give either: of a process in another
    container, or not released by one that has ended (case D20).
    """
    if gpu.processes is None:
        return None
    foreign = [process for process in gpu.processes if process.pid not in own_pids]
    known = [process.memory_mib for process in foreign if process.memory_mib is not None]
    if len(known) == len(foreign):
        return sum(known) + (unexplained_memory(gpu) or 0)
    if gpu.memory_used_mib is None:
        return None
    ours = sum(p.memory_mib or 0 for p in gpu.processes if p.pid in own_pids)
    return max(sum(known), gpu.memory_used_mib - ours)


def unexplained_memory(gpu: Gpu) -> int | None:
    """MiB in use that no process of the driver's list explains; small amounts are the driver's own.

    None when it cannot be told: no list, a process without a figure, MIG, unified memory.
    """
    used, listed = gpu.memory_used_mib, gpu.processes
    if used is None or listed is None or gpu.mig or gpu.slices or gpu.memory_kind == "unified":
        return None
    known = [process.memory_mib for process in listed if process.memory_mib is not None]
    if len(known) < len(listed):
        return None
    left = used - sum(known)
    return left if left > DRIVER_MIB else 0


def parse_kernel_gpu(directory: str, text: str) -> KernelGpu | None:
    """A /proc/driver/nvidia/gpus/<address>/information file; a lost card has `?` in its UUID."""
    fields: dict[str, str] = {}
    for line in text.splitlines():
        key, _, value = line.partition(":")
        fields.setdefault(key.strip(), value.strip())
    address = values.pci_bus_id(fields.get("Bus Location")) or values.pci_bus_id(directory)
    if address is None:
        return None
    uuid = fields.get("GPU UUID", "")
    return KernelGpu(
        pci_bus_id=address,
        uuid=uuid if re.fullmatch(r"GPU-[0-9a-f-]{8,64}", uuid) else None,
        name=fields.get("Model") or None,
        index=values.whole(fields.get("Device Minor")),
    )


def read_kernel_gpus(root: Root) -> tuple[KernelGpu, ...]:
    """Cards the kernel driver holds, by its own list and by PCI's. Blocking, quick.

    A card can go from the first and stay in the second (case E20). PCI devices that another driver
    holds are not ours to miss: a display on nouveau, a card handed to a virtual machine.
    """
    cards = (
        parse_kernel_gpu(name, root.read(f"{PROC_GPUS}/{name}/information", 65536) or "")
        for name in root.names(PROC_GPUS)[:MAX_GPUS]
    )
    held = {card.pci_bus_id: card for card in cards if card is not None}
    for name in root.names(PCI_DRIVER)[:MAX_GPUS]:
        address = values.pci_bus_id(name)
        if address is not None and _is_gpu(root, name):
            held.setdefault(address, KernelGpu(pci_bus_id=address))
    return tuple(held.values())


def _is_gpu(root: Root, address: str) -> bool:
    kind = (root.read(f"/sys/bus/pci/devices/{address}/class", 64) or "").strip()
    return kind[:6] in {"0x0300", "0x0302"}


def add_missing(
    cards: Sequence[Gpu], kernel: Iterable[KernelGpu], error: str | None = None
) -> tuple[Gpu, ...]:
    """Name lost cards by the kernel's list and add those that the tool left out (case E07).

    `error` is why no tool gave any card, if so: then they are not lost, only out of reach, and
    the next look may find them well (case E11).

    A lost card has lost its UUID for NVML as well. Where exactly as many nameless cards as
    unclaimed kernel entries are left they are the same ones, in bus order.
    """
    seen = {card.pci_bus_id for card in cards} | {card.uuid for card in cards}
    seen.discard(None)
    by_address = {entry.pci_bus_id: entry for entry in kernel}
    unclaimed = [e for e in by_address.values() if e.pci_bus_id not in seen and e.uuid not in seen]
    nameless = sum(card.uuid is None and card.pci_bus_id is None for card in cards)
    spare = iter(unclaimed if nameless == len(unclaimed) else ())
    named = []
    for card in cards:
        if card.uuid is None and card.pci_bus_id is None:
            entry = next(spare, None)
        else:
            entry = by_address.get(card.pci_bus_id or "")
        named.append(_named(card, entry) if entry else card)
    claimed = {card.pci_bus_id for card in named}
    left_out = [k for k in unclaimed if k.pci_bus_id not in claimed]
    return (*named, *(_named(Gpu(problems=(_missing(k, error),)), k) for k in left_out))


def _missing(entry: KernelGpu, error: str | None) -> str:
    if error:
        return f"unreachable: {error}"
    return f"lost: the driver holds {entry.pci_bus_id} but its tools do not show it"


def _named(card: Gpu, entry: KernelGpu) -> Gpu:
    return replace(
        card,
        uuid=card.uuid or entry.uuid,
        name=card.name or entry.name,
        pci_bus_id=card.pci_bus_id or entry.pci_bus_id,
    )


def key(gpu: Gpu) -> str | None:
    """What a card is reported under: its UUID, or its address when it has lost even that."""
    return gpu.uuid or (f"PCI-{gpu.pci_bus_id}" if gpu.pci_bus_id else None)


def numa_node(root: Root, pci_bus_id: str | None) -> int | None:
    """NUMA node of a card from sysfs; the kernel writes -1 when it does not know. Blocking."""
    if pci_bus_id is None:
        return None
    node = values.whole(root.read(f"/sys/bus/pci/devices/{pci_bus_id}/numa_node", 64))
    return node if node is not None and node >= 0 else None


def placed(root: Root, card: Gpu) -> Gpu:
    """The card with its NUMA node by sysfs, else as the driver told it. Blocking."""
    node = numa_node(root, card.pci_bus_id)
    return card if node is None else replace(card, numa=node)


def unlike(cards: Sequence[Gpu]) -> tuple[Gpu, ...]:
    """The cards with each UUID once: parts of one partitioned AMD card share it.

    The cards behind the first are known by their PCI address instead. A card that is told twice,
    UUID and address, is one card.
    """
    seen: set[str | None] = set()
    told: dict[object, Gpu] = {}
    for at, card in enumerate(cards):
        one = replace(card, uuid=None) if card.uuid in seen else card
        seen.update((card.uuid,) if card.uuid else ())
        told.setdefault(at if card.pci_bus_id is None else (card.uuid, card.pci_bus_id), one)
    return tuple(told.values())
