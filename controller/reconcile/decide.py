"""The whole decision of one tick: `decide(snapshot, now, seed) -> Plan`. Pure.

Observation first (`lifecycle`), then how many (`scale`), then where (`placement`). One unreadable
row becomes a note and stops nothing else (D10). Same inputs, same plan. Called by the tick, which
commits the plan, and by what-if, which does not.
"""

from __future__ import annotations

from collections import Counter
from operator import attrgetter
from typing import TYPE_CHECKING, Final

from controller.placement.model import Attempt, Create, Model, Move, Place, Plan, Replica, Snapshot
from controller.placement.place import OCCUPYING, Planner
from controller.reconcile import demand, lifecycle, room, scale
from controller.reconcile.demand import Standing

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

_MODEL: Final = attrgetter("model")

MOST_NOTES: Final = 50
"""A thousand bad rows are told of in fifty sentences and a count."""


def decide(snapshot: Snapshot, now: float, seed: int = 0) -> Plan:
    """What to do next. ``now`` is the database's clock; ``seed`` settles ties and jitter."""
    around, guard_notes = lifecycle.survey(snapshot, now, seed)
    notes = list(guard_notes)
    moves = _observe(around.restless, around, notes)
    catalog = {model.name: model for model in snapshot.models}
    counts = Counter(map(_MODEL, snapshot.replicas))
    creates: list[Create] = []
    for name, members in _unsettled(snapshot, catalog, counts, around, notes).items():
        model = catalog.get(name)
        try:
            for item in scale.balance(name, model, _standings(members, moves), around):
                if isinstance(item, Move):
                    moves[item.replica_id] = item
                else:
                    creates.append(item)
        except Exception as exc:  # one model's rows must not stop the others
            notes.append(f"model {name} is not scaled in this tick: {_told(exc)}")
    waiting = _waiting(around.restless, moves, catalog, counts)
    places, attempts = _place(snapshot, waiting, moves, around, notes) if waiting else ([], [])
    _make_room(snapshot, waiting, places, moves, around, notes)
    ordered = [moves[id_] for id_ in sorted(moves)]
    return Plan((*ordered, *creates, *places), tuple(attempts), _bounded(notes))


def _observe(
    replicas: Iterable[Replica], around: lifecycle.Around, notes: list[str]
) -> dict[int, Move]:
    """What became of each launch; replica id -> its move."""
    moves: dict[int, Move] = {}
    for replica in replicas:
        try:
            bad = lifecycle.fault(replica)
            move = None if bad else lifecycle.step(replica, around)
        except Exception as exc:  # a row of impossible values: told, and left alone
            bad, move = f"replica {replica.id} of {replica.model} is left alone: {_told(exc)}", None
        if bad:
            notes.append(bad)
        elif move is not None:
            moves[replica.id] = move
    return moves


def _unsettled(
    snapshot: Snapshot,
    catalog: Mapping[str, Model],
    counts: Mapping[str, int],
    around: lifecycle.Around,
    notes: list[str],
) -> dict[str, list[Replica]]:
    """Replicas of each model that is not as it should be: few, so nothing is done for the others.

    In the catalog's order, then models that left it, by name.
    """
    busy = {replica.model for replica in around.restless}
    found: dict[str, list[Replica]] = {}
    for name, model in catalog.items():
        if name in busy or not demand.holds(model, counts[name], around.now, around.settings):
            found[name] = []
    orphans: dict[str, list[Replica]] = {}
    if found or counts.keys() - catalog.keys() - snapshot.unread_models:
        for replica in snapshot.replicas:
            if replica.model in found:
                found[replica.model].append(replica)
            elif replica.model not in catalog and replica.model not in snapshot.unread_models:
                orphans.setdefault(replica.model or "", []).append(replica)
    notes += [f"replica {r.id} has no model and is wound down" for r in orphans.get("", [])]
    return found | {name: orphans[name] for name in sorted(orphans)}


