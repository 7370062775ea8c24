"""A burst over three real routers on one Postgres: none hears in time what the others send."""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING

import pytest
import trio

from controller.router.config import Watching
from controller.router.scoring import PROFILES
from tests.fake_engine import FakeEngine
from tests.router.test_database import look, prepare
from tests.router.test_key_cases import Gate
from tests.router.wire import Wire, chat_body, until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from tests.conftest import Database

pytestmark = pytest.mark.slow

ENGINES, SLOTS, ROUTERS, REQUESTS = 8, 4, 3, 32
KEY = "sk-db"


@pytest.fixture
async def crowd(
    nursery: trio.Nursery, database: Database, asyncio_loop: None
) -> AsyncIterator[tuple[Gate, list[FakeEngine]]]:
    """No router yet, and engines that hold each request until it is released."""
    with ExitStack() as stack:
        engines = [stack.enter_context(FakeEngine({"hold": True})) for _ in range(ENGINES)]
        prepare(database, *(engine.url for engine in engines))
        look(
            database,
            f"update llmgw_core.setting set value = {SLOTS} where name = 'depth' returning 1",
        )
        gate = Gate(nursery, database)
        yield gate, engines
        for running in gate.routers:
            running.stop()
        nursery.cancel_scope.cancel()


@pytest.mark.parametrize("profile", PROFILES)
async def test_C08_a_burst_over_three_real_routers_overloads_no_engine(
    crowd: tuple[Gate, list[FakeEngine]], profile: str
) -> None:
    gate, engines = crowd
    for seed in range(ROUTERS):
        await gate.add(scoring=profile, seed=seed, watching=Watching(0, 0))
    wires = [await Wire.open(gate.routers[n % ROUTERS].port) for n in range(REQUESTS)]
    for wire in wires:  # whose key it is is known before, so that nothing stretches the burst
        assert (await wire.get("/v1/models", KEY)).status == 200
    async with trio.open_nursery() as burst:
        for n, wire in enumerate(wires):
            body = chat_body(user=f"u{n}")  # of another conversation, for the profile `cache`
            burst.start_soon(lambda w=wire, b=body: w.post("/v1/chat/completions", b, key=KEY))
    await until(lambda: sum(engine.held() for engine in engines) == REQUESTS)
    shares = [engine.held() for engine in engines]
    assert max(shares) <= 2 * REQUESTS / ENGINES, shares
    for engine, share in zip(engines, shares, strict=True):
        engine.release(share)
    assert [(await wire.answer()).status for wire in wires] == [200] * REQUESTS
    assert [len(engine.chats()) for engine in engines] == shares  # each was sent once
    for wire in wires:
        wire.close()
