"""Writes the use of each replica and the demand for each model to Postgres, and usage rows.

About once a second, and at once when a model is wanted that has no replica.

Rows (`usage_writer.py`) are forgotten only after the database has them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import trio

from controller.router.clock import monotonic

if TYPE_CHECKING:
    from collections.abc import Mapping

    from controller.router.core import Core
    from controller.router.refresh import Pool
    from controller.router.usage_writer import UsageWriter


class Reporter:
    """One per process."""

    def __init__(
        self, core: Core, pool: Pool, queries: Mapping[str, str], writer: UsageWriter
    ) -> None:
        self._core = core
        self._pool = pool
        self._queries = queries
        self._writer = writer
        self._told: dict[str, float] = {}  # ends of trips that the database knows

    async def run(self) -> None:
        """Report for ever; errors of the database end this call (the supervisor restarts it)."""
        while True:
            await self._writer.flush()
            await self.report_use()
            await self.report_trips()
            with trio.move_on_after(self._core.config.timeouts.flush_s):
                await self._core.waiting.news.wait()

    async def report_use(self) -> None:
        """What runs on every replica that has a row, and what is asked of every model."""
        await self._pool.fetchval(
            self._queries["router_report"], self._core.router_id, self.use(), self.demand()
        )

    async def report_trips(self) -> None:
        """Breakers that opened since the last time; mostly none, and then nothing is asked."""
        now = monotonic()
        tripped = self._core.fleet.tripped(now)
        ends = {pool.place: pool.breaker.until for pool in tripped}
        if ends.items() - self._told.items():
            rows = [
                {
                    "replica_id": pool.id,
                    "place": pool.place,
                    "left_s": pool.breaker.until - now,
                    "pause_s": pool.breaker.pause_s,
                }
                for pool in tripped
            ]
            await self._pool.fetchval(self._queries["router_trips"], self._core.router_id, rows)
        self._told = ends

    def demand(self) -> list[dict[str, Any]]:
        """One row per model that is asked for: waiting, running, and how long ago unfound."""
        wanted = self._core.waiting.wanted()
        rows = []
        for name, counts in self._core.stats.models.items():
            waiting, age_s = self._core.waits(name), wanted.get(name)
            if name and (counts.in_flight or age_s is not None):
                rows.append(
                    {
                        "model": name,
                        "waiting": waiting,
                        "in_flight": counts.in_flight - waiting,
                        "wanted_age_ms": None if age_s is None else int(age_s * 1000),
                    }
                )
        return rows

    def use(self) -> list[dict[str, Any]]:
        """One row per replica, though one that came back has two pools while the old one ends."""
        now = monotonic()
        rows: dict[int, dict[str, Any]] = {}
        for pool in self._core.fleet.everyone():
            if pool.id is None:
                continue  # a static endpoint is nobody's replica
            row = rows.setdefault(pool.id, {"replica_id": pool.id, "in_flight": 0})
            row["in_flight"] += pool.in_flight
            if pool.last_used is not None:
                age_ms = int((now - pool.last_used) * 1000)
                row["last_used_age_ms"] = min(age_ms, row.get("last_used_age_ms", age_ms))
        return list(rows.values())
