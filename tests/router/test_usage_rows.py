"""Usage rows from a request's end to Postgres: one each, whatever engines say or rows hold."""

from __future__ import annotations

import json
import uuid
from functools import partial
from typing import TYPE_CHECKING, Any

import orjson
import pytest
import trio

from controller.router.answer_id import answer_id
from controller.router.auth import Shown
from controller.router.config import Retries, RouterConfig, Timeouts
from controller.router.segment import Owner, Segment
from controller.router.server import run_router
from controller.router.spool import Spool
from controller.router.stats import Stats
from controller.router.tokens import Tokens, read_usage
from controller.router.usage import UsageLog, UsageRow
from controller.router.usage_writer import REFUSED, UsageWriter
from sql import queries
from tests.router.test_database import look, prepare
from tests.router.test_server import QUERIES, Shelf
from tests.router.test_spool import OWNER, SIZE
from tests.router.wire import PATIENCE_S, Wire, until
from tests.usage_columns import named

if TYPE_CHECKING:
    from pathlib import Path

    from sql.pool import Pool
    from tests.conftest import Database
    from tests.fake_engine import FakeEngine
    from tests.router.conftest import House

LONG = "x\x00'\"; drop" + "y" * 4096


def made(number: int, **more: Any) -> UsageRow:
    told = {
        "row_id": f"{number:032x}", "key_id": "k", "model_asked": "m", "model": "m",
        "replica_id": None, "endpoint": "chat.completions", "status": "ok", "http_status": 200,
        "stream": False,
        "tokens": Tokens(7, 3), "ttft_s": None, "total_s": 0.5, "attempts": 1, "error_code": None,
        "request_id": b"r", "ended": 10.0, "queue_s": 0.0, "at": 1000.0 + number,
    }  # fmt: skip
    return UsageRow(**(told | more))


def ids(records: list[bytes]) -> list[int]:
    return [int(orjson.loads(record)[0], 16) for record in records]


# -- what a row holds ----------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["/v1/responses", "/v1/messages", "/v1/chat/completions"])
async def test_B08_a_request_has_one_row_and_its_attempts_are_children(
    house: House, path: str
) -> None:
    house.engine(status=503)
    house.engine(status=503)
    house.engine(stateful=True)
    await house.start(retries=Retries(3, 1.0, 1000))
    wire = await house.wire()
    body = {"model": "m", "max_tokens": 3, "messages": [], "input": "hi"}
    for _ in range(6):
        await wire.post(path, body)
        assert (await wire.answer()).status == 200
    await until(lambda: len(house.rows) == 6)
    assert len({row["id"] for row in house.rows}) == 6
    asked = sum(len(engine.chats()) for engine in house.engines)
    assert sum(row["attempts"] for row in house.rows) == asked
    for row in house.rows:
        failed = row.get("tried", [])
        assert len(failed) == row["attempts"] - 1
        assert {(why, model) for _, model, why, _ in failed} <= {("503", "m")}
    assert any("tried" in row for row in house.rows)


async def test_an_engine_that_is_not_there_is_told_among_the_attempts(house: House) -> None:
    gone = house.engine()
    gone.stop()
    await house.start(gone.url)
    assert (await house.ask()).status == 502
    row = await house.row()
    assert {why for _, _, why, _ in row["tried"]} == {"connect_failed"}
    assert len(row["tried"]) == row["attempts"]


def test_B10_ids_of_answers_are_cut_and_cleaned() -> None:
    for text, found in (
        (b'{"id":"chatcmpl-1","choices":[]}', "chatcmpl-1"),
        (b'data: {"id": "cmpl-2"}', "cmpl-2"),
        (b'{"id":""}', None),
        (b'{"id":null}', None),
        (b"{}", None),
        (b'{"id":"a\x00b\xff"}', "a?b\ufffd"),
        (b'{"id":"' + b"z" * 4096 + b'"}', "z" * 128),
        (b'{"id":"a\\"b"}', "a\\"),
        (b" " * 600 + b'{"id":"late"}', None),
    ):
        assert answer_id(text) == found, text


