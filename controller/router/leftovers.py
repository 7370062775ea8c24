"""Spools of routers that are dead: their rows are written to Postgres, once, and the files removed.

Whose lock is free is dead; who has the lock settles it. Another database's rows are left alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import structlog
import trio

from controller.router.segment import NoSegment, Segment
from controller.router.spool import SUFFIX

if TYPE_CHECKING:
    import uuid
    from collections.abc import Awaitable, Callable
    from pathlib import Path

    Write = Callable[[uuid.UUID, list[bytes]], Awaitable[None]]

BATCH_ROWS = 1000
DAMAGED = ".damaged"
KEPT_DAMAGED = 10
"""So many files with damaged records are kept for a look; then the oldest go."""

log = structlog.get_logger(__name__)


class Leftovers:
    """What dead routers left in one folder. `write` raises while the database is away."""

    def __init__(self, folder: Path, database: uuid.UUID, write: Write) -> None:
        self._folder = folder
        self._database = database
        self._write = write
        self._told: set[Path] = set()
        self.damaged = 0  # records that were no rows any more

    async def settle(self) -> int:
        """Write what there is; returns how many rows. Raises what `write` raises, and OSError when
        the folder cannot be read; a file that cannot keeps nobody from the others."""
        await trio.to_thread.run_sync(Segment.sweep, self._folder)
        paths = await trio.to_thread.run_sync(lambda: sorted(self._folder.glob(f"*{SUFFIX}")))
        written = 0
        for path in paths:
            try:
                segment = await trio.to_thread.run_sync(Segment.take_over, path)
            except (NoSegment, OSError) as error:  # another user's, for example
                self._tell(path, str(error))
                continue
            if segment is not None:
                written += await self._settle(segment)
        return written

    async def _settle(self, segment: Segment) -> int:
        if segment.owner.database != self._database:
            segment.close()
            self._tell(segment.path, "it is for another database")
            return 0
        written, whole = 0, False
        try:
            while True:
                records, end = await trio.to_thread.run_sync(segment.read, BATCH_ROWS)
                if records:
                    await self._write(segment.owner.router, records)
                segment.acknowledge(end)
                written += len(records)
                if not records:
                    break
            whole = True
        finally:
            if not whole:
                segment.close()
        if written:
            log.info("usage rows of a dead router written", path=str(segment.path), rows=written)
        if segment.damaged:
            self.damaged += len(segment.damaged)
            await trio.to_thread.run_sync(self._put_aside, segment)
        else:
            await trio.to_thread.run_sync(segment.remove)
        return written

    def _put_aside(self, segment: Segment) -> None:
        log.error(
            "a spool held damaged records; its whole ones are written, the file is kept",
            path=str(segment.path), damaged=len(segment.damaged),
        )  # fmt: skip
        segment.path.rename(segment.path.with_suffix(DAMAGED))
        segment.close()
        kept = sorted(self._folder.glob(f"*{DAMAGED}"), key=lambda path: path.stat().st_mtime)
        for path in kept[:-KEPT_DAMAGED]:
            path.unlink(missing_ok=True)

    def _tell(self, path: Path, why: str) -> None:
        if path not in self._told and len(self._told) < 1000:
            self._told.add(path)
            log.warning("a spool of usage rows is left alone", path=str(path), why=why)
