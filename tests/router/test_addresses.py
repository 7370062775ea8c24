"""Names of endpoints that nobody asks for their health: found late, moved, and never waited for."""

from __future__ import annotations

import socket
import threading
from typing import TYPE_CHECKING, Any

import pytest

from controller.router import inquiry
from controller.router.config import RouterConfig, StaticEndpoint, Timeouts
from controller.router.server import run_router
from sql import queries
from tests.router.test_database import prepare
from tests.router.wire import PATIENCE_S, Wire, until

if TYPE_CHECKING:
    from collections.abc import Iterator

    import trio

    from sql.pool import Pool
    from tests.conftest import Database
    from tests.fake_engine import FakeEngine
    from tests.router.conftest import House

NOBODY, ENGINE = "127.0.0.9", "127.0.0.1"
OFTEN = Timeouts(connect_s=0.02, refresh_s=0.05)


async def by_name(house: House) -> None:
    url = house.engine().url.replace(ENGINE, "engine.test")
    await house.start(endpoints=(StaticEndpoint("e0", url, ("m",)),), timeouts=OFTEN)


async def test_a_name_that_leads_nowhere_at_first_serves_once_it_is_known(
    house: House, leads_to: list[str]
) -> None:
    await by_name(house)
    assert (await house.ask()).status == 503
    leads_to.append(ENGINE)
    await until(lambda: house.core.fleet.serves("m"))
    assert (await house.ask()).status == 200


async def test_a_replica_that_fails_is_asked_where_its_name_leads_by_then(
    house: House, leads_to: list[str]
) -> None:
    leads_to.append(NOBODY)
    await by_name(house)
    while not house.core.fleet.pools["e0"].breaker.tripped:
        assert (await house.ask()).status == 502
    leads_to[:] = [ENGINE]
    await until(lambda: house.core.fleet.pools["e0"].address[1][0] == ENGINE)
    assert (await house.ask()).status == 200


@pytest.fixture
def silence(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Set when somebody waits for the name silent.test, of which no name server says anything."""
    asked, over, real = threading.Event(), threading.Event(), socket.getaddrinfo

    def found(host: Any, *args: Any, **how: Any) -> list[Any]:
        if host == "silent.test":
            if not how["flags"]:
                asked.set()
                over.wait(3 * PATIENCE_S)
            raise socket.gaierror(socket.EAI_AGAIN, "no name server answered")
        return real(host, *args, **how)

    monkeypatch.setattr(socket, "getaddrinfo", found)
    yield asked
    over.set()


@pytest.mark.slow
async def test_a_silent_name_server_holds_up_nothing_else_that_is_read(
    nursery: trio.Nursery, database: Database, pool: Pool, engine: FakeEngine,
    silence: threading.Event, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Else a replica that drains gets requests for longer than a second (case C13)."""
    prepare(database, engine.url, "http://silent.test:1")
    monkeypatch.setattr(inquiry, "LOOKUP_S", 0.05)
    config = RouterConfig(host="127.0.0.1", port=0, handle_signals=False, timeouts=OFTEN)
    running = await nursery.start(run_router, config, pool, queries("router"))
    await until(lambda: running.core.table_loaded_at)
    monkeypatch.setattr(inquiry, "LOOKUP_S", 2 * PATIENCE_S)
    silence.clear()
    await until(silence.is_set)  # from now on it is waited for, for longer than we have patience
    loaded_at = running.core.table_loaded_at
    await until(lambda: running.core.table_loaded_at > loaded_at)
    wire = await Wire.open(running.port)
    await wire.post("/v1/chat/completions", {"model": "m"}, key="sk-db")
    assert (await wire.answer()).status == 200
    wire.close()
    running.stop()
