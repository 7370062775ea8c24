"""What observation does to replicas: desired x observed -> the next move. Pure.

Called by `decide.py` for each restless replica. A replica moves at most once a tick, and only along
`sql/states.py`. What the catalog wants (how many) is `scale.py`'s; this module only knows
what became of a launch, whether a failure has waited long enough, and whether a drain is over.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from controller.placement.chance import share
from controller.placement.model import Move, Node, Replica, Settings, Shard, Snapshot
from sql.states import REPLICA, SHARD, SHARD_FINAL

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from collections.abc import Set as AbstractSet

LAUNCHED: Final = frozenset({"starting", "ready", "draining"})
"""States in which a replica needs its nodes."""

JITTER: Final = 0.2
"""Backoffs differ by this share either way, so that a hundred replicas do not come back at once."""

BRINGING: Final = frozenset({"provisioning", "fetching"})
"""Stages that take as long as there are bytes to bring: the agent ends one that gets nowhere."""

LONGEST_S: Final = 86_400.0
"""A start may take this long in all, whatever its shards say (D07)."""


@dataclass(frozen=True, slots=True)
class Around:
    """What a replica's step needs to know besides the replica."""

    now: float
    seed: int
    settings: Settings
    nodes: Mapping[str, Node]
    lost: Mapping[str, str]
    """Nodes that may be given up -> sentence; empty while the guard holds."""
    restless: tuple[Replica, ...]
    """Replicas that may have to move. All others are ready, whole, and on nodes that stay."""
    start_deadlines: Mapping[tuple[str, str | None], float]
    """(model, profile) -> seconds, where the profile sets its own."""
    profiles: frozenset[tuple[str, str | None, str | None]] = frozenset()
    """(model, profile, fingerprint) as the catalog has them now."""
    hungry: frozenset[str] = frozenset()
    """Models with a replica that has no place yet."""


@dataclass(frozen=True, slots=True)
class Trouble:
    """Why a launch is over."""

    reason: str
    error: str
    own_fault: bool
    """A crash waits for its backoff; a replica whose node died does not."""


def survey(snapshot: Snapshot, now: float, seed: int) -> tuple[Around, tuple[str, ...]]:
    """Decide once per tick which nodes are given up; the notes say why some are not."""
    nodes = {node.id: node for node in snapshot.nodes}
    lost, notes = lost_nodes(snapshot, nodes)
    deadlines: dict[tuple[str, str | None], float] = {}
    profiles = frozenset(
        (m.name, p.name, p.fingerprint) for m in snapshot.models for p in m.profiles
    )
    for model in snapshot.models:
        for profile in model.profiles:
            if profile.start_deadline_s is not None:
                deadlines[model.name, profile.name] = profile.start_deadline_s
    restless = _restless(snapshot, nodes, lost)
    hungry = frozenset(r.model for r in restless if r.state == "pending")
    known, settings = frozenset(profiles), snapshot.settings
    return Around(now, seed, settings, nodes, lost, restless, deadlines, known, hungry), notes


def _restless(
    snapshot: Snapshot, nodes: Mapping[str, Node], lost: Mapping[str, str]
) -> tuple[Replica, ...]:
    """Few of many: a tick looks closer at these only."""
    quiet = {
        id_
        for id_, node in nodes.items()
        if node.state != "draining" and id_ not in lost and not any(g.gone for g in node.gpus)
    }
    return tuple(r for r in snapshot.replicas if not _is_calm(r, quiet))


def _is_calm(replica: Replica, quiet: AbstractSet[str]) -> bool:
    if replica.state != "ready" or replica.replace_asked is not None:
        return False
    for shard in replica.shards:
        if shard.state != "ready" or shard.node_id not in quiet:
            return False
    return bool(replica.shards)


