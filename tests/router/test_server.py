"""The process around the reactor: draining, the stats socket, refreshing, reporting."""

from __future__ import annotations

import itertools
import json
import os
import signal
import socket
from hashlib import sha256
from typing import TYPE_CHECKING, Any

import pytest
import trio

from controller.router.auth import Shown
from controller.router.config import RouterConfig, StaticEndpoint, StaticKey, Timeouts
from controller.router.errors import BAD_KEY
from controller.router.server import run_router, supervise
from tests.router.conftest import House
from tests.router.wire import Wire, chat_body, post_bytes, until
from tests.usage_columns import named

if TYPE_CHECKING:
    from pathlib import Path

    from tests.fake_engine import FakeEngine

QUERIES = {
    name: name
    for name in (
        "route_now", "route_models", "route_replicas", "route_waking", "route_peek", "route_trips",
        "keys_first", "keys_changed", "keys_by_id", "keys_by_hash", "keys_used",
        "usage_flush", "router_report", "router_trips",
        "route_bounds",
    )
}  # fmt: skip


async def test_stopping_lets_requests_finish(house: House) -> None:
    engine = house.engine(tokens=3, hold_after=1)
    await house.start()
    idle, busy = await house.wire(), await house.wire()
    assert (await idle.get("/healthz")).status == 200
    await busy.chat(stream=True)
    await busy.until(b"tok0")
    house.running.stop()
    assert await idle.closed()
    with pytest.raises(OSError, match="all attempts"):
        await Wire.open(house.port)
    engine.release()
    await busy.until(b"[DONE]")
    await busy.until(b"0\r\n\r\n")
    assert await busy.closed()
    assert (await house.row())["status"] == "ok"


async def test_what_came_before_the_stop_is_served(house: House) -> None:
    """Whether it was read yet or not, or even accepted: a reset would be the answer else, unless
    the reactor happened to come first, which is why this is tried eight times."""
    for _ in range(8):
        await house.start()
        known, new = await house.wire(), socket.create_connection(("127.0.0.1", house.port))
        assert (await known.get("/healthz")).status == 200
        late = socket.create_connection(("127.0.0.1", house.port))
        for each in (known.raw.socket, new, late):
            os.write(each.fileno(), post_bytes("/v1/chat/completions", chat_body()))
        house.running.stop()
        assert (await known.answer()).status == 200
        for sock in (new, late):
            sock.setblocking(False)
            stream = trio.SocketStream(trio.socket.from_stdlib_socket(sock))
            async with stream:
                assert (await Wire(stream).answer()).status == 200


async def test_two_processes_may_share_the_port(house: House) -> None:
    await house.start()
    other = House(house.nursery)
    other.engine()
    await other.start(port=house.port, worker=1)
    for _ in range(40):
        assert (await house.ask()).status == 200
    assert len(house.rows) + len(other.rows) == 40
    assert house.rows
    assert other.rows
    other.close()


async def test_bad_settings_are_told_at_start(house: House) -> None:
    await house.start()
    bad = StaticEndpoint("e", "https://h:1", ("m",))
    with pytest.raises(ValueError, match="over http://"):
        await run_router(RouterConfig(host="127.0.0.1", port=0, endpoints=(bad,)))
    with pytest.raises(OSError, match=r"cannot listen on 203\.0\.113\.1"):
        await run_router(RouterConfig(host="203.0.113.1", port=0))


async def test_draining_has_an_end(house: House) -> None:
    engine = house.engine(delay=60)
    await house.start(timeouts=Timeouts(drain_s=0.2))
    wire = await house.wire()
    await wire.chat()
    (record,) = await until(engine.chats)
    house.running.stop()
    answer = await wire.answer()
    assert (answer.status, answer.code) == (503, "shutting_down")
    assert await wire.closed()
    await until(lambda: record.closed)
    assert (await house.row())["error_code"] == "shutting_down"


