"""The leader's picture of the fleet, kept between ticks and changed where rows were touched.

Called by `snapshot.py` with what `look.py` read. A mirror that took every look holds the same as
one made of everything at that moment; what triggers could not see lasts FULL_S at most.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeVar

from controller.placement.model import Asked, Model, Node, Replica, Settings, Snapshot
from controller.reconcile import catalog_rows, node_rows, replica_rows
from controller.reconcile.rows import Notes, Row

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

FULL_S = 600.0
"""Everything is read again this often, whatever triggers say."""
KEPT_S = 300.0
"""A look at what was touched reaches back this far, half of what the database keeps."""
HEARD_S = 3.0
"""A router follows a change within two seconds and reports every second: what it said earlier than
this after a replica's last move is not about its present state."""

BLIND = (
    "triggers that tell the leader of changes are disabled, so every tick reads the whole fleet: "
    "alter table ... enable always trigger; select tgrelid::regclass, tgname from pg_trigger "
    "where tgname like 'touched%' and tgenabled = 'D' tells which"
)

K = TypeVar("K", str, int)
V = TypeVar("V")


@dataclass(frozen=True, slots=True)
class Clock:
    """When a look was, by the database, and what it could see."""

    now: float
    started_at: float
    """Start of the server, unix seconds."""
    change: int
    """Value of llmgw_core.change before anything was read."""
    seen: str
    """Its pg_snapshot."""
    blind: bool
    """Somebody has disabled triggers that tell of changes."""
    heard_at: float | None
    """Last word of the live router that was silent longest; None without one."""


@dataclass(frozen=True, slots=True)
class Look:
    """What was read in one transaction."""

    clock: Clock
    everything: bool
    nodes: Sequence[str]
    replicas: Sequence[int]
    """Keys of what was read again: the tables hold these, as far as they are still there."""
    tables: Mapping[str, Sequence[Row]]
    """By the names of queries; the catalog's are absent when it was not touched."""


