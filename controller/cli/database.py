"""`db`: upgrade and look at the database directly, without a controller."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import click

from controller.cli.failures import Failure

if TYPE_CHECKING:
    from controller.cli.session import Session

SEARCH_PATH = "llmgw,llmgw_core"
CONFIG = "controller.cli.database.config"


@click.group()
@click.option(
    "--config",
    type=click.Path(path_type=Path, dir_okay=False, exists=True),
    help="The controller's llmgw.toml. [LLMGW_DATABASE_URL, else /etc/llmgw/llmgw.toml]",
)
@click.pass_context
def db(ctx: click.Context, config: Path | None) -> None:
    """Upgrade the database, show its state, or open psql on it."""
    ctx.meta[CONFIG] = config


def _url(*, migrating: bool = False) -> str:
    """The database of the given file, of the environment or of the system's file."""
    from controller.config import BadConfig, load
    from sql.settings import URL_VARIABLE, url_from_environment

    path = click.get_current_context().meta[CONFIG]
    found = url_from_environment()
    if path is None and found:
        return found
    try:
        settings = load(path, {})
    except BadConfig as error:
        raise Failure(
            f"no database is named ({error}): set {URL_VARIABLE}=postgresql://user:password@host/"
            "database (never an argument, which every user of the machine can read)"
        ) from None
    if settings.database is None:
        raise Failure("the configuration names no database: set [database] url")
    owner = settings.migrate_url if migrating else None
    return (owner or settings.database.url).get_secret_value()


@db.command()
@click.pass_obj
def upgrade(session: Session) -> None:
    """Bring the database to this program's schema; safe while others do the same."""
    from sql import migrate, revisions

    url = _url(migrating=True)
    revision = _asked(lambda: migrate.upgrade(url))
    newer = revision not in revisions.revisions()
    state = "newer than this program, left alone" if newer else "up to date"
    document = {"revision": revision, "state": state}
    session.out.show(document, lambda: f"The database is at revision {revision}: {state}.")


@db.command()
@click.pass_obj
def status(session: Session) -> None:
    """Show the schema's revision and the server's version."""
    url = _url()
    found = _asked(lambda: _state(url))
    session.out.show(found, lambda: "\n".join(f"{name}: {value}" for name, value in found.items()))


def _state(url: str) -> dict[str, Any]:
    from sqlalchemy import create_engine
    from sqlalchemy.pool import NullPool

    from sql import migrate, revisions

    target = migrate.sqlalchemy_url(url)
    engine = create_engine(target, poolclass=NullPool, connect_args={"connect_timeout": 10})
    with engine.connect() as connection:
        revision = migrate.current(connection)
        version = ".".join(str(part) for part in connection.dialect.server_version_info or ())
    head = revisions.head()
    if revision is None:
        state = "empty: run llmgwctl db upgrade"
    elif revision == head:
        state = "up to date"
    elif revision in revisions.revisions():
        state = "behind this program: run llmgwctl db upgrade"
    else:
        state = "newer than this program"
    at = {"revision": revision} if revision is not None else {}
    return {**at, "program": head, "state": state, "server_version": version}


def _asked(call: Any) -> Any:
    from sqlalchemy.exc import SQLAlchemyError

    try:
        return call()
    except SQLAlchemyError as error:
        said = str(getattr(error, "orig", None) or error).strip().splitlines()
        raise Failure(f"the database refused or cannot be reached: {said[0]}") from error


@db.command(context_settings={"ignore_unknown_options": True, "help_option_names": ["--help"]})
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
@click.pass_obj
def psql(session: Session, arguments: tuple[str, ...]) -> NoReturn:
    """Open psql with our views first in its search path; \\dv lists them. Takes psql's options."""
    session.no_json("and psql has its own output: drop --json (psql has --csv)")
    environment = connection_variables(_url())
    program = _program()
    os.execve(program, [program, *arguments], {**os.environ, **environment})  # noqa: S606


def connection_variables(url: str) -> dict[str, str]:
    """The URL as libpq's variables: an argument would show the password to every user."""
    from psycopg import OperationalError, pq

    try:
        options = pq.Conninfo.parse(url.encode())
    except OperationalError as error:
        raise Failure(f"LLMGW_DATABASE_URL is no Postgres URL: {str(error).strip()}") from None
    given = {o.envvar.decode(): o.val.decode() for o in options if o.envvar and o.val is not None}
    asked = f"{given.get('PGOPTIONS', '')} -c search_path={SEARCH_PATH}"
    return given | {"PGOPTIONS": asked.strip()}


def _program() -> str:
    from sql.embedded import EmbeddedPostgresError, bin_dir

    found = shutil.which("psql")
    if found is not None:
        return found
    try:
        return str(bin_dir() / "psql")
    except EmbeddedPostgresError:
        raise Failure("psql is not installed: add Debian's postgresql-client") from None
