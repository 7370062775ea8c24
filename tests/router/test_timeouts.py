"""Deadlines of an engine, each by its own setting, and comments while it is silent."""

from __future__ import annotations

import json
import socket
import threading
import time
from contextlib import asynccontextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Self

import openai
import pytest
import trio

from controller.router.breaker import Breaker, BreakerRules
from controller.router.config import Retries, Timeouts
from controller.router.upstream import DEAD_S, SURE_BYTES
from tests.router.wire import PATIENCE_S, until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

    from tests.router.conftest import House
    from tests.router.wire import Wire

LONG = Timeouts(
    connect_s=20, headers_s=20, first_token_s=20, idle_s=20, total_s=20, comment_s=float("inf")
)


class Deaf:
    """A port that accepts no more: its backlog is full, so that SYNs are dropped."""

    def __enter__(self) -> Self:
        self._sockets = [socket.socket() for _ in range(4)]
        listener, *fillers = self._sockets
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        self.url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        for filler in fillers:
            filler.setblocking(False)
            filler.connect_ex(listener.getsockname())
        return self

    def __exit__(self, *_: object) -> None:
        for each in self._sockets:
            each.close()


class Doorman:
    """Accepts and closes at once, by FIN or by RST, without reading a byte."""

    def __init__(self, *, rst: bool) -> None:
        self._rst = rst

    def __enter__(self) -> Self:
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=512)
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self._thread = threading.Thread(target=self._close_all, daemon=True)
        self._thread.start()
        return self

    def _close_all(self) -> None:
        while True:
            try:
                sock = self._listener.accept()[0]
            except OSError:
                return
            if self._rst:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\0\0\0\0\0\0\0")
            sock.close()

    def __exit__(self, *_: object) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._thread.join(5)
        self._listener.close()


async def come(wire: Wire, mark: bytes, number: int = 1) -> None:
    """Wait until so many of these are there; they can still be read."""
    with trio.fail_after(PATIENCE_S):
        while wire.buffer.count(mark) < number:
            assert await wire.more(), wire.buffer


# -- each its own setting ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("setting", "how", "stream", "cause"),
    [
        ("headers_s", {"delay": 30}, False, "headers_timeout"),
        ("headers_s", {"delay": 30}, True, "headers_timeout"),
        ("first_token_s", {"first_delay": 30}, True, "first_token_timeout"),
        ("total_s", {"delay": 30}, False, "total_timeout"),
        ("total_s", {"first_delay": 30}, True, "total_timeout"),
        ("idle_s", {"first_delay": 30}, False, "idle_timeout"),
    ],
)
async def test_A34_a_timeout_before_a_byte_is_a_504_that_says_when_to_come_back(
    house: House, setting: str, how: dict[str, Any], stream: bool, cause: str
) -> None:
    house.engine(**how)
    house.engine(**how)
    await house.start(timeouts=replace(LONG, **{setting: 0.3}))
    began = time.monotonic()
    answer = await house.ask(stream=stream)
    assert time.monotonic() - began >= 0.3
    assert (answer.status, answer.code) == (504, "upstream_timeout")
    assert answer.headers["retry-after"] == "5"  # A34
    assert cause.replace("_", " ") in answer.json["error"]["message"]
    assert [c for (_, c) in house.core.stats.upstream_failures] == [cause]
    await until(lambda: any(engine.chats() for engine in house.engines))
    assert sum(len(engine.chats()) for engine in house.engines) == 1  # it may be at work
    await until(house.idle)


@pytest.mark.parametrize(
    ("setting", "cause"), [("idle_s", "idle_timeout"), ("total_s", "total_timeout")]
)
async def test_a_timeout_between_tokens_is_an_event(house: House, setting: str, cause: str) -> None:
    house.engine(tokens=3, hold_after=1)
    await house.start(timeouts=replace(LONG, **{setting: 10}))
    wire = await house.wire()
    await wire.chat(stream=True)
    await come(wire, b"tok0")
    house.core.deadlines.sweep(time.monotonic() + 12)
    answer = await wire.answer()
    assert answer.status == 200
    token, error, done = answer.events
    assert "tok0" in token
    assert json.loads(error)["error"]["code"] == "upstream_timeout"
    assert cause.replace("_", " ") in json.loads(error)["error"]["message"]
    assert done == "[DONE]"
    assert await wire.closed()
    row = await house.row()
    assert (row["status"], row["error_code"]) == ("partial", "upstream_timeout")


