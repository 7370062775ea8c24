"""The working copy of the fleet on which one plan is made: what the plan took is taken.

Nodes that no demand of the plan can tell apart share a `Shape`, so a rule runs once per shape
and not once per node: 5,000 nodes are a few dozen shapes. Made by `place.Planner` for each plan.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right, insort
from collections import Counter
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from controller.placement.apart import home
from controller.placement.cards import FOREIGN_NOISE_MIB, claimed_mib, foreign_mib
from controller.placement.chance import draw, mixed
from controller.placement.filters import CORES_SLACK, PORTS_OF_A_HEAD, free_ports
from controller.placement.model import Claim, Gpu, Node, PlacedShard, Profile

if TYPE_CHECKING:
    from collections.abc import Iterable

    from controller.placement.apart import Home

Shape = int
"""Number of a kind of node: all that filters and the node's own part of the score can see of it."""

PLANNED_SHARD: Final = 0
"""Shard id of claims taken within the plan; the database numbers shards from 1."""


@dataclass(frozen=True, slots=True)
class Steps:
    """The amounts that demands of this plan ask for: between two of them all nodes are alike.

    Two servers of one kind differ by a few MiB; without the steps each would be its own shape.
    """

    labels: tuple[str, ...]
    cpus: tuple[float, ...]
    memory_mib: tuple[int, ...]
    gpu_memory_mib: tuple[int, ...]
    excluded: frozenset[str]
    alone_of: frozenset[str]
    weights: tuple[tuple[str, int], ...]
    """(source, MiB) of weights that may have to be fetched."""
    floors: bool
    """Whether any profile has a floor for drivers."""

    @classmethod
    def of(cls, profiles: Iterable[Profile]) -> Steps:
        """Everything that these profiles look at in a node."""
        wanted = tuple(profiles)
        return cls(
            tuple(sorted({label for p in wanted for label in p.pool_labels})),
            tuple(sorted({p.cpus for p in wanted if p.cpus is not None})),
            tuple(sorted({p.memory_mib for p in wanted if p.memory_mib is not None})),
            tuple(sorted({n for p in wanted if (n := p.gpu_memory_mib or p.fit_mib) is not None})),
            frozenset(id_ for p in wanted for id_ in p.exclude_nodes),
            frozenset(p.alone_of for p in wanted if p.alone_of is not None),
            tuple(sorted({(p.spec["source"], p.weights_mib) for p in wanted if p.weights_mib})),
            any(p.driver_min or p.cuda_min for p in wanted),
        )