def _standings(members: Iterable[Replica], moves: Mapping[int, Move]) -> list[Standing]:
    found = []
    for replica in members:
        move = moves.get(replica.id)
        found.append(Standing(replica, move.to_state if move else replica.state, move is not None))
    return found


def _waiting(
    restless: Sequence[Replica],
    moves: Mapping[int, Move],
    catalog: Mapping[str, Model],
    counts: Mapping[str, int],
) -> list[Replica]:
    """Replicas that are pending once the moves are made: by priority, then by how few there are."""
    there = dict(counts)
    pending: list[Replica] = []
    for replica in restless:
        state = _state(replica, moves)
        if state not in ("starting", "ready"):
            there[replica.model] -= 1
        if state == "pending" and replica.model in catalog:
            pending.append(replica)
    calm = moves.keys() - {replica.id for replica in restless}
    for id_ in calm:  # what moves a calm replica is the end of its service
        there[moves[id_].model] -= 1
    pending.sort(key=lambda r: (r.created_at, r.id))
    turns: list[tuple[int, int, float, int, Replica]] = []
    for replica in pending:
        turn = there[replica.model] = there[replica.model] + 1
        rank = -catalog[replica.model].priority
        turns.append((rank, turn, replica.created_at, replica.id, replica))
    return [turn[4] for turn in sorted(turns, key=lambda turn: turn[:4])]


def _place(
    snapshot: Snapshot,
    waiting: list[Replica],
    moves: Mapping[int, Move],
    around: lifecycle.Around,
    notes: list[str],
) -> tuple[list[Place], list[Attempt]]:
    names = {replica.model for replica in waiting}
    models = {model.name: model for model in snapshot.models if model.name in names}
    hosted = (r for r in snapshot.replicas if r.model in names and _state(r, moves) in OCCUPYING)
    planner = Planner(snapshot.nodes, models.values(), hosted, around.seed)
    notes += planner.ledger.notes
    places: list[Place] = []
    attempts: dict[str, Attempt] = {}
    for replica in waiting:
        before = attempts.get(replica.model)
        if before is not None and not before.placed:
            continue  # places only get fewer within a plan
        try:
            place, refused = planner.place(models[replica.model], replica)
        except Exception as exc:  # one impossible profile must not stop the others
            notes.append(f"replica {replica.id} of {replica.model} is not placed: {_told(exc)}")
            continue
        if place is not None:
            places.append(place)
        if before is None or place is None:
            attempts[replica.model] = Attempt(replica.model, place is not None, refused)
    return places, [attempts[name] for name in models if name in attempts]


def _make_room(
    snapshot: Snapshot,
    waiting: list[Replica],
    places: list[Place],
    moves: dict[int, Move],
    around: lifecycle.Around,
    notes: list[str],
) -> None:
    """Adds the drains of idle replicas that stand in the way of wanted ones."""
    placed = {place.replica_id for place in places}
    hungry = [replica for replica in waiting if replica.id not in placed]
    if not hungry:
        return
    try:
        states = {id_: move.to_state for id_, move in moves.items()}
        states |= dict.fromkeys(placed, "starting")
        moves |= {move.replica_id: move for move in room.make(snapshot, hungry, states, around)}
    except Exception as exc:  # whoever waits goes on waiting; nothing else is held up
        notes.append(f"no room is made in this tick: {_told(exc)}")


def _state(replica: Replica, moves: Mapping[int, Move]) -> str:
    move = moves.get(replica.id)
    return move.to_state if move is not None else replica.state


def _bounded(notes: list[str]) -> tuple[str, ...]:
    if len(notes) <= MOST_NOTES:
        return tuple(notes)
    return (*notes[:MOST_NOTES], f"and {len(notes) - MOST_NOTES} more notes like these")


def _told(exc: Exception) -> str:
    return f"its row cannot be read ({type(exc).__name__}: {exc})"