async def test_sigterm_drains_and_returns(nursery: trio.Nursery, engine: FakeEngine) -> None:
    config = RouterConfig(
        host="127.0.0.1", port=0, endpoints=(StaticEndpoint("e", engine.url, ("m",)),)
    )
    running = await nursery.start(run_router, config)
    wire = await Wire.open(running.port)
    assert (await wire.get("/v1/models", key=None)).status == 200  # no keys: open to all
    os.kill(os.getpid(), signal.SIGTERM)
    assert await wire.closed()
    wire.close()


async def test_a_router_that_ends_leaves_the_stats_socket_of_the_next_one(
    house: House, tmp_path: Path
) -> None:
    """As when a controller is killed and started again while its routers drain."""
    path = tmp_path / "stats"
    async with trio.open_nursery() as till_it_ended:
        first = House(till_it_ended)
        engine = first.engine(tokens=3, hold_after=1)
        await first.start(stats_socket=str(path))
        wire = await first.wire()
        await wire.chat(stream=True)
        await wire.until(b"tok0")
        first.running.stop()
        await house.start(stats_socket=str(path))
        engine.release()
    first.close()
    async with await trio.open_unix_socket(path) as stream:
        assert json.loads(b"".join([piece async for piece in stream]))["worker"] == 0
    house.running.stop()
    await until(lambda: not path.exists())


async def test_the_stats_socket_tells_everything(house: House, tmp_path: Path) -> None:
    path = tmp_path / "stats"
    await house.start(stats_socket=str(path))
    await house.ask(stream=True, fake={"gap": 0.05})
    await house.ask(stream=True, fake={"tokens": 1})  # one token has no pace
    await house.ask(stream=True, fake={"die_at": 2})  # nor has a stream that broke
    await house.ask(model="nope")
    async with await trio.open_unix_socket(path) as stream:
        data = b"".join([piece async for piece in stream])
    told = json.loads(data)
    assert ["m", "chat.completions", 200, 3] in told["requests"]
    assert ["m", "out", 4] in told["tokens"]
    assert told["refusals"] == [["model_not_found", 1]]
    assert told["replicas"] == [["e0", 0]]
    assert told["in_flight"] == [["m", 0]]
    assert told["ttft"][0][1]["count"] == 3
    model, pace = told["itl"][0]
    assert (model, pace["count"]) == ("m", 1)
    row = house.rows[0]
    mean_s = (row["total_ms"] - row["ttft_ms"]) / 2 / 1000  # of two gaps
    assert pace["sum"] == pytest.approx(mean_s, abs=1e-5)
    assert mean_s > 0
    assert told["ready"] is True
    assert "usage_waiting" not in told  # without a database, no row waits for it or is lost


