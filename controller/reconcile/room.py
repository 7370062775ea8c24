"""Who leaves when a wanted replica finds no place. Pure.

Called by `decide.py` once placement has failed. Of the replicas that may leave, idle ones of the
lowest priority and idle longest go first, one at a time for each model that wants in, and only
where the planner says that their leaving helps. One that has just come stays. A busy one is asked
only for a model that has waited past the fairness limit; it takes no new requests then, and stops
when those that run have ended (D17).
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from controller.placement import filters
from controller.placement.ledger import pool_claim
from controller.placement.place import Planner
from controller.placement.reasons import Code
from controller.reconcile import demand
from controller.reconcile.scale import drain

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from controller.placement.model import Model, Move, Node, Profile, Replica, Shard, Snapshot
    from controller.reconcile.lifecycle import Around

MOST: Final = 4
"""Models for which one plan looks for room."""

WALK: Final = 2000
"""Idle replicas that are looked at for one model."""

GANG_GUESTS: Final = 64
"""The same where several nodes are wanted together: each step plans over all nodes."""

TAKEN: Final = frozenset({Code.GPU_TAKEN, Code.CPUS, Code.MEMORY, Code.PORT_RANGE_FULL})
"""Refusals that end when others leave."""

OF_CARDS: Final = frozenset(c for c in Code if c.startswith("gpu_")) - {
    Code.GPU_CLASS,
    Code.GPU_COUNT,
}

LONGEST_S: Final = 3600.0
"""A busy replica that makes room may finish what it runs: routers end a request after this long."""

DOUBLINGS: Final = 6
"""Each failed start doubles the fairness limit of a replica, so often at most: one that never comes
up must not send those that serve away again and again."""

SERVING: Final = frozenset({"starting", "ready"})
LEAVING: Final = frozenset({"draining", "stopping"})


@dataclass(frozen=True, slots=True)
class Guest:
    """A replica that may leave, with what decides who goes first."""

    replica: Replica
    model: Model
    since: float
    """Idle since then; a busy one has served since then."""

    @property
    def busy(self) -> bool:
        return bool(self.replica.in_flight)

    @property
    def turn(self) -> tuple[bool, int, float, int]:
        """Idle ones first, of those the lowest priority, then idle (or serving) longest."""
        return (self.busy, self.model.priority, self.since, self.replica.id)


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
        pending = next(r for r in hungry if r.model == wants)
        late = around.now - pending.state_at >= _limit(pending, around)
        able = sorted((g for g in guests if _may(g, model, serving, around, late)), key=_turn)
        if not able or looked >= MOST:
            continue
        # Gangs cost the whole fleet each time: one of them in a plan is enough.
        looked += MOST if any(p.shards > 1 for p in model.profiles) else 1
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
        if replica.in_flight is None or demand.resides(replica, around.now, around.settings):
            continue
        if model.asked.heard and model.asked.waiting == 0:
            since = demand.idle_since(replica) or replica.ready_at or replica.state_at
            found.append(Guest(replica, model, since))
    return found


def _limit(pending: Replica, around: Around) -> float:
    """Seconds without a place after which even busy replicas are asked to leave for this one."""
    return around.settings.fairness_s * 2.0 ** min(max(pending.restarts, 0), DOUBLINGS)


def _may(
    guest: Guest, wants: Model, serving: Mapping[str, int], around: Around, late: bool
) -> bool:
    """Whether the guest may leave for that model: never below min, nor among equals in need.

    Once the wait is past the limit, being busy keeps no place, and equals in need share with one
    that has nothing at all.
    """
    model = guest.model
    if model.name == wants.name or model.priority > wants.priority or (guest.busy and not late):
        return False
    left = serving[model.name] - 1
    if model.priority < wants.priority or (late and not serving[wants.name]):
        return left >= model.min_replicas
    return model.min_replicas <= 0 and left >= demand.needed(model, around.now, around.settings)


def _turn(guest: Guest) -> tuple[bool, int, float, int]:
    return guest.turn


def _who(
    snapshot: Snapshot, model: Model, pending: Replica, able: Sequence[Guest], around: Around
) -> Guest | None:
    """The last of the fewest that must leave, first come first: without it there is no place."""
    alone = [profile for profile in model.profiles if profile.shards == 1]
    gangs = tuple(profile for profile in model.profiles if profile.shards > 1)
    found = _on_one_node(alone, able, around) if alone else None
    if found is None and gangs:
        return _on_several(snapshot, replace(model, profiles=gangs), pending, able, around)
    return found


def _on_one_node(
    profiles: Sequence[Profile], able: Sequence[Guest], around: Around
) -> Guest | None:
    """Lets one after the other go, in thought, until some node could take a shard."""
    hopeful: dict[str, list[Profile]] = {}
    gone: defaultdict[str, list[Shard]] = defaultdict(list)
    for guest in able[:WALK]:
        for shard in guest.replica.shards:
            node = around.nodes.get(shard.node_id)
            if node is None:
                continue
            if node.id not in hopeful:
                hopeful[node.id] = [p for p in profiles if _is_curable(p, node)]
            if not hopeful[node.id]:
                continue
            gone[node.id].append(shard)
            freed = without(node, gone[node.id])
            if any(not filters.refusals(profile, freed) for profile in hopeful[node.id]):
                return guest
    return None


def _is_curable(profile: Profile, node: Node) -> bool:
    """Whether somebody's leaving could help: only what others hold stands in the way.

    Single cards may have faults of their own beside those that are taken.
    """
    codes = {reason.code for reason in filters.refusals(profile, node)}
    return bool(codes & TAKEN) and codes <= TAKEN | OF_CARDS


def _on_several(
    snapshot: Snapshot, model: Model, pending: Replica, able: Sequence[Guest], around: Around
) -> Guest | None:
    ours = [r for r in snapshot.replicas if r.model == model.name and r.state in SERVING]

    def fits(count: int) -> bool:
        gone: defaultdict[str, list[Shard]] = defaultdict(list)
        for guest in able[:count]:
            for shard in guest.replica.shards:
                gone[shard.node_id].append(shard)
        nodes = [without(n, gone[n.id]) if n.id in gone else n for n in snapshot.nodes]
        place, _ = Planner(nodes, [model], ours, around.seed).place(model, pending)
        return place is not None

    low, high = 1, min(len(able), GANG_GUESTS)
    if not fits(high):
        return None
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
    if guest.busy:
        told = f"it has waited long, what runs here ({guest.replica.in_flight}) finishes"
    else:
        told = f"idle for {around.now - guest.since:.0f} s"
    ranks = f"priority {guest.model.priority} against {wants.priority}"
    leaves = drain(guest.replica, f"makes room for {wants.name}: {told}, {ranks}", around)
    return replace(leaves, room_for=wants.name, drain_deadline=around.now + LONGEST_S)
