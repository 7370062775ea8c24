"""Who leaves when a wanted replica finds no place. Pure.

Called by `decide.py` once placement has failed. Of the replicas that may leave, those of the lowest
priority and idle longest go first, one at a time for each model that wants in, and only where the
planner says that their leaving helps. A busy replica never leaves, nor one that has just come.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from controller.placement.ledger import pool_claim
from controller.placement.place import Planner
from controller.reconcile import demand
from controller.reconcile.scale import drain

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from controller.placement.model import Model, Move, Node, Replica, Shard, Snapshot
    from controller.reconcile.lifecycle import Around

MOST: Final = 4
"""Models for which one plan looks for room: each look tries placement a few times over."""

SERVING: Final = frozenset({"starting", "ready"})
LEAVING: Final = frozenset({"draining", "stopping"})


@dataclass(frozen=True, slots=True)
class Guest:
    """A replica that may leave, with what decides who goes first."""

    replica: Replica
    model: Model
    idle_since: float

    @property
    def turn(self) -> tuple[int, float, int]:
        """Lowest priority first, then idle longest."""
        return (self.model.priority, self.idle_since, self.replica.id)


def make(
    snapshot: Snapshot, hungry: Sequence[Replica], states: Mapping[int, str], around: Around
) -> list[Move]:
    """Drains that make room for these pending replicas, which found no place; in their order.

    ``states`` are the replicas' states once the plan's other moves are made.
    """
    catalog = {model.name: model for model in snapshot.models}
    leaving = {r.room_for or "" for r in snapshot.replicas if states.get(r.id, r.state) in LEAVING}
    serving = Counter(r.model for r in snapshot.replicas if states.get(r.id, r.state) in SERVING)
    guests = _guests(snapshot, catalog, states, around)
    moves: list[Move] = []
    looked = 0
    for wants in dict.fromkeys(r.model for r in hungry):
        model = catalog[wants]
        if wants in leaving or serving[wants] >= demand.needed(model, around.now, around.settings):
            continue
        able = sorted((g for g in guests if _may(g, model, serving, around)), key=_turn)
        if not able or looked >= MOST:
            continue
        looked += 1
        pending = next(r for r in hungry if r.model == wants)
        goes = _who(snapshot, model, pending, able, around)
        if goes is not None:
            guests.remove(goes)
            serving[goes.model.name] -= 1
            moves.append(_farewell(goes, model, around))
    return moves


def _guests(
    snapshot: Snapshot, catalog: Mapping[str, Model], states: Mapping[int, str], around: Around
) -> list[Guest]:
    found = []
    for replica in snapshot.replicas:
        model = catalog.get(replica.model)
        if model is None or replica.state != "ready" or states.get(replica.id, "ready") != "ready":
            continue
        since = demand.idle_since(replica)
        if since is None or demand.resides(replica, around.now, around.settings):
            continue
        if model.asked.heard and model.asked.waiting == 0:
            found.append(Guest(replica, model, since))
    return found


def _may(guest: Guest, wants: Model, serving: Mapping[str, int], around: Around) -> bool:
    """Whether the guest may leave for that model: never below min, nor among equals in need."""
    model = guest.model
    if model.name == wants.name or model.priority > wants.priority:
        return False
    left = serving[model.name] - 1
    if model.priority < wants.priority:
        return left >= model.min_replicas
    return model.min_replicas <= 0 and left >= demand.needed(model, around.now, around.settings)


def _turn(guest: Guest) -> tuple[int, float, int]:
    return guest.turn


def _who(
    snapshot: Snapshot, model: Model, pending: Replica, able: Sequence[Guest], around: Around
) -> Guest | None:
    """The last of the fewest that must leave, first come first: without it there is no place."""
    ours = [r for r in snapshot.replicas if r.model == model.name and r.state in SERVING]
    nodes: Iterable[Node] = snapshot.nodes
    if all(profile.shards == 1 for profile in model.profiles):
        touched = {s.node_id for guest in able for s in guest.replica.shards}
        nodes = [node for node in nodes if node.id in touched]

    def fits(count: int) -> bool:
        gone: defaultdict[str, list[Shard]] = defaultdict(list)
        for guest in able[:count]:
            for shard in guest.replica.shards:
                gone[shard.node_id].append(shard)
        freed = [without(node, gone[node.id]) if node.id in gone else node for node in nodes]
        place, _ = Planner(freed, [model], ours, around.seed).place(model, pending)
        return place is not None

    if not fits(len(able)):
        return None
    low, high = 1, len(able)
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if fits(middle) else (middle + 1, high)
    return able[low - 1]


def without(node: Node, shards: Sequence[Shard]) -> Node:
    """The node as it is once these shards are over."""
    ids = {shard.id for shard in shards}
    ports = {port for shard in shards for port in (shard.port, shard.master_port)}
    pooled = sum(
        pool_claim(gpu, claim.memory_mib)
        for gpu in node.gpus
        if gpu.unified
        for claim in gpu.claims
        if claim.shard_id in ids
    )
    return replace(
        node,
        gpus=tuple(
            replace(gpu, claims=tuple(c for c in gpu.claims if c.shard_id not in ids))
            for gpu in node.gpus
        ),
        cpus_claimed=max(0.0, node.cpus_claimed - sum(s.cpus or 0.0 for s in shards)),
        memory_claimed_mib=node.memory_claimed_mib
        - sum(s.memory_mib or 0 for s in shards)
        - pooled,
        ports_taken=frozenset(port for port in node.ports_taken if port not in ports),
        shards_live=max(0, node.shards_live - len(shards)),
    )


def _farewell(guest: Guest, wants: Model, around: Around) -> Move:
    idle = around.now - guest.idle_since
    why = (
        f"makes room for {wants.name}: idle for {idle:.0f} s, "
        f"priority {guest.model.priority} against {wants.priority}"
    )
    return replace(drain(guest.replica, why, around), room_for=wants.name)
