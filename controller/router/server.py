"""Runs one router process: listener, reactor and the background loops, until told to stop.

Stopping: no new connections, requests in flight finish (bounded), usage is flushed, return.
"""

from __future__ import annotations

import gc
import os
import signal
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from random import Random, SystemRandom
from typing import TYPE_CHECKING, Any

import orjson
import structlog
import trio

from controller.router.access_line import Lines
from controller.router.access_log import AccessLog
from controller.router.asking import Asking
from controller.router.client import ClientConnection
from controller.router.clock import monotonic
from controller.router.core import COMPILED, Core
from controller.router.errors import draining
from controller.router.key_reader import KeyReader
from controller.router.listener import Listener, bind
from controller.router.refresh import Refresher
from controller.router.report import Reporter
from controller.router.signals import Signals
from controller.router.spooling import Spooling
from controller.router.stored import StoredLog
from controller.router.table import from_static
from controller.router.usage_writer import UsageWriter

if TYPE_CHECKING:
    import socket
    from collections.abc import Awaitable, Callable, Mapping

    from controller.router.config import RouterConfig
    from controller.router.refresh import Pool
    from controller.router.tls import Certificate

    Listen = Callable[[Callable[[str], None], Callable[[], None]], Awaitable[None]]

log = structlog.get_logger(__name__)

BACKOFF_MIN_S, BACKOFF_MAX_S = 0.1, 5.0
LAST_FLUSH_S = 5.0
KEPT_ROWS = 1000
STATS_S = 5.0  # one client of the stats socket


@dataclass(frozen=True)
class Database:
    """How this process reaches Postgres, if at all."""

    pool: Pool | None
    queries: Mapping[str, str]
    listen: Listen | None


class Running:
    """A started router: its port, what it shares, and the way to stop it."""

    def __init__(
        self,
        core: Core,
        listener: Listener,
        certificate: Certificate | None,
        install: Callable[[], Awaitable[None]],
        reload: Callable[[], Awaitable[None]] | None,
    ) -> None:
        self.core = core
        self._reload = reload
        self._certificate = certificate
        self._install = install
        self.reloads = 0
        self.port = listener.port
        self._stop = trio.Event()

    def stop(self) -> None:
        """Begin to drain; `run_router` returns when that is done."""
        self._stop.set()

    async def reload(self) -> None:
        """Read again the configuration and the files that others replace: the certificate, the
        keys of endpoints."""
        if self._reload is not None:
            await self._reload()
        if await self.core.statics.read_keys():
            await self._install()
        if self._certificate is not None:
            try:
                await trio.to_thread.run_sync(self._certificate.read_again)
                log.info("certificate read again")
            except (OSError, ValueError) as error:
                log.warning("the certificate was not taken, the old one stays", error=repr(error))
        self.reloads += 1

    async def stopping(self) -> None:
        await self._stop.wait()