def lost_nodes(
    snapshot: Snapshot, nodes: Mapping[str, Node]
) -> tuple[dict[str, str], tuple[str, ...]]:
    """Lost or vanished nodes by id, with a sentence; none while a guard holds.

    Many nodes silent at once are a broken network or database, not many broken machines. Only nodes
    that replicas still need count: those given up before, or never seen, say nothing about now.
    """
    held = {shard.node_id for r in snapshot.replicas if r.state in LAUNCHED for shard in r.shards}
    held -= snapshot.unread_nodes
    silent = {
        id_
        for id_ in held
        if id_ not in nodes
        # Who said goodbye is silent in order.
        or (nodes[id_].state in ("unreachable", "lost") and not nodes[id_].agent_ended)
    }
    lost = {
        n.id: f"node {n.id} lost: {n.state_reason or 'silent'}"
        for n in snapshot.nodes
        if n.state == "lost"
    }
    lost |= {
        id_: f"node {id_} lost: it is no longer registered" for id_ in sorted(held - nodes.keys())
    }
    fresh = sorted(held & lost.keys())
    settings = snapshot.settings
    if settings.guard is not None:
        note = f"no silent node is given up: {settings.guard}; waiting: {_few(fresh)}"
        return {}, (note,) if fresh else ()
    counted = sum(n.state not in ("unreachable", "lost") for n in snapshot.nodes) + len(silent)
    # One silent node is one broken node even in a fleet of two, where it is half of all.
    if fresh and len(silent) > max(1.0, settings.silent_share_max * counted):
        note = (
            f"{len(silent)} of {counted} nodes are silent at once, more than the share of "
            f"{settings.silent_share_max:g} that is believed: nobody is moved; look at the network "
            f"and the database, or raise silent_share_max in llmgw_core.setting; "
            f"silent: {_few(sorted(silent))}"
        )
        return {}, (note,)
    return lost, ()


def fault(replica: Replica) -> str | None:
    """What makes the row unreadable for decisions; it is left alone and told of (D10)."""
    if replica.state not in REPLICA:
        return (
            f"replica {replica.id} of {replica.model} is left alone: "
            f"it has the unknown state {replica.state!r}"
        )
    for shard in replica.shards:
        if shard.state not in SHARD:
            return (
                f"replica {replica.id} of {replica.model} is left alone: its shard {shard.id} on "
                f"{shard.node_id} has the unknown state {shard.state!r}"
            )
    return None


def step(replica: Replica, around: Around) -> Move | None:
    """The move that observation asks for now, if any. The replica's row is readable (`fault`)."""
    if replica.state == "ready":
        return _ready(replica, around)
    if replica.state == "starting":
        return _starting(replica, around)
    if replica.state == "draining":
        return _draining(replica, around)
    if replica.state == "stopping":
        return _stopping(replica, around)
    return None


def retry(replica: Replica, around: Around) -> Move | None:
    """A failed replica that is still wanted goes back to the queue when its backoff has passed.

    At once when its profile was edited meanwhile: what failed is not what will be started.
    """
    launched = (replica.model, replica.profile, replica.fingerprint)
    if replica.fingerprint is not None and launched not in around.profiles:
        again = move(replica, "pending", "its profile was edited since it failed")
        return replace(again, restarts=0)
    if replica.backoff_until is not None and around.now < replica.backoff_until:
        return None
    if not replica.restarts:  # its node was lost, or its agent ended
        return move(replica, "pending", "it is wanted still, and the failure was not its own")
    return move(replica, "pending", f"backoff after failure {replica.restarts} has passed")


def move(replica: Replica, to_state: str, reason: str, error: str | None = None) -> Move:
    """A move of this replica from where it is."""
    return Move(replica.id, replica.model, replica.state, to_state, reason, error)


def backoff_s(settings: Settings, replica_id: int, failures_before: int, seed: int) -> float:
    """Seconds to wait after a failure: doubled each time up to the maximum, with jitter."""
    # Beyond 2^32 the float would overflow one day; every sane maximum is reached long before.
    wait = min(
        settings.backoff_max_s, settings.backoff_base_s * 2.0 ** min(max(failures_before, 0), 32)
    )
    return wait * (1 - JITTER + 2 * JITTER * share(seed, replica_id, failures_before))


def _ready(replica: Replica, around: Around) -> Move | None:
    for shard in replica.shards:
        if shard.state != "ready" or shard.node_id in around.lost or _gone(shard, around):
            break
    else:
        if replica.shards:
            return None
    trouble = _trouble(replica, around)
    if trouble is not None:
        return _fail(replica, trouble, around)
    waiting = [s for s in replica.shards if s.state != "ready"]
    if not waiting:
        return None
    fallen = move(replica, "starting", f"{_name(waiting[0])} fell back to {waiting[0].state}")
    # What it fails of after this is no failure in a row with those before its stable time.
    return replace(fallen, restarts=0) if _stable(replica, around) else fallen


def _starting(replica: Replica, around: Around) -> Move | None:
    trouble = _trouble(replica, around)
    if trouble is None and all(shard.state == "ready" for shard in replica.shards):
        return move(replica, "ready", "all shards are ready")
    trouble = trouble or _late(replica, around)
    return None if trouble is None else _fail(replica, trouble, around)


