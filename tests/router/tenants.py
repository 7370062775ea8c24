"""Several routers on one real Postgres, with keys that have budgets and limits."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import psycopg
import trio

from controller.router.config import RouterConfig, Timeouts
from controller.router.server import run_router
from sql import queries
from sql.errors import DatabaseAway
from tests.router.conftest import NEVER_OPEN, UNWATCHED
from tests.router.test_database import prepare
from tests.router.wire import Answer, Wire, chat_body, until

if TYPE_CHECKING:
    from controller.router.server import Running
    from sql.pool import Pool
    from tests.conftest import Database
    from tests.fake_engine import FakeEngine

PRICED = "insert into llmgw_core.price values ('m', '2000-01-01', 1000000, null, 1000000, 'test')"
"""A micro for each token."""


class Line:
    """A pool that can be away, or silent."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self.away = False
        self.asked = 0  # calls for allowances
        self.speaks = trio.Event()  # until then they have no answer
        self.speaks.set()

    async def fetch(self, sql: str, *args: Any) -> list[Any]:
        return list(await self._reach().fetch(sql, *args))

    async def fetchval(self, sql: str, *args: Any) -> Any:
        if "allowances_v1" in sql:
            self.asked += 1
            await self.speaks.wait()
        return await self._reach().fetchval(sql, *args)

    def _reach(self) -> Pool:
        if self.away:
            raise DatabaseAway("cut by the test")
        return self._pool


class Routers:
    """Routers in this process: real sockets, real Postgres, and ways to end them."""

    def __init__(self, nursery: trio.Nursery, database: Database, pool: Pool) -> None:
        self._nursery = nursery
        self._database = database
        self.pool = Line(pool)
        self._scopes: list[trio.CancelScope] = []
        self._left = 0
        self.running: list[Running] = []
        self.wires: list[Wire] = []

    def prepare(self, engine: FakeEngine, *keys: str) -> None:
        """A priced model behind the engine, and keys named as their secrets."""
        prepare(self._database, engine.url, keys={name: name for name in keys})
        self.execute(PRICED)
        self.execute("insert into llmgw_core.model_name values ('m', 'm', false)")

    def execute(self, statement: str, *args: object) -> list[tuple[Any, ...]]:
        """As the superuser; rows where there are some."""
        with psycopg.connect(self._database.url, autocommit=True) as connection:
            done = connection.execute(statement, args)  # type: ignore[arg-type]
            return done.fetchall() if done.description else []

    def budget(self, key: str, micros: int, period: str = "month") -> int:
        put = "select llmgw.budget_put_v1('test', null, %s, %s, %s, null, null)"
        return int(self.execute(put, key, micros, period)[0][0])

    def limit(self, key: str, model: str | None = None, **most: int) -> int:
        put = "select llmgw.limit_put_v1('test', null, %s, %s, %s, %s, %s)"
        args = most.get("requests"), most.get("tokens"), most.get("parallel")
        return int(self.execute(put, key, model, *args)[0][0])

    async def start(self, number: int = 1, **changes: Any) -> None:
        """So many more routers, which know all bounds that there are now."""
        for _ in range(number):
            settings: dict[str, Any] = {
                "host": "127.0.0.1",
                "port": 0,
                "handle_signals": False,
                "watching": UNWATCHED,
                "breaker": NEVER_OPEN,
                "timeouts": Timeouts(refresh_s=0.2, flush_s=0.02, drain_s=2),
                **changes,
            }
            running = await self._nursery.start(self._run, RouterConfig(**settings))
            self.running.append(running)
            await until(lambda running=running: running.core.table_loaded_at)

    async def _run(
        self, config: RouterConfig, task_status: trio.TaskStatus[Running] = trio.TASK_STATUS_IGNORED
    ) -> None:
        with trio.CancelScope() as scope:
            self._scopes.append(scope)
            await run_router(config, self.pool, queries("router"), task_status=task_status)
        self._left += 1

    def kill(self, number: int = 0) -> None:
        """As by kill -9: nothing is given back and nothing written."""
        self.running.pop(number)
        self._scopes.pop(number).cancel()

    async def stop(self) -> None:
        """All of them in order, until they have left."""
        leaving, self.running, self._scopes = self.running, [], []
        gone = self._left + len(leaving)
        for router in leaving:
            router.stop()
        await until(lambda: self._left == gone)

    async def open(self, router: int = 0) -> Wire:
        wire = await Wire.open(self.running[router % len(self.running)].port)
        self.wires.append(wire)
        return wire

    async def ask(self, key: str, router: int = 0, **fields: Any) -> Answer:
        """One chat on a connection of its own."""
        headers = {"key": key, **fields.pop("headers", {})}
        wire = await self.open(router)
        await wire.post("/v1/chat/completions", chat_body(**fields), **headers)
        answer = await wire.answer()
        wire.close()
        return answer

    async def burst(self, key: str, number: int, **fields: Any) -> list[Answer]:
        """So many at once, in turns over all routers."""
        answers: list[Answer] = []

        async def one(router: int) -> None:
            answers.append(await self.ask(key, router, **fields))

        async with trio.open_nursery() as nursery:
            for router in range(number):
                nursery.start_soon(one, router)
        return answers

    async def pause(self) -> None:
        """Between asks that hope for another answer."""
        await trio.sleep(0.05)

    def written(self) -> bool:
        """Whether every usage row is in Postgres."""
        return not any(len(router.core.usage) for router in self.running)

    def close(self) -> None:
        for wire in self.wires:
            wire.close()
        for router in self.running:
            router.stop()
