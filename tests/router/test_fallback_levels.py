"""C10 on a real Postgres: request, key, user, team, org, settings; the nearest word decides."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import trio
from psycopg.types.json import Jsonb

from controller.router.config import Retries
from tests.fake_engine import FakeEngine
from tests.router.tenants import Routers
from tests.router.wire import PATIENCE_S

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from sql.pool import Pool
    from tests.conftest import Database
    from tests.router.wire import Answer

pytestmark = pytest.mark.slow

KEY = "levels"
PLENTY = Retries(attempts=3, ratio=1.0, floor=1000)
BUSY = {"status": 503}
TOO_LONG = {"status": 400, "body": {"error": {"message": "prompt too long"}}}
NEVER: list[str] = []
OTHER = (
    "insert into llmgw_core.model (name, source, min_replicas, max_replicas, origin, updated_by)"
    " values ('n', 'file:/n', 1, 1, 'api', 'test')",
    "insert into llmgw_core.model_name values ('n', 'n', false)",
    "insert into llmgw_core.fallback (model, position, fallback) values ('m', 1, 'n')",
    "insert into llmgw_core.replica (model, state, endpoint, term) values ('n', 'pending', %s, 1)",
    "update llmgw_core.replica set state = 'starting' where model = 'n'",
    "update llmgw_core.replica set state = 'ready' where model = 'n'",
)

SCOPES = (
    ("org", "acme", None), ("team", "ml", "acme"), ("user", "alice", "acme/ml"),
    ("org", "else", None),
)  # fmt: skip


class Levels:
    """Two routers; a key in acme/ml/alice, and a model whose only engine does what a test says."""

    def __init__(self, routers: Routers, primary: FakeEngine) -> None:
        self.routers = routers
        self.primary = primary

    async def start(self, other: FakeEngine) -> None:
        self.routers.prepare(self.primary, KEY)
        for statement in OTHER:
            self.routers.execute(statement, *([other.url] if "%s" in statement else []))
        for kind, name, parent in SCOPES:
            made = "select llmgw.scope_create_v1('test', %s, %s, %s, null)"
            self.routers.execute(made, kind, name, parent)
        self.move("acme/ml/alice")
        await self.routers.start(2, retries=PLENTY)

    def say(self, place: str, said: list[str] | None) -> None:
        function = "key_change_v1" if place == KEY else "scope_change_v1"
        text = f"select llmgw.{function}('test', %s, %s)"
        self.routers.execute(text, place, Jsonb({"fallback": said}))

    def move(self, place: str | None) -> None:
        self.routers.execute("select llmgw.key_move_v1('test', %s, %s)", KEY, place)

    async def ask(self, router: int, *, stream: bool, header: str | None = None) -> Answer:
        headers = {"x-llmgw-explain": "1"}
        if header is not None:
            headers["x-llmgw-fallback"] = header
        return await self.routers.ask(KEY, router, stream=stream, headers=headers)

    async def shows(self, by: str, reasons: str, header: str | None = None) -> None:
        """Both routers come to decide so, for plain calls and streams alike."""
        for router in range(2):
            for stream in (False, True):
                with trio.fail_after(PATIENCE_S):
                    while True:
                        answer = await self.ask(router, stream=stream, header=header)
                        if answer.headers["x-llmgw-fallback-on"] == f"{reasons}; by={by}":
                            break
                        assert not stream, "a stream decides otherwise than a plain call"
                        await self.routers.pause()
                self.decided(answer, by, reasons)

    def decided(self, answer: Answer, by: str, reasons: str) -> None:
        status = self.primary.default.get("status", 502)
        reason = {503: "unavailable", 400: "refusal", 502: "error"}[status]
        if reason in reasons:
            assert answer.status == 200
            assert answer.headers["x-llmgw-fallback"] == f"n; on={reason}; by={by}"
            assert answer.headers["x-llmgw-model"] == "n"
        else:
            assert answer.status == status
            assert answer.headers["x-llmgw-model"] == "m"
            assert "x-llmgw-fallback" not in answer.headers


@pytest.fixture
async def levels(
    nursery: trio.Nursery, database: Database, pool: Pool, engine: FakeEngine
) -> AsyncIterator[Levels]:
    routers = Routers(nursery, database, pool)
    engine.default = dict(BUSY)
    with FakeEngine() as other:
        made = Levels(routers, engine)
        await made.start(other)
        yield made
        crashes = [router.core.reactor.crashes for router in routers.running]
        routers.close()
    assert not any(crashes)


async def test_C10_each_level_overrules_those_above_it(levels: Levels) -> None:
    await levels.shows("settings", "error,timeout,unavailable")
    levels.say("acme", NEVER)
    await levels.shows("org", "none")
    levels.say("acme/ml", ["unavailable"])
    await levels.shows("team", "unavailable")
    levels.say("acme/ml/alice", ["refusal"])
    await levels.shows("user", "refusal")
    levels.say(KEY, ["timeout", "unavailable"])
    await levels.shows("key", "timeout,unavailable")
    await levels.shows("request", "none", header="none")
    levels.say(KEY, NEVER)
    await levels.shows("key", "none")
    await levels.shows("request", "error,unavailable", header="unavailable,error")
    for place, by, reasons in ((KEY, "user", "refusal"), ("acme/ml/alice", "team", "unavailable"),
                               ("acme/ml", "org", "none"),
                               ("acme", "settings", "error,timeout,unavailable")):  # fmt: skip
        levels.say(place, None)
        await levels.shows(by, reasons)


async def test_C10_refusals_fall_back_where_a_level_says_so(levels: Levels) -> None:
    levels.primary.default = dict(TOO_LONG)
    await levels.shows("settings", "error,timeout,unavailable")
    levels.say("acme/ml", ["refusal"])
    await levels.shows("team", "refusal")
    levels.say(KEY, ["error"])
    await levels.shows("key", "error")


async def test_C10_a_moved_key_does_as_it_is_told_where_it_is(levels: Levels) -> None:
    levels.say("acme/ml", ["unavailable"])
    levels.say("else", NEVER)
    await levels.shows("team", "unavailable")
    levels.move("else")
    await levels.shows("org", "none")
    levels.move(None)
    await levels.shows("settings", "error,timeout,unavailable")
    levels.move("acme/ml/alice")
    await levels.shows("team", "unavailable")
    move = "select llmgw.scope_move_v1('test', 'acme/ml', 'else')"
    levels.routers.execute(move)
    levels.say("else/ml", None)
    await levels.shows("org", "none")
    levels.say(KEY, ["unavailable"])  # goes with it wherever it is
    await levels.shows("key", "unavailable")
    levels.move("acme")
    await levels.shows("key", "unavailable")


async def test_C10_our_own_errors_are_judged_alike(levels: Levels) -> None:
    levels.primary.default = {"close": "always"}
    levels.say("acme", ["timeout"])
    await levels.shows("org", "timeout")
    levels.say(KEY, ["error"])
    await levels.shows("key", "error")
    levels.say(KEY, ["unavailable"])
    await levels.shows("key", "unavailable")
