"""The control process: admin API, tick, housekeeping. Apart from the routers, so that no admin
request delays a stream.

Starts without Postgres and becomes ready by itself (H11); opens its port only once everything
inside is in place (H04).
"""

from __future__ import annotations

import math
import os
import signal
import socket
import uuid
from functools import partial
from typing import TYPE_CHECKING

import structlog
import trio
from hypercorn.config import Config as HypercornConfig
from hypercorn.trio import serve
from quart import Response

from controller import __version__, health, schema
from controller.api.server import make_app
from controller.catalog.apply import apply_file
from controller.catalog.faults import CatalogError
from controller.config import host_port
from controller.context import ControlContext
from controller.loops import Loops
from controller.metrics import page
from controller.reconcile import housekeeping
from controller.reconcile.lease import Lease
from controller.reconcile.tick import Ticker
from sql import queries
from sql.errors import DatabaseError
from sql.listen import ListenState, listen
from sql.pool import open_pool

if TYPE_CHECKING:
    from pathlib import Path

    from quart_trio import QuartTrio

    from controller.config import Settings
    from controller.loops import Loop
    from sql.pool import Pool

TICK_OVERDUE_S = 15.0
HOUSEKEEPING_OVERDUE_S = 120.0
RETRY_S = 1.0
APP_END_S = 2
"""hypercorn waits this long at the end even for a connection on which nobody asks anything."""

log = structlog.get_logger()


async def run(settings: Settings, runtime: Path) -> None:
    """Serve until SIGTERM or SIGINT. Raises OSError when the admin port cannot be had."""
    context = ControlContext(settings, uuid.uuid4(), Loops(), ListenState(), runtime)
    stop = trio.Event()
    reload, reloads = trio.open_memory_channel[None](1)
    async with trio.open_nursery() as nursery:
        await nursery.start(_signals, stop, reload)
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
    stop: trio.Event,
    reload: trio.MemorySendChannel[None],
    task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
) -> None:
    """SIGHUP reloads the catalog, SIGTERM and SIGINT stop."""
    with trio.open_signal_receiver(signal.SIGTERM, signal.SIGINT, signal.SIGHUP) as numbers:
        task_status.started()
        async for number in numbers:
            log.info("signal", name=signal.Signals(number).name)
            if number != signal.SIGHUP:
                stop.set()
                continue
            try:
                reload.send_nowait(None)
            except trio.WouldBlock:
                pass  # a reload is due already


async def _serve(context: ControlContext, stop: trio.Event) -> None:
    """The admin port, until ``stop`` and the end of what it still answers."""
    app = make_app(context)
    _add_pages(app, context)
    config = HypercornConfig()
    host, port = host_port(context.config.admin_listen)
    config.bind = [f"[{host}]:{port}" if ":" in host else f"{host}:{port}"]
    config.graceful_timeout = config.shutdown_timeout = APP_END_S
    config.accesslog = config.errorlog = None
    if context.config.admin_tls_cert is not None:
        config.certfile = str(context.config.admin_tls_cert)
        config.keyfile = str(context.config.admin_tls_key)
    async with trio.open_nursery() as nursery:
        await nursery.start(partial(serve, app, config, shutdown_trigger=stop.wait))
        log.info("admin port serves", address=context.config.admin_listen)


def _add_pages(app: QuartTrio, context: ControlContext) -> None:
    """What machines ask: health, readiness, metrics."""

    @app.get("/healthz")
    async def healthz() -> Response:
        return Response("ok\n", content_type="text/plain")

    @app.get("/readyz")
    async def readyz() -> Response:
        reasons = await health.reasons(context)
        body = "".join(f"{reason}\n" for reason in reasons) or "ready\n"
        return Response(body, 503 if reasons else 200, content_type="text/plain; charset=utf-8")

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(await page.render(context), content_type="text/plain; version=0.0.4")


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

    async def housekeep(loop: Loop) -> None:
        await joined.wait()
        await housekeeping.run(pool, context.leases["housekeeping"], loop)

    presence = partial(_presence, context, pool, joined)
    catalog = partial(_catalog, context, pool, joined, reloads)
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


async def _catalog(
    context: ControlContext,
    pool: Pool,
    joined: trio.Event,
    reloads: trio.MemoryReceiveChannel[None],
    loop: Loop,
) -> None:
    """Apply the catalog file at start and at SIGHUP; what is wrong with it is told and left."""
    await joined.wait()
    while True:
        if context.config.catalog is not None:
            await _apply(context.config.catalog, pool)
        loop.succeeded()
        await reloads.receive()


async def _apply(path: Path, pool: Pool) -> None:
    try:
        changes = await apply_file(pool, path, f"catalog file {path}")
    except (CatalogError, DatabaseError, OSError) as error:
        log.warning("the catalog was not applied", file=str(path), error=str(error))
        return
    news = [f"{c.action} {c.kind} {c.name}" for c in changes if c.action != "unchanged"]
    log.info("catalog applied", file=str(path), changes=news)