async def test_nobody_who_accepts_is_a_502_after_the_connect_timeout(house: House) -> None:
    with Deaf() as deaf:
        await house.start(deaf.url, timeouts=replace(LONG, connect_s=0.3))
        began = time.monotonic()
        answer = await house.ask()
        assert time.monotonic() - began >= 0.3
        assert (answer.status, answer.code) == (502, "upstream_failed")
        assert house.core.stats.upstream_failures == {("e0", "connect_timeout"): 1}


async def test_the_time_to_connect_and_the_first_token_do_not_count_between_tokens(
    house: House,
) -> None:
    engine = house.engine(hold=True, tokens=3, hold_after=[0, 1])
    await house.start(timeouts=replace(LONG, connect_s=5, headers_s=9, first_token_s=13))
    wire = await house.wire()
    await wire.chat(stream=True)
    await until(engine.chats)
    sweep = house.core.deadlines.sweep
    sweep(time.monotonic() + 7)
    engine.release()
    (client,) = house.core.clients
    await until(lambda: client._exchange.delivery.headed)
    sweep(time.monotonic() + 11)
    engine.release()
    await wire.until(b"tok0")
    sweep(time.monotonic() + 15)
    engine.release()
    await wire.until(b"[DONE]")
    assert (await house.row())["status"] == "ok"


async def pings(stream: trio.SocketStream) -> None:
    """An engine that says for ever that it lives."""
    async with stream:
        await stream.receive_some(65536)
        await stream.send_all(
            b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n"
            b"transfer-encoding: chunked\r\n\r\n"
        )
        try:
            while True:
                await stream.send_all(b"9\r\n: ping\n\n\n\r\n")
                await trio.sleep(0.05)
        except trio.BrokenResourceError:
            return


@asynccontextmanager
async def before_pings(house: House, timeouts: Timeouts) -> AsyncIterator[None]:
    async with trio.open_nursery() as nursery:
        listeners = await nursery.start(trio.serve_tcp, pings, 0)
        port = listeners[0].socket.getsockname()[1]
        await house.start(f"http://127.0.0.1:{port}", timeouts=timeouts)
        yield
        nursery.cancel_scope.cancel()
    await until(house.idle)


async def test_C14_pings_of_an_engine_are_no_progress(house: House) -> None:
    async with before_pings(house, replace(LONG, first_token_s=0.4)):
        answer = await house.ask(stream=True)
        assert (answer.status, answer.code) == (504, "upstream_timeout")
        assert list(house.core.stats.upstream_failures) == [("e0", "first_token_timeout")]


async def test_A35_pings_of_an_engine_are_not_held_back_for_longer_than_silence(
    house: House,
) -> None:
    async with before_pings(house, replace(LONG, first_token_s=10, comment_s=0.3)):
        wire = await house.wire()
        await wire.chat(stream=True)
        early = await wire.until(b": keep-alive\n\n")
        assert early.startswith(b"HTTP/1.1 200")
        assert b": ping\n\n" in early
        await wire.until(b": ping\n\n")  # from now on as they come
        house.core.deadlines.sweep(time.monotonic() + 12)
        rest = await wire.answer_from_chunks()
        assert b'"upstream_timeout"' in rest
        assert rest.endswith(b"data: [DONE]\n\n")


# -- silent streams (A35) ------------------------------------------------------------------------


@pytest.fixture
def chatty() -> Iterator[Timeouts]:
    return replace(LONG, comment_s=0.15)


