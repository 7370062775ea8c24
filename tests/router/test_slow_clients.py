"""Clients that send or read slowly, too much or nothing: bounded, and nobody else notices."""

from __future__ import annotations

import gc
import json
import os
import time
from contextlib import suppress
from typing import TYPE_CHECKING

import pytest
import trio

from controller.router.config import Limits, Timeouts
from tests.router.wire import chat_body, chunk_of, post_bytes, until

if TYPE_CHECKING:
    from pathlib import Path

    from tests.router.conftest import House
    from tests.router.wire import Wire

PATH = "/v1/chat/completions"
MIB = 1024 * 1024
HEAD = b"POST /v1/chat/completions HTTP/1.1\r\nhost: t\r\nauthorization: Bearer sk-test\r\n"


async def feed(wire: Wire, data: bytes) -> None:
    """One byte per segment (the router sets TCP_NODELAY for itself; the kernel may join them)."""
    wire.raw.setsockopt(trio.socket.IPPROTO_TCP, trio.socket.TCP_NODELAY, 1)
    for n in range(len(data)):
        await wire.send(data[n : n + 1])


@pytest.mark.parametrize("chunked", [False, True])
async def test_a_request_may_come_byte_by_byte(house: House, *, chunked: bool) -> None:
    await house.start()
    wire = await house.wire()
    body = json.dumps(chat_body()).encode()
    data = post_bytes(PATH, body)
    if chunked:
        pieces = b"".join(chunk_of(body[n : n + 1]) for n in range(len(body)))
        data = HEAD + b"transfer-encoding: chunked\r\n\r\n" + pieces + b"0\r\n\r\n"
    for _ in range(2):
        await feed(wire, data)
        assert (await wire.answer()).status == 200
    assert [record.body for record in house.engines[0].records] == [body, body]


@pytest.mark.parametrize(
    "data", [HEAD, HEAD + b"content-length: 10\r\n\r\n{"], ids=["head", "body"]
)
async def test_a_sender_that_stops_is_told_and_others_are_served(house: House, data: bytes) -> None:
    await house.start(timeouts=Timeouts(client_read_s=0.4))
    stopped = [await house.wire() for _ in range(50)]
    for wire in stopped:
        await wire.send(data)
    assert (await house.ask()).status == 200
    for wire in stopped:
        assert (await wire.answer()).status == 408
        assert await wire.closed()
    assert house.idle()


async def test_one_reader_that_stops_holds_up_none_of_twenty(house: House) -> None:
    house.engine(text="x" * 20_000, tokens=200)  # 4 MB each
    await house.start()
    stopped = await house.wire()
    await stopped.chat(stream=True, fake={"text": "x" * 50_000, "tokens": 600})  # 30 MB
    client = await until(lambda: next(iter(house.core.clients)))
    await until(lambda: client.pending > 256 * 1024)
    ends: list[bytes] = []

    async def read() -> None:
        wire = await house.wire()
        await wire.chat(stream=True)
        ends.append((await wire.answer_from_chunks())[-14:])

    async with trio.open_nursery() as nursery:
        for _ in range(20):
            nursery.start_soon(read)
    assert ends == [b"data: [DONE]\n\n"] * 20
    assert 256 * 1024 < client.pending < 700_000
    assert house.core.exchanges == 1
    stopped.close()
    await until(house.idle)


async def test_one_that_sends_a_thousand_requests_at_once_holds_up_nobody(
    house: House, tmp_path: Path
) -> None:
    path = tmp_path / "log"
    await house.start(access_log=str(path))
    many, one = await house.wire(), await house.wire()
    asked = [f"GET /healthz HTTP/1.1\r\nhost: t\r\nx-request-id: {n}\r\n\r\n" for n in range(1000)]
    os.write(many.raw.socket.fileno(), "".join(asked).encode())  # nothing runs before the next
    os.write(one.raw.socket.fileno(), b"GET /readyz HTTP/1.1\r\nhost: t\r\n\r\n")
    for n in range(1000):
        assert (await many.answer()).headers["x-request-id"] == str(n)
    assert (await one.answer()).status == 200
    await until(lambda: path.exists() and path.read_bytes().count(b"\n") == 1001)
    told = [json.loads(text)["endpoint"] for text in path.read_text().splitlines()]
    assert told.index("readyz") < 100


@pytest.mark.parametrize("reads", [True, False])
async def test_who_reads_no_answers_is_not_read_for_ever(house: House, *, reads: bool) -> None:
    """Else each of its requests waits in memory. It is answered in order once it reads."""
    await house.start()
    wire = await house.wire()
    request = b"GET /openapi.json HTTP/1.1\r\nhost: t\r\nx-padding: %b\r\n\r\n" % (b"x" * 8000)
    most, sent = 10_000, 0  # 80 MB: several times what kernels take on a way that nobody reads
    with trio.move_on_after(1.0) as stuck:
        while sent < most:
            await wire.send(request)
            sent += 1
            stuck.deadline = trio.current_time() + 1.0
    assert sent < most
    if reads:
        for _ in range(sent):
            assert (await wire.answer()).status == 200
    else:
        house.core.deadlines.sweep(time.monotonic() + Timeouts().client_write_s + 1)
        assert not house.core.clients


