"""Requests that failed at one replica and wait for room at another."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from controller.router.config import Retries, StaticEndpoint, Timeouts
from tests.router.conftest import NEVER_OPEN
from tests.router.test_admission import Full, answered
from tests.router.test_fallbacks import EXPLAIN, told
from tests.router.wire import until

if TYPE_CHECKING:
    from tests.router.conftest import House


@pytest.fixture
def full(house: House) -> Full:
    return Full(house)


@pytest.mark.parametrize("how", [{"status": 500}, {"status": 503}, {"status": 408}])
async def test_A14_who_waits_for_another_replica_does_not_go_back_to_the_one_that_failed(
    full: Full, how: dict[str, Any]
) -> None:
    """Its own failure made room there, and no other is as quick to have some."""
    await full.start(engines=2, breaker=NEVER_OPEN)
    await full.fill(2)
    failing = full.house.engines[1]
    failing.default = how
    wires = await full.queue("a")
    failing.release()  # "a" goes there, fails, and waits for the other
    await until(lambda: len(failing.chats()) > 1 and full.waiting() == 1)
    seen = len(failing.chats())
    assert full.house.core.stats.retries == {}  # its client may leave before it is made again
    full.engine.default = {}
    full.engine.release()
    assert await answered(*wires) == [200]
    assert len(failing.chats()) == seen
    assert full.served() == ["a"]
    assert list(full.house.core.stats.retries.values()) == [1]
    assert full.empty()


async def test_who_waits_goes_back_when_no_other_replica_works(full: Full) -> None:
    await full.start(engines=2, breaker=NEVER_OPEN)
    await full.fill(2)
    failing = full.house.engines[1]
    failing.default = {"status": 503}
    wires = await full.queue("a")
    failing.release()
    await until(lambda: full.waiting() == 1 and len(failing.chats()) == 2)
    failing.default = {}
    full.house.core.fleet.pools["e0"].breaker.resume(1e12, 1.0)  # the other trips meanwhile
    assert await answered(*wires) == [200]


async def test_who_waits_for_another_replica_keeps_nobody_from_the_one_that_failed_it(
    full: Full,
) -> None:
    await full.start(engines=2, breaker=NEVER_OPEN)
    await full.fill(2)
    failing = full.house.engines[1]
    failing.default = {"status": 500}
    wires = await full.queue("a")
    failing.release()
    await until(lambda: full.waiting() == 1 and len(failing.chats()) == 2)
    failing.default = {}
    assert await answered(await full.ask("b"), await full.ask("c")) == [200, 200]
    assert (full.waiting(), full.served()) == (1, []), "it keeps its turn"
    full.engine.default = {}
    full.engine.release()
    assert await answered(*wires) == [200]
    assert full.served() == ["a"]
    assert full.empty()


async def test_A14_who_waits_for_a_replica_that_is_busy_does_not_go_back_to_the_one_that_failed_it(
    house: House,
) -> None:
    """It got there twice, and its client the 500, while the other one was held for 0.4 s."""
    failing, busy = house.engine(status=500), house.engine()
    await house.start()
    house.core.fleet.pools["e1"].busy(0.4)
    assert (await house.ask()).status == 200
    assert (len(failing.chats()), len(busy.chats())) == (1, 1)


async def test_many_that_wait_for_another_replica_keep_nobody_from_the_one_that_failed_them(
    full: Full, house: House
) -> None:
    """Seventeen had kept everybody from a replica that was idle; one, for 0.1 s each."""
    await full.start(engines=2, breaker=NEVER_OPEN, retries=Retries(3, 1.0, 100))
    await full.fill(2)
    failing = house.engines[1]
    failing.default = {"status": 500}
    failing.release()
    wires = []
    for number in range(1, 21):
        wires.append(await full.ask("a"))
        await until(lambda number=number: full.waiting() == number)
    failing.default = {}
    assert (await house.ask(user="b", headers={"x_llmgw_wait": "0"})).status == 200
    assert (await house.row(1))["queue_ms"] == 0
    assert full.waiting() == len(wires)
    full.engine.default = {}
    full.engine.release()
    assert await answered(*wires) == [200] * len(wires)
    assert full.served() == ["a"] * len(wires)
    assert full.empty()


async def test_who_was_paid_for_and_waited_in_vain_is_not_paid_for_again(house: House) -> None:
    """What a retry may cost had gone for a place in a queue; the fallback was refused for it."""
    bad, full, instead = house.engine(status=500), house.engine(hold=True), house.engine()
    await house.start(
        endpoints=(StaticEndpoint("bad", bad.url, ("a",)),
                   StaticEndpoint("full", full.url, ("a", "c"), 1),
                   StaticEndpoint("b", instead.url, ("b",))),
        fallbacks=(("a", ("b",)),), retries=Retries(3, 0.0, 1), breaker=NEVER_OPEN,
    )  # fmt: skip
    wire = await house.wire()
    await wire.chat(model="c")
    await until(full.held)
    answer = await told(house, headers={**EXPLAIN, "x_llmgw_wait": "0.3"})
    assert answer.headers["x-llmgw-fallback"] == "b; on=unavailable; by=settings"
    assert (await house.row())["attempts"] == 2
    assert (await told(house, headers={**EXPLAIN, "x_llmgw_wait": "0.3"})).status == 500
    assert house.core.stats.retries_refused == {"engine_error": 1, "fallback": 1}


async def test_an_engine_that_was_not_reached_costs_no_more_than_none(house: House) -> None:
    bad, instead = house.engine(status=500), house.engine()
    await house.start(
        endpoints=(StaticEndpoint("bad", bad.url, ("a",)),
                   StaticEndpoint("dead", house.dead(), ("a",)),
                   StaticEndpoint("b", instead.url, ("b",))),
        fallbacks=(("a", ("b",)),), retries=Retries(3, 0.0, 1), breaker=NEVER_OPEN,
        timeouts=Timeouts(connect_s=0.09),  # over when it would be tried again
    )  # fmt: skip
    house.core.fleet.pools["dead"].in_flight += 1  # so that the other one is asked first
    answer = await told(house)
    assert answer.headers["x-llmgw-fallback"] == "b; on=error; by=settings"
    assert [len(engine.chats()) for engine in house.engines] == [1, 1]
    assert house.core.stats.upstream_failures[("dead", "connect_failed")] >= 1


async def test_a_fallback_does_not_overtake_those_that_wait_for_its_model(
    full: Full, house: House
) -> None:
    """It took the room that had just appeared there."""
    bad, good = house.engine(status=500, hold=True), house.engine(hold=True)
    full.engine = good
    await house.start(
        endpoints=(StaticEndpoint("bad", bad.url, ("a",)),
                   StaticEndpoint("good", good.url, ("m",), 1)),
        fallbacks=(("a", ("m",)),), retries=Retries(3, 1.0, 100), breaker=NEVER_OPEN,
    )  # fmt: skip
    (filler,) = await full.fill()
    (first,) = await full.queue("first")
    other = await house.wire()
    await other.chat(model="a", user="fallback")
    await until(bad.held)
    core = house.core
    core.fleet.pools["good"].depth = 2  # there is room, and nobody was told of it yet
    bad.release()
    while core.stats.upstream_failures.get(("bad", "500")) is None:
        core.reactor._turns()
    assert (await other.answer()).status == 500
    await until(lambda: full.served() == ["first"])
    good.release(2)
    assert await answered(filler, first) == [200, 200]


async def test_A35_a_kept_alive_stream_is_kept_alive_until_its_engine_has_a_head(
    full: Full,
) -> None:
    """llama.cpp and SGLang have none before the first token: with a long prompt that takes minutes,
    and proxies cut what is silent for one. What the client has seen by then is ours."""
    await full.start(timeouts=Timeouts(comment_s=0.05))
    await full.fill()
    (stream,) = await full.queue("s", stream=True)
    await stream.until(b": waiting for a free place at model m\n\n\r\n")
    await full.next()
    for _ in range(2):
        await stream.until(b": keep-alive\n\n\r\n")
    full.engine.drop_connections()
    await until(lambda: full.served() == ["s", "s"])  # it is sent again, as if nothing had passed
    await stream.until(b": keep-alive\n\n\r\n")
    full.engine.release()
    rest = await stream.answer_from_chunks()
    assert rest.endswith(b"data: [DONE]\n\n")
    assert b"error" not in rest
    await until(full.house.idle)
