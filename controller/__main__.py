"""`llmgw-controller`: settings, then one of three roles."""

from __future__ import annotations

import sql.plain_logs  # noqa: F401 - before anything that imports structlog

# isort: split
import errno
import json
import os
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import structlog
import trio

from controller import __version__
from controller.app import UNUSABLE, Supervisor, ask_for_port, die_with_parent
from controller.config import (
    BadConfig,
    Settings,
    host_port,
    lifeline,
    load,
    runtime_dir,
    shown,
)
from controller.log import configure

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

log = structlog.get_logger()


@click.command()
@click.option("--config", "path", type=click.Path(path_type=Path), help="llmgw.toml to read.")
@click.option("--role", type=click.Choice(["all", "control", "router"]), help="Processes to run.")
@click.option("--listen", help="host:port for clients (default :8080).")
@click.option("--admin-listen", help="host:port for the admin API (default 127.0.0.1:9090).")
@click.option("--workers", type=int, help="Router processes on the client port (default 1).")
@click.option("--endpoint", "endpoints", multiple=True, help="id=URL[=model,...], repeatable.")
@click.option("--catalog", type=click.Path(path_type=Path), help="TOML applied at start, SIGHUP.")
@click.option("--log-level", type=click.Choice(["debug", "info", "warning"]))
@click.option("--check-config", is_flag=True, help="Print the effective settings and exit.")
@click.option("--worker", type=int, default=0, hidden=True)
@click.version_option(__version__)
def main(path: Path | None, check_config: bool, worker: int, **flags: Any) -> None:
    """Route requests, place replicas and serve the admin API.

    The database URL comes from LLMGW_DATABASE_URL or llmgw.toml: flags can be read by every user
    of the machine. Without a database, --endpoint serves fixed replicas.
    """
    try:
        settings = load(path, flags)
    except BadConfig as error:
        click.echo(f"llmgw-controller: {error}", err=True)
        sys.exit(2)
    if check_config:
        click.echo(json.dumps(shown(settings), indent=2))
        return
    configure(settings.log_level, role=settings.role, pid=os.getpid())
    sys.exit(_run(settings, worker, partial(load, path, flags)))


def _run(settings: Settings, worker: int, read: Callable[[], Settings]) -> int:
    with runtime_dir(settings) as runtime:
        if settings.role == "all":
            try:
                ask_for_port(*host_port(settings.listen))
            except OSError as error:
                routers = settings.model_copy(update={"role": "router"})
                click.echo(f"llmgw-controller: {_port_trouble(error, routers) or error}", err=True)
                return 1
            return trio.run(Supervisor(settings, read, _arguments(), runtime).run)
        if settings.role == "router" and settings.workers > 1 and lifeline() is None:
            told = "this is one worker of several: --role all starts all of them"
            log.warning(told, workers=settings.workers)
        code = 0
        try:
            trio.run(_alone, settings, _role(settings, runtime, worker, read))
        except* OSError as group:
            said = _port_trouble(_first(group), settings)
            if said is None:  # not about the port: a bug or the machine, and a restart may help
                raise
            click.echo(f"llmgw-controller: {said}", err=True)
            code = UNUSABLE
        return code


def _role(
    settings: Settings, runtime: Path, worker: int, read: Callable[[], Settings]
) -> Callable[[], Awaitable[None]]:
    """What a process of one role does; imported here, so that each loads only its own."""
    if settings.role == "control":
        from controller import control

        return lambda: control.run(settings, runtime, read)
    from controller import route

    return lambda: route.run(settings, runtime, worker, read)


async def _alone(settings: Settings, role: Callable[[], Awaitable[None]]) -> None:
    descriptor = lifeline()
    async with trio.open_nursery() as nursery:
        if descriptor is not None:
            nursery.start_soon(die_with_parent, descriptor)
        await role()
        nursery.cancel_scope.cancel()
    log.info("ended", role=settings.role)


def _first(error: BaseException) -> BaseException:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def _arguments() -> list[str]:
    """Our own flags, which children get before their role."""
    return sys.argv[1:]


def _port_trouble(error: BaseException, settings: Settings) -> str | None:
    """Why the port cannot be had and what to do, or None when the error is about something else."""
    router = settings.role == "router"
    where = settings.listen if router else settings.admin_listen
    flag = "--listen" if router else "--admin-listen"
    number = getattr(error, "errno", None)
    if number == errno.EADDRINUSE:
        return f"{where} is taken by another program; choose another with {flag} host:port"
    if number == errno.EACCES:
        return f"{where} may not be opened by this user; choose a port above 1023 with {flag}"
    if number == errno.EADDRNOTAVAIL:
        return f"{where} is no address of this machine; choose one with {flag} host:port"
    if isinstance(number, int) and number < 0:  # of getaddrinfo
        return f"the host {host_port(where)[0]!r} is not known; check {flag}"
    return None


if __name__ == "__main__":
    main()
