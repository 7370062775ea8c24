"""A budget under load with routers killed: never passed, charged exactly, and used to its end."""

from __future__ import annotations

from itertools import cycle
from typing import TYPE_CHECKING, Any

import pytest

from tests.control.process import Controller, until
from tests.end_to_end.chaos import Load, Postgres, Watch, kill_router, postgres
from tests.end_to_end.test_usage_chaos import WORKERS, prepare
from tests.fake_engine import FakeEngine

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

MICROS = 10_000
MOST = 60
"""What one of these requests may come to."""
NOW = """
select 'money', b.spent + coalesce((select sum(a.amount) from llmgw_core.allowance a
    where a.kind = 'money' and a.object_id = b.id), 0) from llmgw.budgets b"""


class Spending(Load):
    """Clients that say how long an answer may be; who is refused goes on asking."""

    def body(self, tokens: int, *, stream: bool) -> dict[str, Any]:
        fake = {"tokens": tokens, "delay": 0.02}
        return {**super().body(tokens, stream=stream), "max_tokens": tokens, "fake": fake}


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
        load = Spending(controller.client, seed=2)
        with controller, Watch(database, NOW) as watch, load:
            controller.ready()
            spent = "select spent from llmgw.budgets"
            for worker in cycle((0, 1)):
                served = len(load.whole)
                until(lambda served=served: len(load.whole) > served + 30, "some are served", 120)
                kill_router(controller, worker)
                if one(database, spent) > MICROS / 3:  # what is left is enough for the next ones
                    break
            until(lambda: one(database, spent) > MICROS - MOST, "the budget is used up", 120)
            until(lambda: load.ends["insufficient_quota"], "somebody is refused", 60)
            load.__exit__()
            served = len(engine.chats())
            costs = "select sum(cost_micros) from llmgw_core.usage_event"
            until(lambda: one(database, costs) == one(database, spent), "both agree", 60)
        assert watch.looks > 100
        assert watch.most["money"] <= MICROS
        assert one(database, costs) <= MICROS
        assert served >= len(load.whole) > 0
