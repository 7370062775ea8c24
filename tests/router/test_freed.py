"""What is over is let go of: no request, connection or error leaves anything in memory."""

from __future__ import annotations

import gc
import sys
import time
from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest
import trio.testing

from controller.router.config import Limits, Retries, StaticEndpoint
from controller.router.dialect import CHAT
from controller.router.plain import PlainRelay
from controller.router.relay import Head, Wish
from tests.router.conftest import NEVER_OPEN
from tests.router.test_access_log import lines
from tests.router.wire import ShortAnswer, chunk_of, post_bytes, until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.router.conftest import House

MIB = 1024 * 1024
HEAD = b"POST /v1/chat/completions HTTP/1.1\r\nhost: t\r\nauthorization: Bearer sk-test\r\n"
KINDS: tuple[dict[str, Any], ...] = (
    {},
    {"model": "short"},
    {"model": "nobody"},
    {"stream": True},
    {"stream": True, "model": "short"},
    {"fake": {"status": 500, "body": {"error": {"message": "no"}}}},
    {"stream": True, "fake": {"error_first": {"message": "no", "code": "503"}}},
    {"stream": True, "fake": {"die_at": 2, "die": "rst"}},
    {"fake": {"die_at": 20, "die": "fin"}},
    {"fake": {"gzip": True}, "model": "short"},
)


def test_an_answer_that_is_written_again() -> None:
    wish = Wish("m", b"id", True, False, False, CHAT, None, b'"other"')
    body = b'{"model":"m"}'
    held = sys.getrefcount(wish)
    for _ in range(100):
        relay = PlainRelay(Head(200, [], len(body), b"application/json"), wish, Limits())
        relay.feed(body)
        assert relay.finish().endswith(b'content-length: 17\r\n\r\n{"model":"other"}')
    del relay
    assert sys.getrefcount(wish) == held


async def _everything(house: House) -> None:
    """A request of each kind, one whose client leaves, and one that is none."""
    for fields in KINDS:
        try:
            await house.ask(**fields)
        except ShortAnswer:
            assert "die_at" in fields["fake"]
    wire = await house.wire()
    await wire.chat(stream=True, fake={"tokens": 50, "gap": 0.01})
    await wire.until(b"data: ")
    wire.reset()
    wire = await house.wire()
    await wire.send(post_bytes("/v1/chat/completions", b"{"))
    await wire.answer()
    await wire.send(b"\0\r\n\r\n")
    await wire.answer()
    wire.close()
    await until(lambda: house.idle() and not house.core.clients)


def _alive(*, collect: bool = True) -> Counter[str]:
    if collect:
        gc.collect()
    names = (str(type(thing)) for thing in gc.get_objects())
    return Counter(name for name in names if "controller.router." in name or "httptools" in name)


async def test_nothing_is_left_of_requests(house: House) -> None:
    await house.start(retries=Retries(ratio=1.0), breaker=NEVER_OPEN)
    left = []
    for times in (1, 4, 8):
        for _ in range(times):
            await _everything(house)
        house.core.deadlines.sweep(time.monotonic() + 10_000)  # idle ones too, and empty slots
        house.core.usage.undated.clear()
        left.append(_alive())
    more, most = left[1] - left[0], left[2] - left[0]
    assert not more
    assert not most


@pytest.fixture
def uncollected() -> Iterator[None]:
    """In a quiet router no collection may come for hours."""
    gc.disable()
    yield
    gc.enable()


async def test_a_closed_connection_waits_for_no_deadline(house: House) -> None:
    """Its own are a minute away, its engine's ten."""
    house.engine(hold=True)
    await house.start()
    wire = await house.wire()
    await wire.chat()
    await until(lambda: house.engines[0].held() == 1)
    wire.close()
    await until(house.idle)
    await until(lambda: not len(house.core.deadlines))


async def test_nothing_stays_of_a_body_that_is_not_read_to_its_end(
    house: House, uncollected: None
) -> None:
    await house.start(limits=Limits(body_bytes=2 * MIB))
    await trio.testing.wait_all_tasks_blocked()  # its loops run by now
    before = _alive()
    wire = await house.wire()
    await wire.send(HEAD + b"content-length: %d\r\n\r\n" % (2 * MIB) + b"x" * MIB)
    wire.reset()
    await until(lambda: house.core.stats.counts.get("accepted") and not house.core.clients)
    left = _alive(collect=False) - before
    assert not left
    wire, held = await house.wire(), _listed_bytes()
    await wire.send(HEAD + b"transfer-encoding: chunked\r\n\r\n" + chunk_of(b"x" * 3 * MIB))
    assert (await wire.answer()).status == 413
    assert _listed_bytes() - held < MIB


def _listed_bytes() -> int:
    """Bytes in lists, where pieces of bodies wait; of the whole process."""
    lists = [thing for thing in gc.get_objects() if type(thing) is list]
    return sum(len(piece) for each in lists for piece in each if type(piece) is bytes)


async def test_nothing_stays_of_a_request_that_waited(house: House, uncollected: None) -> None:
    """It would have stayed, body and all, for as long as it might have waited."""
    engine = house.engine(hold=True)
    await house.start(endpoints=(StaticEndpoint("e0", engine.url, ("m",), depth=1),))
    wires = [await house.wire() for _ in range(3)]
    left = []
    for _ in range(2):
        for number, wire in enumerate(wires):
            await wire.chat()
            await until(lambda number=number: house.core.exchanges == number + 1)
        for wire in wires:
            await until(lambda: engine.held() == 1)
            engine.release()
            assert (await wire.answer()).status == 200
        house.core.usage.undated.clear()
        left.append(_alive(collect=False))
    more = left[1] - left[0]
    assert not more


@pytest.mark.parametrize("size", [1000, 100_000])
async def test_a_stream_that_has_begun_needs_no_prompt_any_more_and_is_told_as_before(
    house: House, tmp_path: Path, size: int
) -> None:
    """500 streams with prompts of 400 KB took 683 MB until their ends; without them it is 55."""
    engine = house.engine(tokens=2, hold_after=1, usage=False)
    await house.start(access_log=str(tmp_path / "log"))
    wire = await house.wire()
    body = {"model": "m", "stream": True, "messages": [{"role": "user", "content": "x" * size}]}
    sent = post_bytes("/v1/chat/completions", body)
    await wire.send(sent)
    while not wire.buffer.count(b"\n\n"):
        assert await wire.more()
    (client,) = house.core.clients
    exchange = client._exchange
    assert exchange is not None
    assert exchange.attempts is not None
    kept = exchange.request.body, exchange.asked.raw, exchange.attempts._body
    assert all(len(each) < 16_384 for each in kept)
    assert bool(kept[0]) == (size < 16_384)
    engine.release()
    assert (await wire.answer()).status == 200
    row = await house.row()
    length = len(sent.partition(b"\r\n\r\n")[2])
    assert (row["prompt_tokens"], row["estimated"]) == (-(-length // 4), True)
    (line,) = await lines(tmp_path / "log", 1)
    assert line["bytes_in"] == length
