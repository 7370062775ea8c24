"""Clients that leave: the engine learns it then, and nothing stays counted.

An engine that is not told works for a minute and more, which is what these tests would see."""

from __future__ import annotations

import json
import math
import socket
from functools import partial
from itertools import permutations
from random import Random
from typing import TYPE_CHECKING, Any

import pytest
import trio

from controller.router.breaker import BreakerRules
from controller.router.config import Retries, Timeouts
from tests.router.conftest import NEVER_OPEN
from tests.router.wire import chat_body, post_bytes, until
from tests.tcp_proxy import TcpProxy

if TYPE_CHECKING:
    from controller.router.connection import Connection
    from tests.router.conftest import House


async def leave_and_look(house: House, how: dict[str, Any], *, stream: bool, first: bool) -> None:
    await house.start()
    engine = house.engines[0]
    wire = await house.wire()
    await wire.chat(stream=stream, headers={"x_fake": json.dumps(how)})
    record = (await until(engine.chats))[0]
    if first:
        await wire.until(b"tok0")
    wire.close()
    await until(lambda: record.closed)
    await until(house.idle)
    row = await house.row()
    assert row["status"] == "client_closed"
    assert row["http_status"] == 499
    assert row["estimated"]  # B11: the engine had begun
    assert 10 < row["prompt_tokens"] < 100
    assert row.get("completion_tokens") == (0 if stream else None)
    assert house.core.snapshot()["cancellations"] == [["m", 1]]


async def test_A01_leaving_a_plain_call_cancels_the_engine(house: House) -> None:
    await leave_and_look(house, {"delay": 60}, stream=False, first=False)


async def test_A02_leaving_before_the_first_token_cancels_the_engine(house: House) -> None:
    await leave_and_look(house, {"first_delay": 60}, stream=True, first=False)


async def test_A02_leaving_before_the_head_cancels_the_engine(house: House) -> None:
    await leave_and_look(house, {"delay": 60}, stream=True, first=False)


async def test_leaving_after_the_first_token_cancels_the_engine(house: House) -> None:
    await leave_and_look(house, {"tokens": 50, "gap": 60}, stream=True, first=True)


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("how", ["fin", "rst", "half-close", "with a second request sent"])
async def test_H05_leaving_is_noticed_however_it_is_done(
    house: House, how: str, *, streaming: bool
) -> None:
    await house.start()
    wire = await house.wire()
    fake = {"tokens": 50, "gap": 60} if streaming else {"delay": 60}
    await wire.chat(stream=streaming, headers={"x_fake": json.dumps(fake)})
    record = (await until(house.engines[0].chats))[0]
    if streaming:
        await wire.until(b"tok0")
    if how == "half-close":
        await wire.stream.send_eof()  # documented: who half-closes has left
    elif how == "rst":
        wire.reset()
    else:
        if how != "fin":
            await wire.chat()
        wire.close()
    await until(lambda: record.closed)
    await until(house.idle)
    assert (await house.row())["status"] == "client_closed"
    assert len(house.engines[0].chats()) == 1


async def test_the_kernel_asks_whether_a_clients_machine_is_there(house: House) -> None:
    """One that lost its power sends no FIN: an engine worked for it until `total_s`, an hour."""
    await house.start()
    wire = await house.wire()
    assert (await wire.get("/healthz")).status == 200
    (client,) = house.core.clients
    assert client.sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)

    def option(number: int) -> int:
        return client.sock.getsockopt(socket.IPPROTO_TCP, number)

    asked_s = option(socket.TCP_KEEPINTVL) * option(socket.TCP_KEEPCNT)
    assert option(socket.TCP_KEEPIDLE) + asked_s == 120
    assert option(socket.TCP_USER_TIMEOUT) == 120_000  # with bytes on their way to it


async def test_whose_key_is_revoked_begins_no_further_request(house: House) -> None:
    """Its second one, with another key, would run on with no client to leave it."""
    await house.start(revoked_streams="end")
    wire = await house.wire()
    path, hold = "/v1/chat/completions", json.dumps({"hold": True})
    first = post_bytes(path, chat_body(), x_fake=hold)
    await wire.send(first + post_bytes(path, chat_body(model="other"), key="sk-narrow"))
    await until(house.engines[0].chats)
    house.core.keys_ended({"k"})
    assert (await wire.answer()).code == "key_revoked"
    assert await wire.closed()
    assert house.idle()
    assert len(house.rows) == 1


async def test_leaving_while_the_engine_does_not_even_accept(house: House) -> None:
    # A port that listens but never answers a SYN needs no engine: TEST-NET is not routed here,
    # so the full backlog of a listener that nobody accepts from does the same.
    with socket.socket() as full:
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        port = full.getsockname()[1]
        fillers = [socket.socket() for _ in range(3)]
        for filler in fillers:
            filler.setblocking(False)
            filler.connect_ex(("127.0.0.1", port))
        await house.start(f"http://127.0.0.1:{port}", timeouts=Timeouts(connect_s=60.0))
        wire = await house.wire()
        await wire.chat()
        await until(lambda: house.core.fleet.pools["e0"].in_flight == 1)
        wire.close()
        await until(house.idle)
        assert (await house.row())["status"] == "client_closed"
        for filler in fillers:
            filler.close()


