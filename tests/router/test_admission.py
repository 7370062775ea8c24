"""Replicas that are full: who waits, whose turn it is, who is refused, and what is told of it."""

from __future__ import annotations

import os
import re
import time
from typing import TYPE_CHECKING, Any, ClassVar

import pytest

from controller.router import errors
from controller.router.config import Limits, StaticEndpoint, StaticKey, Timeouts
from controller.router.pace import ENOUGH
from controller.router.report import Reporter
from tests.router.test_waiting import House as Woken
from tests.router.test_waiting import opened
from tests.router.wire import Wire, chat_body, post_bytes, until

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    import trio

    from tests.fake_engine import FakeEngine
    from tests.router.conftest import House

KEYS = (StaticKey("k", "sk-test"), StaticKey("other", "sk-other"))
OTHER = {"key": "sk-other"}


class Full:
    """A router before engines that hold every request, with so many places at each."""

    how: ClassVar[dict[str, Any]] = {"hold": True}

    def __init__(self, house: House) -> None:
        self.house = house
        self.engine: FakeEngine

    async def start(self, depth: int = 1, engines: int = 1, **changes: Any) -> Full:
        made = [self.house.engine(**self.how) for _ in range(engines)]
        self.engine = made[0]
        endpoints = tuple(
            StaticEndpoint(f"e{n}", engine.url, ("m", "other"), depth)
            for n, engine in enumerate(made)
        )
        await self.house.start(**{"endpoints": endpoints, "keys": KEYS, **changes})
        return self

    async def ask(self, name: str = "", **more: Any) -> Wire:
        """Send a chat, which the engine knows by `name`, and do not wait for its answer."""
        wire = await self.house.wire()
        await wire.chat(user=name, **more)
        return wire

    async def queue(
        self, *names: str, ask: Callable[..., Awaitable[Wire]] | None = None, **more: Any
    ) -> list[Wire]:
        """Requests that came one after the other and wait now."""
        wires = []
        for name in names:
            before = self.waiting()
            wires.append(await (ask or self.ask)(name, **more))
            await until(lambda before=before: self.waiting() == before + 1)
        return wires

    async def fill(self, number: int = 1) -> list[Wire]:
        """So many requests are held by engines."""
        before = self.held()
        wires = [await self.ask("filler") for _ in range(number)]
        await until(lambda: self.held() == before + number)
        return wires

    def held(self) -> int:
        return sum(engine.held() for engine in self.house.engines)

    def waiting(self, model: str = "m") -> int:
        return self.house.core.admission.waiting(model)

    def served(self, engine: FakeEngine | None = None) -> list[str]:
        """Names in the order in which an engine, mostly the first, got them."""
        names = [record.document["user"] for record in (engine or self.engine).chats()]
        return [name for name in names if name != "filler"]

    async def next(self, number: int = 1) -> None:
        """The first engine answers so many, one after the other, and gets the next each time."""
        for _ in range(number):
            seen = len(self.engine.chats())
            self.engine.release()
            await until(lambda seen=seen: len(self.engine.chats()) == seen + 1)

    def empty(self) -> bool:
        queue = self.house.core.admission
        return queue.count == queue.bytes == 0 and self.house.core.fleet.room is None


@pytest.fixture
def full(house: House) -> Full:
    return Full(house)


async def answered(*wires: Wire) -> list[int]:
    return [(await wire.answer()).status for wire in wires]


async def test_who_finds_no_room_waits_and_goes_on_in_order(full: Full) -> None:
    await full.start(depth=2)
    fillers = await full.fill(2)
    wires = await full.queue("a", "b", "c")
    assert full.house.core.snapshot()["queued"] == [["m", 3]]
    assert full.house.core.snapshot()["in_flight"] == [["m", 2]]
    assert full.held() == 2
    await full.next(3)
    assert full.served() == ["a", "b", "c"]
    full.engine.release(2)
    assert await answered(*fillers, *wires) == [200] * 5
    assert full.empty()
    await until(lambda: len(full.house.core.usage) == 5)
    waited = sorted(row["queue_ms"] for row in full.house.rows)
    assert waited[:2] == [0, 0]
    assert waited[2] > 0
    told = full.house.core.snapshot()
    assert sorted(told["admissions"]) == [["m", "at_once", 2], ["m", "queued", 3]]
    ((model, wait),) = told["queue_wait"]
    assert (model, wait["count"]) == ("m", 3)


