"""Postgres for one installation: ours or a given one, migrated, with a login for each side."""

from __future__ import annotations

import secrets
import signal
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import psycopg
import trio
from sqlalchemy import make_url
from sqlalchemy.exc import ArgumentError, SQLAlchemyError

from controller.up import CannotStart
from sql import embedded, logins, migrate

if TYPE_CHECKING:
    from controller.up.folder import Folder
    from controller.up.report import Report

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
        server = embedded.start(base)
    except (embedded.EmbeddedPostgresError, OSError) as error:
        raise CannotStart(f"{error}\nAnother Postgres can be named with --database-url.") from error
    folder.remember_process("postgres", server.process.pid)
    return server


def _prepare(folder: Folder, url: str) -> dict[str, str]:
    try:
        parsed = make_url(url)
    except ArgumentError:
        raise CannotStart(
            "the database URL cannot be read: it is postgresql://user:password@host:port/database"
        ) from None
    shown = parsed.render_as_string(hide_password=True)
    try:
        migrate.upgrade(url)
        passwords = _logins(folder, url)
    except psycopg.errors.InsufficientPrivilege as error:
        raise CannotStart(
            f"the user of {shown} may not do that: {error}. The first start needs a user who may "
            "create schemas and roles (CREATEROLE), as the database's owner or a superuser"
        ) from error
    except (SQLAlchemyError, psycopg.Error) as error:
        raise CannotStart(
            f"the database {shown} cannot be used: {getattr(error, 'orig', None) or error}\n"
            "Is it running, and are user, password and database right?"
        ) from error
    return {
        side: parsed.set(username=name, password=password).render_as_string(hide_password=False)
        for side, (name, password) in passwords.items()
    }


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


LEFT_OVER = {"controller": signal.SIGTERM, "agent": signal.SIGTERM, "postgres": signal.SIGINT}
"""What a killed run may have left, in the order of stopping, with each one's gentle signal."""