class Shelf:
    """A stand-in for Postgres: answers named queries from its fields, or is away."""

    def __init__(self, engine: FakeEngine) -> None:
        self.away = False
        self.written: list[dict[str, Any]] = []
        self.reports: list[Any] = []
        self.keys = [self.key("k", "sk-test", expires_at=None)]
        self.known = {"k"}
        self.models = [{"name": "m", "aliases": ["short"], "fallbacks": []}]
        self.waking: list[dict[str, Any]] = []
        self.replicas = [
            {"replica_id": 5, "model": "m", "state": "ready", "endpoint": engine.url,
             "node_id": "n"},
            {"replica_id": 6, "model": "m", "state": "starting", "endpoint": None,
             "node_id": "n"},
        ]  # fmt: skip

    @staticmethod
    def key(name: str, secret: str, expires_at: float | None) -> dict[str, Any]:
        digest = sha256(secret.encode()).digest()
        unset = dict.fromkeys(("models", "chain", "org_id", "team_id", "user_id", "ips", "tags"))
        olds = dict.fromkeys(("old_hashes", "old_until", "fallback", "fallback_by"))
        return {"id": name, "hash": digest, "expires_at": expires_at, **unset, **olds}

    async def fetch(self, sql: str, *args: Any) -> list[Any]:
        await self._reach()
        self.known |= {row["id"] for row in self.keys}
        if sql.startswith("keys_"):
            return self._keys(sql, args)
        waited = args[0] if sql == "route_waking" else []
        tables = {
            "route_models": self.models, "route_replicas": self.replicas, "route_trips": [],
            "route_bounds": [{"mark": 1, "budgets": [], "limits": [], "prices": {}}],
            "route_waking": [row for row in self.waking if row["model"] in waited],
        }  # fmt: skip
        return tables[sql]

    def _keys(self, sql: str, args: Any) -> list[Any]:
        if sql == "keys_changed":
            return [{"mark": "1", "ids": list(self.known)}]
        if sql == "keys_first":
            return [{"id": row["id"]} for row in self.keys]
        column = {"keys_by_id": "id", "keys_by_hash": "hash"}[sql]
        return [row for row in self.keys if row[column] in args[0]]

    async def fetchval(self, sql: str, *args: Any) -> Any:
        await self._reach()
        if sql == "usage_flush":
            rows = json.loads(args[1])
            self.written += [named(values) for values in rows]
            return {"written": len(rows), "unpriced": 0}
        if sql == "router_report":
            self.reports.append(args)
        return 1000.0

    async def _reach(self) -> None:
        await trio.lowlevel.checkpoint()
        if self.away:
            raise ConnectionError("the database is away")


async def start_on(shelf: Shelf, nursery: trio.Nursery, **times: float) -> tuple[Any, Any]:
    hints: list[Any] = []

    async def listen(on_hint: Any, on_reconnect: Any) -> None:
        hints.append(on_hint)
        await trio.sleep_forever()

    config = RouterConfig(
        host="127.0.0.1",
        port=0,
        handle_signals=False,
        timeouts=Timeouts(**{"refresh_s": 30.0, "flush_s": 0.02, **times}),
    )
    running = await nursery.start(run_router, config, shelf, QUERIES, listen)
    await until(lambda: running.core.table_loaded_at and hints)
    return running, hints[0]


async def ask(port: int, key: str = "sk-test", model: str = "m") -> int:
    wire = await Wire.open(port)
    await wire.post("/v1/chat/completions", {"model": model, "messages": []}, key=key)
    status = (await wire.answer()).status
    wire.close()
    return status


async def test_routes_keys_and_usage_live_in_the_database(
    nursery: trio.Nursery, engine: FakeEngine
) -> None:
    shelf = Shelf(engine)
    running, hint = await start_on(shelf, nursery)
    assert await ask(running.port, model="short") == 200
    await until(lambda: shelf.written)
    row = shelf.written[0]
    assert (row["key_id"], row["replica_id"], row["status"]) == ("k", 5, "ok")
    assert 1000 <= row["at"] < 1030  # the database's clock, which Postgres keeps partitions by
    used = await until(
        lambda: [
            use
            for _, uses, _ in shelf.reports
            for use in uses
            if "last_used_age_ms" in use and use["in_flight"] == 0
        ]
    )
    assert used[-1]["replica_id"] == 5

    shelf.keys = [Shelf.key("k2", "sk-new", expires_at=1300.0)]
    hint("")
    await until(lambda: "k" not in running.core.keys.cache)
    assert await ask(running.port) == 401
    assert await ask(running.port, "sk-new") == 200
    running.core.keys.set_clock(1300.0)  # it expires by itself
    assert running.core.keys.find(b"Bearer sk-new", Shown()) is BAD_KEY
    assert await ask(running.port, "sk-new") == 401
    running.stop()