@pytest.mark.parametrize("how", [{"hold_after": 0}, {"hold_after": 1, "tokens": 2}])
async def test_A35_a_silent_stream_gets_comments(
    house: House, chatty: Timeouts, how: dict[str, Any]
) -> None:
    engine = house.engine(**how)
    await house.start(timeouts=chatty)
    wire = await house.wire()
    await wire.chat(stream=True)
    await come(wire, b": keep-alive\n\n", 3)
    engine.release()
    answer = await wire.answer()
    assert answer.status == 200
    plain = answer.body.replace(b": keep-alive\n\n", b"")
    assert plain.startswith(b"data: ")
    assert answer.events[-1] == "[DONE]"
    row = await house.row()
    assert row["status"] == "ok"
    assert row["ttft_ms"] > (400 if how["hold_after"] == 0 else 0)  # a comment is no token


@pytest.mark.parametrize(("how", "stream"), [({"delay": 0.7}, True), ({"first_delay": 0.7}, False)])
async def test_A35_no_comment_before_the_status_or_in_a_plain_answer(
    house: House, chatty: Timeouts, how: dict[str, Any], stream: bool
) -> None:
    house.engine(**how)
    await house.start(timeouts=chatty)
    wire = await house.wire()
    await wire.chat(stream=stream)
    answer = await wire.answer()
    assert answer.status == 200
    assert b"keep-alive" not in answer.body


@pytest.mark.parametrize(
    ("how", "code"),
    [
        ({"error_at": 0}, 500),
        ({"die_at": 0, "die": "rst"}, "upstream_failed"),
    ],
)
async def test_A35_what_fails_after_a_comment_is_an_event_and_not_repeated(
    house: House, chatty: Timeouts, how: dict[str, Any], code: Any
) -> None:
    house.engine(hold_after=0, **how)
    house.engine(hold_after=0, **how)
    await house.start(timeouts=chatty)
    wire = await house.wire()
    await wire.chat(stream=True)
    await come(wire, b": keep-alive\n\n")
    for engine in house.engines:
        engine.release()
    answer = await wire.answer()
    assert answer.status == 200
    error, done = answer.events
    assert (json.loads(error)["error"]["code"], done) == (code, "[DONE]")
    assert sum(len(engine.chats()) for engine in house.engines) == 1
    assert (await house.row())["status"] in ("partial", "error")
    await until(house.idle)


async def test_A35_a_proxy_that_cuts_silence_and_the_sdk(house: House) -> None:
    house.engine(first_delay=2.5)
    await house.start(timeouts=replace(LONG, comment_s=0.2))

    def read() -> str:
        url = f"http://127.0.0.1:{house.port}/v1"
        timeout = openai.Timeout(10, read=2.0)  # the client cuts what is silent for so long
        with openai.OpenAI(base_url=url, api_key="sk-test", max_retries=0, timeout=timeout) as ai:
            stream = ai.chat.completions.create(
                model="m", messages=[{"role": "user", "content": "x"}], stream=True
            )
            return "".join(chunk.choices[0].delta.content or "" for chunk in stream)

    assert await trio.to_thread.run_sync(read) == "tok0 tok1 tok2 "


async def test_A02_leaving_after_a_comment_cancels_the_engine(
    house: House, chatty: Timeouts
) -> None:
    engine = house.engine(first_delay=60)
    await house.start(timeouts=chatty)
    wire = await house.wire()
    await wire.chat(stream=True)
    await wire.until(b": keep-alive")
    wire.close()
    await until(lambda: engine.chats()[0].closed)  # it would be at it for a minute
    assert (await house.row())["status"] == "client_closed"
    await until(house.idle)


