"""Much of one kind at once: no call may be as deep as what others send is long.

Compiled code has no limit of recursion, only a stack; interpreted code has one that is soon met.
"""

from __future__ import annotations

import time
from itertools import pairwise
from typing import TYPE_CHECKING

import pytest
import trio

from controller.router.affinity import leading
from controller.router.blame import error_of
from controller.router.config import Limits, Retries, StaticEndpoint
from controller.router.http1 import RequestReader
from controller.router.vectors import BASE64, in_form
from controller.router.waiters import AT_A_TIME
from tests.router.test_waiting import held_up, opened
from tests.router.wire import chat_body, until

if TYPE_CHECKING:
    from controller.router.core import Core
    from tests.fake_engine import FakeEngine
    from tests.router.conftest import House

UPGRADE = b"GET /healthz HTTP/1.1\r\nhost:t\r\nupgrade:h2c\r\nconnection:upgrade\r\n\r\n"
PIPELINED = 3000


def test_offers_of_another_protocol_in_one_piece() -> None:
    reader = RequestReader(Limits())
    reader.feed(UPGRADE * 5000)
    assert reader.fault is None
    assert len(reader.ready) == 5000
    assert all(request.target == b"/healthz" for request in reader.ready)


async def test_pipelined_requests_in_one_piece(house: House) -> None:
    await house.start()
    wire = await house.wire()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(wire.send, b"GET /healthz HTTP/1.1\r\nhost:t\r\n\r\n" * PIPELINED)
        for _ in range(PIPELINED):
            assert (await wire.answer()).status == 200


@pytest.mark.parametrize("depth", [200, 900, 100_000])
async def test_deep_documents(house: House, depth: int) -> None:
    await house.start(scoring="cache")
    wire = await house.wire()
    for deep in (b"[" * depth + b"]" * depth, b'{"a":' * depth + b"1" + b"}" * depth):
        for field in (b"messages", b"prompt", b"user", b"stream_options", b"n", b"model"):
            await wire.post("/v1/completions", b'{"model":"m","%b":%b}' % (field, deep))
            assert (await wire.answer()).status in {200, 400}


def test_a_prompt_of_numbers_and_more() -> None:
    deep: list[object] = []
    for _ in range(5000):
        deep = [deep]
    assert leading({"prompt": [1, True, 2, deep]}) == "[1, 2]"


@pytest.mark.parametrize("depth", [200, 990, 100_000])
@pytest.mark.parametrize(
    "event", ['{"error":%s}', '{"error":{"message":%s,"code":%s}}', '{"usage":{"a":%s}}']
)
async def test_deep_events(house: House, depth: int, event: str) -> None:
    told = event.replace("%s", "[" * depth + "]" * depth)
    house.engine(raw=f"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\ndata: {told}\n\n")
    await house.start()
    answer = await house.ask(stream=True)
    assert answer.status in {200, 502}
    assert b"router failed" not in answer.body


def test_a_code_of_thousands_of_digits() -> None:
    told = error_of({"message": "no", "code": "5" * 5000}, "m")
    assert (told.status, told.message) == (502, "no")


def test_an_answer_too_deep_to_be_written_again() -> None:
    deep = b"[" * 300 + b"]" * 300
    body = b'{"data":[{"embedding":[1.0]}],"x":%b}' % deep
    assert in_form(body, BASE64) == body


async def test_a_thousand_fallbacks(house: House) -> None:
    engine = house.engine(status=503, body={"error": {"message": "busy"}})
    names = tuple(f"m{n}" for n in range(1000))
    ends = tuple(StaticEndpoint(f"e{n}", engine.url, (name,)) for n, name in enumerate(names))
    falls = tuple((a, (b,)) for a, b in pairwise(names))
    await house.start(endpoints=ends, fallbacks=falls, retries=Retries(floor=10_000))
    wire = await house.wire()
    await wire.post("/v1/chat/completions", chat_body(model="m0"), x_llmgw_explain="1")
    await until(lambda: house.rows, 90.0)  # all that is a second's work, and more on a busy machine
    answer = await wire.answer()
    assert answer.status == 503
    assert answer.headers["x-llmgw-model"] == "m999"


@pytest.mark.interpreted
async def test_a_model_that_starts_does_not_get_all_that_waited_in_one_turn(
    nursery: trio.Nursery, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thousand held up everybody's streams for 0.1 s, and 0.5 s with bodies of 100 KB."""
    engine.default["hold"] = True
    async with opened(nursery, engine) as woken:
        await woken.start()
        wires = [await woken.ask() for _ in range(40)]
        await woken.waiting(40)
        most = most_in_a_turn(woken.running.core, monkeypatch)
        woken.shelf.waking = [held_up("failed", "as it was a moment ago", 3)]
        woken.ready()
        await until(lambda: engine.held() == 40)
        assert 8 <= max(most) <= AT_A_TIME
        engine.release(40)
        assert [(await wire.answer()).status for wire in wires] == [200] * 40


@pytest.mark.interpreted
async def test_a_replica_that_returns_does_not_get_all_that_waited_in_one_turn(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = house.engine(hold=True)
    await house.start()
    pool = house.core.fleet.pools["e0"]
    pool.breaker.resume(time.monotonic() + 20.0, 20.0)
    wires = [await house.wire() for _ in range(40)]
    for wire in wires:
        await wire.chat()
    await until(lambda: house.core.admission.waiting("m") == 40)
    most = most_in_a_turn(house.core, monkeypatch)
    pool.breaker.hurry()
    await until(engine.held)
    engine.release()  # the probe
    await until(lambda: len(engine.chats()) == 40)
    assert 8 <= max(most) <= AT_A_TIME
    engine.release(40)
    assert [(await wire.answer()).status for wire in wires] == [200] * 40


def most_in_a_turn(core: Core, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many requests began to run in each turn of the reactor from now on."""
    found: list[int] = []
    turn = core.reactor._turn

    def counted(events: list[tuple[int, int]]) -> None:
        before = sum(pool.in_flight for pool in core.fleet.everyone())
        turn(events)
        found.append(sum(pool.in_flight for pool in core.fleet.everyone()) - before)

    monkeypatch.setattr(core.reactor, "_turn", counted)
    return found