async def test_A02_a_client_that_leaves_the_queue_is_gone_at_once_and_no_engine_hears_of_it(
    full: Full,
) -> None:
    await full.start()
    (filler,) = await full.fill()
    gone, stays = await full.queue("gone", "stays")
    gone.close()
    await until(lambda: full.waiting() == 1)  # else it would stay for 30 s
    await full.next()
    full.engine.release()
    assert await answered(filler, stays) == [200, 200]
    assert full.served() == ["stays"]
    row = await full.house.row()
    assert (row["status"], row["attempts"]) == ("client_closed", 0)
    assert row["queue_ms"] > 0
    assert full.empty()


async def test_a_client_that_leaves_its_replica_makes_room(full: Full) -> None:
    await full.start()
    (filler,) = await full.fill()
    (wire,) = await full.queue("a")
    filler.close()
    await until(lambda: full.served() == ["a"])
    full.engine.release()
    assert await answered(wire) == [200]


async def test_tenants_take_turns_whoever_came_first(full: Full) -> None:
    await full.start()
    await full.fill()
    await full.queue(*(f"flood{n}" for n in range(8)))
    await full.queue("b0", "b1", headers=OTHER)
    await full.next(5)
    assert {"b0", "b1"} < set(full.served())
    assert full.served().index("b0") < 2
    assert [name for name in full.served() if name[0] == "f"] == ["flood0", "flood1", "flood2"]


async def test_a_tenant_of_twice_the_weight_gets_twice_the_turns(full: Full) -> None:
    await full.start(keys=(KEYS[0], StaticKey("other", "sk-other", None, 2.0)))
    await full.fill()
    await full.queue(*(f"a{n}" for n in range(6)))
    await full.queue(*(f"b{n}" for n in range(6)), headers=OTHER)
    await full.next(6)
    assert sorted(name[0] for name in full.served()[:6]) == ["a", "a", "b", "b", "b", "b"]


async def test_batch_requests_wait_for_the_others_and_not_for_ever(full: Full) -> None:
    await full.start()
    await full.fill()
    await full.queue("b0", "b1", headers={"x_llmgw_priority": "Batch"})
    await full.queue(*(f"i{n}" for n in range(12)))
    await full.next(12)
    batch = [n for n, name in enumerate(full.served()) if name[0] == "b"]
    assert batch == [0, 10]  # the first came when nobody else waited


async def test_a_priority_that_is_none_is_refused_though_nobody_waits(full: Full) -> None:
    await full.start()
    answer = await full.house.ask(headers={"x_llmgw_priority": "urgent"})
    assert (answer.status, answer.code) == (400, "invalid_priority")


@pytest.mark.parametrize("headers", [{}, {"x_llmgw_wait": "0.1"}])
async def test_A34_who_waits_until_its_deadline_is_told_when_to_come_back(
    full: Full, headers: dict[str, str]
) -> None:
    await full.start(timeouts=Timeouts(queue_s=30.0 if headers else 0.1))
    await full.fill()
    answer = await full.house.ask(headers=headers)
    assert (answer.status, answer.code) == (503, "queue_timeout")
    assert 5 <= int(answer.headers["retry-after"]) <= 8  # nobody knows: 5 s, spread
    assert full.empty()
    assert full.held() == 1


async def test_nonsense_for_a_wait_is_refused(full: Full) -> None:
    await full.start()
    await full.fill()
    answer = await full.house.ask(headers={"x_llmgw_wait": "long"})
    assert (answer.status, answer.code) == (400, "invalid_wait")


