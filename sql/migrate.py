"""Brings a database to this program's schema. Synchronous: run it in a thread.

Any number of controllers may call ``upgrade`` at once: one works, the others wait for its
transaction (F22). A database that is newer than this program is left alone (F23).
"""

from __future__ import annotations

from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING

import psycopg
from alembic.config import Config
from sqlalchemy import URL, create_engine, make_url, text
from sqlalchemy.pool import NullPool

from alembic import command
from sql.revisions import code_digest, code_files, head, revisions

if TYPE_CHECKING:
    from sqlalchemy import Connection

MIGRATION_LOCK = (7720, 1)
JIT_OFF = """do $$ begin
    execute format('alter database %I set jit = off', current_database());
end $$"""
"""Our views are wide and their tables small: compiling takes seconds, running them milliseconds."""


def sqlalchemy_url(url: str) -> URL:
    """The same database for SQLAlchemy, through psycopg."""
    return make_url(url).set(drivername="postgresql+psycopg")


def config() -> Config:
    """Alembic's configuration: scripts beside the repository, or inside the wheel."""
    packaged = Path(str(resources.files("sql"))) / "_alembic"
    found = Config()
    found.set_main_option(
        "script_location",
        str(packaged if packaged.is_dir() else packaged.parent.parent / "alembic"),
    )
    return found


def current(connection: Connection) -> str | None:
    """The database's revision, or None when it is empty."""
    table = connection.execute(
        text("select to_regclass('llmgw_core.alembic_version')::text")
    ).scalar()
    if table is None:
        return None
    revision: str | None = connection.execute(
        text("select version_num from llmgw_core.alembic_version")
    ).scalar()
    return revision


def upgrade(url: str) -> str:
    """Upgrades the database and returns its revision; leaves one that is newer than us alone."""
    engine = create_engine(
        sqlalchemy_url(url), poolclass=NullPool, connect_args={"connect_timeout": 10}
    )
    with engine.connect() as connection, connection.begin():
        connection.execute(
            text(f"select pg_advisory_xact_lock({MIGRATION_LOCK[0]}, {MIGRATION_LOCK[1]})")
        )
        revision = current(connection)
        if revision is not None and revision not in revisions():
            return revision
        if revision == head() and _digest_applied(connection) == code_digest():
            return revision
        # The version table lives in our schema, which the first migration then gives to its owner.
        connection.execute(text("create schema if not exists llmgw_core"))
        settings = config()
        settings.attributes["connection"] = connection
        command.upgrade(settings, "head")
        apply_code(connection)
    return head()


def _digest_applied(connection: Connection) -> str | None:
    found: str | None = connection.execute(
        text("select digest from llmgw_core.applied where name = 'functions and views'")
    ).scalar()
    return found


def run_script(connection: Connection, script: str) -> None:
    """Runs a whole SQL file on the driver: SQLAlchemy would take ``:`` and ``%`` for its own."""
    cursor = connection.connection.cursor()
    try:
        cursor.execute(script)
    finally:
        cursor.close()


def apply_code(connection: Connection) -> None:
    """Re-applies functions and views whole, in the caller's transaction, as the owner role."""
    run_script(connection, "alter table llmgw_core.alembic_version owner to llmgw_owner")
    _let_see_sessions(connection)
    _turn_jit_off(connection)
    run_script(connection, "set local role llmgw_owner")
    functions, views = code_files("functions"), code_files("views")
    for entry in functions:
        run_script(connection, entry.read_text())
    try:
        # In place where that is possible, so that what people granted on views stays.
        with connection.begin_nested():
            for entry in views:
                run_script(connection, entry.read_text())
    except psycopg.Error:
        _drop_views(connection)
        for entry in views:
            run_script(connection, entry.read_text())
    connection.execute(
        text(
            "insert into llmgw_core.applied (name, digest) values ('functions and views', :digest)"
            " on conflict (name) do update set digest = :digest, applied_at = clock_timestamp()"
        ),
        {"digest": code_digest()},
    )
    connection.execute(text("select llmgw_core.partitions_keep_v1(7)"))
    run_script(connection, "reset role")


def _let_see_sessions(connection: Connection) -> None:
    """So that `llmgwctl doctor` names who holds an old snapshot, whatever role that is (F16)."""
    may = "select pg_has_role('llmgw_owner', 'pg_read_all_stats', 'usage')"
    if connection.execute(text(may)).scalar():
        return
    try:
        with connection.begin_nested():
            run_script(connection, "grant pg_read_all_stats to llmgw_owner")
    except psycopg.Error:
        pass  # only a superuser may: the doctor says what is not seen, and what to do


def _turn_jit_off(connection: Connection) -> None:
    try:
        with connection.begin_nested():
            run_script(connection, JIT_OFF)
    except psycopg.Error:
        pass  # only the database's owner may: the doctor says it


def _drop_views(connection: Connection) -> None:
    """Columns may have changed, which "create or replace" refuses."""
    found = connection.execute(
        text(
            "select format('%I.%I', schemaname, viewname) from pg_views"
            " where schemaname in ('llmgw', 'llmgw_core')"
        )
    ).scalars()
    for view in list(found):
        run_script(connection, f"drop view if exists {view} cascade")