async def test_A32_100_mib_in_chunks_are_refused_at_the_limit(house: House) -> None:
    await house.start()
    wire = await house.wire()
    piece = chunk_of(b"x" * MIB)
    sent = 0
    await wire.send(HEAD + b"transfer-encoding: chunked\r\n\r\n")
    async with trio.open_nursery() as nursery:

        async def send() -> None:
            nonlocal sent
            for _ in range(100):
                await wire.send(piece)
                sent += 1

        nursery.start_soon(send)
        answer = await wire.answer()
        # It may be sent to the end: the rest is read and dropped, so that the answer arrives.
        nursery.cancel_scope.cancel()
    assert (answer.status, answer.code) == (413, "request_too_large")
    assert answer.headers["connection"] == "close"
    assert sent >= 32
    assert house.core.snapshot()["refusals"] == [["request_too_large", 1]]
    assert not house.engines[0].records
    wire.close()
    await until(lambda: not house.core.clients)


def bytes_in_lists() -> int:
    """Pieces that anything in this process keeps."""
    lists = [thing for thing in gc.get_objects() if type(thing) is list]
    return sum(len(x) for each in lists for x in each if type(x) is bytes)


@pytest.mark.parametrize("path", ["/healthz", "/openapi.json", "/v1/models"])
async def test_a_body_that_nobody_wants_is_not_kept(house: House, path: str) -> None:
    """Most of these paths need no key: anybody could fill the memory."""
    await house.start()
    wire = await house.wire()
    head = HEAD.replace(b"POST", b"GET").replace(PATH.encode(), path.encode())
    await wire.send(head + b"content-length: %d\r\n\r\n" % (9 * MIB))
    before = bytes_in_lists()  # what tests before this one have left
    for _ in range(8):
        await wire.send(b"x" * MIB)
    assert bytes_in_lists() < before + MIB
    await wire.send(b"x" * MIB)
    assert (await wire.answer()).status == 200
    await wire.chat()
    assert (await wire.answer()).status == 200
    assert json.loads(house.engines[0].chats()[0].body) == chat_body()


@pytest.mark.parametrize("reads_s", [60.0, 0.5])
async def test_who_sends_slowly_gets_the_answer_to_a_refused_body(
    house: House, reads_s: float
) -> None:
    """Many clients read it when all is sent. It is not waited for them for ever."""
    await house.start(timeouts=Timeouts(linger_s=0.3, client_read_s=reads_s))
    wire = await house.wire()
    await wire.send(HEAD.replace(b"sk-test", b"bad") + b"content-length: 200000\r\n\r\n")
    sent = 0
    with suppress(trio.BrokenResourceError):
        while sent < 20:
            await wire.send(b"x" * 10_000)
            await trio.sleep(0.1)  # a slow line
            sent += 1
    if reads_s == 60.0:
        assert (sent, (await wire.answer()).status) == (20, 401)
    else:
        assert sent < 20


async def test_A32_a_length_of_1_gib_is_refused_before_a_byte_of_it(house: House) -> None:
    await house.start()
    wire = await house.wire()
    await wire.send(HEAD + b"content-length: %d\r\n\r\n" % 2**30)
    assert (await wire.answer()).status == 413
    assert await wire.closed()


async def test_header_caps_hold_at_their_edge(house: House) -> None:
    await house.start(limits=Limits(header_bytes=4096, header_count=20))
    wire = await house.wire()
    fields = {"host": "t", "authorization": "Bearer sk-test"}
    for n in range(18):
        fields[f"x-{n}"] = "y"
    lines = b"".join(f"{name}: {value}\r\n".encode() for name, value in fields.items())
    await wire.send(b"GET /v1/models HTTP/1.1\r\n" + lines + b"\r\n")
    assert (await wire.answer()).status == 200
    await wire.send(b"GET /v1/models HTTP/1.1\r\n" + lines + b"x-18: y\r\n\r\n")
    assert (await wire.answer()).status == 431
    assert await wire.closed()


async def test_more_connections_than_allowed_wait_and_are_served_in_turn(house: House) -> None:
    await house.start(limits=Limits(connections=3))
    first = [await house.wire() for _ in range(3)]
    for wire in first:
        assert (await wire.get("/healthz")).status == 200
    waiting = [await house.wire() for _ in range(3)]
    for wire in waiting:
        await wire.send(b"GET /healthz HTTP/1.1\r\nhost: t\r\n\r\n")
    await until(lambda: house.core.stats.counts.get("accept_pauses"))
    assert len(house.core.clients) == 3
    for wire in first:
        wire.close()
    for wire in waiting:
        assert (await wire.answer()).status == 200


async def test_500_idle_connections_cost_nobody_anything_and_end(house: House) -> None:
    await house.start(timeouts=Timeouts(client_idle_s=75.0))
    idle = [await house.wire() for _ in range(500)]
    await until(lambda: house.core.stats.counts.get("accepted") == 500)
    assert (await house.ask()).status == 200
    house.core.deadlines.sweep(time.monotonic() + 76.0)
    for wire in idle:
        assert await wire.closed()
    assert house.core.stats.counts["accepted"] == 501
