"""Nodes that a what-if adds: copies of the fleet's own, or assumptions that are told. Pure."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from controller.placement.model import Gpu, Model, Node

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

ADDRESS: Final = "192.0.2.1"
"""Of documentation: nothing is ever sent there."""
CORES_PER_CARD: Final = 16.0
MEMORY_PER_CARD_MIB: Final = 256 * 1024
LEAST_CARDS: Final = 4
"""What a machine without a pattern is like has cores and memory as for so many cards."""


@dataclass(frozen=True, slots=True)
class AddNodes:
    """So many nodes of one kind."""

    count: int
    gpus: int
    class_: str | None
    memory_mib: int | None = None
    """Of each card; None: as the fleet's cards of that class."""

    @property
    def words(self) -> str:
        """``4 x 8 H100``."""
        return f"{self.count} x {self.gpus} {self.class_ or 'cards'}"


def made(
    wanted: Iterable[AddNodes], nodes: Sequence[Node], models: Sequence[Model]
) -> tuple[list[Node], list[str]]:
    """The nodes, and a sentence for each thing that nobody knows of them."""
    taken = {node.id for node in nodes}
    found: list[Node] = []
    notes: list[str] = []
    for turn, kind in enumerate(wanted, 1):
        pattern = _pattern(kind, nodes)
        if pattern is None:
            pattern, told = _assumed(kind, models)
            notes.append(told)
        else:
            notes.append(f"{kind.words}: each as {pattern.id} is, with nothing on it")
        cards, unknown = _cards(kind, pattern, nodes)
        notes += [f"{kind.words}: {unknown}"] if unknown else []
        if pattern.nvlink_domain is not None:
            notes.append(f"{kind.words}: all in one new NVLink domain")
        for _ in range(kind.count):
            name = _name(kind, taken)
            taken.add(name)
            found.append(_empty(pattern, name, cards, turn))
    return found, notes


def _name(kind: AddNodes, taken: set[str]) -> str:
    word = "".join(c for c in (kind.class_ or "cpu").lower() if c.isalnum() or c in "._-")
    number = 1
    while f"new-{word}-{number}" in taken:
        number += 1
    return f"new-{word}-{number}"


def _pattern(kind: AddNodes, nodes: Sequence[Node]) -> Node | None:
    """The node that new ones are most like: cards of the class, as many of them, usable."""

    def likeness(node: Node) -> tuple[bool, bool, int]:
        same = sum(g.class_ == kind.class_ for g in node.gpus if not g.slice)
        return (same == kind.gpus, node.state == "ready", same)

    if kind.gpus == 0:
        able = [n for n in nodes if not n.gpus and n.engines is not None]
    else:
        able = [n for n in nodes if any(g.class_ == kind.class_ and not g.slice for g in n.gpus)]
        able = [n for n in able if n.engines is not None]
    return max(able, key=likeness, default=None)


def _assumed(kind: AddNodes, models: Sequence[Model]) -> tuple[Node, str]:
    """A machine of a kind that the fleet has not."""
    size = max(kind.gpus, LEAST_CARDS)
    engines: dict[str, set[str]] = {}
    for profile in (p for m in models for p in m.profiles):
        engines.setdefault(profile.engine, set()).add(profile.engine_version or "")
    node = Node(
        id="assumed", state="ready", alloc_gen=0, arch="x86_64", mgmt_addr=ADDRESS,
        cpu_flags=frozenset(f for m in models for p in m.profiles for f in p.cpu_flags),
        cpus=CORES_PER_CARD * size, memory_mib=MEMORY_PER_CARD_MIB * size,
        engines={name: tuple(sorted(versions)) for name, versions in sorted(engines.items())},
    )  # fmt: skip
    told = (
        f"{kind.words}: the fleet has none like it, so each is taken to be x86_64 with "
        f"{node.cpus:g} cores, {size * MEMORY_PER_CARD_MIB // 1024} GiB of memory, no labels, no "
        f"fabric and every engine of the catalog"
    )
    return node, told


def _cards(
    kind: AddNodes, pattern: Node, nodes: Sequence[Node]
) -> tuple[tuple[Gpu, ...], str | None]:
    """The cards of each, and what is not known of them."""
    if kind.gpus == 0:
        return (), None
    alike = [g for g in pattern.gpus if g.class_ == kind.class_ and not g.slice]
    first = alike[0] if alike else Gpu("", 0, kind.class_ or "unknown", None, 0, healthy=True)
    memory, told = kind.memory_mib, None
    if memory is None:
        sizes = Counter(
            g.memory_mib for n in nodes for g in n.gpus
            if g.class_ == kind.class_ and not g.slice and g.memory_mib is not None
        )  # fmt: skip
        memory = max(sizes, key=lambda size: (sizes[size], size), default=None)
        if memory is None:
            told = "the memory of the cards is unknown, say it to fit models that need some"
    patterns = [alike[i] if i < len(alike) else first for i in range(kind.gpus)]
    cards = (
        replace(
            card, index=i, memory_mib=memory, memory_foreign_mib=0, healthy=True, problems=(),
            claims=(), gone=False,
        )
        for i, card in enumerate(patterns)
    )  # fmt: skip
    return tuple(cards), told


def _empty(pattern: Node, name: str, cards: tuple[Gpu, ...], turn: int) -> Node:
    domain = None if pattern.nvlink_domain is None else f"what-if.{turn}"
    return replace(
        pattern, id=name, state="ready", state_reason=None, alloc_gen=0, cpus_claimed=0.0,
        memory_claimed_mib=0, ports_taken=frozenset(), shards_live=0, models=frozenset(),
        sources_on_disk=frozenset(), nvlink_domain=domain,
        gpus=tuple(replace(card, uuid=f"{name}-{card.index}") for card in cards),
    )  # fmt: skip
