"""Fixtures of the router's tests: fake engines, and a router in static mode before them."""

from __future__ import annotations

import socket
from contextlib import ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from controller.router.breaker import BreakerRules
from controller.router.config import RouterConfig, StaticEndpoint, StaticKey, Timeouts, Watching
from controller.router.server import run_router
from tests.fake_engine import FakeEngine
from tests.router.wire import Answer, Wire, until
from tests.usage_columns import named

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

    import trio

    from controller.router.core import Core
    from sql.pool import Pool
    from tests.conftest import Database
    from tests.router.tenants import Routers


NEVER_OPEN = BreakerRules(failures_in_row=99, failures_of_20=99, hold_s=0.0, longest_hold_s=0.0)
"""So that every request reaches an engine, and the budget alone is seen."""
UNWATCHED = Watching(metrics_s=0, health_s=0)
"""So that engines see nothing but what a test sends."""


class House:
    """One router with its engines and the connections a test opened."""

    def __init__(self, nursery: trio.Nursery) -> None:
        self.nursery = nursery
        self._stack = ExitStack()
        self.engines: list[FakeEngine] = []
        self.wires: list[Wire] = []
        self.running: Any = None

    def engine(self, **default: Any) -> FakeEngine:
        engine = self._stack.enter_context(FakeEngine(default, self._port()))
        self.engines.append(engine)
        return engine

    def dead(self) -> str:
        """The URL of an engine that does not listen."""
        return f"http://127.0.0.1:{self._port()}"

    def _port(self) -> int:
        """A port that nobody else gets before the test is over, though nobody listens there."""
        sock = self._stack.enter_context(socket.socket())
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # an engine may listen there
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])

    async def start(self, *urls: str, **changes: Any) -> House:
        """Start the router before `urls` (default: the engines made so far, one by default)."""
        if not self.engines and not urls:
            self.engine()
        urls = urls or tuple(engine.url for engine in self.engines)
        settings: dict[str, Any] = {
            "host": "127.0.0.1",
            "port": 0,
            "endpoints": tuple(
                StaticEndpoint(f"e{n}", url, ("m", "other")) for n, url in enumerate(urls)
            ),
            "keys": (
                StaticKey("k", "sk-test"),
                StaticKey("narrow", "sk-narrow", ("other",)),
            ),
            "aliases": (("short", "m"),),
            "handle_signals": False,
            "seed": 1,
            "watching": UNWATCHED,
            **changes,
        }
        config = RouterConfig(**settings)
        self.running = await self.nursery.start(run_router, config)
        return self

    @property
    def core(self) -> Core:
        return self.running.core

    @property
    def port(self) -> int:
        return self.running.port

    async def wire(self) -> Wire:
        wire = await Wire.open(self.port)
        self.wires.append(wire)
        return wire

    async def ask(self, **fields: Any) -> Answer:
        """One chat on a connection of its own."""
        wire = await self.wire()
        await wire.chat(**fields)
        answer = await wire.answer()
        wire.close()
        return answer

    @property
    def rows(self) -> list[dict[str, Any]]:
        return [named(row.as_values()) for row in self.core.usage.undated]

    async def row(self, number: int = 0) -> dict[str, Any]:
        await until(lambda: len(self.core.usage) > number)
        return self.rows[number]

    def idle(self) -> bool:
        """Whether nothing counts as running."""
        pools = self.core.fleet.everyone()
        gauges = [model.in_flight for model in self.core.stats.models.values()]
        return self.core.exchanges == 0 and not any(p.in_flight for p in pools) and not any(gauges)

    def close(self) -> None:
        if self.running is not None:
            self.running.stop()
        for wire in self.wires:
            wire.close()
        self._stack.close()


@pytest.fixture
async def house(nursery: trio.Nursery) -> AsyncIterator[House]:
    place = House(nursery)
    yield place
    crashes = place.running.core.reactor.crashes if place.running else 0
    place.close()
    assert crashes == 0


@pytest.fixture
async def routers(nursery: trio.Nursery, database: Database, pool: Pool) -> AsyncIterator[Routers]:
    from tests.router.tenants import Routers  # which takes some of the above

    made = Routers(nursery, database, pool)
    yield made
    crashes = [router.core.reactor.crashes for router in made.running]
    made.close()
    assert not any(crashes)


@pytest.fixture
def quick() -> Timeouts:
    """Deadlines short enough to be waited for."""
    return replace(
        Timeouts(), connect_s=0.3, headers_s=0.4, first_token_s=0.4, idle_s=0.4,
        client_read_s=0.4, linger_s=1.0, handshake_s=0.4,
    )  # fmt: skip


@pytest.fixture
def engine() -> Iterator[FakeEngine]:
    with FakeEngine() as made:
        yield made


@pytest.fixture
def leads_to(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Where the name engine.test leads at the moment; nowhere: it is not known."""
    addresses: list[str] = []
    real = socket.getaddrinfo

    def found(host: Any, port: Any, *args: Any, **how: Any) -> list[Any]:
        if host != "engine.test":
            return real(host, port, *args, **how)
        if how["flags"] or not addresses:
            raise socket.gaierror(socket.EAI_NONAME, "not known")
        kind = socket.AF_INET, socket.SOCK_STREAM, 6, ""
        return [(*kind, (address, port)) for address in addresses]

    monkeypatch.setattr(socket, "getaddrinfo", found)
    return addresses
