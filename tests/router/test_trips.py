"""On a real Postgres: trips that outlive a router, and replicas that drain."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import psycopg
import pytest

from controller.router.breaker import BreakerRules, Phase
from controller.router.config import RouterConfig, StaticEndpoint, Timeouts, Watching
from controller.router.server import run_router
from sql import queries
from sql.listen import listen
from tests.fake_engine import FakeEngine
from tests.router.test_database import look, prepare
from tests.router.wire import Wire, until

if TYPE_CHECKING:
    from collections.abc import Callable

    import trio

    from sql.pool import Pool
    from tests.conftest import Database

pytestmark = pytest.mark.slow

CONFIG = RouterConfig(
    host="127.0.0.1",
    port=0,
    handle_signals=False,
    timeouts=Timeouts(refresh_s=0.1, flush_s=0.05, queue_s=1.0),
    watching=Watching(0, 0),
    breaker=BreakerRules(failures_in_row=2, pause_s=30.0),
)


async def ask(port: int, **fields: Any) -> int:
    wire = await Wire.open(port)
    try:
        await wire.post("/v1/chat/completions", {"model": "m", **fields}, key="sk-db")
        return (await wire.answer()).status
    finally:
        wire.close()


async def test_C11_a_trip_ends_when_it_would_have_although_the_router_restarts(
    nursery: trio.Nursery, database: Database, pool: Pool, engine: FakeEngine
) -> None:
    (replica,) = prepare(database, engine.url)
    engine.default = {"status": 500}
    first = await nursery.start(run_router, CONFIG, pool, queries("router"))
    await until(lambda: first.core.table_loaded_at)
    for _ in range(2):
        assert await ask(first.port) == 500
    breaker = first.core.fleet.pools[str(replica)].breaker
    assert breaker.phase is Phase.OPEN
    told = "select replica_id, pause_s from llmgw_core.trip"
    await until(lambda: look(database, told))
    assert look(database, told) == [(replica, 30.0)]
    first.stop()

    look(database, "update llmgw_core.trip set until = until - interval '10 s' returning 1")
    second = await nursery.start(run_router, CONFIG, pool, queries("router"))
    await until(lambda: second.core.table_loaded_at)
    resumed = second.core.fleet.pools[str(replica)].breaker
    await until(lambda: resumed.phase is Phase.OPEN)
    # Ten seconds had passed for the database, less what it took to tell it and to ask it.
    assert 2 < breaker.until - resumed.until < 11
    assert resumed.pause_s == 30.0
    engine.default = {}
    assert await ask(second.port) == 503
    assert len(engine.chats()) == 2

    resumed.hurry()
    assert await ask(second.port) == 200
    second.stop()


@pytest.mark.parametrize("models", [("m",), ()], ids=["named", "found"])
async def test_C11_a_static_endpoints_trip_outlives_its_router_too(
    nursery: trio.Nursery,
    database: Database,
    pool: Pool,
    engine: FakeEngine,
    models: tuple[str, ...],
) -> None:
    """Also when the next router hears only later which models are there; of this address only."""
    prepare(database)
    end = StaticEndpoint("e1", engine.url, models)
    config = replace(CONFIG, endpoints=(end,), watching=Watching(0, 0.1))
    first = await nursery.start(run_router, config, pool, queries("router"))
    await until(lambda: first.core.table_loaded_at and first.core.fleet.serves("m"))
    engine.default = {"status": 500}
    for _ in range(2):
        assert await ask(first.port) == 500
    told = partial(look, database, "select place, pause_s from llmgw_core.endpoint_trip")
    await until(told)
    assert told() == [(f"e1=127.0.0.1:{engine.port}", 30.0)]
    first.stop()

    engine.default = {"models": 404}
    second = await nursery.start(run_router, config, pool, queries("router"))
    await until(lambda: second.core.table_loaded_at)
    assert second.core.fleet.serves("m") == bool(models)
    engine.default = {}
    await until(lambda: second.core.fleet.serves("m"))
    breaker = first.core.fleet.pools["e1"].breaker
    resumed = second.core.fleet.pools["e1"].breaker
    await until(lambda: resumed.phase is Phase.OPEN)
    assert resumed.until == pytest.approx(breaker.until, abs=5.0)
    assert await ask(second.port) == 503
    assert len(engine.chats()) == 2
    second.stop()

    with FakeEngine() as other:
        config = replace(config, endpoints=(replace(end, url=other.url),))
        third = await nursery.start(run_router, config, pool, queries("router"))
        await until(lambda: third.core.table_loaded_at and third.core.fleet.serves("m"))
        assert await ask(third.port) == 200
        third.stop()


async def test_C11_trips_that_are_over_are_forgotten(
    nursery: trio.Nursery, database: Database, pool: Pool, engine: FakeEngine
) -> None:
    (replica,) = prepare(database, engine.url)
    left = [
        {"replica_id": identity, "place": place, "left_s": -1.0, "pause_s": 2.0}
        for identity, place in ((replica, str(replica)), (None, "e1=h:1"))
    ]
    router = "00000000-0000-4000-8000-000000000001"
    await pool.fetchval(queries("router")["router_trips"], router, left)
    assert await pool.fetch(queries("router")["route_trips"]) == []
    gone = [{"replica_id": 99999, "left_s": 9.0, "pause_s": 2.0}]
    await pool.fetchval(queries("router")["router_trips"], router, gone)
    assert look(database, "select * from llmgw_core.trip") == []
    for left_s in (9.0, 5.0):  # the latest end counts
        told = [
            {"replica_id": identity, "place": place, "left_s": left_s, "pause_s": left_s}
            for identity, place in ((replica, str(replica)), (None, "e1=h:1"))
        ]
        await pool.fetchval(queries("router")["router_trips"], router, told)
    found = await pool.fetch(queries("router")["route_trips"])
    assert {row["place"]: row["pause_s"] for row in found} == {str(replica): 9.0, "e1=h:1": 9.0}
    assert look(database, "select pause_s from llmgw_core.trip") == [(9.0,)]


@pytest.mark.parametrize("how", ["hints", "looking"])
async def test_C13_a_draining_replica_gets_nothing_new_on_any_router(
    nursery: trio.Nursery, database: Database, pool: Pool, engine: FakeEngine, how: str
) -> None:
    """Each way alone: with notifications dead, and with nothing else alive."""
    (replica,) = prepare(database, engine.url)
    rare = {"refresh_s": 60.0, "peek_s": 60.0 if how == "hints" else 0.1}
    config = replace(CONFIG, timeouts=Timeouts(**rare))

    async def hints(on_hint: Callable[[str], None], on_connect: Callable[[], None]) -> None:
        async def connected() -> None:
            on_connect()
            listening.append(1)

        await listen(database.settings(), on_hint, connected)

    routers: list[Any] = []
    listening: list[int] = []
    for _ in range(2):
        way = hints if how == "hints" else None
        running = await nursery.start(run_router, config, pool, queries("router"), way)
        routers.append(running)
        await until(lambda running=running: running.core.table_loaded_at)
    long: list[int] = []

    async def stream(port: int) -> None:
        long.append(await ask(port, stream=True, fake={"tokens": 5, "hold_after": 1}))

    for running in routers:
        nursery.start_soon(stream, running.port)
        assert await ask(running.port) == 200
    await until(lambda: engine.held() == 2)
    if how == "hints":
        await until(lambda: len(listening) == 2)
    drain(database, replica)
    await until(lambda: not any(running.core.fleet.serves("m") for running in routers))
    before = len(engine.chats())
    for running in routers:
        assert await ask(running.port) == 503
    assert len(engine.chats()) == before == 4
    engine.release(2)
    await until(lambda: len(long) == 2)
    assert long == [200, 200]  # what ran there ran to its end
    for running in routers:
        running.stop()


def drain(database: Database, replica: int) -> None:
    with psycopg.connect(database.url) as connection:
        connection.execute(
            "update llmgw_core.replica set state = 'draining' where id = %s", (replica,)
        )
        connection.execute("select llmgw_core.notify('plan')")


def test_C13_looking_is_often_enough() -> None:
    usual = Timeouts()
    assert usual.peek_s <= 0.5  # and the second read of the table takes the rest of the second
