"""Ways to a current database: alone, five at once, killed halfway, newer, without superuser."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import psycopg
import pytest
import sqlalchemy
from psycopg import sql as psql

from sql import migrate
from tests.sql.catalogs import catalogs

ROOT = Path(__file__).parents[2]
DEADLINE_S = 60.0
PROCESSES = 5
UPGRADE = """
import os, sys
from sql import migrate
print("loaded", flush=True)
for _ in sys.stdin:
    print(migrate.upgrade(os.environ["LLMGW_DATABASE_URL"]), flush=True)
"""


def connect(url):
    return psycopg.connect(url, autocommit=True)


@pytest.fixture
def expected(database):
    """The catalogs of a database that was upgraded in peace."""
    with connect(database.url) as connection:
        return catalogs(connection)


def differences(url, expected):
    """What differs in this database from the one upgraded in peace; empty when nothing."""
    with connect(url) as connection:
        found = catalogs(connection)
    return {
        name: sorted(set(found[name]) ^ set(rows))
        for name, rows in expected.items()
        if found[name] != rows
    }


def test_schema_files_and_migrations_build_the_same(empty_database, expected):
    engine = sqlalchemy.create_engine(migrate.sqlalchemy_url(empty_database))
    with engine.begin() as connection:
        for path in sorted((ROOT / "sql" / "schema").glob("*.sql")):
            migrate.run_script(connection, path.read_text())
        migrate.run_script(connection, "reset role")
        version = (
            "create table llmgw_core.alembic_version (version_num varchar(32) not null"
            " constraint alembic_version_pkc primary key)"
        )
        migrate.run_script(connection, version)
        migrate.apply_code(connection)
    engine.dispose()
    assert differences(empty_database, expected) == {}


def test_every_migration_file_has_one_revision():
    files = {path.name.partition("_")[0] for path in (ROOT / "sql" / "migrations").glob("*.sql")}
    scripts = list((ROOT / "alembic" / "versions").glob("*.py"))
    revisions = [
        re.search(r'^revision = "(\d{4})"', path.read_text(), re.MULTILINE)[1] for path in scripts
    ]
    assert sorted(revisions) == sorted(files)
    assert len(list((ROOT / "sql" / "migrations").glob("*.sql"))) == len(files)
    assert migrate.head() == max(files)


@pytest.mark.parametrize("path", sorted((ROOT / "sql").glob("*/*.sql")), ids=lambda path: path.name)
def test_sql_files_stay_short(path):
    limit = 10_000 if path.parent.name == "migrations" else 250
    assert len(path.read_text().splitlines()) <= limit


def test_everything_has_a_comment(database):
    bare = """
        select 'schema ' || nspname from pg_namespace n
            where {ours} and obj_description(oid, 'pg_namespace') is null
        union all select 'relation ' || c.oid::regclass
            from pg_class c join pg_namespace n on n.oid = c.relnamespace
            where {ours} and relkind in ('r', 'p', 'v', 'm')
              and not relispartition and relname <> 'alembic_version'
              and obj_description(c.oid, 'pg_class') is null
        union all select 'function ' || p.oid::regprocedure
            from pg_proc p join pg_namespace n on n.oid = p.pronamespace
            where {ours} and obj_description(p.oid, 'pg_proc') is null""".format(
        ours="n.nspname in ('llmgw_core', 'llmgw', 'agent')"
    )
    with database.connect() as connection:
        assert connection.execute(bare).fetchall() == []


def start(url, name):
    """A process that has loaded everything and upgrades once per line it is sent."""
    env = {**os.environ, "LLMGW_DATABASE_URL": f"{url}?application_name={name}"}
    return subprocess.Popen(
        [sys.executable, "-c", UPGRADE],
        cwd=ROOT,
        env=env,
        text=True,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )


def release(processes):
    """Lets all processes upgrade at once."""
    for process in processes:
        process.stdin.write("\n")
        process.stdin.flush()


def told(processes):
    """The next word of each process; nothing when it died."""
    return [process.stdout.readline().strip() for process in processes]


def end(process):
    """Ends a process and closes its pipes."""
    process.kill()
    process.communicate(timeout=DEADLINE_S)


def wait_for(connection, query, *args):
    """The first row of a query, once it has one."""
    deadline = time.monotonic() + DEADLINE_S
    while time.monotonic() < deadline:
        row = connection.execute(query, args).fetchone()
        if row is not None:
            return row
    raise AssertionError(f"never any row of: {query}")


@pytest.fixture
def crowd(empty_database):
    """Processes about to upgrade one empty database, one more than shall survive."""
    processes = [start(empty_database, f"upgrade-{n}") for n in range(PROCESSES + 1)]
    try:
        assert told(processes) == ["loaded"] * len(processes)
        yield processes
    finally:
        for process in processes:
            end(process)


@pytest.mark.slow
def test_F22_many_processes_at_once_one_of_them_killed_in_mid_migration(
    empty_database, crowd, expected
):
    """On an empty database with a kill, then with old functions, then with nothing to do."""
    with connect(empty_database) as blocker, connect(empty_database) as admin:
        with blocker.transaction():
            # Tables are made by then, the first function cannot be: that is halfway.
            blocker.execute("lock table pg_proc in share mode")
            release(crowd)
            [name] = wait_for(
                admin,
                "select a.application_name from pg_locks l join pg_stat_activity a using (pid)"
                " where l.relation = 'pg_proc'::regclass and not l.granted",
            )
            end(crowd.pop(int(name.removeprefix("upgrade-"))))
        assert told(crowd) == [migrate.head()] * PROCESSES
        assert differences(empty_database, expected) == {}
        for digest in ("old", migrate.code_digest()):
            admin.execute("update llmgw_core.applied set digest = %s", (digest,))
            release(crowd)
            assert told(crowd) == [migrate.head()] * PROCESSES
            assert differences(empty_database, expected) == {}
        revisions = admin.execute("select count(*) from llmgw_core.alembic_version")
        assert revisions.fetchone() == (1,)


def test_F22_a_migration_that_fails_leaves_nothing_and_the_next_repairs(empty_database, expected):
    with connect(empty_database) as blocker, blocker.transaction():
        blocker.execute("lock table pg_proc in share mode")
        with pytest.raises(psycopg.errors.LockNotAvailable):
            migrate.upgrade(f"{empty_database}?options=-c%20lock_timeout%3D200")
    with connect(empty_database) as connection:
        assert connection.execute(
            "select count(*) from pg_namespace where nspname like 'llmgw%'"
        ).fetchone() == (0,)
    assert migrate.upgrade(empty_database) == migrate.head()
    assert differences(empty_database, expected) == {}


def test_F23_a_newer_database_is_left_alone(database):
    with database.connect() as admin:
        admin.execute("update llmgw_core.alembic_version set version_num = '9999'")
        admin.execute("drop view llmgw.trouble")
        admin.execute("update llmgw_core.applied set digest = 'newer'")
        before = catalogs(admin)
        assert migrate.upgrade(database.url) == "9999"
        assert catalogs(admin) == before
        assert admin.execute("select digest from llmgw_core.applied").fetchone() == ("newer",)


def test_an_upgrade_without_news_takes_no_heavy_lock(database):
    impatient = f"{database.url}?options=-c%20lock_timeout%3D500"
    with database.connect() as reader, reader.transaction():
        everything = reader.execute(
            "select c.oid::regclass::text from pg_class c"
            " join pg_namespace n on n.oid = c.relnamespace"
            " where n.nspname in ('llmgw_core', 'llmgw') and c.relkind in ('r', 'p', 'v')"
        ).fetchall()
        names = psql.SQL(", ").join(psql.SQL(name) for (name,) in everything)
        reader.execute(psql.SQL("lock table {} in access share mode").format(names))
        assert migrate.upgrade(impatient) == migrate.head()
        with database.connect() as admin:  # and this test would notice one that does
            admin.execute("update llmgw_core.applied set digest = 'old'")
        with pytest.raises(psycopg.errors.LockNotAvailable):
            migrate.upgrade(impatient)


@pytest.fixture
def plain_owner(empty_database):
    """The URL of an empty database for its owner, who is no superuser but may use llmgw_owner."""
    name = empty_database.rpartition("/")[2]
    role = f"migrator_{name}"
    with connect(empty_database) as admin:
        admin.execute(
            psql.SQL("create role {} login password 'test-only'").format(psql.Identifier(role))
        )
        admin.execute(
            psql.SQL("alter database {} owner to {}").format(
                psql.Identifier(name), psql.Identifier(role)
            )
        )
    yield role, re.sub(r"//[^@]+@", f"//{role}:test-only@", empty_database)
    with connect(empty_database) as admin:
        admin.execute(
            psql.SQL("reassign owned by {} to current_user").format(psql.Identifier(role))
        )
        admin.execute(psql.SQL("drop owned by {}").format(psql.Identifier(role)))
        admin.execute(psql.SQL("drop role {}").format(psql.Identifier(role)))


def test_a_plain_database_owner_may_upgrade_once_given_the_owner_role(
    plain_owner, empty_database, expected
):
    role, url = plain_owner
    with pytest.raises(psycopg.errors.RaiseException, match="llmgw roles"):
        migrate.upgrade(url)
    with connect(empty_database) as admin:
        admin.execute(psql.SQL("grant llmgw_owner to {}").format(psql.Identifier(role)))
    assert migrate.upgrade(url) == migrate.head()
    assert differences(empty_database, expected) == {}
    with connect(empty_database) as admin:
        admin.execute("update llmgw_core.applied set digest = 'old'")
    assert migrate.upgrade(url) == migrate.head()
    assert differences(empty_database, expected) == {}


def test_an_upgrade_keeps_what_people_granted_on_views(database):
    with database.connect() as connection:
        connection.execute(
            "do $$ begin create role test_grafana; exception when others then null; end $$"
        )
        connection.execute("grant select on llmgw.nodes to test_grafana")
        connection.execute("update llmgw_core.applied set digest = 'older'")
    migrate.upgrade(database.url)
    with database.connect() as connection:
        granted = "select has_table_privilege('test_grafana', 'llmgw.nodes', 'select')"
        assert connection.execute(granted).fetchone() == (True,)


def test_an_upgrade_replaces_views_whose_columns_changed(database):
    with database.connect() as connection:
        connection.execute("drop view llmgw.locks; create view llmgw.locks as select 1 as one")
        connection.execute("update llmgw_core.applied set digest = 'older'")
    migrate.upgrade(database.url)
    with database.connect() as connection:
        assert connection.execute("select lock from llmgw.locks limit 0").description
