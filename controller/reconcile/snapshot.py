"""Rows -> the values that decisions are made of. One consistent read; a bad row costs itself only.

Called by the tick. The builders are plain functions over rows, so tests need no database.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, fields
from functools import cache
from operator import attrgetter
from typing import TYPE_CHECKING, Any, TypeVar

import trio

from controller.placement.ledger import pool_claim
from controller.placement.model import (
    Asked,
    Claim,
    Gpu,
    Model,
    Node,
    Profile,
    Replica,
    Settings,
    Shard,
    Snapshot,
)
from controller.reconcile.fitted import fitted
from sql import queries

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from sql.pool import Pool

T = TypeVar("T")
Row = Any
TABLES = (
    "settings",
    "nodes",
    "gpus",
    "engines",
    "weights",
    "facts",
    "models",
    "demand",
    "profiles",
    "replicas",
    "shards",
)
THREAD_ABOVE = 2000
"""Nodes and cards from which building leaves the loop for a thread."""
TAIL = 600
"""Characters of an engine's last words that go into an error; the log has the rest."""


@dataclass(frozen=True, slots=True)
class Seen:
    """One read of the database."""

    snapshot: Snapshot
    now: float
    """The database's clock, unix seconds."""
    server_started_at: float
    change: int
    """Value of llmgw_core.change before anything was read."""
    guard_s: float
    """How long silence is not believed after a restart or a new leader."""
    notes: tuple[str, ...]


Kept = dict[tuple[str, str], tuple[Row, Gpu]]
"""(node, uuid) -> the row of the last read and what was made of it: of 40,000 cards few change
between two ticks."""


async def read(pool: Pool, kept: Kept | None = None) -> Seen:
    """One REPEATABLE READ transaction; raises sql.errors. ``kept`` is the caller's, for reuse."""
    texts = queries("tick")
    async with pool.transaction(isolation="repeatable_read", readonly=True) as connection:
        clock = await connection.fetchrow(texts["now"])
        assert clock is not None
        tables = {name: await connection.fetch(texts[name]) for name in TABLES}
    if len(tables["gpus"]) + len(tables["nodes"]) < THREAD_ABOVE:
        snapshot, notes = build(tables, kept)
    else:  # 5,000 nodes of 8 cards take 0.3 s, in which nothing else would be answered
        snapshot, notes = await trio.to_thread.run_sync(build, tables, kept)
    guard_s = _numbers(tables["settings"]).get("guard", 60.0)
    return Seen(snapshot, clock["now"], clock["started_at"], clock["change"], guard_s, tuple(notes))


def build(
    tables: Mapping[str, Sequence[Row]], kept: Kept | None = None
) -> tuple[Snapshot, list[str]]:
    """The snapshot, and a sentence for every row that could not be read."""
    notes: list[str] = []
    cards = _cards(tables["gpus"], {} if kept is None else kept, notes)
    engines: defaultdict[str, dict[str, tuple[str, ...]]] = defaultdict(dict)
    failures: defaultdict[str, dict[tuple[str, str], str]] = defaultdict(dict)
    for row in tables["engines"]:
        if row["versions"]:
            engines[row["node_id"]][row["engine"]] = tuple(row["versions"])
        for version, error in (row["failures"] or {}).items():
            failures[row["node_id"]][row["engine"], version] = error
    sources = {row["node_id"]: frozenset(row["sources"]) for row in tables["weights"]}

    def node_of(row: Row) -> Node:
        found = row["id"]
        on_disk = sources.get(found, frozenset())
        return _node(row, cards[found], engines[found], failures[found], on_disk)

    nodes = _each(tables["nodes"], node_of, "node", notes)
    numbers = _numbers(tables["settings"])
    where = {row["name"]: row["source"] for row in tables["models"]}
    facts = {row["source"]: row["facts"] for row in tables.get("facts", ())}
    sizes = {row["source"]: row["weights_mib"] for row in tables.get("facts", ())}
    profiles: defaultdict[str, list[Profile]] = defaultdict(list)
    for name, profile in _each(
        tables["profiles"],
        lambda r: (r["model"], fitted(_profile(r, where[r["model"]], numbers, sizes), facts)),
        "profile",
        notes,
    ):
        profiles[name].append(profile)
    asked = dict(_each(tables["demand"], _asked, "demand", notes))
    models = _each(
        tables["models"],
        lambda r: _model(r, profiles[r["name"]], asked.get(r["name"], Asked(heard=False))),
        "model",
        notes,
    )
    shards: defaultdict[int, list[Shard]] = defaultdict(list)
    for replica_id, shard in _each(
        tables["shards"], lambda r: (r["replica_id"], _shard(r)), "shard", notes
    ):
        shards[replica_id].append(shard)
    parts = Counter(row["replica_id"] for row in tables["shards"])
    replicas = _each(
        tables["replicas"], lambda r: _replica(r, shards[r["id"]], parts[r["id"]]), "replica", notes
    )
    return Snapshot(tuple(nodes), tuple(models), tuple(replicas), settings(numbers)), notes


