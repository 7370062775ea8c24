"""What a Postgres server of a benchmark does: its CPU by process, its statements, WAL and tables.

Called by the benchmarks around each period that they measure. Blocking; its own connection is
left out of no figure, but asks twice per period only.
"""

from __future__ import annotations

import secrets
import shutil
import tempfile
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Any

import psycopg
from psycopg.rows import dict_row

from ops.benchmarks import processes
from sql import embedded, logins, migrate

if TYPE_CHECKING:
    from collections.abc import Iterator

BACKENDS = "select pid, application_name as name, backend_type as kind from pg_stat_activity"
COUNTERS = """select pg_wal_lsn_diff(pg_current_wal_lsn(), '0/0')::bigint as wal_bytes,
    (select xact_commit + xact_rollback from pg_stat_database where datname = current_database())
        as transactions,
    (select wal_fpi from pg_stat_wal) as wal_page_images"""
TABLES = """select relname as table, n_tup_ins as inserted, n_tup_upd as updated,
    n_tup_hot_upd as hot, n_tup_del as deleted, n_dead_tup as dead, n_live_tup as live,
    autovacuum_count as vacuumed, autoanalyze_count as analyzed,
    pg_total_relation_size(relid) as bytes
    from pg_stat_user_tables where schemaname = 'llmgw_core'"""
COUNTED = ("inserted", "updated", "hot", "deleted", "vacuumed", "analyzed")


@dataclass(frozen=True, slots=True)
class Database:
    """A migrated database with the logins that a fleet needs."""

    server: embedded.Server
    controller_url: str
    agent_url: str


@dataclass(frozen=True, slots=True)
class Reading:
    """Everything that only grows, at one moment."""

    at: float
    cpu_s: float
    processes: dict[int, tuple[str, float]]
    """Of each one its kind and its CPU seconds."""
    counters: dict[str, Any]
    tables: dict[str, dict[str, Any]] = field(default_factory=dict)


@contextmanager
def database(connections: int) -> Iterator[Database]:
    """A server with safe settings (fsync, WAL) on an empty folder, gone afterwards."""
    # Not below a private folder: as root the server runs as nobody, who must reach it.
    base = Path(tempfile.mkdtemp(prefix="llmgw-bench-", dir="/var/tmp"))
    try:
        with embedded.running(base, options={"max_connections": str(connections)}) as server:
            with psycopg.connect(server.url, autocommit=True) as connection:
                migrate.upgrade(server.url)
                password = secrets.token_urlsafe(16)
                urls = {}
                for role in ("controller", "agent"):
                    name = f"bench_{role}"
                    logins.ensure(connection, name, f"llmgw_{role}", password)
                    rest = server.url.rpartition("@")[2]
                    urls[role] = f"postgresql://{name}:{password}@{rest}"
            yield Database(server, urls["controller"], urls["agent"])
    finally:
        shutil.rmtree(base, ignore_errors=True)


class Meter:
    """Readings of one server."""

    def __init__(self, server: embedded.Server) -> None:
        self._pid = server.process.pid
        self._connection = psycopg.connect(
            server.url, autocommit=True, row_factory=dict_row, application_name="meter"
        )

    def close(self) -> None:
        """Leave the server."""
        self._connection.close()

    def read(self) -> Reading:
        """All counters now."""
        ask = self._connection.execute
        names = {row["pid"]: row["name"].split(" ")[0] or row["kind"] for row in ask(BACKENDS)}
        tables = {row.pop("table"): row for row in ask(TABLES)}
        counters = ask(COUNTERS).fetchone()
        seen = processes.tree(self._pid)
        at = monotonic()
        # Times of children that ended are the postmaster's, which is left out: see `between`.
        each = {
            pid: (names.get(pid, "other"), one.own_s)
            for pid, one in seen.items()
            if pid != self._pid
        }
        return Reading(at, processes.spent_s(seen), each, counters or {}, tables)

    def vacuum(self) -> None:
        """As autovacuum does when it comes to it: planner statistics, no dead rows."""
        self._connection.execute("vacuum (analyze)")


def between(before: Reading, after: Reading) -> dict[str, Any]:
    """One period: shares of a core, rates per second, and the tables that were written. Pure."""
    seconds = after.at - before.at
    spent: dict[str, float] = {}
    for pid, (kind, cpu_s) in after.processes.items():
        spent[kind] = spent.get(kind, 0.0) + cpu_s - before.processes.get(pid, ("", 0.0))[1]
    spent["postmaster and ended"] = after.cpu_s - before.cpu_s - sum(spent.values())
    share = {kind: round(100 * cpu_s / seconds, 2) for kind, cpu_s in spent.items()}
    rates = {
        f"{name}_per_s": round((value - before.counters[name]) / seconds, 1)
        for name, value in after.counters.items()
    }
    return {
        "seconds": round(seconds, 1),
        "cpu_percent": round(100 * (after.cpu_s - before.cpu_s) / seconds, 2),
        "cpu_percent_by_process": dict(sorted(share.items(), key=lambda kv: -kv[1])),
        **rates,
        "tables": dict(_tables(before.tables, after.tables)),
    }


def _tables(
    before: dict[str, dict[str, Any]], after: dict[str, dict[str, Any]]
) -> Iterator[tuple[str, dict[str, Any]]]:
    for name, now in sorted(after.items()):
        grown = {key: now[key] - before.get(name, now)[key] for key in COUNTED}
        if any(grown.values()):
            hot = round(100 * grown["hot"] / grown["updated"], 1) if grown["updated"] else None
            kept = {"dead": now["dead"], "live": now["live"], "bytes": now["bytes"]}
            yield name, grown | {"hot_percent": hot} | kept