@pytest.mark.parametrize("limits", [Limits(queue=2), Limits(queue_bytes=170)])
async def test_A34_the_queue_is_bounded_and_says_when_to_come_again(
    full: Full, limits: Limits
) -> None:
    await full.start(limits=limits)
    await full.fill()
    wires = await full.queue("a", "b")
    answer = await full.house.ask(user="c")
    assert (answer.status, answer.code) == (503, "queue_full")
    assert int(answer.headers["retry-after"]) >= 1
    wires[0].close()
    await until(lambda: full.waiting() == 1)
    await full.queue("d")


async def test_a_tenant_that_fills_the_queue_gives_way_to_others(full: Full) -> None:
    await full.start(limits=Limits(queue=4))
    await full.fill()
    flood = await full.queue("f0", "f1", "f2", "f3")
    others = [await full.house.wire(), await full.house.wire()]
    for wire in others:
        assert (await wire.get("/v1/models")).status == 200
    for number, wire in enumerate(others):  # both are read in one turn of the reactor
        body = chat_body(user=f"b{number}")
        os.write(wire.stream.socket.fileno(), post_bytes("/v1/chat/completions", body, **OTHER))
    pushed = [await wire.answer() for wire in flood[2:]]
    assert [(answer.status, answer.code) for answer in pushed] == [(503, "queue_full")] * 2
    assert (await full.house.ask(headers=OTHER)).code == "queue_full"  # it has its half
    await full.next(4)
    full.engine.release()
    assert sorted(full.served()) == ["b0", "b1", "f0", "f1"]
    assert await answered(*flood[:2], *others) == [200] * 4
    assert full.empty()


async def test_A34_who_cannot_make_its_deadline_at_the_pace_of_now_is_refused_at_once(
    full: Full,
) -> None:
    await full.start()
    await full.fill()
    await full.queue("a")
    pace = full.house.core.admission._lines["m"].pace
    now = time.monotonic()
    pace.start(now - 4.0 * ENOUGH)
    for turn in range(ENOUGH):  # one turn in 4 s
        pace.took(now - 4.0 * (ENOUGH - 1 - turn))
    answer = await full.house.ask(headers={"x_llmgw_wait": "3"})
    assert (answer.status, answer.code) == (503, "overloaded")
    words = r"its turn would come in about (\d+) s, and it waits for 3 s"
    told = re.search(words, answer.json["error"]["message"])
    assert told is not None
    due_s = int(told[1])
    assert 7 <= due_s <= 14  # more, the longer ago that was
    assert due_s - 4 <= int(answer.headers["retry-after"]) <= 1.5 * (due_s - 2) + 1
    await full.queue("b", headers={"x_llmgw_wait": "20"})
    await full.queue(
        "c", headers={"key": "sk-other", "x_llmgw_wait": "9"}
    )  # its turn is before b's


async def test_A34_an_idle_time_is_no_slow_pace_and_refuses_nobody(full: Full) -> None:
    await full.start()
    await full.fill()
    (first,) = await full.queue("a")
    pace = full.house.core.admission._lines["m"].pace
    await full.next()
    now = time.monotonic()
    pace.start(now - 260.0 - ENOUGH)
    for turn in range(ENOUGH):  # one turn in a second, four minutes ago
        pace.took(now - 260.0 + turn)
    await full.queue("b", headers={"x_llmgw_wait": "3"})
    full.engine.release(2)
    assert await answered(first) == [200]


async def test_A35_a_stream_that_waits_is_silent_then_kept_alive_and_goes_on(full: Full) -> None:
    await full.start(timeouts=Timeouts(comment_s=0.05))
    await full.fill()
    stream, plain = await full.queue("s", stream=True) + await full.queue("p")
    status, headers = await stream.head()
    assert (status, headers["content-type"]) == (200, "text/event-stream; charset=utf-8")
    await stream.until(b": waiting for a free place at model m\n\n\r\n")
    await full.next(2)
    full.engine.release()
    rest = await stream.answer_from_chunks()
    assert rest.endswith(b"data: [DONE]\n\n")
    assert b"HTTP/1.1" not in rest
    assert b"waiting for" not in (await plain.answer()).body