def _each(rows: Iterable[Row], make: Callable[[Row], T], kind: str, notes: list[str]) -> list[T]:
    """Every row that can be read; one that cannot becomes a note (D10)."""
    made: list[T] = []
    for row in rows:
        try:
            made.append(make(row))
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            notes.append(
                f"{kind} row {dict(row)!r:.200} is left out: {type(error).__name__} {error}"
            )
    return made


def _whole(made: T) -> T:
    """``made``, unless it has a null where the model knows none: a constraint was dropped."""
    kind: Any = type(made)
    names, values = _required(kind)
    if None in values(made):
        nulls = ", ".join(name for name in names if getattr(made, name) is None)
        raise ValueError(f"null in {nulls}")
    return made


@cache
def _required(kind: type) -> tuple[tuple[str, ...], Callable[[Any], Any]]:
    names = tuple(field.name for field in fields(kind) if "None" not in str(field.type))
    return names, attrgetter(*names)


def _numbers(rows: Iterable[Row]) -> dict[str, float]:
    return {row["name"]: row["value"] for row in rows if row["value"] is not None}


def settings(numbers: Mapping[str, float]) -> Settings:
    """The numbers of llmgw_core.setting; a missing row leaves the default of the program."""
    named = {
        "backoff_base_s": "backoff_base",
        "backoff_max_s": "backoff_max",
        "stable_s": "stable",
        "start_deadline_s": "start_deadline",
        "drain_deadline_s": "drain_deadline",
        "silent_share_max": "silent_share_max",
        "min_residence_s": "min_residence",
        "idle_timeout_s": "idle_timeout",
        "concurrency": "concurrency",
        "demand_stale_s": "demand_stale",
    }
    known: dict[str, Any] = {
        field: numbers[name] for field, name in named.items() if name in numbers
    }
    return Settings(**known)


def _cards(rows: Sequence[Row], kept: Kept, notes: list[str]) -> defaultdict[str, list[Gpu]]:
    """Cards by node; ``kept`` then holds exactly these."""
    before = dict(kept)
    kept.clear()

    def make(row: Row) -> tuple[str, Gpu]:
        key = (row["node_id"], row["uuid"])
        known = before.get(key)
        found = known if known is not None and known[0] == row else (row, _gpu(row))
        kept[key] = found
        return key[0], found[1]

    cards: defaultdict[str, list[Gpu]] = defaultdict(list)
    for node_id, card in _each(rows, make, "gpu", notes):
        cards[node_id].append(card)
    return cards


def _gpu(row: Row) -> Gpu:
    made = Gpu(
        uuid=row["uuid"],
        index=row["index"],
        class_=row["class"],
        memory_mib=row["memory_mib"],
        memory_foreign_mib=row["memory_foreign_mib"],
        healthy=row["healthy"],
        problems=tuple(row["problems"]),
        numa=row["numa"],
        claims=tuple(Claim(shard, memory) for shard, memory in row["claims"] or ()),
        driver=row["driver_version"],
        cuda=row["cuda_version"],
        nearest_nic=row["nearest_nic"],
        island=row["island"],
        slice=row["slice"],
        unified=row["unified"],
        gone=row["gone"],
    )
    return _whole(made)


def _node(
    row: Row,
    cards: list[Gpu],
    engines: dict[str, tuple[str, ...]],
    failures: dict[tuple[str, str], str],
    sources: frozenset[str],
) -> Node:
    flags, provisions = row["cpu_flags"], row["provisions"]
    made = Node(
        id=row["id"],
        state=row["state"],
        alloc_gen=row["alloc_gen"],
        state_reason=row["state_reason"],
        labels={str(key): str(value) for key, value in row["labels"].items()},
        arch=row["arch"],
        cpu_flags=None if flags is None else frozenset(flags),
        cpus=row["cpus_effective"],
        cpus_claimed=row["cpus"] or 0.0,
        memory_mib=row["memory_effective_mib"],
        memory_claimed_mib=(row["memory_mib"] or 0) + _pooled(cards),
        gpus=tuple(cards),
        ports=(int(row["port_first"]), int(row["port_last"])),
        ports_taken=frozenset(row["ports"] or ()),
        engines=engines if row["reported"] else None,
        provisions=frozenset(provisions) if isinstance(provisions, list) else frozenset(),
        engine_failures=failures,
        sources_on_disk=sources,
        weights_free_mib=row["weights_free_mib"],
        mgmt_addr=row["mgmt_addr"],
        shards_live=row["shards"] or 0,
        models=frozenset(row["models"] or ()),
        nvlink_domain=row["nvlink_domain"],
        nvlink_reason=row["nvlink_reason"],
        imex_ready=row["imex_ready"],
        fabrics={key: tuple(found["hcas"]) for key, found in (row["fabrics"] or {}).items()},
        declared={key: frozenset(found["names"]) for key, found in (row["fabrics"] or {}).items()},
    )
    return _whole(made)


