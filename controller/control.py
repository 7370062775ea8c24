"""The control process: admin API, tick, housekeeping. Apart from the routers, so that no admin
request delays a stream.

Starts without Postgres and becomes ready by itself (H11); opens its port only once everything
inside is in place (H04).
"""

from __future__ import annotations

import importlib
import math
import os
import signal
import socket
import uuid
from functools import partial
from typing import TYPE_CHECKING

import structlog
import trio

from controller import __version__, schema
from controller.catalog.own import OwnFile
from controller.context import ControlContext
from controller.loops import Loops
from controller.reconcile import housekeeping
from controller.reconcile.lease import Lease
from controller.reconcile.tick import Ticker
from controller.reload import reread
from sql import queries
from sql.listen import ListenState, listen
from sql.pool import open_pool

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from controller.config import Settings
    from controller.loops import Loop
    from sql.pool import Pool

TICK_OVERDUE_S = 15.0
HOUSEKEEPING_OVERDUE_S = 120.0
RETRY_S = 1.0
log = structlog.get_logger()


async def run(settings: Settings, runtime: Path, read: Callable[[], Settings]) -> None:
    """Serve until SIGTERM or SIGINT. Raises OSError when the admin port cannot be had.

    ``read`` reads the configuration anew, at SIGHUP.
    """
    context = ControlContext(settings, uuid.uuid4(), Loops(), ListenState(), runtime)
    stop = trio.Event()
    reload, reloads = trio.open_memory_channel[None](1)
    async with trio.open_nursery() as nursery:
        await nursery.start(_signals, context, read, stop, reload)
        if settings.database is None:
            await _serve(context, stop)
        else:
            async with open_pool(settings.database, "llmgw control") as pool:
                context.pool = pool
                async with trio.open_nursery() as duties:
                    _start_duties(context, pool, duties, reloads)
                    duties.start_soon(_resign, context, stop)
                    await _serve(context, stop)
                    duties.cancel_scope.cancel()
        nursery.cancel_scope.cancel()


async def _resign(context: ControlContext, stop: trio.Event) -> None:
    """Gives our duties back before the admin port closes, which may take APP_END_S."""
    await stop.wait()
    async with trio.open_nursery() as nursery:
        for lease in context.leases.values():
            nursery.start_soon(lease.resign)


async def _signals(
    context: ControlContext,
    read: Callable[[], Settings],
    stop: trio.Event,
    reload: trio.MemorySendChannel[None],
    task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
) -> None:
    """SIGHUP reloads configuration and catalog, SIGTERM and SIGINT stop."""
    with trio.open_signal_receiver(signal.SIGTERM, signal.SIGINT, signal.SIGHUP) as numbers:
        task_status.started()
        async for number in numbers:
            log.info("signal", name=signal.Signals(number).name)
            if number != signal.SIGHUP:
                stop.set()
                continue
            context.config = await reread(context.config, read)
            try:
                reload.send_nowait(None)
            except trio.WouldBlock:
                pass  # a reload is due already


async def _serve(context: ControlContext, stop: trio.Event) -> None:
    """The admin port, until ``stop``. Its libraries load in a thread: the tick need not wait."""
    admin = await trio.to_thread.run_sync(importlib.import_module, "controller.admin")
    await admin.serve(context, stop)


def _start_duties(
    context: ControlContext,
    pool: Pool,
    nursery: trio.Nursery,
    reloads: trio.MemoryReceiveChannel[None],
) -> None:
    joined = trio.Event()
    for duty in ("tick", "housekeeping"):
        context.leases[duty] = Lease(pool, context.id, duty, context.listening)
    ticker = context.ticker = Ticker(pool, context.leases["tick"])

    async def tick(loop: Loop) -> None:
        await joined.wait()
        await ticker.run(loop)

    own = OwnFile(pool, context.id, socket.gethostname(), lambda: context.config.catalog)

    async def catalog(loop: Loop) -> None:
        await joined.wait()
        await own.run(loop, reloads)

    async def housekeep(loop: Loop) -> None:
        await joined.wait()
        await housekeeping.run(pool, context.leases["housekeeping"], loop)

    presence = partial(_presence, context, pool, joined)
    loops = context.loops
    nursery.start_soon(loops.run, loops.add("presence", math.inf), presence)
    nursery.start_soon(loops.run, loops.add("tick", TICK_OVERDUE_S), tick)
    nursery.start_soon(loops.run, loops.add("housekeeping", HOUSEKEEPING_OVERDUE_S), housekeep)
    nursery.start_soon(loops.run, loops.add("catalog", math.inf), catalog)


async def _presence(context: ControlContext, pool: Pool, joined: trio.Event, loop: Loop) -> None:
    """Schema, registration, then LISTEN for ever. Raises sql.errors; the loop tries again."""
    context.schema = await schema.check(pool, context.config.migrate_url)
    if context.schema != "ok":
        log.warning("not ready", reason=context.schema)
        await trio.sleep(RETRY_S)
        return
    number = await pool.fetchval(
        queries("control")["join"], context.id, "control", socket.gethostname(), os.getpid(),
        __version__,
    )  # fmt: skip
    ticker = context.ticker
    assert ticker is not None and context.config.database is not None  # noqa: PT018

    async def connected() -> None:
        loop.succeeded()
        joined.set()
        ticker.wake()

    def lost() -> None:
        for lease in context.leases.values():
            lease.step_down("the presence connection is lost")

    await listen(
        context.config.database, lambda _: ticker.wake(), connected,
        presence=number, state=context.listening, on_lost=lost,
    )  # fmt: skip
