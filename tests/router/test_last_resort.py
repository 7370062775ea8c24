"""Who is asked although it tripped, because nobody is better: one client cannot shut others out."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controller.router.breaker import LATELY_S, Breaker, BreakerRules, Phase
from controller.router.config import StaticEndpoint
from controller.router.upstream import Cause
from tests.router.test_breaker import NEVER_BACK, ONE, RULES
from tests.router.wire import until

if TYPE_CHECKING:
    from controller.router.pool import Pool
    from tests.router.conftest import House


def wear(pool: Pool, good_at: float) -> None:
    """Trip it by its answers; it is a last resort if it answered well lately (monotonic)."""
    pool.breaker.good_at = good_at
    for _ in range(5):
        pool.answered(500)


@given(st.lists(st.sampled_from(["good", "bad", "silent", "probe"]), max_size=80), st.data())
def test_C01_who_tripped_is_a_last_resort_if_it_answered_well_lately_and_always_answers(
    steps: list[str], data: st.DataObject
) -> None:
    breaker, now, good_at = Breaker(RULES), 1000.0, None
    silent: list[bool] = []  # of the last outcomes, newest first
    for step in steps:
        now += data.draw(st.sampled_from([0.0, 0.5, 20.0, 61.0]))
        if step == "good":
            recovers = breaker.phase is Phase.HALF_OPEN
            breaker.answered(now, 200)
            good_at = breaker.good_at = now
            silent = [] if recovers else [False, *silent]
        elif step == "bad":
            breaker.answered(now, 500)
            silent = [False, *silent]
        elif step == "silent":
            breaker.failed(now)
            silent = [True, *silent]
        elif breaker.admits(now):
            breaker.probe(now)
        lately = good_at is not None and now - good_at < LATELY_S
        told = breaker.tripped and lately and not any(silent[:20])
        assert breaker.is_last_resort(now) == told
        if breaker.is_last_resort(now):
            assert breaker.back_at(now) <= now


def test_C01_a_silence_that_is_no_more_remembered_takes_no_last_resort_away() -> None:
    breaker = Breaker(RULES)
    breaker.failed(0.0)
    for _ in range(10):  # never spotless: one client goes on to provoke failures
        breaker.answered(0.0, 200)
        breaker.answered(0.0, 500)
        breaker.answered(0.0, 200)
    breaker.good_at = 0.0
    for _ in range(3):
        breaker.answered(0.0, 500)
    assert breaker.is_last_resort(1.0)


def test_C02_a_last_resort_that_is_busy_rests_for_a_moment_and_is_taken_back_by_silence() -> None:
    breaker = Breaker(replace(RULES, pause_s=100.0, longest_pause_s=100.0))
    breaker.good_at = 0.0
    for _ in range(3):
        breaker.answered(0.0, 500)
    for _ in range(3):
        breaker.busy(0.0)  # the others of the same moment
    assert (breaker.is_last_resort(0.09), breaker.back_at(0.05)) == (False, 0.1)
    assert breaker.is_last_resort(0.1)
    breaker.sent(0.1)
    assert not breaker.is_last_resort(0.19), "one goes, and others when it is not refused"
    breaker.busy(0.11)
    assert breaker.back_at(0.2) == 0.11 + 0.2
    breaker.sent(0.4)  # a plain request, which answers minutes later
    assert not breaker.is_last_resort(0.5)
    for _ in range(3):
        breaker.sent(0.7)
        assert breaker.is_last_resort(0.7)
    breaker.busy(0.7)
    assert breaker.back_at(0.7) == 0.7 + 0.1
    assert (breaker.phase, breaker.until) == (Phase.OPEN, 100.0), "its pause is what it was"


# -- before engines --------------------------------------------------------------------------------


@pytest.mark.parametrize("replicas", [1, 2])
async def test_C01_requests_of_one_client_that_engines_answer_500_shut_nobody_out(
    house: House, replicas: int
) -> None:
    for _ in range(replicas):
        house.engine()
    await house.start(breaker=NEVER_BACK, retries=ONE)
    pools = house.core.fleet.everyone()
    for _ in pools:
        assert (await house.ask()).status == 200
    while not all(pool.breaker.phase is Phase.OPEN for pool in pools):
        assert (await house.ask(fake={"status": 500})).status == 500
    for _ in range(3):
        for _ in range(20):
            assert (await house.ask(fake={"status": 500})).status == 500
        answer = await house.ask(headers={"x_llmgw_explain": "1"})
        assert (answer.status, answer.headers["x-llmgw-breaker"]) == (200, "open")
    (first, *_) = pools
    first.failed(Cause.CLOSED_EARLY)
    for _ in range(10):
        answer = await house.ask()
        assert answer.status == (200 if replicas == 2 else 503), "who goes silent gets probes only"
    assert first.breaker.trips == 1


@pytest.mark.parametrize(
    "others",
    [{"stream": True, "fake": {"error_at": 1}}, {"fake": {"status": 400}}],
    ids=["begun", "refused"],
)
async def test_C01_only_an_answer_that_ends_well_makes_a_last_resort(
    house: House, others: dict[str, Any]
) -> None:
    engine = house.engine()
    await house.start(breaker=NEVER_BACK, retries=ONE)
    (pool,) = house.core.fleet.everyone()
    while pool.breaker.closed:
        await house.ask(**others)
        await house.ask(fake={"status": 500})
    asked = len(engine.chats())
    for _ in range(5):
        assert (await house.ask(**others)).code == "replicas_cooling_down"
    assert len(engine.chats()) == asked


@pytest.mark.parametrize(
    "broken",
    [{"api_key": "other"}, {"status": 500, "body": {"error": "cannot schedule new futures"}}],
    ids=["refuses our key", "stops"],
)
async def test_C01_what_no_client_can_cause_makes_no_last_resort(
    house: House, broken: dict[str, Any]
) -> None:
    engine = house.engine()
    await house.start(breaker=NEVER_BACK, retries=ONE)
    assert (await house.ask()).status == 200
    engine.default = broken
    for _ in range(5):
        assert (await house.ask()).status in (500, 502)
    for _ in range(5):
        assert (await house.ask()).code == "replicas_cooling_down"
    assert len(engine.chats()) == 6


async def test_A14_who_failed_a_request_is_no_last_resort_for_it(house: House) -> None:
    engine = house.engine()
    await house.start(engine.url, house.dead(), breaker=NEVER_BACK)
    failed, dead = (house.core.fleet.pools[key] for key in ("e0", "e1"))
    while dead.breaker.phase is not Phase.OPEN:
        dead.failed(Cause.CONNECT_FAILED)
    assert (await house.ask()).status == 200
    for _ in range(4):
        failed.answered(500)
    assert failed.breaker.closed
    assert (await house.ask(fake={"status": 500})).status == 500
    assert len(engine.chats()) == 2
    assert (await house.ask()).status == 200


async def test_C01_who_is_failed_by_a_last_resort_keeps_nobody_behind_it_waiting(
    house: House,
) -> None:
    """Two replicas, and the other one is none: a queue for its probe would have it in front."""
    house.engine()
    house.engine()
    await house.start(breaker=BreakerRules(pause_s=20.0))  # less than requests wait
    pools = house.core.fleet.everyone()
    for pool in pools:
        for _ in range(5):
            pool.answered(500)
    pools[1].breaker.good_at = time.monotonic()
    wires = [await house.wire() for _ in range(3)]
    for wire in wires:
        await wire.chat(fake={"status": 500}, stream=True)
    assert (await house.ask()).status == 200
    assert [(await wire.answer()).status for wire in wires] == [500] * 3
    assert [len(engine.chats()) for engine in house.engines] == [0, 4]
    assert house.core.admission.count == 0


async def test_an_explanation_tells_how_the_breaker_stood_when_the_replica_was_asked(
    house: House,
) -> None:
    house.engine()
    await house.start(breaker=replace(RULES, pause_s=0.0), retries=ONE)
    pool = house.core.fleet.pools["e0"]

    async def told(status: int) -> str | None:
        answer = await house.ask(fake={"status": status}, headers={"x_llmgw_explain": "1"})
        assert answer.status == status
        return answer.headers.get("x-llmgw-breaker")

    assert [await told(500) for _ in range(3)] == [None] * 3, "the last one opened it"
    assert pool.breaker.phase is Phase.OPEN
    assert await told(500) == "half_open", "a probe, which failed"
    assert pool.breaker.phase is Phase.OPEN
    assert [await told(200), await told(200)] == ["half_open", None]


async def test_C01_who_broke_for_good_is_no_last_resort_beside_one_that_answers_some(
    house: House,
) -> None:
    house.engine()
    house.engine()
    await house.start(breaker=NEVER_BACK, retries=ONE)
    pools = house.core.fleet.everyone()
    now = time.monotonic()
    for pool, ago_s in zip(pools, (10.0, 0.0), strict=True):
        wear(pool, now - ago_s)
        assert pool.breaker.is_last_resort(now)
    broken, works = house.engines
    broken.default = {"status": 500}
    for _ in range(10):
        assert (await house.ask()).status == 200
    assert (len(broken.chats()), len(works.chats())) == (0, 10)
    pools[1].busy()
    assert (await house.ask()).status == 200
    assert not broken.chats(), "who rests for a moment is waited for"
    pools[0].breaker.answered(now, 200)  # asked before: a bad answer is not its last one
    for _ in range(20):
        await house.ask()
    assert broken.chats()


async def test_C01_a_last_resort_has_room_for_its_depth_and_others_queue(house: House) -> None:
    engine = house.engine(hold=True)
    await house.start(
        endpoints=(StaticEndpoint("one", engine.url, ("m",), 1),), breaker=NEVER_BACK, retries=ONE
    )
    (pool,) = house.core.fleet.everyone()
    wear(pool, time.monotonic())
    wires = [await house.wire() for _ in range(3)]
    for number, wire in enumerate(wires):
        await wire.chat(model="m")
        await until(lambda number=number: engine.held() and house.core.admission.count == number)
    for wire in wires:
        engine.release(1)
        assert (await wire.answer()).status == 200
    assert pool.breaker.phase is Phase.OPEN
    await until(house.idle)


async def test_C04_who_fails_and_answered_well_lately_gets_probes_only_beside_a_good_one(
    house: House,
) -> None:
    bad, good = house.engine(), house.engine()
    await house.start(breaker=NEVER_BACK, retries=ONE)
    while not bad.chats():
        assert (await house.ask()).status == 200
    bad.default = {"status": 500}
    answers = [(await house.ask()).status for _ in range(200)]
    assert answers.count(500) == 5
    before = len(bad.chats())
    good.default = {"status": 503}
    assert (await house.ask()).status == 503  # held for a moment: it is waited for
    good.default = {}
    assert (await house.ask()).status == 200
    assert len(bad.chats()) == before