@pytest.mark.slow
@pytest.mark.parametrize("end_delay", [0, 30])
async def test_A05_closing_right_after_done_is_ok(house: House, end_delay: float) -> None:
    """Also when the engine has said all and has not ended its answer."""
    house.engine(end_delay=end_delay)
    await house.start()
    for _ in range(200):
        wire = await house.wire()
        await wire.chat(stream=True, stream_options={"include_usage": True})
        await wire.until(b"[DONE]")
        wire.reset()
    await until(lambda: len(house.rows) == 200)
    assert {row["status"] for row in house.rows} == {"ok"}
    assert {row["completion_tokens"] for row in house.rows} == {3}
    assert {row["http_status"] for row in house.rows} == {200}


@pytest.mark.slow
async def test_A04_nothing_stays_in_flight_after_a_storm(house: House) -> None:
    house.engine()
    house.engine()
    often = BreakerRules(pause_s=0.1, longest_pause_s=0.1)
    await house.start(timeouts=Timeouts(headers_s=1.0), breaker=often)
    hard = [
        {"delay": 5},
        {"tokens": 9, "die_at": 2, "die": "rst"},
        {"status": 500},
        {"delay": 2},
        {"close": "always"},
    ]
    wires = []
    for n in range(50):
        wire = await house.wire()
        wires.append(wire)
        if n % 6 == 5:
            await wire.post("/v1/chat/completions", b"{not json")
        else:
            await wire.chat(stream=n % 2 == 0, fake=hard[n % 6])
        if n % 6 == 0:
            wire.close()
    await until(lambda: len(house.rows) == 50, 60.0)
    await until(house.idle)
    for wire in wires:
        wire.close()
    pools = house.core.fleet.everyone()
    while not all(pool.breaker.closed for pool in pools):  # what the storm tripped is probed
        await house.ask()
    before = [len(engine.chats()) for engine in house.engines]
    for _ in range(100):
        assert (await house.ask()).status == 200
    after = [len(engine.chats()) for engine in house.engines]
    shares = [b - a for a, b in zip(before, after, strict=True)]
    assert sum(shares) == 100
    assert min(shares) > 30, shares
    assert house.idle()


@pytest.mark.slow
async def test_H01_aborts_at_random_moments_poison_nothing(house: House) -> None:
    house.engine(delay=0.01)
    house.engine(first_delay=0.01)
    house.engine(status=503, delay=0.005)  # so that some leave between two attempts
    await house.start(retries=Retries(3, 1.0, 1000))
    random = Random(5)

    async def abort() -> None:
        for _ in range(100):
            wire = await house.wire()
            await wire.chat(stream=random.random() < 0.5)
            await trio.sleep(random.random() * 0.02)
            if random.random() < 0.5:
                wire.reset()
            else:
                wire.close()

    async with trio.open_nursery() as nursery:
        for _ in range(20):
            nursery.start_soon(abort)
    await until(lambda: house.core.stats.counts["accepted"] >= 2000, 60.0)
    await until(house.idle)
    for _ in range(20):
        assert (await house.ask()).status == 200
    assert house.idle()
    assert all(row["status"] in ("ok", "client_closed") for row in house.rows)


async def test_H02_an_engine_that_stops_reading_holds_nobody(house: House) -> None:
    engine = house.engine()
    with TcpProxy(engine.port, mode="hold") as proxy:
        await house.start(proxy.url, timeouts=Timeouts(drain_s=0.2))
        wires = [await house.wire() for _ in range(2)]
        for wire in wires:
            await wire.chat(messages=[{"role": "user", "content": "x" * 16_000_000}])
        pool = house.core.fleet.pools["e0"]
        await until(lambda: pool.in_flight == 2)
        assert all(up.pending > 1_000_000 for up in pool._open)  # the kernel takes no more
        wires[0].close()
        await until(lambda: pool.in_flight == 1)
        house.running.stop()
        answer = await wires[1].answer()
        assert (answer.status, answer.code) == (503, "shutting_down")
        await until(house.idle)
        assert not pool._open


def end(connection: Connection, error: OSError | None) -> None:
    """As the reactor tells it: to an open socket only."""
    if connection.fd >= 0:
        connection._end(error)


@pytest.mark.slow
async def test_H08_what_comes_in_one_turn_ends_a_request_once(house: House) -> None:
    """The engine resets, its time is over, it answers late and the client leaves, in any order
    within one turn: one row each time, and nothing stays counted."""
    house.engine(delay=30)
    house.engine(first_delay=30)
    await house.start(retries=Retries(1), breaker=NEVER_OPEN)
    core, random = house.core, Random(3)
    orders = list(permutations(("reset", "timeout", "leave")))
    for number in range(1000):
        wire = await house.wire()
        await wire.chat(stream=random.random() < 0.5)
        pools = core.fleet.pools.values()
        await until(lambda pools=pools: sum(pool.in_flight for pool in pools) == 1)
        client = next(c for c in core.clients if c._exchange is not None)
        (up,) = [up for pool in pools for up in pool._open if up.owner is not None]
        happen = {
            "reset": partial(end, up, ConnectionResetError()),
            "timeout": partial(up.expired, math.inf),
            "leave": partial(end, client, None),
        }
        for word in orders[number % len(orders)]:
            core.reactor.call_soon(happen[word])
        await until(lambda number=number: len(core.usage) == number + 1)
        wire.close()
    await until(house.idle)
    statuses = {row["http_status"] for row in house.rows}
    assert statuses == {499, 502, 504}
    assert len(house.rows) == 1000
