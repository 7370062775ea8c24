"""The whole decision of one tick: `decide(snapshot, now, seed) -> Plan`. Pure.

Observation first (`lifecycle`), then how many (`scale`), then where (`placement`). One unreadable
row becomes a note and stops nothing else (D10). Same inputs, same plan. Called by the tick, which
commits the plan, and by what-if, which does not.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from controller.placement.model import Attempt, Create, Model, Move, Place, Plan, Replica, Snapshot
from controller.placement.place import OCCUPYING, Planner
from controller.reconcile import demand, lifecycle, room, scale
from controller.reconcile.demand import Standing

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

MOST_NOTES: Final = 50
"""A thousand bad rows are told of in fifty sentences and a count."""


def decide(snapshot: Snapshot, now: float, seed: int = 0) -> Plan:
    """What to do next. ``now`` is the database's clock; ``seed`` settles ties and jitter."""
    around, guard_notes = lifecycle.survey(snapshot, now, seed)
    notes = list(guard_notes)
    moves = _observe(snapshot.replicas, around, notes)
    catalog = {model.name: model for model in snapshot.models}
    creates: list[Create] = []
    for name, members in _by_model(snapshot, catalog, notes).items():
        model = catalog.get(name)
        if _at_rest(model, members, moves, around):
            continue
        try:
            for item in scale.balance(name, model, _standings(members, moves), around):
                if isinstance(item, Move):
                    moves[item.replica_id] = item
                else:
                    creates.append(item)
        except Exception as exc:  # one model's rows must not stop the others
            notes.append(f"model {name} is not scaled in this tick: {_told(exc)}")
    waiting = _waiting(snapshot.replicas, moves, catalog)
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


def _by_model(
    snapshot: Snapshot, catalog: Mapping[str, Model], notes: list[str]
) -> dict[str, list[Replica]]:
    """Replicas of each model: the catalog's order, then models that left it, by name."""
    found: dict[str, list[Replica]] = {name: [] for name in catalog}
    orphans: dict[str, list[Replica]] = {}
    for replica in snapshot.replicas:
        if replica.model in found:
            found[replica.model].append(replica)
        else:
            orphans.setdefault(replica.model or "", []).append(replica)
    notes += [f"replica {r.id} has no model and is wound down" for r in orphans.get("", [])]
    return found | {name: orphans[name] for name in sorted(orphans)}


def _at_rest(
    model: Model | None,
    members: list[Replica],
    moves: Mapping[int, Move],
    around: lifecycle.Around,
) -> bool:
    """Nothing to do for the model: the usual case, so it is checked before any work is done."""
    if moves and any(replica.id in moves for replica in members):
        return False
    if around.draining:
        return False
    if not all(replica.state == "ready" for replica in members):
        return False
    if model is not None and demand.holds(model, len(members), around.now, around.settings):
        return True
    standings = [Standing(replica, "ready", moved=False) for replica in members]
    return len(members) == scale.wanted(model, standings, around).count


def _standings(members: Iterable[Replica], moves: Mapping[int, Move]) -> list[Standing]:
    found = []
    for replica in members:
        move = moves.get(replica.id)
        found.append(Standing(replica, move.to_state if move else replica.state, move is not None))
    return found


def _waiting(
    replicas: Iterable[Replica], moves: Mapping[int, Move], catalog: Mapping[str, Model]
) -> list[Replica]:
    """Replicas that are pending once the moves are made: by priority, then by how few there are."""
    there: dict[str, int] = {}
    pending: list[Replica] = []
    for replica in replicas:
        state = _state(replica, moves)
        if state in ("starting", "ready"):
            there[replica.model] = there.get(replica.model, 0) + 1
        elif state == "pending" and replica.model in catalog:
            pending.append(replica)
    pending.sort(key=lambda r: (r.created_at, r.id))
    turns: list[tuple[int, int, float, int, Replica]] = []
    for replica in pending:
        turn = there[replica.model] = there.get(replica.model, 0) + 1
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
