"""Anything may come over the wire: nothing raises, nothing grows, nothing stays in flight."""

from __future__ import annotations

import json
from dataclasses import replace
from random import Random
from typing import TYPE_CHECKING, Any

import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st

from controller.router.config import Limits
from controller.router.http1 import Request, RequestReader
from controller.router.sse import Scanner
from tests.router.wire import chat_body, post_bytes, until

if TYPE_CHECKING:
    from tests.router.conftest import House

PATH = "/v1/chat/completions"
TOLD = [
    name for name in dir(Request()) if name[0] != "_" and not callable(getattr(Request(), name))
]
WHOLE = b"POST /v1/x HTTP/1.1\r\nhost: t\r\ncontent-length: 5\r\n\r\nhello"
OF_REQUESTS = [
    b"GET / HTTP/1.1\r\n", b"POST /v1/x HTTP/1.1\r\n", b"POST /v1/x HTTP/1.0\r\n", b"host: t\r\n",
    b"content-length: 5\r\n", b"content-length: 0\r\n", b"transfer-encoding: chunked\r\n",
    b"connection: close\r\n", b"connection: upgrade\r\nupgrade: h2c\r\n", b"5;x=y\r\n",
    b"expect: 100-continue\r\n", b"authorization: Bearer k\r\n", b"\r\n", b"hello",
    b"5\r\nhello\r\n", b"0\r\n\r\n", WHOLE, WHOLE[:-7], b"GET / HTTP/1.1\r\nhost: t\r\n\r\n",
    b"\n", b"\r", b" ", b":", b"\0", b"\xff", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b"x-a: b\r\n",
]  # fmt: skip
WHOLE_REQUESTS = [
    WHOLE, b"GET / HTTP/1.1\r\nhost: t\r\n\r\n",
    b"POST /v1/x HTTP/1.1\r\nhost: t\r\ntransfer-encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n",
]  # fmt: skip
OF_STREAMS = [
    b"data:", b"data: ", b"event: x", b"id: 1", b": comment", b"\n", b"\r", b"\r\n", b"\n\n",
    b"[DONE]",
    b'{"error": {"message": "x"}}', b'{"choices": []', b', "usage": {"prompt_tokens": 1}}', b"{}",
    b'{"model": "up"}', b'"finish_reason": "stop"', b"\0", b"\xff", "ä€".encode(), b" ",
]  # fmt: skip


def mixed(words: list[bytes], most: int) -> st.SearchStrategy[bytes]:
    """Words of a protocol in any order, with rubbish in between."""
    one = st.sampled_from(words) | st.binary(max_size=6)
    return st.lists(one, max_size=most).map(b"".join)


def cut(data: bytes, draw: Any) -> list[bytes]:
    places = sorted(draw(st.sets(st.integers(0, len(data)), max_size=20)))
    return [data[a:b] for a, b in zip([0, *places], [*places, len(data)], strict=True)]


def seen(reader: RequestReader) -> Any:
    def told(request: Any) -> Any:
        return {name: getattr(request, name) for name in TOLD}

    current = reader.current and told(reader.current)
    return [told(request) for request in reader.ready], current, reader.fault, reader.busy


@given(st.data())
def test_requests_are_understood_the_same_however_they_are_cut(data: st.DataObject) -> None:
    begun = data.draw(st.lists(st.sampled_from(WHOLE_REQUESTS), max_size=3))
    raw = b"".join(begun) + data.draw(mixed(OF_REQUESTS, 24))
    whole, pieces = RequestReader(Limits()), RequestReader(Limits())
    whole.feed(raw)
    for piece in cut(raw, data.draw):
        pieces.feed(piece)
    assert len(whole.ready) >= len(begun)
    assert seen(whole) == seen(pieces)


