"""Keeps routes and keys in memory equal to Postgres: on every hint, and by polling.

When the database is away the last good table and keys stay in force. Static endpoints from the
configuration are merged in each time.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import structlog
import trio

from controller.router.addresses import Addresses
from controller.router.auth import static_keys
from controller.router.clock import monotonic
from controller.router.table import RouteTable, from_rows, merged
from sql.errors import DatabaseError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from controller.router.core import Core

FIRST_AGAIN_S = 0.3
"""Between tries of the first refresh: until it is done keys get 503."""

log = structlog.get_logger(__name__)


class Pool(Protocol):
    """What we use of `sql.pool`."""

    async def fetch(self, sql: str, *args: Any) -> list[Any]: ...

    async def fetchval(self, sql: str, *args: Any) -> Any: ...


class Refresher:
    """Reads what the router needs to know; one per process."""

    def __init__(self, core: Core, pool: Pool | None, queries: Mapping[str, str]) -> None:
        self._core = core
        self._pool = pool
        self._queries = queries
        self._changed = trio.Event()
        self._addresses = Addresses(core)
        self._rows = RouteTable()  # what the database said last
        self._trips_read = False
        self._peeked: int | None = None
        self._one_at_a_time = trio.Lock()

    def hint(self, _payload: str = "") -> None:
        """Something changed, or the listening connection is new: read everything soon."""
        self._changed.set()

    async def run(self) -> None:
        """Refresh for ever; errors of the database end this call (the supervisor restarts it)."""
        await self._first()
        while True:
            self._changed = trio.Event()
            await self.refresh()
            await self._news()

    async def _first(self) -> None:
        """The database may be away for long when we start: look for it often."""
        said = False
        while self._core.table_loaded_at is None:
            try:
                await self.refresh()
            except DatabaseError as error:
                if not said:
                    log.warning("nothing was read yet, trying again", error=repr(error))
                said = True
                await trio.sleep(FIRST_AGAIN_S)

    async def _news(self) -> None:
        """Wait until there is something to read: a hint, a changed replica, or it is time.

        Notifications may be dead and nobody knows yet, so replicas are looked at besides.
        """
        times = self._core.config.timeouts
        until = trio.current_time() + times.refresh_s
        while (left := until - trio.current_time()) > 0:
            with trio.move_on_after(min(times.peek_s, left)):
                await self._changed.wait()
                return
            if self._pool is not None:
                peeked = await self._pool.fetchval(self._queries["route_peek"])
                if peeked != self._peeked:
                    return

    async def refresh(self) -> None:
        """One full read, then one swap."""
        if self._pool is None:
            await self.configured()
        else:
            await self._read(self._pool)
        self._core.table_loaded_at = monotonic()

    async def configured(self) -> None:
        """Take over what the configuration names; it serves while the database is away."""
        self._core.keys.fix(static_keys(self._core.config.keys))
        await self.install()

    async def _read(self, pool: Pool) -> None:
        # The clock at once: what is asked in between would make it late, and keys good for longer.
        self._core.keys.set_clock(float(await pool.fetchval(self._queries["route_now"])))
        self._peeked = await pool.fetchval(self._queries["route_peek"])  # before what it is of
        if self._core.asking is not None:
            await self._core.asking.read()  # before the keys that they hold for
        if self._core.spooling is not None:
            await self._core.spooling.open()  # before the requests of keys
        young = self._core.table_loaded_at is None
        if self._core.key_reader is not None and not young:
            await self._core.key_reader.refresh()
        models = await pool.fetch(self._queries["route_models"])
        replicas = await pool.fetch(self._queries["route_replicas"], self._core.router_id)
        waited_for = self._core.waiting.waited_for()
        delays: list[Any] = []
        if waited_for:
            delays = await pool.fetch(self._queries["route_waking"], waited_for)
        self._rows = from_rows(models, replicas)
        await self.install()
        self._core.waiting.told(delays)
        if not self._trips_read:
            self._core.fleet.resume(await pool.fetch(self._queries["route_trips"]))
            self._trips_read = True
        if self._core.key_reader is not None and young:
            await self._core.key_reader.refresh()  # last: its requests find all that they need

    async def follow(self) -> None:
        """Look again for endpoints that are nowhere or fail, for ever."""
        await self._addresses.run(self.install)

    async def install(self) -> None:
        """Put routes in force: the database's last ones, and those to static endpoints."""
        async with self._one_at_a_time:
            table = merged(self._rows, self._core.statics.table())
            wanted = {replica.endpoint for model in table.models for replica in model.replicas}
            self._core.fleet.swap(table, await self._addresses.of(wanted))
            self._core.waiting.release()
            self._core.admission.release()