def _draining(replica: Replica, around: Around) -> Move | None:
    trouble = _trouble(replica, around)
    if trouble is not None:  # it was leaving anyway: no failure to wait for, but told
        return move(replica, "stopping", trouble.reason, trouble.error)
    if replica.in_flight == 0:
        return move(replica, "stopping", "no request is running any more")
    deadline = replica.drain_deadline
    if deadline is None:
        deadline = replica.state_at + around.settings.drain_deadline_s
    if around.now < deadline:
        return None
    left = "an unknown number of" if replica.in_flight is None else replica.in_flight
    return move(replica, "stopping", f"drain deadline passed with {left} requests running")


def _stopping(replica: Replica, around: Around) -> Move | None:
    for shard in replica.shards:
        if (
            shard.state not in SHARD_FINAL
            and shard.node_id in around.nodes
            and shard.node_id not in around.lost
        ):
            return None
    return move(replica, "gone", "all shards are over")


def _trouble(replica: Replica, around: Around) -> Trouble | None:
    """The first thing that ended the launch: a lost node, a crash, or rows that make no launch."""
    lost = sorted({s.node_id for s in replica.shards if s.node_id in around.lost})
    if lost:
        return Trouble(
            f"node {lost[0]} is lost", "; ".join(around.lost[id_] for id_ in lost), own_fault=False
        )
    over = [shard for shard in replica.shards if shard.state in SHARD_FINAL]
    if over:
        if ended := sorted({s.node_id for s in replica.shards if _agent_ended(s, around)}):
            # Whichever shard went first: the others of a gang fall with the one that was stopped.
            text = f"the agent of {ended[0]} ended and stopped its shard"
            return Trouble(text, text, own_fault=False)
        # In a gang one shard dies first and takes the others with it: the first is the cause.
        first = min(over, key=lambda shard: (shard.state_at, shard.rank))
        verb = "failed" if first.state == "failed" else "stopped without being asked"
        reason = f"{_name(first)} {verb}"
        return Trouble(
            reason, f"{reason}: {first.error}" if first.error else reason, own_fault=True
        )
    for shard in replica.shards:
        if gone := _gone(shard, around):
            text = f"{_name(shard)}: device gone: {', '.join(gone)}; the MIG layout has changed"
            return Trouble("device gone", text, own_fault=False)
    ranks = sorted(shard.rank for shard in replica.shards)
    if not ranks or ranks != list(range(len(ranks))):
        text = f"replica {replica.id} is {replica.state} with shards of ranks {ranks}, not all"
        return Trouble("its shards are not a whole launch", text, own_fault=True)
    return None


def _agent_ended(shard: Shard, around: Around) -> bool:
    node = around.nodes.get(shard.node_id)
    return node is not None and node.agent_ended


def _gone(shard: Shard, around: Around) -> list[str]:
    """Slices that the shard holds and that its node no longer has (E19)."""
    node = around.nodes.get(shard.node_id)
    return [] if node is None else [g.uuid for g in node.gpus if g.gone and g.uuid in shard.gpus]


def _late(replica: Replica, around: Around) -> Trouble | None:
    """Engines did not get ready within their deadline, or the whole start takes too long."""
    limit = around.start_deadlines.get(
        (replica.model, replica.profile), around.settings.start_deadline_s
    )
    slow = [shard for shard in replica.shards if shard.state != "ready"]
    # Of a gang the head gets ready only after the last of the others has come.
    since = max([replica.state_at, *(shard.state_at for shard in replica.shards)])
    bringing = any(shard.state in BRINGING for shard in slow)
    if bringing or since + limit > replica.state_at + LONGEST_S:
        since, limit = replica.state_at, LONGEST_S
    if around.now < since + limit:
        return None
    where = ", ".join(f"{_name(shard)} is {shard.state}" for shard in slow[:3])
    error = f"not ready after {around.now - replica.state_at:.0f} s (deadline {limit:g} s): {where}"
    error += "".join(f"; {shard.error}" for shard in slow if shard.error)
    return Trouble("start deadline exceeded", error, own_fault=True)


def _fail(replica: Replica, trouble: Trouble, around: Around) -> Move:
    before = 0 if _stable(replica, around) else max(replica.restarts, 0)
    wait = backoff_s(around.settings, replica.id, before, around.seed) if trouble.own_fault else 0.0
    return Move(
        replica.id,
        replica.model,
        replica.state,
        "failed",
        trouble.reason,
        error=trouble.error,
        backoff_until=around.now + wait,
        restarts=before + 1 if trouble.own_fault else before,
    )


def _stable(replica: Replica, around: Around) -> bool:
    """Whether it has been ready for so long that failures before do not count any more."""
    since = replica.ready_at if replica.ready_at is not None else replica.state_at
    return replica.state == "ready" and around.now - since >= around.settings.stable_s


def _name(shard: Shard) -> str:
    return f"shard {shard.rank} on {shard.node_id}"


def _few(names: Sequence[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
