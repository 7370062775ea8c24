"""Postgres for one installation: ours or a given one, migrated, with a login for each side."""

from __future__ import annotations

import secrets
import signal
import socket
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING
from urllib.parse import quote, urlsplit, urlunsplit

import psycopg
import trio

from controller.up import CannotStart
from sql import embedded, logins, queries
from sql.revisions import code_digest, head

if TYPE_CHECKING:
    from controller.up.folder import Folder
    from controller.up.report import Report

PORT_NOTE = "postgres_port"
"""In the state folder: where our own Postgres listened last."""
SIDES = ("controller", "agent", "read")


@dataclass(frozen=True, slots=True)
class Database:
    """A migrated database and who may log in. ``server`` is None when it is not ours to stop."""

    controller_url: str
    agent_url: str
    read_url: str
    server: embedded.Server | None

    async def stop(self, folder: Folder) -> None:
        """Stop our own server; last of all, so that the others can still write."""
        if self.server is not None:
            await trio.to_thread.run_sync(embedded.stop, self.server.process)
            folder.forget_process("postgres")


async def prepare(folder: Folder, given_url: str | None, report: Report) -> Database:
    """Start or reach Postgres, bring it to our schema, make the logins. Raises CannotStart."""
    server = None
    url = given_url
    if url is None:
        report.waiting("starting Postgres")
        server = await trio.to_thread.run_sync(_start, folder)
        url = server.url
        report.done(f"Postgres runs, its data is in {folder.path / 'postgres'}")
    try:
        report.waiting("bringing the database to this version")
        urls = await trio.to_thread.run_sync(partial(_prepare, folder, url))
    except BaseException:
        if server is not None:
            with trio.CancelScope(shield=True):
                await trio.to_thread.run_sync(embedded.stop, server.process)
                folder.forget_process("postgres")
        raise
    report.done("the database is ready")
    return Database(urls["controller"], urls["agent"], urls["read"], server)


def _start(folder: Folder) -> embedded.Server:
    folder.reachable_for_nobody()
    base = folder.path / "postgres"
    try:
        server = embedded.start(base, port=_kept_port(folder))
    except (embedded.EmbeddedPostgresError, OSError) as error:
        hint = "Another Postgres can be named with --database-url."
        if "user does not exist" in str(error):
            hint = f"Postgres wants its user in /etc/passwd; yours has the number only. {hint}"
        raise CannotStart(f"{error}\n{hint}") from error
    folder.remember_process("postgres", server.process.pid)
    (folder.path / PORT_NOTE).write_text(f"{urlsplit(server.url).port}\n")
    return server


def _kept_port(folder: Folder) -> int | None:
    """The port of the last start where it is free: what people noted of it stays true."""
    try:
        port = int((folder.path / PORT_NOTE).read_text())
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as Postgres does
            probe.bind(("127.0.0.1", port))
            return port
    except (OSError, ValueError, OverflowError):
        return None


def _prepare(folder: Folder, url: str) -> dict[str, str]:
    """Upgrade where needed, make the logins; side -> its URL. Blocks."""
    where = shown(url)
    try:
        if not _up_to_date(url):
            # Takes over a second to import, and is needed at the first start only.
            from sql import migrate

            migrate.upgrade(url)
        logins_made = _logins(folder, url)
    except Exception as error:
        # SQLAlchemy wraps the driver's errors, and is not imported here.
        cause = getattr(error, "orig", None) or error
        if isinstance(cause, psycopg.errors.InsufficientPrivilege):
            raise CannotStart(
                f"the user of {where} may not do that: {cause}. The first start needs a user who "
                "may create schemas and roles (CREATEROLE): the database's owner or a superuser"
            ) from error
        if isinstance(cause, psycopg.Error):
            raise CannotStart(
                f"the database {where} cannot be used: {cause}\n"
                "Is it running, and are user, password and database right?"
            ) from error
        raise
    return {side: with_login(url, *login) for side, login in logins_made.items()}


def _up_to_date(url: str) -> bool:
    try:
        with psycopg.connect(url, autocommit=True, connect_timeout=10) as connection:
            found = connection.execute(queries("up")["schema"]).fetchone()
    except psycopg.errors.UndefinedTable:
        return False
    return found == (head(), code_digest())


def _logins(folder: Folder, url: str) -> dict[str, tuple[str, str]]:
    """Makes or re-keys this installation's roles; side -> name and password."""
    found = {}
    with psycopg.connect(url, autocommit=True, connect_timeout=10) as connection:
        for side in SIDES:
            kept = f"password_{side}"
            password = folder.read_secret(kept) or secrets.token_urlsafe(24)
            folder.keep_secret(kept, password)
            name = f"llmgw_{folder.installation()}_{side}"
            logins.ensure(connection, name, f"llmgw_{side}", password)
            found[side] = (name, password)
    return found


def with_login(url: str, name: str, password: str) -> str:
    """The same database for another user."""
    parts = urlsplit(url)
    hosts = parts.netloc.rpartition("@")[2]
    return urlunsplit(parts._replace(netloc=f"{quote(name)}:{quote(password)}@{hosts}"))


def shown(url: str) -> str:
    """A database URL without its password and options. Raises CannotStart for what is none."""
    parts = urlsplit(url)
    if parts.scheme not in ("postgresql", "postgres") or not parts.netloc:
        raise CannotStart(
            "the database URL cannot be read: it is postgresql://user:password@host:port/database"
        )
    user, _, hosts = parts.netloc.rpartition("@")
    name, colon, _ = user.partition(":")
    login = f"{name}{':***' if colon else ''}@" if user else ""
    return f"{parts.scheme}://{login}{hosts}{parts.path}"


LEFT_OVER = {"controller": signal.SIGTERM, "agent": signal.SIGTERM, "postgres": signal.SIGINT}
"""What a killed run may have left, in the order of stopping, with each one's gentle signal."""
