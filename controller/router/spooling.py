"""Opens the spool of this process once the database is known, and settles what dead ones left.

It is open before any key is known, so that no request of a key ends without it.

The spool's files say whose rows they hold and for which database: another one's are left alone.
"""

from __future__ import annotations

import uuid
from typing import TYPE_CHECKING

import structlog
import trio

from controller.router.leftovers import Leftovers
from controller.router.segment import Owner
from controller.router.spool import Spool

if TYPE_CHECKING:
    from collections.abc import Mapping

    from controller.router.core import Core
    from controller.router.refresh import Pool
    from controller.router.usage_writer import UsageWriter

FIRST_S = 3.0
"""For a disk to give the first file, with two tries more should one fail; then rows wait in memory
until it does."""
LOOK_S = 30.0
"""Routers of other controllers on this machine die too."""

log = structlog.get_logger(__name__)


class Spooling:
    """The spool of one process, in a folder that all routers of the machine share, if any."""

    def __init__(
        self,
        core: Core,
        pool: Pool,
        queries: Mapping[str, str],
        writer: UsageWriter,
    ) -> None:
        self._core = core
        self.writer = writer
        self._folder = core.config.spool
        self._pool = pool
        self._queries = queries
        self._spool: Spool | None = None
        self._opened = trio.Event()
        self._told = False  # that there is no folder

    async def open(self) -> None:
        """Have a file for the first row, or know that the disk gives none now; once. Raises
        sql.errors."""
        if self._folder is None or self._spool is not None:
            return
        database = uuid.UUID(str(await self._pool.fetchval(self._queries["usage_database"])))
        try:
            await trio.Path(self._folder).mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            if not self._told:
                log.warning("usage rows wait in memory only: no folder", error=str(error))
            self._told = True
            return  # the next refresh tries again
        owner = Owner(uuid.UUID(self._core.router_id), database)
        self._spool = Spool(self._folder, owner, self._core.config.limits.spool_bytes)
        self._core.usage.spool = self._spool
        self._opened.set()
        with trio.move_on_after(FIRST_S):
            await self._spool.ready.wait()

    async def run(self) -> None:
        """Provide files for ever, from `open` on."""
        await self._opened.wait()
        assert self._spool is not None
        await self._spool.run()

    async def settle(self) -> None:
        """Write what dead routers left, for ever; errors of the database end this call."""
        await self._opened.wait()
        assert self._spool is not None
        leftovers = Leftovers(self._spool.folder, self._spool.owner.database, self._write)
        while True:
            await leftovers.settle()
            self._core.stats.usage_row("damaged", leftovers.damaged)
            leftovers.damaged = 0
            await trio.sleep(LOOK_S)

    async def _write(self, router: uuid.UUID, records: list[bytes]) -> None:
        await self.writer.write(str(router), records)

    def close(self) -> None:
        """Leave: rows that are not written yet wait on disk for the next router."""
        if self._spool is not None:
            self._core.usage.spool = None
            self._spool.close()