# -- engines that vanish (C16) -------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("how", ["syn", "rst", "fin", "refused"])
async def test_C16_a_request_for_an_engine_that_is_gone_is_picked_again(
    house: House, how: str
) -> None:
    engine = house.engine()
    dead = house.engine()
    dead.stop()
    gone: Any = {
        "syn": Deaf(), "rst": Doorman(rst=True), "fin": Doorman(rst=False),
        "refused": nullcontext(dead),
    }[how]  # fmt: skip
    with gone as place:
        await house.start(
            place.url, engine.url, timeouts=replace(Timeouts(), connect_s=0.2),
            retries=Retries(3, 1.0, 1000),
        )  # fmt: skip
        pools = house.core.fleet.pools
        for _ in range(100):
            pools["e0"].breaker = Breaker(BreakerRules())  # it looks as good as ever
            assert (await house.ask()).status == 200  # a hang would be 600 s
    failures = sum(house.core.stats.upstream_failures.values())
    assert failures > 20
    assert {row["status"] for row in house.rows} == {"ok"}
    assert sum(row["attempts"] for row in house.rows) == 100 + failures
    await until(house.idle)


async def test_that_an_answer_was_begun_is_no_first_token(house: House) -> None:
    """Engines tell it before a request's turn comes: it was cut after the time between tokens."""
    begun, token = b'data: {"type":"response.created"}\n\n', b'data: {"type":"a.delta"}\n\n'
    go_on = trio.Event()

    async def serve(stream: trio.SocketStream) -> None:
        async with stream:
            await stream.receive_some(65536)
            await stream.send_all(
                b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\n" + begun
            )
            await go_on.wait()
            await stream.send_all(token)
            await trio.sleep_forever()

    async with trio.open_nursery() as nursery:
        listeners = await nursery.start(partial(trio.serve_tcp, serve, 0, host="127.0.0.1"))
        url = f"http://127.0.0.1:{listeners[0].socket.getsockname()[1]}"
        await house.start(url, timeouts=replace(LONG, idle_s=0.4, comment_s=0.1))
        wire = await house.wire()
        await wire.post("/v1/responses", {"model": "m", "input": "x", "stream": True})
        for _ in range(8):  # twice as long
            await wire.until(b": keep-alive")
        (pool,) = house.core.fleet.pools.values()
        assert pool.first_byte_s == 0.0, "nor does it say how fast this replica is"
        go_on.set()
        await wire.until(token)
        assert pool.first_byte_s > 0.7
        await wire.until(b"idle timeout")
        nursery.cancel_scope.cancel()


@pytest.mark.parametrize("size", [10, SURE_BYTES])
async def test_C16_the_kernel_asks_whether_an_engines_machine_is_there(
    house: House, size: int
) -> None:
    """Without, requests that run on a machine that loses its power end after `headers_s`, 600 s.
    A large one may wait for an engine that does not read: its machine is not asked for its word."""
    engine = house.engine(hold=True)
    await house.start()
    wire = await house.wire()
    await wire.chat(x="x" * size)
    await until(lambda: engine.held() == 1)
    (connection,) = house.core.fleet.pools["e0"]._open

    def option(number: int, level: int = socket.IPPROTO_TCP) -> int:
        return connection.sock.getsockopt(level, number)

    assert option(socket.SO_KEEPALIVE, socket.SOL_SOCKET)
    asked_s = option(socket.TCP_KEEPINTVL) * option(socket.TCP_KEEPCNT)
    assert option(socket.TCP_KEEPIDLE) + asked_s == DEAD_S
    assert option(socket.TCP_USER_TIMEOUT) == (DEAD_S * 1000 if size < SURE_BYTES else 0)
    engine.release()
    assert (await wire.answer()).status == 200


async def test_C16_a_connection_that_had_a_large_request_is_asked_for_its_word_again(
    house: House,
) -> None:
    """Else one short request on it would wait for a machine without power as long as the kernel
    repeats itself: a quarter of an hour, or `headers_s`."""
    house.engine()
    await house.start()
    told = []
    for size in (SURE_BYTES, 10, 10, SURE_BYTES):
        assert (await house.ask(x="x" * size)).status == 200
        (connection,) = house.core.fleet.pools["e0"]._open
        assert connection.reused
        told.append(connection.sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT))
    assert told == [0, DEAD_S * 1000, DEAD_S * 1000, 0]
    assert house.engines[0].connections == 1


async def test_C16_the_default_connect_timeout_is_a_second() -> None:
    assert Timeouts().connect_s == 1.0
