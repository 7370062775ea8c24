"""The router process: settings in, the reactor of controller/router run until SIGTERM."""

from __future__ import annotations

import math
import os
import socket
import uuid
from dataclasses import replace
from math import ceil
from typing import TYPE_CHECKING

import structlog

from controller import __version__
from controller.config import host_port
from controller.descriptors import clients_for
from controller.endpoint import endpoint
from controller.reload import reread
from controller.router.access_log import STDOUT
from controller.router.breaker import BreakerRules
from controller.router.config import (
    MIB,
    Limits,
    Retries,
    RouterConfig,
    StaticKey,
    Timeouts,
    Watching,
)
from controller.router.server import run_router
from sql import queries
from sql.listen import listen
from sql.pool import open_pool

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from controller.config import Settings
    from controller.router.config import StaticEndpoint
    from sql.pool import Pool

POOL_SIZE = 4
"""Refresh, report, keys that are looked up, and allowances: a router asks for little else."""

log = structlog.get_logger(__name__)


def router_config(settings: Settings, runtime: Path, worker: int, name: str) -> RouterConfig:
    """What one router process is told."""
    host, port = host_port(settings.listen)
    times, bounds = settings.timeouts, settings.limits
    keys = (StaticKey(k.id, k.secret.get_secret_value(), k.models, k.weight) for k in settings.keys)
    return RouterConfig(
        id=name,
        host=host,
        port=port,
        worker=worker,
        spool=(settings.state_dir or runtime) / "spool",
        stats_socket=str(runtime / f"router-{worker}.sock"),
        endpoints=tuple(_fixed(text, settings) for text in settings.endpoints),
        keys=tuple(keys),
        cors=frozenset(settings.cors),
        revoked_streams=settings.revoked_streams,
        without_database=settings.allowances.unavailable,
        access_log=_log_of(settings.access_log),
        access_log_sample=0.0 if settings.access_log == "errors" else settings.access_log_sample,
        tls_cert=settings.tls_cert,
        tls_key=settings.tls_key,
        scoring=settings.scoring,
        watching=Watching(settings.replicas.metrics, settings.replicas.health),
        breaker=BreakerRules(
            failures_in_row=settings.replicas.failures,
            pause_s=settings.replicas.pause,
            longest_pause_s=max(settings.replicas.pause, settings.replicas.longest_pause),
        ),
        limits=Limits(
            body_bytes=bounds.body * MIB,
            inflated_bytes=bounds.inflated_body * MIB,
            connections=bounds.connections,
            waiting=bounds.waiting,
            queue=bounds.queue,
            answer_tokens=settings.allowances.answer_tokens,
            spool_bytes=bounds.spool * MIB,
        ),
        retries=Retries(settings.retries.attempts, settings.retries.ratio, settings.retries.floor),
        aliases=tuple(settings.aliases.items()),
        fallbacks=tuple(settings.fallbacks.items()),
        fallback_on=frozenset(settings.fallback_on),
        timeouts=Timeouts(
            connect_s=times.connect,
            headers_s=times.headers,
            first_token_s=times.first_token,
            idle_s=times.idle,
            total_s=times.total,
            wake_s=times.wake,
            queue_s=times.queue,
            comment_s=times.comment or math.inf,
            drain_s=settings.drain,
        ),
    )


def _fixed(text: str, settings: Settings) -> StaticEndpoint:
    """With what each of our processes sends it at once: together its depth, and nobody nothing."""
    fixed = endpoint(text)
    depth = None if fixed.depth is None else ceil(fixed.depth / settings.workers)
    return replace(fixed, depth=depth, key_file=settings.endpoint_keys.get(fixed.id))


def _log_of(setting: str) -> str | None:
    return {"off": None, "errors": STDOUT}.get(setting, setting)


async def run(settings: Settings, runtime: Path, worker: int, read: Callable[[], Settings]) -> None:
    """Route until SIGTERM. Raises OSError when the client port cannot be had.

    ``read`` reads the configuration anew, at SIGHUP.
    """
    in_force = settings

    async def reload() -> None:
        nonlocal in_force
        in_force = await reread(in_force, read)

    name = uuid.uuid4()
    config = router_config(settings, runtime, worker, str(name))
    connections = clients_for(config.limits.connections)
    config = replace(config, limits=replace(config.limits, connections=connections))
    if settings.database is None:
        await run_router(config, reload=reload)
        return
    if settings.state_dir is None and worker == 0:
        log.warning("usage rows that wait for Postgres do not outlive us: set state_dir")
    database = settings.database.model_copy(update={"pool_size": POOL_SIZE})
    async with open_pool(database, "llmgw router") as pool:

        async def listening(on_hint: Callable[[str], None], on_connect: Callable[[], None]) -> None:
            number = await _join(pool, name)

            async def connected() -> None:
                on_connect()

            await listen(
                database, on_hint, connected, presence=number, application="llmgw router listen"
            )

        await run_router(config, pool, queries("router"), listening, reload=reload)


async def _join(pool: Pool, name: uuid.UUID) -> int:
    """Register this process; raises sql.errors, and the router's supervisor tries again."""
    number: int = await pool.fetchval(
        queries("control")["join"], name, "router", socket.gethostname(), os.getpid(), __version__
    )
    return number
