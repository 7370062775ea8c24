"""Hands usage rows to Postgres in batches; ids and times make a repeated write harmless.

A row that Postgres cannot take is found by halving its batch and put aside: else it would keep all
others from being written, for ever.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import structlog
import trio

from sql.errors import BadValue

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from controller.router.core import Core
    from controller.router.refresh import Pool

BATCH_ROWS = 1000
REFUSED = "refused-rows.jsonl"
REFUSED_BYTES = 16 * 1024 * 1024
"""Beyond this, rows that Postgres refuses are only counted."""

log = structlog.get_logger(__name__)


class UsageWriter:
    """One per process."""

    def __init__(self, core: Core, pool: Pool, queries: Mapping[str, str]) -> None:
        self._core = core
        self._pool = pool
        self._queries = queries
        self._one_at_a_time = trio.Lock()

    async def flush(self) -> int:
        """Write the rows that wait now; returns how many. Errors of the database end it."""
        offset = self._core.keys.database_time(0.0)
        if offset is None:
            return 0  # rows need the database's time, and it was not reached yet
        written = 0
        usage = self._core.usage
        async with self._one_at_a_time:
            usage.date(offset)
            while records := usage.batch(BATCH_ROWS):
                await self.write(self._core.router_id, records)
                usage.written()
                written += len(records)
                if len(records) < BATCH_ROWS:
                    break  # what came meanwhile has time until the next second: else it never ends
        return written

    async def write(self, router: str, records: list[bytes]) -> None:
        """Write rows of this router, or of a dead one."""
        text = b"[" + b",".join(records) + b"]"
        try:
            told = await self._pool.fetchval(self._queries["usage_flush"], router, text.decode())
        except BadValue as error:
            half = len(records) // 2
            if half:
                await self.write(router, records[:half])
                await self.write(router, records[half:])
            else:
                await self._put_aside(records[0], error)
            return
        for word in ("written", "unpriced"):
            self._core.stats.usage_row(word, told[word])

    async def _put_aside(self, record: bytes, error: BadValue) -> None:
        self._core.stats.usage_row("refused")
        folder = self._core.config.spool
        log.error(
            "Postgres takes a usage row in no case", error=str(error), kept=folder is not None
        )
        if folder is not None:
            await trio.to_thread.run_sync(_append, folder / REFUSED, record)


def _append(path: Path, record: bytes) -> None:
    """Add a line, unless the file is large or the disk is full: the log and a counter tell."""
    try:
        with path.open("ab") as file:
            if file.tell() < REFUSED_BYTES:
                file.write(record + b"\n")
    except OSError as error:
        log.warning("a refused usage row is not kept", path=str(path), error=str(error))
