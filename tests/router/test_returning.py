"""Replicas that leave, trip and come back while requests run there or wait for them."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import pytest

from controller.router.breaker import BreakerRules
from controller.router.config import StaticEndpoint, Timeouts
from controller.router.table import RouteTable
from controller.router.upstream import Cause
from tests.router.test_admission import Full, answered
from tests.router.test_timeouts import Deaf
from tests.router.wire import until

if TYPE_CHECKING:
    from tests.router.conftest import House


async def test_a_replica_that_left_and_came_back_is_as_full_as_it_was(house: House) -> None:
    full = Full(house)
    await full.start(depth=2)
    fleet = full.house.core.fleet
    fillers = await full.fill(2)
    table, places = fleet.table, {p.endpoint: p.address for p in fleet.pools.values()}
    fleet.swap(RouteTable(), {})
    assert full.house.core.snapshot()["endpoints"] == []
    fleet.swap(table, places)
    (shown,) = full.house.core.snapshot()["endpoints"]
    assert (shown["in_flight"], shown["ready"]) == (2, True)
    assert shown["score"] > 2, "full, and new"
    (wire,) = await full.queue("a")
    assert full.held() == 2
    await full.next()
    full.engine.release(2)
    assert await answered(*fillers, wire) == [200] * 3
    assert full.house.core.snapshot()["replicas"] == [["e0", 0]]


async def test_C17_who_waited_while_the_replica_tripped_is_told_when_it_returns(
    house: House,
) -> None:
    full = Full(house)
    await full.start(breaker=BreakerRules(failures_in_row=1, pause_s=20.0))
    await full.fill()
    (wire,) = await full.queue("a")
    full.house.core.fleet.pools["e0"].failed(Cause.CLOSED_EARLY)
    full.house.core.admission._lines["m"].queue.first().give_up()
    answer = await wire.answer()
    assert (answer.status, answer.code) == (503, "replicas_cooling_down")
    assert 10 < int(answer.headers["retry-after"]) <= 20  # the pause's rest, not the queue's pace


async def test_trips_of_a_replica_that_left_and_came_back_go_on(house: House) -> None:
    await house.start(breaker=BreakerRules(failures_in_row=1))
    fleet = house.core.fleet
    table, places = fleet.table, {p.endpoint: p.address for p in fleet.pools.values()}
    assert house.core.snapshot()["trips"] == []
    for trips in (1, 2):
        fleet.pools["e0"].failed(Cause.CLOSED_EARLY)
        assert house.core.snapshot()["trips"] == [["e0", trips]]
        fleet.swap(RouteTable(), {})
        assert house.core.snapshot()["trips"] == [["e0", trips]]
        fleet.swap(table, places)


@pytest.mark.parametrize(
    ("instead", "status", "code"), [("b", 200, None), ("nobody", 503, "no_ready_replica")]
)
async def test_a_replica_that_leaves_while_its_connection_is_made_is_none(
    house: House, instead: str, status: int, code: str | None
) -> None:
    """It had been a bug of ours, a 500, for all that were on their way to a machine that died."""
    other = house.engine()
    with Deaf() as deaf:
        await house.start(
            endpoints=(StaticEndpoint("on-a", deaf.url, ("a",)),
                       StaticEndpoint("on-b", other.url, ("b",))),
            fallbacks=(("a", (instead,)),), timeouts=Timeouts(connect_s=20),
        )  # fmt: skip
        wire = await house.wire()
        await wire.chat(model="a")
        fleet = house.core.fleet
        await until(lambda: fleet.pools["on-a"].in_flight == 1)
        fleet.swap(fleet.table, {p.endpoint: p.address for p in (fleet.pools["on-b"],)})
        house.core.deadlines.sweep(time.monotonic() + 21)
        answer = await wire.answer()
        assert (answer.status, answer.json.get("error", {}).get("code")) == (status, code)
        await until(house.idle)