class Mirror:
    """Holds one fleet; empty until the first look."""

    def __init__(self) -> None:
        self.stale: frozenset[str] = frozenset()
        """Nodes whose fast facts were too old at the last look."""
        self.clock: Clock | None = None
        self._full_at = 0.0
        self._nodes: dict[str, Node] = {}
        self._replicas: dict[int, Replica] = {}
        self._models: list[Model] = []
        self._unread_nodes: frozenset[str] = frozenset()
        self._unread_models: frozenset[str] = frozenset()
        self._settings = Settings()
        self._numbers: dict[str, float] = {}
        self._in_flight: dict[int, int] = {}
        self._last_used: dict[int, float] = {}
        self._notes: dict[str, Notes] = {k: Notes() for k in ("node", "replica", "catalog")}

    @property
    def guard_s(self) -> float:
        """How long silence is not believed after a restart or a new leader."""
        return self._numbers.get("guard", 60.0)

    def needs_all(self, clock: Clock) -> bool:
        """Whether what was touched since the last look does not tell everything."""
        last = self.clock
        return (
            last is None
            or clock.blind
            or clock.started_at != last.started_at
            or not 0 <= clock.now - last.now < KEPT_S
            or clock.now - self._full_at >= FULL_S
        )

    def take(self, look: Look) -> tuple[Snapshot, list[str]]:
        """The fleet as it was at this look, and a sentence for every row that is left out."""
        self.clock = None  # until all of it is taken: half a look is none
        if look.everything:
            self._forget()
            self._full_at = look.clock.now
        tables = look.tables
        if "models" in tables:
            self._take_catalog(tables)
        notes = self._notes["node"]
        made = {node.id: node for node in node_rows.nodes(tables, _without(notes, look.nodes))}
        self._nodes = _merged(self._nodes, look.nodes, made)
        unread = {row["id"] for row in tables["nodes"]} - made.keys()
        self._unread_nodes = self._unread_nodes.difference(look.nodes) | unread
        notes = self._notes["replica"]
        found = replica_rows.replicas(tables, _without(notes, look.replicas))
        self._replicas = _merged(self._replicas, look.replicas, {r.id: r for r in found})
        self._take_uses(tables["uses"])
        self._say_what_runs(look.clock.heard_at, look.replicas)
        self.stale = frozenset(row["node_id"] for row in tables["stale"])
        self.clock = look.clock
        return self._snapshot(tables)

    def _forget(self) -> None:
        for kept in (self._nodes, self._replicas, self._in_flight, self._last_used):
            kept.clear()
        self._unread_nodes = frozenset()
        for notes in self._notes.values():
            notes.clear()

    def _take_catalog(self, tables: Mapping[str, Sequence[Row]]) -> None:
        notes = self._notes["catalog"] = Notes()
        self._numbers = catalog_rows.numbers(tables["settings"], notes)
        self._settings = catalog_rows.settings(self._numbers)
        self._models = catalog_rows.models(tables, self._numbers, notes)
        read = {model.name for model in self._models}
        self._unread_models = frozenset(row["name"] for row in tables["models"]) - read

    def _take_uses(self, rows: Iterable[Row]) -> None:
        """A replica that is not among them runs nothing, and was last used when it was said."""
        self._in_flight = {}
        for row in rows:
            id_, at = row["replica_id"], row["last_used_at"]
            self._in_flight[id_] = row["in_flight"]
            if at is not None:
                self._last_used[id_] = max(at, self._last_used.get(id_, at))

    def _say_what_runs(self, heard_at: float | None, again: Iterable[int]) -> None:
        """Puts in_flight and last_used_at into the replicas; unknown until every router spoke."""
        there, flights = self._replicas, self._in_flight
        horizon = float("inf") if heard_at is None else heard_at - HEARD_S
        changed = [
            r.id
            for r in there.values()
            if r.in_flight != (flights.get(r.id, 0) if r.state_at <= horizon else None)
        ]
        for id_ in {*changed, *again, *flights} & there.keys():
            was = there[id_]
            runs = flights.get(id_, 0) if was.state_at <= horizon else None
            used = self._last_used.get(id_)
            if (was.in_flight, was.last_used_at) != (runs, used):
                there[id_] = replace(was, in_flight=runs, last_used_at=used)
        if len(self._last_used) > len(there):
            self._last_used = {k: v for k, v in self._last_used.items() if k in there}

    def _snapshot(self, tables: Mapping[str, Sequence[Row]]) -> tuple[Snapshot, list[str]]:
        notes = Notes()
        asked = catalog_rows.demand(tables["demand"], notes)
        mute = Asked(heard=False)
        models = tuple(replace(m, asked=asked.get(m.name, mute)) for m in self._models)
        nodes = self._nodes
        silent = {
            row["node_id"]: replace(
                nodes[row["node_id"]],
                state=row["state"],
                state_reason=row["state_reason"],
                agent_ended=row["agent_ended"],
            )
            for row in tables["silent"]
            if row["node_id"] in nodes
        }
        nodes = nodes | silent if silent else nodes
        if self.clock is not None and self.clock.blind:
            notes[""].append(BLIND)
        fleet = Snapshot(
            tuple(nodes.values()),
            models,
            tuple(self._replicas.values()),
            self._settings,
            self._unread_nodes,
            self._unread_models,
        )
        every = (*self._notes.values(), notes)
        return fleet, [text for some in every for key in sorted(some) for text in some[key]]


def _without(notes: Notes, keys: Iterable[K]) -> Notes:
    """The notes, but for those of objects that are read again."""
    if notes:
        for key in keys:
            notes.pop(key, None)
    return notes


def _merged(kept: dict[K, V], again: Sequence[K], made: dict[K, V]) -> dict[K, V]:
    """``kept`` with these objects as they are now, in the order of their keys."""
    if not again:
        return kept
    new = bool(made.keys() - kept.keys())
    for key in again:
        if key not in made:
            kept.pop(key, None)
    kept |= made
    return {key: kept[key] for key in sorted(kept)} if new else kept
