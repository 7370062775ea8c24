"""A budget under load with routers killed: never passed, charged exactly, and used to its end."""

from __future__ import annotations

import http.client
import json
import threading
import time
from itertools import cycle
from typing import TYPE_CHECKING, Any, Self

import pytest

from tests.control.process import Controller, until
from tests.end_to_end.test_usage_chaos import (
    KEY,
    WORKERS,
    Load,
    Postgres,
    kill_router,
    postgres,
    prepare,
)
from tests.fake_engine import FakeEngine

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]

MICROS = 10_000
MOST = 60
"""What one of these requests may come to."""
NOW = """
select b.spent + coalesce((select sum(a.amount) from llmgw_core.allowance a
    where a.kind = 'money' and a.object_id = b.id), 0) from llmgw.budgets b"""


class Spending(Load):
    """Clients that say how long an answer may be; who is refused goes on asking."""

    def _ask(self, name: str, tokens: int, *, stream: bool) -> bool:
        body = {
            "model": "m",
            "stream": stream,
            "max_tokens": tokens,
            "fake": {"tokens": tokens, "delay": 0.02},
        }
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=20)
        try:
            headers = {"Authorization": f"Bearer {KEY}", "X-Request-Id": name}
            connection.request("POST", "/v1/chat/completions", json.dumps(body), headers)
            answer = connection.getresponse()
            told = answer.read()
        except (OSError, http.client.HTTPException):
            return False
        finally:
            connection.close()
        self.ends[str(answer.status) if answer.status == 200 else _code(told)] += 1
        return answer.status == 200


def _code(told: bytes) -> str:
    code: str = json.loads(told)["error"]["code"]
    return code


class Watch:
    """Looks at what is spent and held, all the time, on a connection of its own."""

    def __init__(self, database: Postgres) -> None:
        self._database = database
        self._stopping = threading.Event()
        self.most = 0.0
        self.looks = 0
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopping.set()
        self._thread.join(10)

    def _run(self) -> None:
        with self._database.connect() as connection:
            while not self._stopping.is_set():
                ((found,),) = connection.execute(NOW).fetchall()
                self.most = max(self.most, float(found))
                self.looks += 1
                time.sleep(0.005)


def limit(database: Postgres) -> None:
    with database.connect() as connection:
        put = "select llmgw.budget_put_v1('test', null, 'chaos0', %s, 'month', null, null)"
        connection.execute(put, (MICROS,))
        short = "update llmgw_core.setting set value = 5 where name = 'budget_lease'"
        connection.execute(short)


def one(database: Postgres, query: str) -> Any:
    ((found,),) = database.rows(query)
    return found


def test_b01_a_budget_holds_while_routers_are_killed(tmp_path: Path) -> None:
    with postgres() as database, FakeEngine() as engine:
        prepare(database)
        limit(database)
        flags = ("--workers", str(WORKERS), "--endpoint", f"e={engine.url}=m")
        state = str(tmp_path / "state")
        controller = Controller(tmp_path, database.url, *flags, role="all", LLMGW_STATE_DIR=state)
        with controller, Watch(database) as watch, Spending(controller.client, seed=2) as load:
            controller.ready()
            spent = "select spent from llmgw.budgets"
            for worker in cycle((0, 1)):
                served = len(load.whole)
                until(lambda served=served: len(load.whole) > served + 30, "some are served", 60)
                kill_router(controller, worker)
                if one(database, spent) > MICROS / 3:  # what is left is enough for the next ones
                    break
            until(lambda: one(database, spent) > MICROS - MOST, "the budget is used up", 90)
            load.__exit__()
            served = len(engine.chats())
            assert load.ends["insufficient_quota"]
            costs = "select sum(cost_micros) from llmgw_core.usage_event"
            until(lambda: one(database, costs) == one(database, spent), "both agree", 30)
        assert watch.looks > 100
        assert watch.most <= MICROS
        assert one(database, costs) <= MICROS
        assert served >= len(load.whole) > 0