def _pooled(cards: list[Gpu]) -> int:
    """Host memory that is claimed through unified cards."""
    return sum(pool_claim(g, c.memory_mib) for g in cards if g.unified for c in g.claims)


def _profile(
    row: Row, source: str, numbers: Mapping[str, float], sizes: Mapping[str, int | None]
) -> Profile:
    """A profile, with the part of the agent's assignment document that the catalog decides."""
    spec = {
        name: row[name]
        for name in ("engine", "engine_version", "args", "env", "command", "health_path")
    }
    grace = row["stop_grace_s"]
    spec |= {
        "source": source,
        "start_deadline_s": row["start_deadline_s"] or numbers.get("start_deadline", 1800.0),
        "stop_grace_s": 30.0 if grace is None else grace,
    }
    made = Profile(
        name=row["name"],
        engine=row["engine"],
        fingerprint=row["fingerprint"],
        engine_version=row["engine_version"],
        pool=row["pool"],
        pool_labels={key: tuple(values) for key, values in (row["pool_labels"] or {}).items()},
        gpu_class=row["gpu_class"],
        gpus=row["gpus"],
        gpu_memory_mib=row["gpu_memory_mib"],
        share=row["share"],
        cpus=row["cpus"],
        memory_mib=row["memory_mib"],
        arch=row["arch"],
        cpu_flags=tuple(row["cpu_flags"]),
        shards=row["shards"],
        fabric=row["fabric"],
        driver_min=row["driver_min"],
        cuda_min=row["cuda_min"],
        exclude_nodes=frozenset(row["exclude_nodes"]),
        weights_mib=sizes.get(source),
        alone_of=row["model"] if row["spread"] == "node" else None,
        start_deadline_s=row["start_deadline_s"],
        spec=spec,
    )
    return _whole(made)


def _asked(row: Row) -> tuple[str, Asked]:
    made = Asked(
        waiting=row["waiting"] or 0,
        in_flight=row["in_flight"] or 0,
        peak=row["peak"] or 0,
        wanted_at=row["wanted_at"],
        concurrency=row["concurrency"],
        heard=row["routers"] > 0,
    )
    return row["model"], made


def _model(row: Row, profiles: list[Profile], asked: Asked) -> Model:
    made = Model(
        name=row["name"],
        source=row["source"],
        min_replicas=row["min_replicas"],
        max_replicas=row["max_replicas"],
        idle_timeout_s=row["idle_timeout_s"],
        profiles=tuple(profiles),
        priority=row["priority"],
        asked=asked,
    )
    return _whole(made)


def _shard(row: Row) -> Shard:
    error = row["error"]
    if row["state"] == "failed" and row["log_tail"]:
        error = f"{error or 'failed'}; last words: {row['log_tail'].strip()[-TAIL:]}"
    made = Shard(
        id=row["id"],
        rank=row["rank"],
        node_id=row["node_id"],
        state=row["state"],
        gpus=tuple(row["gpus"] or ()),
        port=row["port"],
        error=error,
        state_at=row["state_at"],
        cpus=row["cpus"],
        memory_mib=row["memory_mib"],
        master_port=row["master_port"],
    )
    return _whole(made)


def _replica(row: Row, shards: list[Shard], parts: int) -> Replica:
    if len(shards) != parts:
        raise ValueError("one of its shards cannot be read")
    named = (
        "id",
        "model",
        "state",
        "profile",
        "fingerprint",
        "created_at",
        "state_at",
        "ready_at",
        "restarts",
    )
    more = ("backoff_until", "error", "drain_deadline", "in_flight", "last_used_at")
    asked = ("replace_asked", "replace_force", "room_for")
    return _whole(
        Replica(**{name: row[name] for name in named + more + asked}, shards=tuple(shards))
    )
