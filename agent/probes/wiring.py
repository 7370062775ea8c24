"""How the devices of one machine are wired: joins NVML, nvidia-smi, PCI and network ports. Pure.

Called by agent/probes/inventory.py with what the other probes found. What a card says of itself
(NVML) stands; gaps are filled from `topo -m`, then from the PCI tree; what is left stays unknown.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final, Protocol

from agent.probes import values

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from agent.probes.card import Gpu, NvLink, Path
    from agent.probes.pci import Pci
    from agent.probes.topo import Matrix, NvLinks

MAX_NICS: Final = 256
_RANKS: Final = {"PIX": 1000, "PXB": 1001, "PHB": 1002, "NODE": 1003, "SYS": 1004}
UNKNOWN_RANK: Final = 2000
_LAYERS: Final = {"InfiniBand": 0, "Ethernet": 1}


class Port(Protocol):
    """What wiring needs of a network port (agent/probes/ib.py's `IbPort`)."""

    @property
    def hca(self) -> str: ...
    @property
    def pci_bus_id(self) -> str | None: ...
    @property
    def numa(self) -> int | None: ...
    @property
    def active(self) -> bool: ...
    @property
    def link_layer(self) -> str | None: ...


@dataclass(frozen=True, slots=True)
class Nic:
    """A network device by name. `active` is None when only the GPU driver's matrix names it."""

    name: str
    pci_bus_id: str | None = None
    numa: int | None = None
    active: bool | None = None
    link_layer: str | None = None


def rank(path: Path | None) -> int:
    """Order of paths, best first: more NVLinks, PIX, PXB, PHB, NODE, SYS, unknown."""
    links = re.fullmatch(r"NV([0-9]{1,3})", path or "", re.ASCII)
    return 1000 - int(links[1]) if links else _RANKS.get(path or "", UNKNOWN_RANK)


def wire(
    cards: Sequence[Gpu], pci: Pci, matrix: Matrix, nvlinks: NvLinks, ports: Iterable[Port]
) -> tuple[Gpu, ...]:
    """The cards with NUMA nodes, CPUs, NVLinks, paths to cards and NICs, and the nearest NIC."""
    nics = network_devices(ports, pci, matrix)
    placed = [_placed(card, pci, matrix, nvlinks) for card in cards]
    wired = [replace(card, paths=_paths(card, placed, nics, pci, matrix)) for card in placed]
    nearest = nearest_nics(wired, nics)
    return tuple(
        replace(card, nearest_nic=nic, nic_path=card.paths.get(nic)) if nic is not None else card
        for card, nic in zip(wired, nearest, strict=True)
    )


def islands(cards: Sequence[Gpu]) -> dict[int, int]:
    """Number of the group of cards that NVLink joins, by `id` of the card; others have none. Pure.

    Cards of a group may reach each other over a third one: engines use what the driver offers.
    """
    by_index: dict[tuple[str, str], Gpu] = {
        (card.vendor, str(card.index)): card for card in cards if card.index is not None
    }
    found: dict[int, int] = {}
    for card in cards:
        if id(card) in found or not _linked(card, by_index):
            continue
        number, ahead = len(set(found.values())), [card]
        while ahead:
            one = ahead.pop()
            if id(one) not in found:
                found[id(one)] = number
                ahead += _linked(one, by_index)
    return found


def _linked(card: Gpu, by_index: Mapping[tuple[str, str], Gpu]) -> list[Gpu]:
    """Cards that NVLink leads to."""
    names = (name for name, path in card.paths.items() if path.startswith("NV"))
    return [by_index[card.vendor, name] for name in names if (card.vendor, name) in by_index]


def network_devices(ports: Iterable[Port], pci: Pci, matrix: Matrix) -> tuple[Nic, ...]:
    """Devices of all ports and of the matrix, each once, by name in natural order.

    A device with several ports is active when one of them is.
    """
    nics: dict[str, Nic] = {name: Nic(name) for name in matrix.nics[:MAX_NICS]}
    for port in ports:
        known = nics.get(port.hca)
        if known is None and len(nics) >= MAX_NICS:
            continue
        device = pci.devices.get(values.pci_bus_id(port.pci_bus_id) or "")
        nics[port.hca] = Nic(
            name=port.hca,
            pci_bus_id=port.pci_bus_id or (known.pci_bus_id if known else None),
            numa=port.numa if port.numa is not None else device.numa if device else None,
            active=port.active or bool(known and known.active),
            link_layer=known.link_layer if known and known.active else port.link_layer,
        )
    return tuple(sorted(nics.values(), key=lambda nic: _natural(nic.name)))


def _natural(name: str) -> tuple[tuple[int, int, str], ...]:
    """mlx5_2 before mlx5_10."""
    parts = re.findall(r"[0-9]{1,18}|[^0-9]+", name[:200])
    return tuple((0, int(part), "") if part.isdecimal() else (1, 0, part) for part in parts)


def _label(card: Gpu) -> str | None:
    """The card in the matrix, which knows NVIDIA's only."""
    return f"GPU{card.index}" if card.vendor == "nvidia" and card.index is not None else None


def _placed(card: Gpu, pci: Pci, matrix: Matrix, nvlinks: NvLinks) -> Gpu:
    """Where the card is; a node that the PCI device names is sure, the matrix may leave it out."""
    device = pci.devices.get(values.pci_bus_id(card.pci_bus_id) or "")
    label = _label(card) or ""
    return replace(
        card,
        numa=_first(card.numa, device.numa if device else None, matrix.numa.get(label)),
        numa_memory=_first(card.numa_memory, matrix.numa_memory.get(label)),
        cpu_affinity=card.cpu_affinity
        or matrix.cpu_affinity.get(label)
        or (device.cpus if device else None),
        nvlinks=card.nvlinks if card.nvlinks is not None else _links(card, nvlinks),
    )


def _first(*found: int | None) -> int | None:
    return next((value for value in found if value is not None), None)


def _links(card: Gpu, nvlinks: NvLinks) -> tuple[NvLink, ...] | None:
    """By UUID where it is one of a kind (captures have them masked), else by index."""
    if card.vendor != "nvidia":
        return None
    same = [gpu for gpu in nvlinks.gpus if card.uuid is not None and gpu.uuid == card.uuid]
    if len(same) != 1:
        same = [gpu for gpu in nvlinks.gpus if card.index is not None and gpu.index == card.index]
    return same[0].links if len(same) == 1 else None


def _paths(
    card: Gpu, cards: Sequence[Gpu], nics: Sequence[Nic], pci: Pci, matrix: Matrix
) -> dict[str, Path]:
    """Known paths only. Indices are per vendor, so cards of another vendor have no name here."""
    label = _label(card)
    found: dict[str, Path | None] = {}
    for other in cards:
        if other is card or other.vendor != card.vendor or other.index in (None, card.index):
            continue
        there = _label(other)
        cell = matrix.path(label, there) if label and there else None
        found[str(other.index)] = cell or pci.distance(card.pci_bus_id, other.pci_bus_id)
    for nic in nics:
        cell = matrix.path(label, nic.name) if label else None
        found[nic.name] = _to_nic(card, nic, cell, pci)
    return {name: path for name, path in found.items() if path is not None} | dict(card.paths)


def _to_nic(card: Gpu, nic: Nic, cell: Path | None, pci: Pci) -> Path | None:
    """GPUs on NVLink-C2C (GB200) hang off no PCIe bus: SYS in the matrix although on one node."""
    same_node = card.numa is not None and card.numa == nic.numa
    if cell == "SYS" and same_node:
        return "NODE"
    if cell is not None:
        return cell
    apart = pci.distance(card.pci_bus_id, nic.pci_bus_id)
    if apart is None and card.numa is not None and nic.numa is not None and not same_node:
        return "SYS"
    return apart


def nearest_nics(cards: Sequence[Gpu], nics: Sequence[Nic]) -> list[str | None]:
    """One NIC per card: active before unknown before inactive, then the best path, then node.

    Among equals InfiniBand comes before Ethernet, and card i takes the i-th of them, or the next
    one that fewer cards use: eight cards and eight NICs on one switch get one each. Cards with
    less choice choose first. A card keeps its NIC when another card is lost.
    """
    choices = [_equals(card, nics) for card in cards]
    order = sorted(range(len(cards)), key=lambda at: (len(choices[at]), _index(cards[at]), at))
    uses: Counter[str] = Counter()
    nearest: list[str | None] = [card.nearest_nic for card in cards]
    for at in order:
        equals = choices[at]
        if nearest[at] is None and equals:
            start = _index(cards[at]) % len(equals)
            turned = equals[start:] + equals[:start]
            nearest[at] = min(turned, key=lambda name: uses[name])
        if (chosen := nearest[at]) is not None:
            uses[chosen] += 1
    return nearest


def _index(card: Gpu) -> int:
    return card.index if card.index is not None and card.index >= 0 else 0


def _equals(card: Gpu, nics: Sequence[Nic]) -> list[str]:
    """NICs that nothing tells apart for a card, in rail order; none when nothing is known."""
    ranked: Mapping[str, tuple[int, ...]] = {
        nic.name: (
            {True: 0, None: 1, False: 2}[nic.active],
            # On one node without a known path: NODE at worst.
            rank(card.paths.get(nic.name, "NODE")),
            _other_node(card, nic),
            _LAYERS.get(nic.link_layer or "", 2),
        )
        for nic in nics
        if card.paths.get(nic.name) is not None or _other_node(card, nic) == 0
    }
    best = min(ranked.values(), default=None)
    return [name for name, key in ranked.items() if key == best]


def _other_node(card: Gpu, nic: Nic) -> int:
    if card.numa is None or nic.numa is None:
        return 1
    return 0 if card.numa == nic.numa else 2
