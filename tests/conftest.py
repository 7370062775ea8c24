"""Fixtures that every test may use: a real Postgres, a fresh database per test, and its roles.

One server per run (embedded PostgreSQL 18, or LLMGW_TEST_POSTGRES_BIN's), one migrated template
database, one clone per test.
"""

from __future__ import annotations

import itertools
import os
import shutil
import signal
import tempfile
from collections import Counter
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import psycopg
import pytest
from hypothesis import HealthCheck, settings
from psycopg import sql as psql

from sql import embedded, logins, migrate
from sql.pool import asyncio_host, open_pool
from sql.settings import DatabaseSettings

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

    from sql.pool import Pool

TEMPLATE = "llmgw_template"
PASSWORD = "test-only"
MEMORY_BYTES = 2 << 30
"""A server of a worker takes a fifth of a GiB."""
WORKER = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
"""The number of this process among those of its run."""
numbers = itertools.count(1)

# How fast an example was says how busy the machine is, and nothing of ours.
settings.register_profile(
    "untimed", max_examples=50, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("untimed")


@dataclass(frozen=True, slots=True)
class Database:
    """A fresh database and the URLs of its roles."""

    name: str
    url: str
    """The superuser's."""
    controller_url: str
    agent_url: str
    read_url: str
    server: embedded.Server

    def settings(self, url: str | None = None, **more: object) -> DatabaseSettings:
        """Connection settings for a role's URL (default: the controller's)."""
        return DatabaseSettings(url=url or self.controller_url, **more)

    def connect(self, url: str | None = None) -> psycopg.Connection:
        """A synchronous autocommit connection (default: the superuser's)."""
        return psycopg.connect(url or self.url, autocommit=True)


def pytest_configure() -> None:
    """Each worker has ports of its own: what another was given and has not bound looks free.
    Its children hear an interrupt, which who runs us in the background had turned off."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    count = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    embedded.PORTS = embedded.PORTS[WORKER::count]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files with the most slow tests first: one of them started last keeps a worker alone."""
    slow = Counter(item.path for item in items if item.get_closest_marker("slow"))
    items.sort(key=lambda item: -slow[item.path])


@pytest.fixture(scope="session")
def postgres() -> Iterator[embedded.Server]:
    """The run's server, with a migrated template and login roles."""
    # Not under pytest's own folder: as root the server runs as nobody, who must reach it.
    base = Path(tempfile.mkdtemp(prefix="llmgw-test-pg-", dir=_place()))
    given = os.environ.get("LLMGW_TEST_POSTGRES_BIN")
    options = {"max_connections": "200", "max_wal_size": "128MB"}
    try:
        with embedded.running(
            base, fast_and_unsafe=True, binaries=Path(given) if given else None, options=options
        ) as server:
            with psycopg.connect(server.url, autocommit=True) as connection:
                connection.execute(f"create database {TEMPLATE}")
            migrate.upgrade(_url(server.url, TEMPLATE))
            with psycopg.connect(server.url, autocommit=True) as connection:
                for role in ("controller", "agent", "read"):
                    logins.ensure(connection, f"test_{role}", f"llmgw_{role}", PASSWORD)
            yield server
    finally:
        shutil.rmtree(base, ignore_errors=True)


def _place() -> Path:
    """In memory where there is room: a database is 350 files, made and removed for each test."""
    memory = Path("/dev/shm")
    roomy = memory.is_dir() and shutil.disk_usage(memory).free > MEMORY_BYTES
    return memory if roomy else Path("/var/tmp")


def _url(url: str, database: str, user: str | None = None) -> str:
    head, _, _ = url.rpartition("/")
    if user is not None:
        scheme, _, rest = head.partition("://")
        head = f"{scheme}://{user}:{PASSWORD}@{rest.partition('@')[2]}"
    return f"{head}/{database}"


@pytest.fixture(scope="session")
def server_connection(postgres: embedded.Server) -> Iterator[psycopg.Connection]:
    """The superuser's, for making and dropping databases: one, not three for each test."""
    with psycopg.connect(postgres.url, autocommit=True) as connection:
        yield connection


@contextmanager
def _fresh(connection: psycopg.Connection, name: str, template: str) -> Iterator[None]:
    """A database for the length of a block."""
    named, copied = psql.Identifier(name), psql.Identifier(template)
    # As files: unlike by the WAL, with the caches that each first connection would make anew.
    make = "create database {} template {} strategy file_copy"
    connection.execute(psql.SQL(make).format(named, copied))
    try:
        yield
    finally:
        connection.execute(psql.SQL("drop database {} with (force)").format(named))


@pytest.fixture
def database(
    postgres: embedded.Server, server_connection: psycopg.Connection
) -> Iterator[Database]:
    """A migrated, empty database of its own."""
    name = f"t{os.getpid()}_{next(numbers)}"
    with _fresh(server_connection, name, TEMPLATE):
        # A clone has no settings of its template.
        jit_off = psql.SQL("alter database {} set jit = off").format(psql.Identifier(name))
        server_connection.execute(jit_off)
        yield Database(
            name,
            _url(postgres.url, name),
            *(_url(postgres.url, name, f"test_{role}") for role in ("controller", "agent", "read")),
            server=postgres,
        )


@pytest.fixture
def empty_database(
    postgres: embedded.Server, server_connection: psycopg.Connection
) -> Iterator[str]:
    """The superuser's URL of a database without any of our schema."""
    name = f"e{os.getpid()}_{next(numbers)}"
    with _fresh(server_connection, name, "template1"):
        yield _url(postgres.url, name)


@pytest.fixture
async def asyncio_loop() -> AsyncIterator[None]:
    """One asyncio loop for all pools of a test: fixtures share their context, so two would mix."""
    async with asyncio_host():
        yield


@pytest.fixture
async def pool(database: Database, asyncio_loop: None) -> AsyncIterator[Pool]:
    """A pool with the controller's rights."""
    async with open_pool(database.settings()) as opened:
        yield opened


@pytest.fixture
async def agent_pool(database: Database, asyncio_loop: None) -> AsyncIterator[Pool]:
    """A pool with an agent's rights."""
    async with open_pool(database.settings(database.agent_url)) as opened:
        yield opened
