"""Replicas that leave, trip and come back while requests run there or wait for them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from controller.router.breaker import BreakerRules
from controller.router.table import RouteTable
from controller.router.upstream import Cause
from tests.router.test_admission import Full, answered

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
