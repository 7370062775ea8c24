"""Usage adds up to the token while routers and Postgres are killed under load (B02, kill -9)."""

from __future__ import annotations

import hashlib
from collections import Counter
from typing import TYPE_CHECKING

import pytest

from tests.control.process import Controller, until
from tests.end_to_end.chaos import (
    KEY,
    Load,
    Postgres,
    kill_all,
    kill_router,
    knows_keys,
    postgres,
)
from tests.fake_engine import FakeEngine

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
WORKERS = 2


def prepare(database: Postgres) -> None:
    with database.connect() as connection:
        connection.execute(
            "insert into llmgw_core.api_key (id, hash, name, created_by)"
            " values ('chaos0', %s, 'k', 'test')",
            (hashlib.sha256(KEY.encode()).digest(),),
        )
        connection.execute(
            "insert into llmgw_core.price (model, since, prompt, completion, set_by)"
            " values ('m', now() - interval '1 day', 1000000, 3000000, 'test')"
        )


def test_B02_usage_adds_up_through_kills_of_routers_and_postgres(tmp_path: Path) -> None:
    state = tmp_path / "state"
    with postgres() as database, FakeEngine() as engine:
        prepare(database)
        flags = ("--workers", str(WORKERS), "--endpoint", f"e={engine.url}=m")
        first = Controller(tmp_path, database.url, *flags, role="all", LLMGW_STATE_DIR=str(state))
        again = Controller(
            tmp_path, database.url, *flags, "--listen", f"127.0.0.1:{first.client}",
            role="all", LLMGW_STATE_DIR=str(state),
        )  # fmt: skip
        with Load(first.client, seed=1) as load:
            with first:
                first.ready()
                load.more(100)
                for worker in (0, 1, 0):
                    kill_router(first, worker)
                    load.more(100)
                    knows_keys(first, WORKERS)
                database.kill()
                load.more(200)
                kill_router(first, 1)
                load.more(100)
                database.start()
                load.more(100)
                knows_keys(first, WORKERS)
                database.kill()
                load.more(50)
                kill_all(first)
            database.start()
            with again:
                again.ready()
                load.more(200)
                load.__exit__()
                until(lambda: nothing_waits(again), "all rows are written", 60)
                until(lambda: settled(database, load), "rows of dead routers are written", 60)
                check(database, load, engine)
        assert not list(state.rglob("*.spool")), "nothing is left to write"
        assert not list(state.rglob("*.damaged"))


def nothing_waits(controller: Controller) -> bool:
    found = controller.metrics()
    waiting = [("llmgw_usage_rows_waiting", (("worker", str(n)),)) for n in range(WORKERS)]
    return all(found.get(name) == 0 for name in waiting)


def settled(database: Postgres, load: Load) -> bool:
    kept = {name for (name,) in database.rows("select request_id from llmgw_core.usage_event")}
    return load.whole.keys() <= kept


def check(database: Postgres, load: Load, engine: FakeEngine) -> None:
    query = (
        "select request_id, status, completion_tokens, cost_micros from llmgw_core.usage_event"
        " where key_id = 'chaos0'"
    )
    sums = "select sum(requests), sum(completion_tokens), sum(cost_micros) from llmgw_core."
    with database.connect() as connection, connection.transaction():
        # One snapshot: what a dead router left of broken answers may be written any time.
        connection.execute("set transaction isolation level repeatable read")
        rows = connection.execute(query).fetchall()
        minutes = connection.execute(f"{sums}usage_minute").fetchall()
        days = connection.execute(f"{sums}usage_day").fetchall()
    twice = [name for name, count in Counter(row[0] for row in rows).items() if count > 1]
    assert not twice
    served = Counter(record.headers["x-request-id"] for record in engine.chats())
    kept = {name: tokens for name, status, tokens, _ in rows if status == "ok"}
    # Whoever has a whole answer has its row, to the token, and no row is of nothing.
    assert {name: kept.get(name) for name in load.whole} == load.whole
    assert all(served[name] and load.sent[name] == tokens for name, tokens in kept.items())
    total = len(rows), sum(row[2] or 0 for row in rows), sum(row[3] for row in rows)
    assert minutes == days == [total]
