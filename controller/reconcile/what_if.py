"""What the real planner would do if the fleet or the catalog were otherwise. Pure, writes nothing.

`decide` runs on a changed snapshot round after round, on an `Imagined` fleet that obeys it, until
nothing is left to do. Called by the admin API with a live snapshot.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final

from controller.placement import explain
from controller.placement.cards import FOREIGN_NOISE_MIB
from controller.reconcile import added
from controller.reconcile.decide import decide
from controller.reconcile.imagined import HEARD, Imagined

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from controller.placement.model import Attempt, Gpu, Model, Node, Plan, Replica, Snapshot
    from controller.reconcile.added import AddNodes

ROUNDS: Final = 1000
"""A node of 64 replicas of one model empties in some 250 rounds: one at a time."""
MOST_CAUSES: Final = 20
MOST_NOTES: Final = 50
SERVING: Final = frozenset({"starting", "ready"})


class NotThere(ValueError):
    """The change names what does not exist: ``kind``, ``name`` and the names there are."""

    def __init__(self, kind: str, name: str, known: Iterable[str]) -> None:
        super().__init__(f"there is no {kind} {name}")
        self.kind, self.name, self.known = kind, name, sorted(known)


@dataclass(frozen=True, slots=True)
class Change:
    """What would be otherwise. Models replace those of their name; scale comes after them."""

    add: Sequence[AddNodes] = ()
    remove: Sequence[str] = ()
    drain: Sequence[str] = ()
    scale: Mapping[str, int] = field(default_factory=dict)
    models: Sequence[Model] = ()


def what_if(
    snapshot: Snapshot,
    change: Change,
    now: float,
    seed: int = 0,
    *,
    enough: Callable[[], bool] = lambda: False,
) -> dict[str, Any]:
    """The answer as a document (`api/what_if.py` has its form). Raises NotThere.

    ``enough`` ends the rounds early; the answer then says that more would follow.
    """
    fleet, assumptions = _changed(snapshot, change, now)
    fleet.lose(change.remove)
    waits = _waiting(snapshot.replicas)
    under_way = len(decide(snapshot, now, seed).items)
    plan, rounds, notes = _rounds(fleet, now, seed, enough)
    after = fleet.snapshot()
    moves, placed, stopped = _came_and_went(snapshot, after)
    return {
        "moves": moves,
        "placed": placed,
        "stopped": stopped,
        "unplaced": _unplaced(plan, after, waits),
        "drained": _drained(change.drain, after),
        "gpus": _gpus(snapshot, after),
        "emptied": _emptied(snapshot, after),
        "under_way": under_way,
        "rounds": rounds,
        "settled": not plan.items,
        "assumptions": assumptions,
        "notes": notes,
    }


def _changed(snapshot: Snapshot, change: Change, now: float) -> tuple[Imagined, list[str]]:
    """The fleet with the change, but for nodes to be taken out, and what is assumed."""
    nodes = {node.id: node for node in snapshot.nodes}
    for name in (*change.remove, *change.drain):
        if name not in nodes:
            raise NotThere("node", name, nodes)
    notes: list[str] = []
    for name in change.drain:
        if nodes[name].state in HEARD:
            nodes[name] = replace(nodes[name], state="draining", state_reason="what if")
        else:
            notes.append(f"node {name} is {nodes[name].state}: nobody there does what a drain asks")
    catalog = {model.name: model for model in snapshot.models}
    for model in change.models:
        asked = catalog[model.name].asked if model.name in catalog else model.asked
        catalog[model.name] = replace(model, asked=asked)
        if model.min_replicas == 0:
            most = max(model.max_replicas, 1)
            catalog[model.name] = replace(catalog[model.name], min_replicas=1, max_replicas=most)
            notes.append(f"model {model.name} is on demand: shown as if somebody asked for it")
    for name, count in change.scale.items():
        if name not in catalog:
            raise NotThere("model", name, catalog)
        most = max(count, 1)
        catalog[name] = replace(catalog[name], min_replicas=count, max_replicas=most)
    models = tuple(catalog[name] for name in sorted(catalog))
    new, told = added.made(change.add, snapshot.nodes, models)
    every = (*nodes.values(), *new)
    return Imagined(replace(snapshot, nodes=every, models=models), now), [*told, *notes]


def _rounds(
    fleet: Imagined, now: float, seed: int, enough: Callable[[], bool]
) -> tuple[Plan, int, list[str]]:
    """The last plan (empty when all is done), how many there were, and their notes."""
    notes: dict[str, None] = {}
    for count in range(ROUNDS + 1):
        plan = decide(fleet.snapshot(), now, seed)
        notes |= dict.fromkeys(plan.notes)
        if not plan.items or count == ROUNDS or enough():
            return plan, count, list(notes)[:MOST_NOTES]
        fleet.obey(plan)
    raise AssertionError("the last round returns")


def _at(replica: Replica, nodes: Mapping[str, Node]) -> list[dict[str, Any]]:
    """Where its shards are, in the order of their ranks."""
    found = []
    for shard in sorted(replica.shards, key=lambda s: s.rank):
        node = nodes.get(shard.node_id)
        index = {g.uuid: g.index for g in node.gpus} if node is not None else {}
        gpus = sorted(index[uuid] for uuid in shard.gpus if uuid in index)
        found.append({"node": shard.node_id, "gpus": gpus})
    return found


def _came_and_went(
    before: Snapshot, after: Snapshot
) -> tuple[list[dict[str, Any]], list[dict[str, Any]], list[dict[str, Any]]]:
    """Moves, new replicas and stopped ones; of one model who comes takes the place of who goes."""
    nodes = {n.id: n for n in (*before.nodes, *after.nodes)}
    old = {r.id: r for r in before.replicas if r.state in SERVING and r.shards}
    new = {r.id: r for r in after.replicas if r.state in SERVING and r.shards}
    coming: dict[str, list[Replica]] = {}
    for id_, replica in new.items():
        if id_ not in old or _launch(old[id_]) != _launch(replica):
            coming.setdefault(replica.model, []).append(replica)
    moves, stopped = [], []
    for id_, replica in old.items():
        if id_ in new and _launch(new[id_]) == _launch(replica):
            continue
        who = {"model": replica.model, "replica": id_}
        instead = coming.get(replica.model, [])
        if instead:
            there = instead.pop(0)
            to = {"profile": there.profile, "from": _at(replica, nodes), "to": _at(there, nodes)}
            moves.append(who | to)
        else:
            stopped.append(who | {"at": _at(replica, nodes)})
    placed = [
        {"model": r.model, "profile": r.profile, "at": _at(r, nodes)}
        for members in coming.values() for r in members
    ]  # fmt: skip
    return moves, placed, stopped


def _launch(replica: Replica) -> list[int]:
    return sorted(shard.id for shard in replica.shards)


def _waiting(replicas: Iterable[Replica]) -> dict[str, int]:
    """Model -> replicas without a place."""
    found: dict[str, int] = {}
    for replica in replicas:
        if replica.state in ("pending", "failed"):
            found[replica.model] = found.get(replica.model, 0) + 1
    return found


def _unplaced(plan: Plan, after: Snapshot, before: Mapping[str, int]) -> list[dict[str, Any]]:
    attempts = {a.model: a for a in plan.attempts if not a.placed}
    return [
        {"model": name, "replicas": count, "before": before.get(name, 0)} | _why(attempts.get(name))
        for name, count in sorted(_waiting(after.replicas).items())
    ]


def _why(attempt: Attempt | None) -> dict[str, Any]:
    if attempt is None:
        return {"causes": []}
    known = explain.causes(attempt.refusals)[:MOST_CAUSES]
    causes = [
        {"profile": c.profile, "code": c.code, "nodes": c.nodes, "of": c.of, "reason": c.sentence}
        for c in known
    ]
    return {"reason": explain.main_reason(attempt), "causes": causes}


def _drained(names: Sequence[str], after: Snapshot) -> list[dict[str, Any]]:
    """Whether each node would come empty, and who would stay."""
    left: dict[str, list[int]] = {name: [] for name in names}
    for replica in after.replicas:
        for name in {s.node_id for s in replica.shards if replica.state in SERVING} & left.keys():
            left[name].append(replica.id)
    return [{"node": name, "left": sorted(ids)} for name, ids in left.items()]


def _gpus(now: Snapshot, after: Snapshot) -> list[dict[str, Any]]:
    """Per class: cards there are and cards free, now and afterwards."""
    first, last = _free(now.nodes), _free(after.nodes)
    none = (0, 0)
    return [
        {
            "class": name,
            "total": first.get(name, none)[0], "free": first.get(name, none)[1],
            "total_after": last.get(name, none)[0], "free_after": last.get(name, none)[1],
        }
        for name in sorted(first.keys() | last.keys())
    ]  # fmt: skip


def _free(nodes: Iterable[Node]) -> dict[str, tuple[int, int]]:
    found: dict[str, tuple[int, int]] = {}
    for node in nodes:
        for gpu in node.gpus:
            total, free = found.get(gpu.class_, (0, 0))
            found[gpu.class_] = (total + 1, free + (node.state == "ready" and _is_free(gpu)))
    return found


def _is_free(gpu: Gpu) -> bool:
    foreign = gpu.memory_foreign_mib
    noise = foreign is not None and (foreign <= FOREIGN_NOISE_MIB or gpu.unified)
    return gpu.healthy and not gpu.claims and noise


def _emptied(before: Snapshot, after: Snapshot) -> list[str]:
    """Nodes that run something now and would run nothing."""
    busy = {node.id for node in before.nodes if node.shards_live}
    return sorted(node.id for node in after.nodes if node.id in busy and not node.shards_live)
