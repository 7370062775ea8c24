"""The router on a real Postgres: its queries, its rows, a key revoked."""

from __future__ import annotations

from functools import partial
from hashlib import sha256
from typing import TYPE_CHECKING, Any

import psycopg
import pytest
import trio

from controller.router import key_reader
from controller.router.config import RouterConfig, Timeouts
from controller.router.server import run_router
from sql import queries
from sql.errors import DatabaseAway
from tests.router.wire import PATIENCE_S, Wire, until

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from sql.pool import Pool
    from tests.conftest import Database
    from tests.fake_engine import FakeEngine

pytestmark = pytest.mark.slow

KEYS = {"sk-db": "abcdef"}


def prepare(database: Database, *urls: str, keys: Mapping[str, str] = KEYS) -> list[int]:
    """One model with a ready replica at each URL, and keys by secret; returns the replicas' ids."""
    replicas = []
    with psycopg.connect(database.url, autocommit=True) as connection:
        connection.execute(
            "insert into llmgw_core.model"
            " (name, source, min_replicas, max_replicas, origin, updated_by)"
            " values ('m', 'file:/m', 1, 9, 'api', 'test')"
        )
        for url in urls:
            row = connection.execute(
                "insert into llmgw_core.replica (model, state, endpoint, term)"
                " values ('m', 'pending', %s, 1) returning id",
                (url,),
            ).fetchone()
            assert row is not None
            replicas.append(int(row[0]))
        for state in ("starting", "ready"):
            connection.execute("update llmgw_core.replica set state = %s", (state,))
        for secret, identity in keys.items():
            connection.execute(
                "insert into llmgw_core.api_key (id, hash, name, created_by)"
                " values (%s, %s, 'test', 'test')",
                (identity, sha256(secret.encode()).digest()),
            )
    return replicas


def look(database: Database, query: str) -> list[tuple[Any, ...]]:
    with psycopg.connect(database.url, autocommit=True) as connection:
        return connection.execute(query).fetchall()  # type: ignore[arg-type]


class Held:
    """The pool, but the spool's question waits until it may go on; notes what was answered."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._names = {text: name for name, text in queries("router").items()}
        self.go = trio.Event()
        self.done: list[str] = []

    async def fetch(self, sql: str, *args: Any) -> list[Any]:
        return await self._answer(self._pool.fetch, sql, *args)

    async def fetchval(self, sql: str, *args: Any) -> Any:
        if sql == queries("router")["usage_database"]:
            await self.go.wait()
        return await self._answer(self._pool.fetchval, sql, *args)

    async def _answer(self, ask: Any, sql: str, *args: Any) -> Any:
        answer = await ask(sql, *args)
        self.done.append(self._names[sql])
        return answer


async def test_a_new_router_serves_no_key_before_it_knows_bounds_and_models_and_has_a_spool(
    nursery: trio.Nursery, database: Database, pool: Pool, engine: FakeEngine, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Else a kill loses rows, first requests pass budgets by, and models are unknown (404)."""
    monkeypatch.setattr(key_reader, "LOOKUP_S", PATIENCE_S)  # it waits for all that, too
    prepare(database, engine.url)
    held = Held(pool)
    config = RouterConfig(host="127.0.0.1", port=0, handle_signals=False, spool=tmp_path)
    running = await nursery.start(run_router, config, held, queries("router"))
    wire = await Wire.open(running.port)
    await wire.post("/v1/chat/completions", {"model": "m"}, key="sk-db")
    await until(lambda: running.core.key_reader._asked)
    held.go.set()
    assert (await wire.answer()).status == 200
    first = held.done.index("keys_by_hash")
    assert {"route_now", "route_bounds", "usage_database", "route_models"} <= set(held.done[:first])
    assert running.core.snapshot()["spool_bytes"] > 0
    assert not len(running.core.usage._memory)
    wire.close()
    running.stop()


async def test_requests_are_routed_and_recorded_by_the_database(
    nursery: trio.Nursery, database: Database, pool: Pool, engine: FakeEngine
) -> None:
    (replica,) = prepare(database, engine.url)
    config = RouterConfig(
        host="127.0.0.1",
        port=0,
        handle_signals=False,
        timeouts=Timeouts(refresh_s=0.05, flush_s=0.02),
    )
    running = await nursery.start(run_router, config, pool, queries("router"))
    await until(lambda: running.core.table_loaded_at)
    wire = await Wire.open(running.port)
    for stream in (False, True):
        await wire.post("/v1/chat/completions", {"model": "m", "stream": stream}, key="sk-db")
        assert (await wire.answer()).status == 200
    await wire.post("/v1/chat/completions", {"model": "m\0?"}, key="sk-db")  # no text to Postgres
    assert (await wire.answer()).status == 404
    models = await wire.get("/v1/models", key="sk-db")
    assert models.json["data"][0]["created"] > 1_600_000_000
    await until(lambda: not len(running.core.usage))
    rows = look(
        database,
        "select key_id, model, replica_id, endpoint, status, http_status, stream, prompt_tokens,"
        " completion_tokens, attempts, abs(extract(epoch from clock_timestamp() - at)) < 30"
        " from llmgw_core.usage_event where model_asked = 'm' order by stream",
    )
    expected = ("abcdef", "m", replica, "chat.completions", "ok", 200)
    assert rows == [(*expected, False, 7, 3, 1, True), (*expected, True, 7, 3, 1, True)]
    used = partial(
        look, database, "select in_flight, last_used_at is null from llmgw_core.router_use"
    )
    await until(lambda: used() == [(0, False)])

    look(database, "update llmgw_core.api_key set revoked_at = clock_timestamp() returning 1")
    await until(lambda: "abcdef" not in running.core.keys.cache)
    assert (await wire.get("/v1/models", key="sk-db")).status == 401
    wire.close()
    running.stop()
    await until(lambda: not running.core.clients)


class Refusing:
    """The pool, but it does not take which keys were used while it is away."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self.away = False

    async def fetch(self, sql: str, *args: Any) -> list[Any]:
        return await self._pool.fetch(sql, *args)

    async def fetchval(self, sql: str, *args: Any) -> Any:
        if self.away and sql == queries("router")["keys_used"]:
            raise DatabaseAway("it does not answer")
        return await self._pool.fetchval(sql, *args)


@pytest.mark.parametrize("away", [False, True])
async def test_that_a_key_was_used_is_told_though_the_router_ends_or_postgres_was_away(
    nursery: trio.Nursery, database: Database, pool: Pool, engine: FakeEngine, away: bool,
) -> None:  # fmt: skip
    """Of a key that is used once a day, nobody would know that somebody needs it."""
    prepare(database, engine.url)
    shelf = Refusing(pool)
    config = RouterConfig(host="127.0.0.1", port=0, handle_signals=False)
    running = await nursery.start(run_router, config, shelf, queries("router"))
    wire = await Wire.open(running.port)
    await wire.post("/v1/chat/completions", {"model": "m"}, key="sk-db")
    assert (await wire.answer()).status == 200
    wire.close()
    shelf.away = away
    if away:
        with pytest.raises(DatabaseAway):
            await running.core.key_reader.tell_used()
        shelf.away = False
    running.stop()
    used = partial(look, database, "select used_at is not null from llmgw.keys where id = 'abcdef'")
    await until(lambda: used() == [(True,)])