async def test_a_draining_replica_gets_nothing_new(
    nursery: trio.Nursery, engine: FakeEngine
) -> None:
    shelf = Shelf(engine)
    running, hint = await start_on(shelf, nursery)
    wire = await Wire.open(running.port)
    how = {"tokens": 4, "hold_after": 1}
    await wire.post("/v1/chat/completions", {"model": "m", "stream": True, "fake": how})
    await wire.until(b"tok0")
    shelf.replicas[0] = {**shelf.replicas[0], "state": "draining"}
    hint("")
    await until(lambda: not running.core.fleet.table.models[0].replicas[0].ready)
    assert await ask(running.port) == 503
    shelf.replicas.clear()
    hint("")
    await until(lambda: not running.core.fleet.pools)
    assert running.core.snapshot()["replicas"] == [["5", 1]]
    engine.release()
    await wire.until(b"[DONE]")
    wire.close()
    running.stop()


async def test_a_replica_that_came_back_elsewhere_is_told_of_once(
    nursery: trio.Nursery, engine: FakeEngine
) -> None:
    shelf = Shelf(engine)
    running, hint = await start_on(shelf, nursery)
    wire = await Wire.open(running.port)
    how = {"tokens": 4, "hold_after": 1}
    await wire.post("/v1/chat/completions", {"model": "m", "stream": True, "fake": how})
    await wire.until(b"tok0")
    shelf.replicas[0] = {**shelf.replicas[0], "endpoint": f"{engine.url}/elsewhere"}
    hint("")
    await until(lambda: len(running.core.fleet.everyone()) == 2)
    shelf.reports.clear()
    _, uses, _ = (await until(lambda: shelf.reports))[0]
    assert [(use["replica_id"], use["in_flight"]) for use in uses] == [(5, 1)]
    engine.release()
    await wire.until(b"[DONE]")
    wire.close()
    running.stop()


async def test_the_last_good_table_serves_while_the_database_is_away(
    nursery: trio.Nursery, engine: FakeEngine
) -> None:
    shelf = Shelf(engine)
    running, hint = await start_on(shelf, nursery)
    shelf.away = True
    hint("")
    for _ in range(3):
        assert await ask(running.port) == 200
    assert len(running.core.usage) == 3
    shelf.away = False
    await until(lambda: len(shelf.written) == 3)
    assert len({row["id"] for row in shelf.written}) == 3
    running.stop()


async def test_rows_from_before_the_first_contact_get_a_time(
    nursery: trio.Nursery, engine: FakeEngine
) -> None:
    shelf = Shelf(engine)
    shelf.away = True
    config = RouterConfig(
        host="127.0.0.1",
        port=0,
        handle_signals=False,
        keys=(StaticKey("k", "sk-test"),),
        endpoints=(StaticEndpoint("e", engine.url, ("m",)),),
        timeouts=Timeouts(flush_s=0.02),
    )
    running = await nursery.start(run_router, config, shelf, QUERIES)
    assert await ask(running.port) == 200  # configured keys and endpoints need no database
    assert running.core.usage.undated[0].at is None
    shelf.away = False
    await until(lambda: shelf.written)
    assert 990 < shelf.written[0]["at"] < 1010
    running.stop()


async def test_H04_not_ready_until_the_table_was_read(
    nursery: trio.Nursery, engine: FakeEngine
) -> None:
    shelf = Shelf(engine)
    shelf.away = True
    config = RouterConfig(host="127.0.0.1", port=0, handle_signals=False)
    running = await nursery.start(run_router, config, shelf, QUERIES)
    wire = await Wire.open(running.port)
    answer = await wire.get("/readyz", key=None)
    assert answer.status == 503
    assert "routing table" in answer.json["reasons"][0]
    shelf.away = False
    await until(lambda: running.core.table_loaded_at)
    assert (await wire.get("/readyz", key=None)).status == 200
    wire.close()
    running.stop()


async def test_a_failing_loop_is_restarted_with_growing_pauses(autojump_clock: Any) -> None:
    began: list[float] = []

    async def loop() -> None:
        began.append(trio.current_time())
        raise ValueError("broken")

    with trio.move_on_after(4):
        await supervise("test", loop)
    pauses = [b - a for a, b in itertools.pairwise(began)]
    assert pauses == sorted(pauses)
    assert 4 <= len(began) <= 8
