"""Opens the spool of this process once the database is known, and settles what dead ones left.

The spool's files say whose rows they hold and for which database: another one's are left alone.
"""

from __future__ import annotations

import uuid
from typing import TYPE_CHECKING

import trio

from controller.router.leftovers import Leftovers
from controller.router.segment import Owner
from controller.router.spool import Spool

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from controller.router.core import Core
    from controller.router.refresh import Pool
    from controller.router.usage_writer import UsageWriter

LOOK_S = 30.0
"""Routers of other controllers on this machine die too."""


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

    async def run(self) -> None:
        """Provide files for ever; an error of the database before the first ends this call."""
        if self._folder is None:
            await trio.sleep_forever()
        if self._spool is None:
            self._spool = await self._open(self._folder)
            self._core.usage.spool = self._spool
            self._opened.set()
        await self._spool.run()

    async def _open(self, folder: Path) -> Spool:
        database = uuid.UUID(str(await self._pool.fetchval(self._queries["usage_database"])))
        await trio.Path(folder).mkdir(mode=0o700, parents=True, exist_ok=True)
        owner = Owner(uuid.UUID(self._core.router_id), database)
        return Spool(folder, owner, self._core.config.limits.spool_bytes)

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
