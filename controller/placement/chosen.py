"""From chosen nodes to a place: cards, ports, and where the shards of a gang meet.

Called by `place.Planner`, which has made sure that every node passes the filters.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from controller.placement import filters, score
from controller.placement.chance import draw
from controller.placement.gang import ALL_PORTS, document, master_port
from controller.placement.model import Place, PlacedShard
from controller.placement.nearness import nearest

if TYPE_CHECKING:
    from controller.placement.gang import Gang
    from controller.placement.model import Gpu, Model, Node, Profile, Replica


@dataclass(frozen=True, slots=True)
class Chosen:
    """Nodes for one replica. ``gang`` is None for one node."""

    model: Model
    profile: Profile
    replica: Replica
    nodes: tuple[Node, ...]
    """By rank."""
    gang: Gang | None
    seed: int

    def place(self, liking: score.Liking) -> Place:
        """Cards, ports and the meeting point, with the points that decided."""
        parts = self._parts(liking)
        cards = [self._cards(node) for node in self.nodes]
        return Place(
            replica_id=self.replica.id,
            model=self.model.name,
            profile=self.profile.name,
            fingerprint=self.profile.fingerprint,
            spec=self.profile.spec,
            shards=self._shards(cards),
            score=parts,
            reason=self._sentence(cards, parts),
            pool=self.profile.pool,
        )

    def _cards(self, node: Node) -> list[Gpu]:
        wanted = self.profile
        if self.gang is not None and self.gang.class_ is not None:
            wanted = replace(wanted, gpu_class=self.gang.class_)
        return nearest(wanted, node)

    def _shards(self, cards: list[list[Gpu]]) -> tuple[PlacedShard, ...]:
        profile = self.profile
        shards = tuple(
            PlacedShard(
                rank=rank,
                node_id=node.id,
                basis=node.alloc_gen,
                gpus=tuple(gpu.uuid for gpu in cards[rank]),
                gpu_memory_mib=profile.gpu_memory_mib if profile.share else None,
                port=self._port(node),
                cpus=profile.cpus,
                memory_mib=profile.memory_mib,
            )
            for rank, node in enumerate(self.nodes)
        )
        if self.gang is None:
            return shards
        meeting = master_port(self.nodes[0], shards[0].port, self.replica, self.seed)
        return tuple(
            replace(
                shard,
                master_port=meeting if shard.rank == 0 else None,
                gang=document(self.gang, self.nodes[shard.rank], cards[shard.rank], meeting),
            )
            for shard in shards
        )

    def _port(self, node: Node) -> int:
        """The lowest free one, and after a failure another than last time.

        What listens on a port outside llmgw is known to nobody before an engine wants it: with the
        same port at each launch a stranger there would keep the replica down for ever.
        """
        if not self.replica.restarts:
            return filters.free_ports(node, 1)[0]
        last = {shard.port for shard in self.replica.shards if shard.node_id == node.id}
        free = filters.free_ports(node, ALL_PORTS)
        fresh = [port for port in free if port not in last] or free
        return fresh[draw(self.seed, self.replica.id, self.replica.restarts, node.id) % len(fresh)]

    def _parts(self, liking: score.Liking) -> dict[str, float]:
        """Points by name; of several nodes their mean, so that places can be compared."""
        found: dict[str, float] = {}
        for node in self.nodes:
            for name, value in (score.base(self.profile, node) | liking.parts(node)).items():
                found[name] = found.get(name, 0.0) + value / len(self.nodes)
        return found

    def _sentence(self, cards: list[list[Gpu]], parts: dict[str, float]) -> str:
        where = "; ".join(
            node.id + (f" gpu {', '.join(str(gpu.index) for gpu in held)}" if held else "")
            for node, held in zip(self.nodes, cards, strict=True)
        )
        if self.gang is not None:
            where += f" {self.gang.group.over}"
        points = ", ".join(f"{name} {value:g}" for name, value in parts.items() if value)
        total = sum(parts.values())
        return f"on {where} by profile {self.profile.name}: {total:.1f} points ({points})"
