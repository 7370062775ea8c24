"""The catalog file of this controller's own configuration: offered at start and at SIGHUP.

Controllers whose files differ must not undo each other's at every restart. So the database knows
what each file held (`catalog_offer_v1`): at start a file is applied when its content is news, or
is in force anyway; at SIGHUP in any case. Who has another one than what is in force is told of.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

import structlog
import trio

from controller.catalog.apply import offer
from controller.catalog.faults import CatalogError
from controller.catalog.reading import read_file
from sql import queries
from sql.errors import Conflict, DatabaseAway, DatabaseError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path
    from uuid import UUID

    from controller.loops import Loop
    from sql.pool import Pool

TELL_S: Final = 60.0
"""So often it is told again: the row of a process that was away for long is made anew."""

log = structlog.get_logger()


@dataclass(slots=True)
class OwnFile:
    """Offers one controller's file, and keeps its row true."""

    pool: Pool
    controller: UUID
    hostname: str
    configured: Callable[[], Path | None]
    told: bool = False
    """An operator's SIGHUP is not carried out yet; outlives an error of the database."""
    _said: tuple[str | None, str | None, str | None] = field(default=(None, None, None), init=False)

    async def run(self, loop: Loop, reloads: trio.MemoryReceiveChannel[None]) -> None:
        """For ever. Raises DatabaseAway and Conflict: the loop tries again."""
        while True:
            await self._offer(self.configured())
            self.told = False
            loop.succeeded()
            await self._wait(reloads)
            self.told = True

    async def _wait(self, reloads: trio.MemoryReceiveChannel[None]) -> None:
        while True:
            with trio.move_on_after(TELL_S):
                await reloads.receive()
                return
            try:
                await self._tell(*self._said)
            except DatabaseError as error:
                log.info("the catalog file was not told again", error=str(error))

    async def _offer(self, path: Path | None) -> None:
        if path is None:
            await self._tell(None, None, None)
            return
        file, digest = str(path), None
        try:
            file = str(await trio.Path(path).absolute())
            catalog = await trio.to_thread.run_sync(read_file, path)
            digest = catalog.digest
            written = await offer(
                self.pool, catalog, file, self.controller, self.hostname, told=self.told
            )
        except (DatabaseAway, Conflict):
            raise
        except (CatalogError, DatabaseError, OSError) as error:
            log.warning("the catalog was not applied", file=file, error=str(error))
            await self._tell(file, digest, str(error))
            return
        self._said = (file, digest, None)
        if written is None:
            log.warning(
                "another catalog file is in force", file=file, digest=digest,
                next="llmgwctl controllers tells which; SIGHUP applies this one",
            )  # fmt: skip
            return
        news = [f"{c.action} {c.kind} {c.name}" for c in written.changes if c.action != "unchanged"]
        log.info("catalog applied", file=file, changes=news)

    async def _tell(self, file: str | None, digest: str | None, error: str | None) -> None:
        """What `llmgw.controllers` shows of us."""
        await self.pool.execute(queries("catalog")["told"], self.controller, file, digest, error)
        self._said = (file, digest, error)