async def run_router(
    config: RouterConfig,
    pool: Pool | None = None,
    queries: Mapping[str, str] | None = None,
    listen: Listen | None = None,
    *,
    reload: Callable[[], Awaitable[None]] | None = None,
    task_status: trio.TaskStatus[Running] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Serve the client port until SIGTERM, SIGINT or `Running.stop`, drain, return.

    `pool` None: static mode, nothing is recorded. `queries`: the texts of `sql/queries/router.sql`
    by name. `listen(on_hint, on_reconnect)` runs for ever and calls back on notifications.
    `reload` is awaited at SIGHUP.
    Raises OSError when the address cannot be bound or the certificate or an endpoint's key not be
    read, ValueError for a bad static endpoint or key.
    """
    from_static(config.endpoints, config.aliases)  # a bad endpoint is told before anything starts
    sock = bind(config.host, config.port, config.backlog)
    async with trio.open_nursery() as nursery:
        if pool is None:  # nobody takes rows away: keep the last few for a look
            limits = replace(config.limits, usage_rows=KEPT_ROWS)
            config = replace(config, limits=limits)
        core = Core(config, nursery)
        try:
            database = Database(pool, queries or {}, listen)
            await _serve(core, sock, database, reload, task_status)
        finally:
            for client in list(core.clients):
                client.crashed()
            core.fleet.close()
            core.reactor.close()
            sock.close()
            nursery.cancel_scope.cancel()


async def _serve(
    core: Core,
    sock: socket.socket,
    database: Database,
    reload: Callable[[], Awaitable[None]] | None,
    task_status: trio.TaskStatus[Running],
) -> None:
    config, pool = core.config, database.pool
    refresher = Refresher(core, pool, database.queries)
    core.keys.open_to_all = pool is None and not config.keys
    if core.keys.open_to_all:
        log.warning("no database and no keys: everybody may use this router")
    await (refresher.refresh() if pool is None else refresher.configured())
    certificate = await trio.to_thread.run_sync(_certificate, config)
    opens = ClientConnection if certificate is None else certificate.open
    listener = Listener(core, sock, opens)
    running = Running(core, listener, certificate, refresher.install, reload)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(core.reactor.run)
        nursery.start_soon(_sweep, core)
        if config.access_log is not None:
            sampling = Random(SystemRandom().getrandbits(64))  # noqa: S311 (a sample, no secret)
            core.access_lines = Lines(config.access_log_sample, sampling, core.stats)
            access_log = AccessLog(config.access_log, core.access_lines)
            nursery.start_soon(supervise, "access log", access_log.run)
        _start_watching(nursery, core, refresher)
        recording = None
        if pool is not None:
            recording = _start_reading(nursery, core, pool, database.queries)
            nursery.start_soon(supervise, "refresh", refresher.run)
        if database.listen is not None:
            listen = partial(database.listen, refresher.hint, refresher.hint)
            nursery.start_soon(supervise, "listen", listen)
        if config.stats_socket is not None:
            await nursery.start(_serve_stats, core, config.stats_socket)
        if config.handle_signals:
            await nursery.start(_signals, running)
        if config.handle_signals:
            _quiet_collector()
        at = {"host": config.host, "port": running.port, "worker": config.worker}
        log.info("router serves", **at, compiled=COMPILED)
        task_status.started(running)
        await running.stopping()
        await _drain(core, listener)
        if recording is not None:
            await _flush_last(core, recording.writer)
        nursery.cancel_scope.cancel()
    if recording is not None:
        recording.close()


def _start_watching(nursery: trio.Nursery, core: Core, refresher: Refresher) -> None:
    """The loops that ask engines how they are, and name servers where."""
    nursery.start_soon(supervise, "signals", Signals(core).run)
    nursery.start_soon(supervise, "names of endpoints", refresher.follow)
    if core.statics.all and core.config.watching.health_s:
        watch = partial(core.statics.run, refresher.install)
        nursery.start_soon(supervise, "static endpoints", watch)


def _start_reading(
    nursery: trio.Nursery, core: Core, pool: Pool, texts: Mapping[str, str]
) -> Spooling:
    """The loops that keep us and the database equal, but for the refresher's."""
    writer = UsageWriter(core, pool, texts)
    core.spooling = spooling = Spooling(core, pool, texts, writer)
    core.stored_log = StoredLog(core.stored, pool, texts)
    core.key_reader = KeyReader(core, pool, texts)
    core.keys.lazy = True
    core.asking = Asking(core, pool, texts)
    nursery.start_soon(supervise, "allowances", core.asking.run)
    nursery.start_soon(supervise, "report", Reporter(core, pool, texts, writer).run)
    nursery.start_soon(supervise, "spool", spooling.run)
    nursery.start_soon(supervise, "spools of dead routers", spooling.settle)
    nursery.start_soon(supervise, "stored answers", core.stored_log.run)
    nursery.start_soon(supervise, "look-ups of keys", core.key_reader.run)
    nursery.start_soon(supervise, "use of keys", core.key_reader.tell_use)
    return spooling


def _quiet_collector() -> None:
    """In a process of our own: what lives for ever is not looked at, and collections are rarer."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)


async def supervise(name: str, loop: Callable[[], Awaitable[Any]]) -> None:
    """Run `loop` for ever: when it ends or fails, say so and start it again after a pause."""
    pause = BACKOFF_MIN_S
    while True:
        began = trio.current_time()
        try:
            await loop()
        except Exception as error:
            # One line, not a traceback: mostly this is the database being away.
            log.warning("loop failed, will be restarted", loop=name, error=repr(error), in_s=pause)
        if trio.current_time() - began > 10 * BACKOFF_MAX_S:
            pause = BACKOFF_MIN_S
        await trio.sleep(pause)
        pause = min(pause * 2, BACKOFF_MAX_S)


async def _sweep(core: Core) -> None:
    while True:
        await trio.sleep(core.deadlines.step)
        await core.reactor.catch_up()  # else our own stall is taken for an engine's or a client's
        try:
            core.deadlines.sweep(monotonic())
            core.admission.look_again()
        except Exception:
            log.exception("a deadline's callback failed")


async def _signals(
    running: Running, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED
) -> None:
    """SIGHUP reads files again, SIGTERM and SIGINT drain.

    A SIGHUP before this was reached ends the process; its supervisor starts another, which reads
    the same files.
    """
    numbers = signal.SIGTERM, signal.SIGINT, signal.SIGHUP
    with trio.open_signal_receiver(*numbers) as signals:
        task_status.started()
        async for number in signals:
            if number == signal.SIGHUP:
                await running.reload()
                continue
            log.info("router drains", signal=signal.Signals(number).name)
            running.stop()


def _certificate(config: RouterConfig) -> Certificate | None:
    if config.tls_cert is None or config.tls_key is None:
        return None
    from controller.router.tls import Certificate  # most routers speak plain HTTP

    return Certificate(config.tls_cert, config.tls_key)


async def _drain(core: Core, listener: Listener) -> None:
    """Let requests in flight finish, those too that lie unread in our sockets, where a close would
    reset them; what is left after the deadline is cut."""
    await core.reactor.catch_up()
    listener.close()
    await core.reactor.catch_up()  # those that it accepted last
    core.draining = True
    with trio.move_on_after(core.config.timeouts.drain_s):
        while core.exchanges or core.clients:
            for client in list(core.clients):
                client.drain()
            await trio.sleep(core.deadlines.step / 2)
    if core.exchanges:
        log.warning("requests cut at the end of the drain", requests=core.exchanges)
    for client in list(core.clients):
        client.cut(draining())


async def _flush_last(core: Core, writer: UsageWriter) -> None:
    with trio.move_on_after(LAST_FLUSH_S):
        try:
            await writer.flush()
            if core.asking is not None:
                await core.asking.leave()  # after the rows: what they cost is no more held
            if core.key_reader is not None:
                await core.key_reader.tell_used()
        except Exception as error:
            log.warning("not all was told to Postgres at the end", error=repr(error))
    if core.usage.spooled:
        log.warning("usage rows wait on disk for the next router", rows=core.usage.spooled)
    if len(core.usage) > core.usage.spooled:
        log.error("usage rows are lost", rows=len(core.usage) - core.usage.spooled)


async def _serve_stats(
    core: Core, path: str, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED
) -> None:
    """Tell the counters, as one JSON document, to everyone who connects to `path`."""
    file = trio.Path(path)
    await file.unlink(missing_ok=True)
    sock = trio.socket.socket(trio.socket.AF_UNIX)
    await sock.bind(path)
    Path(path).chmod(0o600)  # noqa: ASYNC240 (one system call, before anything runs)
    made = Path(path).stat()  # noqa: ASYNC240
    sock.listen(16)

    async def tell(stream: trio.SocketStream) -> None:
        with trio.move_on_after(STATS_S):
            try:
                await stream.send_all(orjson.dumps(core.snapshot()))
            except trio.BrokenResourceError:
                return  # it did not wait for the answer
            finally:
                await trio.aclose_forcefully(stream)

    try:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(trio.serve_listeners, tell, [trio.SocketListener(sock)])
            task_status.started()
    finally:  # the process is leaving; who came after it may have put its own there
        with suppress(FileNotFoundError):
            if os.path.samestat(made, Path(path).stat()):  # noqa: ASYNC240
                Path(path).unlink()  # noqa: ASYNC240