class Ledger:
    """Nodes with the claims of the plan on top, by id and by shape."""

    def __init__(self, nodes: Iterable[Node], profiles: Iterable[Profile], seed: int) -> None:
        self._steps = Steps.of(profiles)
        self.nodes: dict[str, Node] = {node.id: node for node in nodes}
        self.shapes: dict[str, Shape] = {}
        self.members: list[list[tuple[int, str]]] = []
        """By shape: (tie, node id), lowest tie first, so that among equals the seed decides."""
        self.homes: dict[str, Home] = {}
        """The failure domains of each node; the plan does not change them."""
        self.housed: list[Counter[Home]] = []
        """By shape: how many of its nodes are in the same failure domains."""
        self.examples: list[Node] = []
        """By shape: the first node that had it. Shapes are only ever added, the newest last."""
        self._known: dict[tuple[object, ...], Shape] = {}
        self.prints: list[int] = []
        """By shape: the sum of its nodes' fingerprints, the same in whatever order they came."""
        self._prints = {id_: draw(id_) for id_ in self.nodes}
        stir = draw(seed)
        self._ties = {id_: mixed(number ^ stir) for id_, number in self._prints.items()}
        self._present: tuple[Node, ...] | None = None
        self.taken: list[str] = []
        """The nodes of which the plan has taken something, in its order."""
        self.notes: list[str] = []
        """Nodes that were left out because their rows make no sense."""
        for node in tuple(self.nodes.values()):
            self._admit(node)
        for found in self.members:
            found.sort()

    def tie(self, node_id: str) -> int:
        """The node's number among equals; it depends on the seed and the id alone."""
        return self._ties[node_id]

    def print_of(self, node_id: str) -> int:
        """The node's fingerprint: it depends on the id alone."""
        return self._prints[node_id]

    def present(self) -> tuple[Node, ...]:
        """All nodes as the plan has left them so far, in the snapshot's order."""
        if self._present is None:
            self._present = tuple(self.nodes.values())
        return self._present

    def take(self, shard: PlacedShard, model: str) -> None:
        """Count the shard's cards, port, cores and memory as claimed from now on."""
        old = self.nodes[shard.node_id]
        new = replace(
            old,
            cpus_claimed=old.cpus_claimed + (shard.cpus or 0.0),
            memory_claimed_mib=old.memory_claimed_mib
            + (shard.memory_mib or 0)
            + _pooled(old, shard),
            gpus=tuple(_claim(gpu, shard) for gpu in old.gpus) if shard.gpus else old.gpus,
            ports_taken=old.ports_taken | _ports(shard),
            shards_live=old.shards_live + 1,
            models=old.models | {model},
        )
        entry = (self._ties[old.id], old.id)
        left = self.members[self.shapes[old.id]]
        del left[bisect_left(left, entry)]
        self.prints[self.shapes[old.id]] -= self._prints[old.id]
        self.housed[self.shapes[old.id]][self.homes[old.id]] -= 1
        self.nodes[new.id] = new
        self._present = None
        self.taken.append(new.id)
        self.shapes[new.id] = self._shape(new)
        self.prints[self.shapes[new.id]] += self._prints[new.id]
        self.housed[self.shapes[new.id]][self.homes[new.id]] += 1
        insort(self.members[self.shapes[new.id]], entry)

    def _admit(self, node: Node) -> None:
        try:
            self.homes[node.id] = home(node)
            self.shapes[node.id] = self._shape(node)
        except (TypeError, ValueError, AttributeError) as exc:  # one bad row stops no other (D10)
            del self.nodes[node.id]
            self.notes.append(
                f"node {node.id} gets nothing: its row cannot be read ({type(exc).__name__}: {exc})"
            )
            return
        self.members[self.shapes[node.id]].append((self._ties[node.id], node.id))
        self.prints[self.shapes[node.id]] += self._prints[node.id]
        self.housed[self.shapes[node.id]][self.homes[node.id]] += 1

    def _shape(self, node: Node) -> Shape:
        facts = self._facts(node)
        shape = self._known.setdefault(facts, len(self.examples))
        if shape == len(self.examples):
            self.examples.append(node)
            self.members.append([])
            self.prints.append(0)
            self.housed.append(Counter())
        return shape

    def _facts(self, node: Node) -> tuple[object, ...]:
        steps = self._steps
        engines = node.engines
        return (
            node.state,
            tuple(node.labels.get(label) for label in steps.labels),
            node.arch,
            node.cpu_flags,
            None if engines is None else tuple(sorted(engines.items())),
            node.provisions,
            frozenset(node.engine_failures),
            _free_step(steps.cpus, node.cpus, node.cpus_claimed - CORES_SLACK),
            _free_step(steps.memory_mib, node.memory_mib, node.memory_claimed_mib),
            tuple(sorted(self._card(gpu) for gpu in node.gpus)),
            _pool(node),
            len(free_ports(node, PORTS_OF_A_HEAD)),
            bool(node.mgmt_addr),
            node.shards_live > 0,
            _eighths(node.cpus_claimed, node.cpus),
            _eighths(node.memory_claimed_mib, node.memory_mib),
            _magnitude(node.cpus),
            _magnitude(node.memory_mib),
            node.id if node.id in steps.excluded else None,
            node.models & steps.alone_of,
            self._too_big(node),
            tuple((gpu.driver, gpu.cuda) for gpu in node.gpus) if steps.floors else None,
        )

    def _too_big(self, node: Node) -> tuple[str, ...]:
        """Sources that the node has neither on its disk nor room for: few, and mostly none."""
        free = node.weights_free_mib
        if free is None or not self._steps.weights:
            return ()
        big = (source for source, need in self._steps.weights if need > free)
        return tuple(source for source in big if source not in node.sources_on_disk)

    def _card(self, gpu: Gpu) -> tuple[object, ...]:
        """What the rules of `cards.py` see, in numbers that sort: -1 is unknown."""
        foreign, total, claimed = foreign_mib(gpu), gpu.memory_mib, claimed_mib(gpu)
        held = -1 if foreign is None else (foreign > 0) + (foreign > FOREIGN_NOISE_MIB)
        kind = 2 if claimed is None else int(bool(gpu.claims))
        where = (_or_none(gpu.island), _or_none(gpu.numa))
        if total is None:
            return (gpu.class_, gpu.healthy, gpu.slice, held, kind, -1, -1, where)
        steps = self._steps.gpu_memory_mib
        left = total - (foreign or 0)
        # Whether the whole card, what others leave of it, and what is unclaimed of that are enough.
        return (
            gpu.class_,
            gpu.healthy,
            gpu.slice,
            held,
            kind,
            bisect_right(steps, total) * (len(steps) + 1) + bisect_right(steps, left),
            bisect_right(steps, left - (claimed or 0)),
            where,
        )


def _or_none(number: int | None) -> int:
    return -1 if number is None else number


def _ports(shard: PlacedShard) -> set[int]:
    return {shard.port} if shard.master_port is None else {shard.port, shard.master_port}


def _pooled(node: Node, shard: PlacedShard) -> int:
    """Host memory that the shard takes by its unified cards."""
    held = [gpu for gpu in node.gpus if gpu.unified and gpu.uuid in shard.gpus]
    return sum(pool_claim(gpu, shard.gpu_memory_mib) for gpu in held)


def pool_claim(gpu: Gpu, memory_mib: int | None) -> int:
    """Host memory in MiB behind a claim on a unified card: the share, else the whole card."""
    return (gpu.memory_mib or 0) if memory_mib is None else memory_mib


def _pool(node: Node) -> tuple[object, ...]:
    """Unified machines are few and their cards, memory and claims hang together: kept as is."""
    cards = tuple((g.memory_mib, g.memory_foreign_mib, g.claims) for g in node.gpus if g.unified)
    return (node.memory_mib, node.memory_claimed_mib, *cards) if cards else ()


def _claim(gpu: Gpu, shard: PlacedShard) -> Gpu:
    if gpu.uuid not in shard.gpus:
        return gpu
    return replace(gpu, claims=(*gpu.claims, Claim(PLANNED_SHARD, shard.gpu_memory_mib)))


def _free_step(
    steps: tuple[float, ...] | tuple[int, ...], total: float | None, claimed: float
) -> int:
    return -1 if total is None else bisect_right(steps, total - claimed)


def _magnitude(total: float | None) -> int | None:
    """The same number for totals that differ by 9 % at most: what a shard takes of a small machine
    is more of it than of a large one."""
    return math.floor(8 * math.log2(total)) if total else None


def _eighths(claimed: float, total: float | None) -> int:
    return -1 if not total else int(8 * claimed / total)
