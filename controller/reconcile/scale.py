"""How many replicas a model wants, and which come and go to get there. Pure.

Called by `decide.py` for each model that is not at rest, after `lifecycle.step` has spoken for its
replicas. Draining a node is scaling too: one replica more until the replacement is ready, then the
old one leaves.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final

from controller.placement.model import Create, Model, Move, Replica
from controller.reconcile import demand
from controller.reconcile.demand import Standing, Wish
from controller.reconcile.lifecycle import Around, move, retry

if TYPE_CHECKING:
    from collections.abc import Sequence

ACTIVE: Final = frozenset({"pending", "starting", "ready", "failed"})
"""Replicas that count as wanted ones; a failed one comes back after its backoff."""

MOST_CREATES: Final = 500
"""New replicas of one model in one plan: a typo of three zeros must not make one huge commit."""

STAYING: Final = frozenset({"ready", "cordoned"})
"""States of nodes whose replicas may go on serving."""

PATIENCE_S: Final = 5.0
"""So long a replacement looks for room of its own before the replica that it replaces may stop."""

SETTLED_S: Final = 30.0
"""A replacement that is ready frees the replica that it replaces within a tick or two: after this
long it is one of the others."""

_FIRST_TO_GO: Final = {"pending": 0, "failed": 1, "starting": 2, "ready": 3}


def wanted(model: Model | None, active: Sequence[Standing], around: Around) -> Wish:
    """How many replicas should serve now, with these there; none when out of the catalog."""
    if model is None:
        return Wish(0, "its model left the catalog")
    return demand.desired(model, active, around.now, around.settings)


def balance(
    name: str, model: Model | None, standings: Sequence[Standing], around: Around
) -> list[Create | Move]:
    """Moves and creations that bring one model nearer to what is wanted, each replica once."""
    active = [s for s in standings if s.state in ACTIVE]
    wish = wanted(model, _without_replacement(active, standings, around), around)
    want, told = wish.count, f" ({wish.why})" if wish.why else ""
    starting = [s for s in active if s.state == "starting" and _must_leave(s.replica, around)]
    active = [s for s in active if s not in starting]
    surplus = _surplus(active, want, around)
    why = f"{len(active)} replicas, {want} wanted{told}" if model else wish.why
    active = [s for s in active if s not in surplus]
    items: list[Create | Move] = [_evict(s, around) for s in starting if not s.moved]
    items += [_release(s, why, around) for s in surplus if not s.moved]
    leaving = [s for s in active if s.state == "ready" and _must_leave(s.replica, around)]
    extra = 0
    if leaving and not _under_way(standings, around):
        old = _replaced(active, leaving, want) or _forced(active, leaving, want, around)
        if old is None:
            extra = 1
        else:
            active.remove(old)
            items.append(drain(old.replica, _leaving_reason(old, around), around))
    back = _recovered(standings, want - len(active), around)
    items += [move(s.replica, "ready", "wanted again: its drain is cancelled") for s in back]
    have = len(active) + len(back)
    for_drain = _leaving_reason(leaving[0], around) if extra and have >= want else None
    reason = f"replacement: {for_drain}" if for_drain else f"{want} wanted{told}, {have} there"
    items += [Create(name, reason)] * min(MOST_CREATES, max(0, want + extra - have))
    waiting = [s.replica for s in active if s.state == "failed" and not s.moved]
    items += [again for replica in waiting if (again := retry(replica, around))]
    return items


def _without_replacement(
    active: list[Standing], standings: Sequence[Standing], around: Around
) -> list[Standing]:
    """Those that say how many there should be: one more for a drain is no wish for more.

    Else each replacement would count as wanted, and the next tick would add another one to it.
    """
    leaving = [s for s in active if s.state == "ready" and _must_leave(s.replica, around)]
    others = [s for s in active if s not in leaving]
    if not leaving or not others or _under_way(standings, around):
        return active
    newest = max(others, key=lambda s: (s.replica.created_at, s.replica.id))
    # A residence of nothing would call it a wish in the moment in which it is ready.
    stays = replace(
        around.settings, min_residence_s=max(around.settings.min_residence_s, SETTLED_S)
    )
    if newest.state == "ready" and not demand.resides(newest.replica, around.now, stays):
        return active
    return [s for s in active if s is not newest]


def drain(replica: Replica, reason: str, around: Around) -> Move:
    """Out of routing; running requests get until the deadline."""
    deadline = around.now + around.settings.drain_deadline_s
    return Move(
        replica.id, replica.model, replica.state, "draining", reason, drain_deadline=deadline
    )


def _evict(standing: Standing, around: Around) -> Move:
    """On a draining node a replica that serves nobody yet just stops; it starts anew elsewhere."""
    return move(standing.replica, "stopping", _leaving_reason(standing, around))


def _surplus(active: list[Standing], want: int, around: Around) -> list[Standing]:
    """Replicas to let go: who serves least goes first."""
    leaving = any(s.state == "ready" and _must_leave(s.replica, around) for s in active)
    # While a node drains one more is right: it is, or will be, the replacement.
    count = len(active) - want - (1 if leaving and want else 0)
    if count <= 0:
        return []
    return sorted(active, key=lambda s: _order_to_go(s, around))[:count]


def _release(standing: Standing, why: str, around: Around) -> Move:
    replica = standing.replica
    if replica.state == "ready":
        return drain(replica, why, around)
    return move(replica, "stopping" if replica.state == "starting" else "gone", why)


def _under_way(standings: Sequence[Standing], around: Around) -> bool:
    """One replica of the model is leaving a draining node already: the next one waits."""
    return any(
        s.state in ("draining", "stopping") and _must_leave(s.replica, around) for s in standings
    )


def _order_to_go(standing: Standing, around: Around) -> tuple[int, bool, bool, float, int]:
    """Pending, failed, starting, then ready: on draining nodes first, idle ones before busy ones,
    then least recently used."""
    replica = standing.replica
    stays = _must_leave(replica, around) is None
    busy = standing.state == "ready" and replica.in_flight != 0
    used = replica.last_used_at if replica.last_used_at is not None else replica.state_at
    # Of those that have not served, the youngest has the least behind it.
    age = used if standing.state == "ready" else -replica.created_at
    return _FIRST_TO_GO[standing.state], stays, busy, age, replica.id


def _replaced(active: list[Standing], leaving: list[Standing], want: int) -> Standing | None:
    """The replica that may leave its draining node now, because another serves in its stead."""
    ready = sum(s.state == "ready" for s in active)
    newest = max(active, key=lambda s: (s.replica.created_at, s.replica.id))
    # One that crashes on and on must not hold up the drain, unless it is the replacement itself.
    broken = sum(s.state == "failed" and s is not newest for s in active)
    if ready <= max(want - broken, min(want, 1)):
        return None
    free = [s for s in leaving if not s.moved]
    return min(free, key=lambda s: (s.replica.last_used_at or 0.0, s.replica.id), default=None)


def _forced(
    active: list[Standing], leaving: list[Standing], want: int, around: Around
) -> Standing | None:
    """One whose operator lets it stop first, when the other has waited for room and all serve."""
    stuck = any(
        s.state == "pending" and around.now - s.replica.state_at >= PATIENCE_S for s in active
    )
    if not stuck or sum(s.state == "ready" for s in active) < want:
        return None
    free = [s for s in leaving if s.replica.replace_force and not s.moved]
    return min(free, key=lambda s: (s.replica.last_used_at or 0.0, s.replica.id), default=None)


def _recovered(standings: Sequence[Standing], missing: int, around: Around) -> list[Standing]:
    """Draining replicas that are wanted after all: taken back faster than any new one starts."""
    able = [
        s
        for s in standings
        if s.state == "draining"
        and not s.moved
        and _may_stay(s.replica, around)
        # Else two models that alternate would take back from each other what they had given.
        and s.replica.room_for not in around.hungry
    ]
    return able[: max(0, missing)]


def _may_stay(replica: Replica, around: Around) -> bool:
    return (
        bool(replica.shards)
        and replica.replace_asked is None
        and all(
            shard.state == "ready"
            and shard.node_id in around.nodes
            and around.nodes[shard.node_id].state in STAYING
            for shard in replica.shards
        )
    )


def _must_leave(replica: Replica, around: Around) -> str | None:
    """Why another replica should take its place: its operator said so, or drains a node of it."""
    if replica.replace_asked is not None:
        return "an operator asked to replace it"
    for shard in replica.shards:
        node = around.nodes.get(shard.node_id)
        if node is not None and node.state == "draining":
            return f"node {node.id} is draining"
    return None


def _leaving_reason(standing: Standing, around: Around) -> str:
    return _must_leave(standing.replica, around) or "it need not leave"