async def test_A35_a_kept_alive_stream_ends_with_the_reason(full: Full) -> None:
    await full.start(timeouts=Timeouts(comment_s=0.05))
    await full.fill()
    (wire,) = await full.queue("s", stream=True)
    await wire.until(b": waiting for a free place")
    full.house.core.admission._lines["m"].queue.first().wait_until = 0.0  # its deadline is over
    rest = await wire.answer_from_chunks()
    assert b'"code":"queue_timeout"' in rest
    assert rest.endswith(b"data: [DONE]\n\n")
    row = await full.house.row()
    assert (row["status"], row["http_status"]) == ("error", 200)  # as the client saw it


async def test_a_stream_that_waits_briefly_keeps_its_status(full: Full) -> None:
    await full.start(timeouts=Timeouts(queue_s=0.1))
    await full.fill()
    answer = await full.house.ask(stream=True)
    assert (answer.status, answer.code) == (503, "queue_timeout")


async def test_C08_a_burst_fills_every_replica_to_its_depth_and_none_beyond(full: Full) -> None:
    await full.start(depth=4, engines=8)
    wires = [await full.ask(str(n)) for n in range(40)]
    await until(lambda: full.held() == 32 and full.waiting() == 8)
    assert [engine.held() for engine in full.house.engines] == [4] * 8
    for engine in full.house.engines:
        engine.release(40)
    assert await answered(*wires) == [200] * 40
    assert full.empty()


async def test_models_that_share_a_replica_share_its_room_oldest_first(full: Full) -> None:
    await full.start()
    await full.fill()
    for name in "abcd":
        model = "m" if name in "ac" else "other"
        before = full.waiting(model)
        await full.ask(name, model=model)
        await until(lambda before=before, model=model: full.waiting(model) == before + 1)
    await full.next(4)
    assert full.served() == ["a", "b", "c", "d"]


async def test_a_retry_that_finds_the_other_replicas_full_waits_for_them(
    full: Full, house: House
) -> None:
    good = house.engine(hold=True)
    dead = house.engine()
    dead.stop()
    ends = tuple(
        StaticEndpoint(f"e{n}", engine.url, ("m",), 1) for n, engine in enumerate((good, dead))
    )
    full.engine = good
    await house.start(endpoints=ends, keys=KEYS)
    first = await full.ask("first")
    await until(lambda: full.held() == 1)
    wires = await full.queue("a")
    assert house.core.stats.upstream_failures[("e1", "connect_failed")] >= 1
    await full.next()
    good.release()
    assert await answered(first, *wires) == [200, 200]
    told = house.core.snapshot()
    assert sum(n for _, _, n in told["admissions"]) == 2, "each request once, however often sent"
    assert sum(n for _, n in told["retries"]) == sum(row["attempts"] for row in house.rows) - 2


async def test_what_waits_is_told_as_demand(full: Full) -> None:
    await full.start()
    await full.fill()
    await full.queue("a", "b")
    (row,) = Reporter(full.house.core, None, {}, None).demand()  # type: ignore[arg-type]
    assert row == {"model": "m", "waiting": 2, "in_flight": 1, "wanted_age_ms": None}


@pytest.fixture
def holding(engine: FakeEngine) -> FakeEngine:
    engine.default["hold"] = True
    return engine


async def admitted(house: Woken, number: int) -> None:
    await until(lambda: house.running.core.admission.waiting("m") == number)


async def test_a_woken_model_gets_no_more_than_it_can_do_of_those_that_waited_for_it(
    nursery: trio.Nursery, holding: FakeEngine
) -> None:
    async with opened(nursery, holding) as house:
        await house.start()
        wires = [await house.ask() for _ in range(5)]
        await house.waiting(5)
        house.replicas = [{**house.replicas[0], "share": 2}]
        house.ready()
        await until(lambda: holding.held() == 2)
        await admitted(house, 3)
        house.replicas = [{**house.replicas[0], "share": 4}]
        house.ready()  # it was measured meanwhile
        await until(lambda: holding.held() == 4)
        await admitted(house, 1)
        holding.release(5)
        assert await answered(*wires) == [200] * 5