@pytest.mark.interpreted
async def test_B20_a_row_that_was_not_built_is_there_and_marked(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(_: bytes) -> str:
        raise ValueError("a bug of ours")

    monkeypatch.setattr("controller.router.record.answer_id", broken)
    await house.start()
    assert (await house.ask()).status == 200
    row = await house.row()
    assert (row["degraded"], row["key_id"], row["prompt_tokens"], row["completion_tokens"]) == (
        True, "k", 7, 3,
    )  # fmt: skip
    assert house.idle()


@pytest.mark.parametrize(
    "bad",
    [
        {"model_asked": "half \ud800 of it"}, {"tokens": Tokens(2**70, 3)},
        {"request_id": b"\xff"}, {"replica_id": 2**64}, {"failed": [object()]},
    ],
)  # fmt: skip
def test_B20_what_is_no_json_is_kept_as_far_as_it_is(bad: dict[str, Any]) -> None:
    stats = Stats()
    log = UsageLog(10, stats)
    bad = {"tried" if name == "failed" else name: value for name, value in bad.items()}
    log.add(made(1, **bad))
    (record,) = log.batch(10)
    row = named(orjson.loads(record))
    assert (row["degraded"], row["key_id"], row["completion_tokens"]) == (True, "k", 3)
    assert stats.usage_rows == {"degraded": 1}


def test_numbers_that_no_model_makes_are_unknown() -> None:
    for odd in (-1, 2**31, 10**12, 2**63, 1.5, True, "7", None, [], float("nan")):
        assert read_usage({"prompt_tokens": odd, "completion_tokens": 5}) == Tokens(None, 5), odd


# -- where rows wait -----------------------------------------------------------------------------


def test_rows_in_memory_go_oldest_first_and_are_counted() -> None:
    log = UsageLog(5, Stats())
    for number in range(7):
        log.add(made(number))
    assert log.dropped == 2
    assert ids(log.batch(3)) == [2, 3, 4]
    for number in (7, 8):  # two of the batch have to go while it is under way
        log.add(made(number))
    log.written()
    assert ids(log.batch(10)) == [5, 6, 7, 8]
    log.written()
    assert len(log) == 0


async def test_rows_without_room_on_disk_wait_in_memory(
    nursery: trio.Nursery, tmp_path: Path
) -> None:
    stats = Stats()
    log = UsageLog(1_000_000, stats)  # more than come before the disk has answered
    log.spool = Spool(tmp_path, OWNER, 0, SIZE)
    log.add(made(0))  # before its first file
    assert stats.usage_rows == {"unspooled": 1}
    nursery.start_soon(log.spool.run)
    await until(lambda: log.spool.size)
    number = 0
    while not log.spool_as_json()["spool_full"]:
        number += 1
        log.add(made(number, request_id=b"r" * 500))
        await trio.lowlevel.checkpoint()
    assert len(log) == number + 1
    assert log.spooled + stats.usage_rows["unspooled"] == len(log)
    assert log.oldest_age_s(2000.0) > 0
    seen: list[int] = []
    while records := log.batch(7):
        seen += ids(records)
        log.written()
    assert sorted(seen) == list(range(number + 1))
    log.spool.close()


def test_the_age_of_what_waits_is_by_the_databases_clock() -> None:
    log = UsageLog(10, Stats())
    assert log.oldest_age_s(0.0) is None
    log.add(made(1, at=None))
    assert log.oldest_age_s(None) > 0
    log.date(1000.0)
    assert ids(log.batch(9)) == [1]
    assert log.oldest_age_s(None) is None  # nobody knows


# -- to Postgres ---------------------------------------------------------------------------------


class Standing:
    """A router on a real Postgres before one fake engine."""

    def __init__(self, nursery: trio.Nursery, database: Database, pool: Pool) -> None:
        self._nursery, self._database, self._pool = nursery, database, pool

    async def start(self, engine: FakeEngine, spool: Path | None) -> Any:
        prepare(self._database, engine.url)
        look(
            self._database,
            "insert into llmgw_core.price (model, since, prompt, cached, completion, set_by)"
            " values ('m', now() - interval '1 day', 1000000, 0, 3000000, 'test') returning 1",
        )
        times = Timeouts(refresh_s=0.05, flush_s=0.02)
        config = RouterConfig(
            host="127.0.0.1", port=0, handle_signals=False, timeouts=times, spool=spool
        )
        running = await self._nursery.start(run_router, config, self._pool, queries("router"))
        await until(lambda: running.core.table_loaded_at)
        if spool is not None:
            await until(lambda: running.core.snapshot().get("spool_bytes"))
        return running


@pytest.fixture
def standing(nursery: trio.Nursery, database: Database, pool: Pool) -> Standing:
    return Standing(nursery, database, pool)


@pytest.mark.slow
async def test_B10_a_hundred_answers_of_one_id_are_a_hundred_rows(
    standing: Standing, database: Database, engine: FakeEngine, tmp_path: Path
) -> None:
    running = await standing.start(engine, tmp_path)
    wire = await Wire.open(running.port)
    usage = {"prompt_tokens": 1, "completion_tokens": 1}
    for name in ("", "same", LONG):
        engine.default["body"] = {"id": name, "choices": [], "usage": usage}
        for _ in range(100 if name == "same" else 5):
            await wire.post("/v1/chat/completions", {"model": "m"}, key="sk-db")
            assert (await wire.answer()).status == 200
    count = partial(look, database, "select count(*) from llmgw_core.usage_event")
    await until(lambda: count()[0][0] == 110)
    kept = look(
        database,
        "select upstream_id, count(*) from llmgw_core.usage_event group by 1 order by 2, 1",
    )
    assert [number for _, number in kept] == [5, 5, 100]
    assert kept[2][0] == "same"
    told = {text for text, number in kept if number == 5}
    assert None in told
    (long,) = told - {None}
    assert len(long) <= 128
    wire.close()
    running.stop()
    await until(lambda: not running.core.clients)


@pytest.mark.slow
async def test_B07_streamed_and_plain_answers_cost_the_same_to_the_token(
    standing: Standing, database: Database, engine: FakeEngine, tmp_path: Path
) -> None:
    running = await standing.start(engine, tmp_path)
    engine.default["stateful"] = True
    wire = await Wire.open(running.port)
    paths = ("/v1/chat/completions", "/v1/completions", "/v1/responses")
    for path in paths:
        for stream in (False, True):
            body = {"model": "m", "stream": stream, "input": "hi", "prompt": "hi", "messages": []}
            await wire.post(path, body, key="sk-db")
            assert (await wire.answer()).status == 200
    rows = partial(
        look,
        database,
        "select endpoint, prompt_tokens, completion_tokens, cost_micros::float8, count(*),"
        " count(distinct stream), bool_or(unpriced) from llmgw_core.usage_event"
        " group by 1, 2, 3, 4 order by 1",
    )
    await until(lambda: sum(row[4] for row in rows()) == 6)
    # The fake engine tells two of chat's and completions' seven prompt tokens as cached.
    assert rows() == [
        ("chat.completions", 7, 3, 14.0, 2, 2, False),
        ("completions", 7, 3, 14.0, 2, 2, False),
        ("responses", 7, 3, 16.0, 2, 2, False),
    ]
    wire.close()
    running.stop()
    await until(lambda: not running.core.clients)


@pytest.mark.slow
async def test_a_row_tells_the_scopes_that_its_key_had_when_it_began(
    standing: Standing, database: Database, engine: FakeEngine
) -> None:
    running = await standing.start(engine, None)
    engine.default["hold"] = True
    for call in (
        "llmgw.scope_create_v1('test', 'org', 'old', null, '{}')",
        "llmgw.scope_create_v1('test', 'org', 'new', null, '{}')",
        "llmgw.key_move_v1('test', 'abcdef', 'old')",
    ):
        look(database, f"select {call}")
    key = partial(running.core.keys.find, b"Bearer sk-db", Shown())
    wire = await Wire.open(running.port)
    (old,), (new,) = look(database, "select id from llmgw_core.scope order by id")
    await until(lambda: getattr(key(), "org", None) == old)
    await wire.post("/v1/chat/completions", {"model": "m"}, key="sk-db")
    await until(engine.chats)
    look(database, "select llmgw.key_move_v1('test', 'abcdef', 'new')")
    await until(lambda: getattr(key(), "org", None) == new)
    engine.release()
    assert (await wire.answer()).status == 200
    rows = partial(look, database, "select org_id, team_id, user_id from llmgw_core.usage_event")
    assert await until(rows) == [(old, None, None)]
    wire.close()
    running.stop()
    await until(lambda: not running.core.clients)


async def test_a_row_that_postgres_refuses_keeps_no_other_back(
    house: House, database: Database, pool: Pool, tmp_path: Path
) -> None:
    await house.start(spool=tmp_path)
    (now,) = look(database, "select extract(epoch from now())::float8")[0]
    core = house.core
    for number in range(50):
        status = "lost" if number in (7, 31) else "ok"
        core.usage.add(made(number, at=now, status=status))
    core.keys.set_clock(now)
    writer = UsageWriter(core, pool, queries("router"))
    assert await writer.flush() == 50
    assert len(core.usage) == 0
    assert look(database, "select count(*) from llmgw_core.usage_event") == [(48,)]
    assert dict(core.stats.usage_rows) == {"written": 48, "unpriced": 48, "refused": 2}
    kept = [json.loads(line) for line in (tmp_path / REFUSED).read_text().splitlines()]
    assert ids([orjson.dumps(row) for row in kept]) == [7, 31]


class Leaving(Shelf):
    """A database that is there at the start and away at the end."""

    async def fetchval(self, sql: str, *args: Any) -> Any:
        if sql == "usage_database":
            return str(OWNER.database)
        return await super().fetchval(sql, *args)


async def test_a_router_that_stops_without_postgres_leaves_its_rows_on_disk(
    nursery: trio.Nursery, engine: FakeEngine, tmp_path: Path
) -> None:
    shelf = Leaving(engine)
    config = RouterConfig(
        host="127.0.0.1", port=0, handle_signals=False, spool=tmp_path,
        timeouts=Timeouts(refresh_s=30.0, flush_s=0.02),
    )  # fmt: skip
    names = {**QUERIES, "usage_database": "usage_database"}
    running = await nursery.start(run_router, config, shelf, names)
    await until(lambda: running.core.snapshot().get("spool_bytes"))
    await until(lambda: running.core.table_loaded_at)
    shelf.away = True
    wire = await Wire.open(running.port)
    for _ in range(3):
        await wire.post("/v1/chat/completions", {"model": "m"})
        assert (await wire.answer()).status == 200
    wire.close()
    running.stop()
    await until(lambda: running.core.usage.spool is None)
    assert not shelf.written
    (path,) = tmp_path.glob("*.spool")
    left = Segment.take_over(path)
    assert left is not None
    assert left.owner == Owner(uuid.UUID(running.core.router_id), OWNER.database)
    assert len(set(ids(left.read(9)[0]))) == 3
    left.remove()


async def test_rows_that_wait_at_the_end_are_on_disk_for_the_next_router(
    nursery: trio.Nursery, standing: Standing, database: Database, engine: FakeEngine,
    pool: Pool, tmp_path: Path,
) -> None:  # fmt: skip
    spool = Spool(tmp_path, OWNER, 0, SIZE)
    nursery.start_soon(spool.run)
    await until(lambda: spool.size)
    (identity,) = look(database, "select llmgw_core.database_id()")[0]
    spool.owner = OWNER._replace(database=identity)
    spool.close()
    left = Spool(tmp_path, spool.owner, 0, SIZE)
    nursery.start_soon(left.run)
    await until(lambda: left.size)
    (now,) = look(database, "select extract(epoch from now())::float8")[0]
    for number in range(5):
        assert left.append(made(number, at=now).rendered() or b"")
    left.close()
    running = await standing.start(engine, tmp_path)
    count = partial(look, database, "select count(*) from llmgw_core.usage_event")
    await until(lambda: count() == [(5,)])
    await until(lambda: len(list(tmp_path.glob("*.spool"))) == 1)  # its own
    assert running.core.snapshot()["spool_rows"] == 0
    running.stop()


async def test_rows_that_come_while_others_are_written_wait_for_the_next_second(
    house: House,
) -> None:
    """One row at a time else kept a router writing without a pause, at every load."""
    await house.start()
    await house.ask()
    core = house.core
    await until(lambda: len(core.usage) == 1)

    class Busy:
        async def fetchval(self, *_: Any) -> dict[str, int]:
            await trio.lowlevel.checkpoint()
            core.usage.add(made(len(core.usage)))
            return {"written": 1, "unpriced": 0}

    core.keys.set_clock(1000.0)
    writer = UsageWriter(core, Busy(), {"usage_flush": ""})
    with trio.fail_after(PATIENCE_S):
        assert await writer.flush() == 1
    assert len(core.usage) == 1
