"""A fleet in memory that obeys plans as commit_plan and agents do when nothing goes wrong. Pure.

Made by `what_if.py`. Time stands still: what is placed is ready, what drains is idle, what stops is
over, each in the next round. Backoffs are over at once.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final

from controller.placement.ledger import PLANNED_SHARD, Ledger
from controller.placement.model import Create, Move, Node, Place, Replica, Shard, Snapshot
from controller.reconcile.room import without
from sql.states import SHARD_FINAL

if TYPE_CHECKING:
    from collections.abc import Iterable

    from controller.placement.model import PlacedShard, Plan

HEARD: Final = frozenset({"ready", "cordoned", "draining"})
"""States of nodes whose agents do what they are told."""


class Imagined:
    """What would stand in the tables after each plan."""

    def __init__(self, snapshot: Snapshot, now: float) -> None:
        self._first = snapshot
        self._now = now
        self.nodes = {node.id: node for node in snapshot.nodes}
        self.replicas = {r.id: _eased(r) for r in snapshot.replicas}
        self._next_replica = max(self.replicas, default=0)
        shards = [s.id for r in snapshot.replicas for s in r.shards]
        claims = [c.shard_id for n in snapshot.nodes for g in n.gpus for c in g.claims]
        self._next_shard = max([*shards, *claims, 0])

    def snapshot(self) -> Snapshot:
        """What the next decision sees."""
        nodes, replicas = tuple(self.nodes.values()), tuple(self.replicas.values())
        return replace(self._first, nodes=nodes, replicas=replicas)

    def obey(self, plan: Plan) -> None:
        """Do what the plan says, and then what agents do about it."""
        for item in plan.items:
            if isinstance(item, Create):
                self._create(item)
            elif isinstance(item, Place):
                self._place(item)
            else:
                self._move(item)
        for replica in tuple(self.replicas.values()):
            if replica.state == "starting":
                self._start(replica)

    def lose(self, node_ids: Iterable[str]) -> None:
        """Take nodes out, with what ran there: such replicas wait for another place."""
        gone = set(node_ids)
        for replica in tuple(self.replicas.values()):
            if not gone & {s.node_id for s in replica.shards if s.state not in SHARD_FINAL}:
                continue
            self._stop(replica)
            if replica.state in ("draining", "stopping"):
                del self.replicas[replica.id]
            else:
                self._set(replica.id, state="failed", error="its node was taken out")
        for node_id in gone:
            del self.nodes[node_id]

    def _create(self, item: Create) -> None:
        self._next_replica += 1
        id_, now = self._next_replica, self._now
        self.replicas[id_] = Replica(id_, item.model, "pending", created_at=now, state_at=now)

    def _place(self, item: Place) -> None:
        shards = tuple(self._take(placed, item.model) for placed in item.shards)
        self._set(
            item.replica_id, state="starting", profile=item.profile, shards=shards,
            fingerprint=item.fingerprint, replace_asked=None, replace_force=False, ready_at=None,
        )  # fmt: skip

    def _take(self, placed: PlacedShard, model: str) -> Shard:
        self._next_shard += 1
        id_ = self._next_shard
        book = Ledger([self.nodes[placed.node_id]], (), 0)
        book.take(placed, model)
        node = book.nodes[placed.node_id]
        ours = {PLANNED_SHARD: id_}
        cards = tuple(
            replace(g, claims=tuple(
                replace(c, shard_id=ours.get(c.shard_id, c.shard_id)) for c in g.claims))
            for g in node.gpus
        )  # fmt: skip
        self.nodes[node.id] = replace(node, gpus=cards)
        return Shard(
            id_, placed.rank, node.id, "assigned", placed.gpus, placed.port, None, self._now,
            cpus=placed.cpus, memory_mib=placed.memory_mib, master_port=placed.master_port,
        )  # fmt: skip

    def _move(self, item: Move) -> None:
        replica = self.replicas[item.replica_id]
        if item.to_state == "gone":
            del self.replicas[item.replica_id]
            return
        if item.to_state in ("stopping", "failed"):
            self._stop(replica)
        ready_at = self._now if item.to_state == "ready" else replica.ready_at
        restarts = replica.restarts if item.restarts is None else item.restarts
        self._set(
            item.replica_id, state=item.to_state, ready_at=replica.ready_at or ready_at,
            restarts=restarts, drain_deadline=item.drain_deadline, room_for=item.room_for,
        )  # fmt: skip

    def _start(self, replica: Replica) -> None:
        shards = tuple(
            replace(s, state="ready") if s.state not in SHARD_FINAL and self._hears(s) else s
            for s in replica.shards
        )
        self.replicas[replica.id] = replace(replica, shards=shards)

    def _hears(self, shard: Shard) -> bool:
        node = self.nodes.get(shard.node_id)
        return node is not None and node.state in HEARD

    def _stop(self, replica: Replica) -> None:
        """Its shards are over and hold nothing any more."""
        live = [s for s in replica.shards if s.state not in SHARD_FINAL]
        shards = tuple(replace(s, state="stopped") if s in live else s for s in replica.shards)
        self._set(replica.id, shards=shards)
        for shard in live:
            node = self.nodes.get(shard.node_id)
            if node is not None:
                self.nodes[node.id] = replace(
                    without(node, [shard]), models=self._models(node, replica.model)
                )

    def _models(self, node: Node, stopped: str) -> frozenset[str]:
        """Models that still run on the node."""
        still = any(
            s.node_id == node.id and s.state not in SHARD_FINAL
            for r in self.replicas.values()
            if r.model == stopped
            for s in r.shards
        )
        return node.models if still else node.models - {stopped}

    def _set(self, replica_id: int, **facts: object) -> None:
        changed = replace(self.replicas[replica_id], **facts)  # type: ignore[arg-type]
        if "state" in facts:
            changed = replace(changed, state_at=self._now)
        self.replicas[replica_id] = _eased(changed)


def _eased(replica: Replica) -> Replica:
    """Requests end and backoffs pass while nobody looks."""
    if replica.state == "draining":
        return replace(replica, in_flight=0)
    return replace(replica, backoff_until=None) if replica.state == "failed" else replica