@pytest.mark.parametrize(
    ("change", "code"), [("draining", None), ("gone from the catalog", "no_ready_replica")]
)
async def test_who_waits_for_a_replica_that_leaves_waits_for_the_next_or_is_told(
    nursery: trio.Nursery, holding: FakeEngine, change: str, code: str | None
) -> None:
    async with opened(nursery, holding) as house:
        await house.start()
        house.replicas = [{**house.replicas[0], "share": 1}]
        house.ready()
        await until(lambda: house.running.core.fleet.serves("m"))
        first, second = await house.ask(), await house.ask()
        await admitted(house, 1)
        if code is not None:
            house.shelf.models = house.shelf.models[1:]
        house.shelf.replicas = [{**house.replicas[0], "state": "draining"}]
        house.hint("")
        await admitted(house, 0)
        holding.release(2)
        if code is None:
            await house.waiting(1)
            house.ready()
            assert await answered(first, second) == [200, 200]
        else:
            refused = [a for a in (await first.answer(), await second.answer()) if a.status != 200]
            assert [answer.code for answer in refused] == [code]


@pytest.mark.interpreted
async def test_a_bug_in_one_request_does_not_make_the_others_wait(full: Full) -> None:
    await full.start()
    (filler,) = await full.fill()
    bad, good = await full.queue("bad", "good")
    core = full.house.core
    first = core.admission._lines["m"].queue.first()
    first._request = None  # type: ignore[assignment]  # whoever sends it raises
    full.engine.release()
    assert (await bad.answer()).code == "internal_error"
    await until(lambda: full.served() == ["good"])
    full.engine.release()
    assert await answered(filler, good) == [200, 200]
    assert core.reactor.crashes == 1
    core.reactor.crashes = 0
    assert full.empty()


async def test_who_comes_when_room_has_just_appeared_does_not_overtake(full: Full) -> None:
    await full.start()
    (filler,) = await full.fill()
    (wire,) = await full.queue("first")
    late = await full.house.wire()
    assert (await late.get("/v1/models")).status == 200
    core = full.house.core
    (pool,) = core.fleet.pools.values()
    pool.depth = 2  # there is room, and nobody was told of it yet: no sweep comes in between
    body = post_bytes("/v1/chat/completions", chat_body(user="late"))
    os.write(late.stream.socket.fileno(), body)
    while full.waiting() < 2:
        core.reactor._turns()
    pool.depth = 1
    await full.next(2)
    full.engine.release()
    assert await answered(filler, wire, late) == [200] * 3
    assert full.served() == ["first", "late"]


async def test_who_left_in_the_turn_in_which_its_place_was_taken_is_over_once(full: Full) -> None:
    await full.start()
    await full.fill()
    (wire,) = await full.queue("a")
    first = full.house.core.admission._lines["m"].queue.first()
    wire.close()
    await until(lambda: full.waiting() == 0)
    first.turn_away(errors.queue_full("m", 1))
    assert [row["status"] for row in full.house.rows] == ["client_closed"]


async def test_who_waited_is_sent_where_its_own_profile_says(full: Full) -> None:
    await full.start(engines=2)
    await full.fill(2)
    fleet = full.house.core.fleet
    for number in range(6):
        await full.queue(f"user-{number}", headers={"x-llmgw-profile": "cache"})
        waits = full.house.core.admission._lines["m"].queue.first()
        for pool in fleet.pools.values():
            pool.depth = 8
        assert waits.want.key is not None
        near = fleet._ready["m"].nearest(waits.want.key, fleet._ready["m"].members)
        full.house.core.admission.look(["m"])
        await until(lambda: full.waiting() == 0)
        assert waits.target is near
        for pool in fleet.pools.values():
            pool.depth = 1
