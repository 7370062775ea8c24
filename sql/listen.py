"""One LISTEN connection of a process, and the presence lock that lives on it.

The connection is never pooled (F02, F04): when it ends, the lock is free and other controllers
see it at once. A NOTIFY is only a hint: after every (re)connect ``on_connect`` reads everything
again (F01).
"""

from __future__ import annotations

import secrets
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import asyncpg
import trio

from sql.errors import DatabaseAway
from sql.pool import CLOSE_S, connect_arguments, on_asyncio, prepare

if TYPE_CHECKING:
    from sql.settings import DatabaseSettings

CHANNEL = "llmgw"
PRESENCE_CLASS = 7719
END_EARLIER = """select pg_terminate_backend(pid) from pg_locks
    where locktype = 'advisory' and classid = $1::int::oid and objid = $2::int::oid and objsubid = 2
    and database = (select oid from pg_database where datname = current_database())"""
PING_S = 5.0
"""A dead channel is noticed within two pings, so under 10 s (F01)."""
RETRY_S = (0.1, 0.2, 0.5, 1.0, 2.0)


@dataclass(slots=True)
class ListenState:
    """What metrics and readiness want to know of the channel. Times are trio.current_time()."""

    connected: bool = False
    heard_at: float | None = None
    connects: int = 0
    error: str | None = None


async def listen(
    settings: DatabaseSettings,
    on_hint: Callable[[str], None],
    on_connect: Callable[[], Awaitable[None]],
    *,
    presence: int | None = None,
    state: ListenState | None = None,
    on_lost: Callable[[], None] | None = None,
    application: str = "llmgw listen",
) -> None:
    """Runs for ever: LISTEN, call ``on_connect``, then ``on_hint(payload)`` per notification.

    Reconnects by itself. ``presence`` is the number of this process's advisory lock.
    Must run inside ``open_pool``'s block, whose asyncio loop it uses.
    """
    state = state or ListenState()
    attempt = 0
    while True:
        connects = state.connects
        try:
            await _session(settings, on_hint, on_connect, on_lost, presence, state, application)
        except DatabaseAway as error:
            state.error = str(error)
        attempt = 0 if state.connects > connects else min(attempt + 1, len(RETRY_S) - 1)
        await trio.sleep(RETRY_S[attempt])


async def _session(
    settings: DatabaseSettings,
    on_hint: Callable[[str], None],
    on_connect: Callable[[], Awaitable[None]],
    on_lost: Callable[[], None] | None,
    presence: int | None,
    state: ListenState,
    application: str,
) -> None:
    ended, heard = trio.Event(), trio.Event()
    ping = f"ping:{secrets.token_hex(4)}"

    def notified(_connection: object, _pid: int, _channel: str, payload: object) -> None:
        nonlocal heard
        state.heard_at = trio.current_time()
        if payload == ping:
            heard.set()
        elif not str(payload).startswith("ping:"):
            on_hint(str(payload))

    limit = settings.command_timeout_s
    raw: Any = await on_asyncio(
        lambda: asyncpg.connect(**connect_arguments(settings, application)),
        settings.connect_timeout_s + 1,
    )
    try:
        raw.add_termination_listener(lambda _: ended.set())
        await on_asyncio(lambda: prepare(raw), limit)
        await on_asyncio(lambda: raw.add_listener(CHANNEL, notified), limit)
        await _take_presence(raw, presence, limit)
        state.connected, state.error = True, None
        state.connects += 1
        state.heard_at = trio.current_time()
        await on_connect()
        while not ended.is_set():
            heard = trio.Event()
            await on_asyncio(lambda: raw.execute("select pg_notify($1, $2)", CHANNEL, ping), limit)
            with trio.move_on_after(PING_S):
                await heard.wait()
            if not heard.is_set():
                raise DatabaseAway(
                    "the LISTEN connection is silent: its own ping did not come back"
                )
            with trio.move_on_after(PING_S):
                await ended.wait()
        raise DatabaseAway("the LISTEN connection ended")
    finally:
        # First the news: closing a dead connection takes seconds.
        was, state.connected = state.connected, False
        if was and on_lost is not None:
            on_lost()
        with trio.CancelScope(shield=True):
            await _close(raw)


async def _take_presence(raw: Any, presence: int | None, limit: float) -> None:
    if presence is None:
        return
    got = await on_asyncio(
        lambda: raw.fetchval("select pg_try_advisory_lock($1, $2)", PRESENCE_CLASS, presence), limit
    )
    if not got:
        # Behind a cut network the server keeps our former connection for hours: end it ourselves.
        await on_asyncio(lambda: raw.fetch(END_EARLIER, PRESENCE_CLASS, presence), limit)
        raise DatabaseAway(
            f"presence lock {presence} is still held by an earlier connection of this process"
        )


async def _close(raw: Any) -> None:
    try:
        await on_asyncio(lambda: raw.close(timeout=CLOSE_S), 2 * CLOSE_S)
    except Exception:
        raw.terminate()
