"""When a replica gets requests and when not: the pure machine, and before engines that fail."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING

import trio
from hypothesis import given
from hypothesis import strategies as st

from controller.router.breaker import Breaker, BreakerRules, Phase
from controller.router.config import Retries, Timeouts
from controller.router.scoring import RAMP_S
from controller.router.table import RouteTable
from controller.router.upstream import Cause
from tests.router.wire import until

if TYPE_CHECKING:
    from tests.router.conftest import House

ONE = Retries(attempts=1)  # clients see what each engine does
NEVER_BACK = BreakerRules(pause_s=600.0, longest_pause_s=600.0)  # within a test
RULES = BreakerRules(failures_in_row=3, failures_of_20=5, pause_s=2.0, longest_pause_s=10.0)


def tripped(at: float = 0.0) -> Breaker:
    breaker = Breaker(RULES)
    for _ in range(3):
        breaker.failed(at)
    assert breaker.phase is Phase.OPEN
    return breaker


def test_it_opens_after_failures_in_a_row_and_probes_at_doubling_pauses() -> None:
    breaker, now = tripped(), 0.0
    for pause in (2.0, 4.0, 8.0, 10.0, 10.0):
        assert not breaker.admits(now + pause - 0.01)
        now += pause
        assert breaker.admits(now)
        breaker.probe(now)
        assert breaker.phase is Phase.HALF_OPEN
        assert not breaker.admits(now)  # one probe at a time
        breaker.failed(now)
    assert breaker.trips == 6


def test_a_probe_without_an_outcome_does_not_shut_it_for_ever() -> None:
    breaker = tripped()
    breaker.probe(2.0)  # its client leaves
    assert not breaker.admits(3.9)
    assert breaker.admits(4.0)


def test_after_a_good_probe_it_is_on_trial() -> None:
    breaker = tripped()
    breaker.probe(2.0)
    breaker.answered(2.1, 200)
    assert breaker.closed
    breaker.failed(2.2)
    assert breaker.phase is Phase.OPEN
    assert breaker.until == 2.2 + 4.0
    breaker.probe(7.0)
    for _ in range(21):
        breaker.answered(7.1, 200)
    assert breaker.spotless
    for _ in range(3):
        breaker.failed(8.0)
    assert breaker.until == 8.0 + 2.0  # the earlier trips are forgotten


def test_requests_from_before_the_trip_change_nothing() -> None:
    breaker = tripped()
    for _ in range(9):
        breaker.failed(0.1)
        breaker.busy(0.1)
        breaker.answered(0.1, 200)
    assert (breaker.phase, breaker.until, breaker.trips) == (Phase.OPEN, 2.0, 1)


def test_every_other_failure_opens_it_too() -> None:
    breaker = Breaker(RULES)
    for number in range(8):
        assert breaker.closed, number
        breaker.failed(0.0)
        breaker.answered(0.0, 200)
        if breaker.phase is Phase.OPEN:
            break
    assert number == 4


@given(st.lists(st.sampled_from([200, 400, 404, 422, 429, 501, 503]), max_size=60), st.data())
def test_C01_C02_neither_client_errors_nor_busy_answers_ever_open_it(
    statuses: list[int], data: st.DataObject
) -> None:
    breaker, now = Breaker(RULES), 0.0
    for status in statuses:
        now += data.draw(st.floats(0, 0.3))
        if not breaker.closed and breaker.admits(now):
            breaker.probe(now)
        if status in (429, 503):
            breaker.busy(now, data.draw(st.floats(0, 99)), data.draw(st.floats(0, 1)))
        else:
            breaker.answered(now, status)
        assert breaker.phase in (Phase.CLOSED, Phase.HELD)
        assert breaker.until <= now + 0.5  # C02: service resumes within a second


def test_C02_a_busy_replica_is_held_for_a_moment_and_taken_back_by_silence() -> None:
    breaker = Breaker(RULES)
    breaker.busy(0.0)
    breaker.busy(0.01)  # the others of the same moment
    assert (breaker.phase, breaker.until) == (Phase.HELD, 0.1)
    breaker.probe(0.1)
    breaker.busy(0.11)
    assert breaker.until == 0.11 + 0.2
    breaker.probe(0.4)  # a plain request, which answers minutes later
    assert not breaker.admits(0.5)
    breaker.probe(0.6)
    assert breaker.closed


def test_a_hold_that_is_over_is_not_shown_though_nobody_came_since() -> None:
    breaker = Breaker(RULES)
    breaker.busy(100.0)
    assert (breaker.shown(100.0), breaker.shown(101.0)) == (Phase.HELD, Phase.CLOSED)
    for _ in range(5):
        breaker.failed(102.0)
    assert breaker.shown(999.0) is Phase.OPEN, "that it works again is not known"


def test_an_unreachable_replica_is_held_from_the_first_failure_on() -> None:
    breaker = Breaker(RULES)
    breaker.failed(0.0, unreachable=True)
    assert breaker.phase is Phase.HELD
    breaker.probe(0.2)
    breaker.probe(0.5)
    assert breaker.phase is Phase.HELD  # silence proves nothing here
    breaker.answered(0.6, 200)
    assert breaker.closed


def test_failures_forgotten_while_it_is_held_are_forgotten() -> None:
    breaker = tripped()
    breaker.probe(2.0)
    breaker.answered(2.1, 200)  # on trial
    for _ in range(19):
        breaker.answered(2.2, 200)
    breaker.busy(2.3)
    breaker.answered(2.3, 200)  # from before; the last failure leaves what is remembered
    breaker.probe(2.5)
    breaker.probe(2.7)
    assert breaker.spotless
    for _ in range(3):
        breaker.failed(8.0)
    assert breaker.until == 8.0 + 2.0, "as after a first trip"


# -- before engines --------------------------------------------------------------------------------


async def test_trips_are_counted_on_when_a_replica_left_and_came_back(house: House) -> None:
    await house.start()
    fleet = house.core.fleet
    table, places = fleet.table, {p.endpoint: p.address for p in fleet.pools.values()}
    for trips in (1, 2, 3):
        for _ in range(5):
            fleet.pools["e0"].failed(Cause.CLOSED_EARLY)
        assert house.core.snapshot()["trips"] == [["e0", trips]]
        fleet.swap(RouteTable(), {})
        assert house.core.snapshot()["trips"] == [["e0", trips]]
        fleet.swap(table, places)


async def test_C01_client_errors_are_no_failures_of_the_replica(house: House) -> None:
    engine = house.engine()
    await house.start()
    for _ in range(50):
        assert (await house.ask(fake={"status": 400})).status == 400
    assert (await house.ask()).status == 200
    (pool,) = house.core.fleet.everyone()
    assert pool.breaker.spotless
    assert len(engine.chats()) == 51


async def test_C04_a_replica_that_fails_fast_gets_probes_only(house: House) -> None:
    bad, good = house.engine(status=500), house.engine()
    await house.start(breaker=NEVER_BACK, retries=ONE)
    answers = [await house.ask() for _ in range(200)]
    assert [answer.status for answer in answers].count(500) == 5
    assert len(bad.chats()) == 5
    assert len(good.chats()) == 195


async def test_C04_recovery_is_automatic(house: House) -> None:
    engine = house.engine(status=500)
    await house.start(breaker=BreakerRules(failures_in_row=2, pause_s=0.2))
    for _ in range(2):
        assert (await house.ask()).status == 500
    engine.default = {}
    (pool,) = house.core.fleet.everyone()
    pool.since -= RAMP_S
    pool.weigh(pool.since + RAMP_S)
    whole = pool.drag
    assert (await house.ask()).status == 200  # it waited for the probe's time
    assert pool.breaker.closed
    assert pool.drag > 5 * whole  # and comes to its share slowly


async def test_C02_service_resumes_when_a_busy_engine_is_idle_again(house: House) -> None:
    engine = house.engine(status=503)
    await house.start()
    for _ in range(5):
        assert (await house.ask()).status == 503
    (pool,) = house.core.fleet.everyone()
    assert pool.breaker.phase is Phase.HELD
    engine.default = {}
    assert pool.breaker.until - time.monotonic() <= 0.5  # the rest is our own work
    assert (await house.ask()).status == 200
    assert pool.breaker.trips == 0


async def test_C17_when_all_cool_down_the_first_to_return_is_named(house: House) -> None:
    engines = [house.engine(status=500), house.engine(status=500)]
    await house.start(
        breaker=BreakerRules(failures_in_row=1, pause_s=25.0),
        retries=ONE,
        timeouts=Timeouts(queue_s=1.0),
    )
    for _ in engines:
        assert (await house.ask()).status == 500
    refused = await house.ask()
    assert (refused.status, refused.code) == (503, "replicas_cooling_down")
    assert 15 < int(refused.headers["retry-after"]) <= 25
    house.core.config = replace(house.core.config, timeouts=Timeouts())
    began = trio.current_time()
    refused = await house.ask(headers={"x_llmgw_wait": "12"})
    assert (refused.status, refused.code) == (503, "replicas_cooling_down")
    assert 12 < int(refused.headers["retry-after"]) <= 25
    assert trio.current_time() - began < 12, "it does not wait in vain"
    assert [len(engine.chats()) for engine in engines] == [1, 1]


async def test_C17_a_request_waits_for_the_first_to_return_and_one_probes(house: House) -> None:
    engines = [house.engine(status=500), house.engine(status=500)]
    await house.start(breaker=BreakerRules(failures_in_row=1, pause_s=0.5), retries=ONE)
    for _ in engines:
        assert (await house.ask()).status == 500
    for engine in engines:
        engine.default = {}
    answers = []

    async def ask() -> None:
        answers.append((await house.ask()).status)

    async with trio.open_nursery() as nursery:
        for _ in range(6):
            nursery.start_soon(ask)
    assert answers == [200] * 6
    await until(house.idle)