@given(st.lists(st.sampled_from(OF_REQUESTS), max_size=3), st.binary(min_size=1, max_size=3))
def test_what_is_kept_of_a_request_is_bounded(start: list[bytes], flood: bytes) -> None:
    limits = Limits(header_bytes=2000, header_count=20, body_bytes=1000)
    reader = RequestReader(limits)
    reader.feed(b"".join(start))
    for _ in range(60):
        reader.feed(flood * 100)
        reader.ready.clear()
        kept = reader.current
        assert kept is None or len(kept.headers) <= 20
    assert reader.fault is not None or not reader.begun


@given(st.data())
def test_streams_pass_byte_for_byte_however_they_are_cut(data: st.DataObject) -> None:
    raw = b"data: {}\n\n" + data.draw(mixed(OF_STREAMS, 30))  # a bare [DONE] would not pass
    scanner = Scanner(10_000)
    out, gone = b"", b""
    for piece in cut(raw, data.draw):
        out += scanner.feed(piece)
        gone += piece
        assert gone.startswith(out)
    assert out + scanner.finish() == raw
    at_once = Scanner(10_000)
    assert at_once.feed(raw) + at_once.finish() == raw
    assert (scanner.done, scanner.usage) == (at_once.done, at_once.usage)


@given(st.lists(st.sampled_from(OF_STREAMS), max_size=3), st.binary(min_size=1, max_size=3))
def test_what_a_stream_makes_us_keep_is_bounded(start: list[bytes], flood: bytes) -> None:
    scanner = Scanner(1000)
    pending = -len(scanner.feed(b"".join(start))) + sum(map(len, start))
    for _ in range(60):
        piece = flood * 100
        pending += len(piece) - len(scanner.feed(piece))
        assert pending <= 1000 + len(piece) or scanner.overflow
        if scanner.overflow:
            break


def mutated(random: Random) -> bytes:
    """A valid request with some of its bytes changed, taken out, doubled or moved."""
    kind = random.randrange(3)
    body = json.dumps(chat_body(stream=random.random() < 0.5)).encode()
    data = bytearray(post_bytes(PATH, body))
    if kind == 1:
        head = data[: data.index(b"content-length")]
        data = head + b"transfer-encoding: chunked\r\n\r\n%x\r\n%b\r\n0\r\n\r\n" % (len(body), body)
    elif kind == 2:
        data = data + data
    for _ in range(random.randrange(1, 5)):
        place = random.randrange(len(data))
        piece = bytes(data[place : place + random.randrange(1, 12)])
        how = random.randrange(5)
        if how == 0:
            data[place] = random.randrange(256)
        elif how == 1:
            del data[place : place + len(piece)]
        elif how == 2:
            data[place:place] = piece
        elif how == 3:
            data[place:place] = random.choice(OF_REQUESTS)
        else:
            del data[place:]
            break
    return bytes(data) or b"x"


@pytest.mark.slow
async def test_H01_after_mutated_requests_the_next_good_one_is_served(
    house: House, quick: Any
) -> None:
    house.engine()
    house.engine(first_delay=0.02)
    await house.start(timeouts=replace(quick, connect_s=60.0, headers_s=60.0, first_token_s=60.0))
    random = Random(20)

    async def send(data: bytes, *, wait: bool, rude: bool) -> None:
        wire = await house.wire()
        try:
            await wire.send(data)
            with trio.move_on_after(0.2 if wait else 0):
                while await wire.more():
                    pass
        except trio.BrokenResourceError:
            pass  # it closed while we were sending
        (wire.reset if rude else wire.close)()

    def chance() -> bool:
        return random.random() < 0.4

    requests = [(mutated(random), chance(), chance()) for _ in range(400)]

    async def some(start: int) -> None:
        for data, wait, rude in requests[start::20]:
            await send(data, wait=wait, rude=rude)

    async with trio.open_nursery() as nursery:
        for start in range(20):
            nursery.start_soon(some, start)
    await until(lambda: house.core.stats.counts["accepted"] == 400)
    await until(house.idle)
    await until(lambda: not house.core.clients)
    assert (await house.ask()).status == 200
    assert (await house.ask(stream=True)).events[-1] == "[DONE]"
    assert house.idle()
