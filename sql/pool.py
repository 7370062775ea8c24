"""Postgres for Trio: a pool, transactions, and nothing else knows the driver.

asyncpg speaks asyncio only, so it runs inside trio-asyncio; this module wraps that once. Every call
has a deadline. Callers get sql.errors, never the driver's classes.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, TypeVar

import asyncpg
import orjson
import trio
import trio_asyncio

from sql.errors import translate

if TYPE_CHECKING:
    from sql.settings import DatabaseSettings

T = TypeVar("T")
Record = asyncpg.Record
CLOSE_S = 2.0


def to_json(value: object) -> str:
    """JSON text that jsonb accepts: NUL, which it does not, becomes the replacement character."""
    text = orjson.dumps(value, option=orjson.OPT_NON_STR_KEYS).decode()
    return text.replace("\\u0000", "\\ufffd") if "\\u0000" in text else text


async def prepare(connection: asyncpg.Connection[Any]) -> None:
    """Run on each new connection (asyncio side): jsonb as Python values."""
    for kind in ("json", "jsonb"):
        await connection.set_type_codec(
            kind, encoder=to_json, decoder=orjson.loads, schema="pg_catalog"
        )


def connect_arguments(settings: DatabaseSettings, application: str) -> dict[str, Any]:
    """Arguments that pool and listener share."""
    return {
        "dsn": settings.url.get_secret_value(),
        "timeout": settings.connect_timeout_s,
        "command_timeout": settings.command_timeout_s,
        "statement_cache_size": 100 if settings.prepared_statements else 0,
        "server_settings": {"application_name": application},
        "target_session_attrs": "read-write",
    }


async def on_asyncio(call: Callable[[], Awaitable[T]], deadline_s: float) -> T:
    """Run one driver call under Trio with a last deadline; raises sql.errors."""
    try:
        with trio.fail_after(deadline_s):
            result: T = await trio_asyncio.aio_as_trio(call)()
            return result
    except trio.TooSlowError as error:
        raise translate(TimeoutError()) from error  # type: ignore[misc]
    except Exception as error:
        # A call that was given up ends as cancelled, whatever its clean-up ran into meanwhile.
        await trio.lowlevel.checkpoint_if_cancelled()
        known = translate(error)
        if known is None:
            raise
        raise known from error


class Connection:
    """One connection inside a transaction; the same verbs as Pool."""

    def __init__(self, raw: Any, timeout_s: float) -> None:
        self._raw = raw
        self._timeout_s = timeout_s

    async def _call(self, verb: str, query: str, args: tuple[object, ...]) -> Any:
        return await on_asyncio(
            lambda: getattr(self._raw, verb)(query, *args, timeout=self._timeout_s),
            self._timeout_s + 1,
        )

    async def fetch(self, query: str, *args: object) -> list[Record]:
        """All rows."""
        rows: list[Record] = await self._call("fetch", query, args)
        return rows

    async def fetchrow(self, query: str, *args: object) -> Record | None:
        """The first row, or None."""
        row: Record | None = await self._call("fetchrow", query, args)
        return row

    async def fetchval(self, query: str, *args: object) -> Any:
        """The first column of the first row, or None."""
        return await self._call("fetchval", query, args)

    async def execute(self, query: str, *args: object) -> str:
        """Runs a statement; returns its command tag."""
        tag: str = await self._call("execute", query, args)
        return tag


class Pool:
    """Connections for short calls: each is held for one statement or one transaction only."""

    def __init__(self, raw: Any, settings: DatabaseSettings) -> None:
        self._raw = raw
        self.settings = settings

    async def _call(
        self, verb: str, query: str, args: tuple[object, ...], timeout_s: float | None
    ) -> Any:
        limit = timeout_s or self.settings.command_timeout_s

        async def call() -> Any:
            async with self._raw.acquire(timeout=limit) as connection:
                try:
                    return await getattr(connection, verb)(query, *args, timeout=limit)
                except (asyncio.CancelledError, TimeoutError):
                    connection.terminate()  # an answer may be under way still, or nobody is there
                    raise

        return await on_asyncio(call, 2 * limit + self.settings.connect_timeout_s)

    async def fetch(
        self, query: str, *args: object, timeout_s: float | None = None
    ) -> list[Record]:
        """All rows."""
        rows: list[Record] = await self._call("fetch", query, args, timeout_s)
        return rows

    async def fetchrow(
        self, query: str, *args: object, timeout_s: float | None = None
    ) -> Record | None:
        """The first row, or None."""
        row: Record | None = await self._call("fetchrow", query, args, timeout_s)
        return row

    async def fetchval(self, query: str, *args: object, timeout_s: float | None = None) -> Any:
        """The first column of the first row, or None."""
        return await self._call("fetchval", query, args, timeout_s)

    async def execute(self, query: str, *args: object, timeout_s: float | None = None) -> str:
        """Runs a statement; returns its command tag."""
        tag: str = await self._call("execute", query, args, timeout_s)
        return tag

    @asynccontextmanager
    async def transaction(
        self, *, isolation: str | None = None, readonly: bool = False, rollback: bool = False
    ) -> AsyncIterator[Connection]:
        """One transaction; ``rollback=True`` never commits (dry runs).

        Leaving by an exception rolls back. The connection goes back within CLOSE_S or is cut.
        """
        limit = self.settings.command_timeout_s
        raw = await on_asyncio(
            lambda: self._raw.acquire(timeout=limit), limit + self.settings.connect_timeout_s
        )
        over = False
        try:
            begun = raw.transaction(isolation=isolation, readonly=readonly)
            await on_asyncio(begun.start, limit)
            try:
                yield Connection(raw, limit)
            except BaseException:
                over = await self._end(begun.rollback)
                raise
            await on_asyncio(begun.rollback if rollback else begun.commit, limit)
            over = True
        finally:
            if not over:
                raw.terminate()  # whatever was begun ends with it
            await self._end(lambda: self._raw.release(raw, timeout=CLOSE_S))

    async def _end(self, call: Callable[[], Awaitable[Any]]) -> bool:
        """Whether it ended well; an error means that the connection is lost."""
        with trio.CancelScope(shield=True):
            try:
                await on_asyncio(call, 2 * CLOSE_S)
            except Exception:
                return False
        return True

    def statistics(self) -> dict[str, int]:
        """Connections open, idle and allowed, for metrics."""
        return {
            "open": self._raw.get_size(),
            "idle": self._raw.get_idle_size(),
            "allowed": self._raw.get_max_size(),
        }


@asynccontextmanager
async def asyncio_host() -> AsyncIterator[None]:
    """The asyncio loop that the driver lives in; the one around us when there is one already."""
    if trio_asyncio.current_loop.get(None) is not None:
        yield
        return
    async with trio_asyncio.open_loop() as loop:
        loop.set_exception_handler(_abandoned)
        yield


def _abandoned(loop: Any, context: dict[str, Any]) -> None:
    """Called for errors that nobody waits for; trio-asyncio's own handler ends the process then.

    A call that was given up leaves the driver's release of its connection behind, which fails in
    its turn when Postgres does not answer: the connection is terminated, the caller has been told.
    """
    error = context.get("exception")
    if error is None or translate(error) is None:
        loop.default_exception_handler(context)


@asynccontextmanager
async def open_pool(settings: DatabaseSettings, application: str = "llmgw") -> AsyncIterator[Pool]:
    """A pool for the tasks inside the block. Opens no connection yet: Postgres may still be away.

    Tasks that use the pool or sql.listen must start inside the block: they need its asyncio loop.
    """
    async with asyncio_host():
        raw = asyncpg.create_pool(
            min_size=0,
            max_size=settings.pool_size,
            max_inactive_connection_lifetime=60,
            init=prepare,
            reset=_as_it_is,
            **connect_arguments(settings, application),
        )
        await on_asyncio(lambda: _opened(raw), settings.connect_timeout_s)
        try:
            yield Pool(raw, settings)
        finally:
            with trio.CancelScope(shield=True):
                await _close(raw)


async def _as_it_is(connection: Any) -> None:
    """Nothing is reset between two calls: none of ours leaves state in a session (settings are
    local to a transaction, locks too), and the driver's reset is a second round trip for each call.
    A transaction that is open still is rolled back by the driver before this."""


async def _opened(raw: Any) -> Any:
    return await raw


async def _close(raw: Any) -> None:
    try:
        with trio.fail_after(CLOSE_S):
            await trio_asyncio.aio_as_trio(raw.close)()
    except Exception:  # nobody answers a goodbye any more: whoever leaves must not fail for it
        raw.terminate()
