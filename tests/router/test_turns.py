"""What comes and goes within one turn of the reactor, and connections that end with bytes left."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import pytest
import trio
from structlog.testing import capture_logs

from controller.router.breaker import BreakerRules, Phase
from controller.router.config import Limits, Retries, Timeouts
from tests.router.conftest import NEVER_OPEN
from tests.router.wire import ShortAnswer, chat_body, post_bytes, until

if TYPE_CHECKING:
    from tests.router.conftest import House
    from tests.router.wire import Wire

PATH = "/v1/chat/completions"
STRAY = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 5\r\n\r\n[666]"


def at_once(wire: Wire, data: bytes) -> None:
    """Sent without giving the router a turn, which runs in this very task's thread."""
    assert os.write(wire.raw.socket.fileno(), data) == len(data)


@pytest.mark.parametrize("client_first", [True, False])
async def test_what_an_idle_engine_says_is_no_answer_to_the_request_of_that_turn(
    house: House, *, client_first: bool
) -> None:
    """Else a client gets what was meant for the one before it."""
    engine = house.engine()
    await house.start()
    wire = await house.wire()
    for _ in range(5):
        await wire.chat()
        assert (await wire.answer()).json["id"] == "c-1"
        request = post_bytes(PATH, chat_body())
        if client_first:
            at_once(wire, request)
        for sock in list(engine._open):
            with suppress(OSError):  # one of before, whose thread has not closed it yet
                sock.sendall(STRAY)
        if not client_first:
            at_once(wire, request)
        assert (await wire.answer()).json["id"] == "c-1"
    assert {row["status"] for row in house.rows} == {"ok"}
    assert len(engine.chats()) == 10


# -- clients that do not read --------------------------------------------------------------------


async def stuffed(house: House, *, version: bytes = b"HTTP/1.1", **fields: Any) -> Wire:
    """A client that reads nothing of a large stream."""
    wire = await house.wire()
    data = post_bytes(PATH, chat_body(stream=True, **fields))
    await wire.send(data.replace(b"HTTP/1.1", version, 1))
    return wire


@pytest.mark.parametrize("version", [b"HTTP/1.1", b"HTTP/1.0"])
async def test_H14_a_reader_that_stopped_learns_that_its_answer_is_short(
    house: House, version: bytes
) -> None:
    """Where only the close ends an answer, an orderly one would make what it had whole."""
    house.engine(text="x" * 50_000, tokens=200)
    await house.start(timeouts=Timeouts(client_write_s=0.2))
    wire = await stuffed(house, version=version)
    assert (await house.row())["status"] == "client_closed"
    with pytest.raises(ShortAnswer):
        await wire.answer()


async def test_a_reader_that_stops_again_has_a_deadline_again(house: House) -> None:
    house.engine(text="x" * 50_000, tokens=200)
    await house.start(limits=Limits(pause_above_bytes=1 << 30))
    wire = await house.wire()
    await wire.chat(stream=True)
    await house.row()  # the engine is done, and bytes wait
    client = next(iter(house.core.clients))
    assert client.pending
    assert len((await wire.answer()).body) > 10_000_000
    client.due = client.slot = trio.current_time() + 1e6  # none is left over from that answer
    await wire.chat(stream=True, fake={"hold_after": 199})
    await until(lambda: client.pending)
    house.core.deadlines.sweep(time.monotonic() + Timeouts().client_write_s + 1)
    assert not house.core.clients
    assert (await house.row(1))["status"] == "client_closed"


# -- health --------------------------------------------------------------------------------------


async def test_without_budget_nobody_is_chosen_to_be_probed_and_gets_nothing(house: House) -> None:
    house.engine(status=500)
    other = house.engine()
    await house.start(retries=Retries(ratio=0, floor=0), breaker=NEVER_OPEN)
    breaker = house.core.fleet.pools["e1"].breaker
    answers = []
    for _ in range(12):
        breaker.resume(0.0, 30.0)  # it failed, and its pause is over
        before = len(other.chats())
        answers.append((await house.ask()).status)
        asked = len(other.chats()) > before
        assert (breaker.phase is Phase.OPEN) == (not asked)
    assert {200, 500} == set(answers)
    assert house.core.stats.retries_refused == {"engine_error": answers.count(500)}


async def test_an_error_too_long_to_be_held_counts_as_a_failure(house: House) -> None:
    house.engine(status=500, body={"error": "x" * 100_000}, framing="chunked", end_delay=0.05)
    house.engine(status=500, body={"error": "x" * 100_000}, framing="chunked", end_delay=0.05)
    await house.start(breaker=BreakerRules(failures_in_row=1, pause_s=60.0, longest_pause_s=60.0))
    answer = await house.ask()
    assert (answer.status, len(answer.body)) == (500, 100_013)
    row = await house.row()
    assert [attempt[2] for attempt in row["tried"]] == ["500"]
    assert sum(pool.breaker.trips for pool in house.core.fleet.pools.values()) == 1


async def test_a_trip_and_a_recovery_are_one_line_each(house: House) -> None:
    engine = house.engine(status=500)
    await house.start(breaker=BreakerRules(failures_in_row=2, pause_s=30.0))
    pool = house.core.fleet.pools["e0"]
    with capture_logs() as lines:
        for number in range(6):
            assert (await house.ask()).status == 500
            if number:
                pool.breaker.hurry()  # the next is a probe, which fails
        engine.default = {}
        assert (await house.ask()).status == 200
        assert (await house.ask()).status == 200
    assert pool.breaker.trips == 5
    assert [(line["log_level"], line["replica"], line.get("last")) for line in lines] == [
        ("warning", "e0", "status 500"),
        ("info", "e0", None),
    ]
    assert lines[0]["pause_s"] == 30.0
