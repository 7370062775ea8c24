"""Reads what changed in the database since the last look; everything the first time.

One REPEATABLE READ transaction a look, so that all of it is of one moment. Which rows to read says
llmgw_core.touched, which triggers fill; what changes with time alone is read each time.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Any

from controller.reconcile.mirror import Clock, Look
from sql import queries

if TYPE_CHECKING:
    from collections.abc import Iterable

    from controller.reconcile.mirror import Mirror
    from sql.pool import Connection, Pool

EACH_TIME = ("silent", "demand")
OF_NODES = ("nodes", "gpus", "engines", "weights")
OF_REPLICAS = ("replicas", "shards")
CATALOG = ("settings", "facts", "models", "profiles")
TABLES = (*EACH_TIME, "stale", "uses", *OF_NODES, *OF_REPLICAS, *CATALOG)
BACK_S = 60.0
"""Uses are read again this far back: a report takes effect later than its time says, by seconds."""

Touched = dict[str, set[str]]
"""Kind -> keys."""


async def look(pool: Pool, mirror: Mirror) -> Look:
    """What ``mirror`` has to take to be as the database is. Raises sql.errors."""
    async with pool.transaction(isolation="repeatable_read", readonly=True) as connection:
        row = await connection.fetchrow(queries("tick")["now"])
        assert row is not None
        clock = Clock(**dict(row))
        stale = await connection.fetch(queries("tick")["stale"])
        touched = await _touched(connection, mirror, clock)
        everything = "everything" in touched
        if everything:
            touched |= await _by_kind(connection, "everybody")
        else:  # a node's facts became too old to count, or are fresh again
            touched["node"] |= mirror.stale ^ {found["node_id"] for found in stale}
        nodes = sorted(touched["node"])
        replicas = sorted(int(key) for key in touched["replica"])
        whole = everything or bool(touched["catalog"] or touched["facts"])
        since = 0.0 if everything or mirror.clock is None else mirror.clock.now - BACK_S
        tables: dict[str, list[Any]] = {"stale": stale}
        tables["uses"] = await connection.fetch(queries("tick")["uses"], since)
        await _add(connection, tables, EACH_TIME)
        await _add(connection, tables, CATALOG if whole else ())
        await _add(connection, tables, OF_NODES, nodes)
        await _add(connection, tables, OF_REPLICAS, replicas)
    return Look(clock, everything, nodes, replicas, tables)


async def _touched(connection: Connection, mirror: Mirror, clock: Clock) -> Touched:
    if mirror.clock is None or mirror.needs_all(clock):
        return defaultdict(set, everything={""})
    return await _by_kind(connection, "touched", mirror.clock.seen)


async def _by_kind(connection: Connection, name: str, *args: object) -> Touched:
    kinds: Touched = defaultdict(set)
    for row in await connection.fetch(queries("tick")[name], *args):
        kinds[row["kind"]].add(row["key"])
    return kinds


async def _add(
    connection: Connection,
    tables: dict[str, list[Any]],
    names: Iterable[str],
    keys: list[Any] | None = None,
) -> None:
    """Adds the rows of these queries; of no keys there are none."""
    for name in names:
        if keys is None:
            tables[name] = await connection.fetch(queries("tick")[name])
        else:
            tables[name] = await connection.fetch(queries("tick")[name], keys) if keys else []
