"""Requests that another replica takes over: which, how often, and within which budget."""

from __future__ import annotations

import json
import math
from inspect import Parameter, signature
from types import FunctionType
from typing import TYPE_CHECKING, Any

import openai
import pytest
import trio

from controller.metrics.router import families
from controller.router import errors
from controller.router.breaker import BreakerRules
from controller.router.budget import SPAN_S, RetryBudget
from controller.router.config import Retries
from controller.router.upstream import Cause
from controller.router.verdict import BY_CAUSE, BY_STATUS, Again, judge
from tests.router.conftest import NEVER_OPEN
from tests.router.wire import until

if TYPE_CHECKING:
    from controller.router.errors import ApiError
    from tests.router.conftest import House

PLENTY = Retries(attempts=3, ratio=1.0, floor=1000)
CAPACITY = {"error": {"message": "capacity", "code": 503, "type": "busy"}, "choices": []}


def hits(house: House) -> int:
    return sum(len(engine.chats()) for engine in house.engines)


# -- the table -----------------------------------------------------------------------------------


def test_the_table_of_verdicts() -> None:
    again = {status: verdict.again for status, verdict in BY_STATUS.items()}
    assert again == {
        401: Again.FREE, 429: Again.FREE, 503: Again.FREE, 529: Again.FREE,
        408: Again.ONCE, 500: Again.ONCE, 502: Again.ONCE, 504: Again.ONCE,
    }  # fmt: skip
    for status in (200, 400, 403, 404, 413, 422, 451, 501, 505):
        assert judge(status, b"cannot schedule new futures").again is Again.NEVER
    assert judge(500, b'{"message": "cannot schedule new futures after shutdown"}').again == 2
    assert all(verdict.reason for verdict in BY_STATUS.values())
    unsafe = set(Cause) - set(BY_CAUSE)  # a head came, or time passed: it may be at work
    assert unsafe == {
        Cause.CLOSED_EARLY, Cause.HEADERS_TIMEOUT, Cause.FIRST_TOKEN_TIMEOUT, Cause.IDLE_TIMEOUT,
        Cause.TOTAL_TIMEOUT, Cause.NOT_HTTP,
    }  # fmt: skip


BUSY: list[dict[str, Any]] = [
    {"status": 503}, {"status": 429}, {"status": 529}, {"error_first": CAPACITY},
    {"status": 500, "body": {"message": "cannot schedule new futures after shutdown"}},
]  # fmt: skip


@pytest.mark.parametrize("how", BUSY)
@pytest.mark.parametrize("stream", [False, True])
async def test_A08_a_busy_engine_is_passed_over(
    house: House, how: dict[str, Any], stream: bool
) -> None:
    if "error_first" in how and not stream:
        how = {"status": 503}
    house.engine(**how)
    house.engine(**how)
    house.engine()
    await house.start(retries=PLENTY)
    for _ in range(6):
        answer = await house.ask(stream=stream)
        assert answer.status == 200
        assert b"error" not in answer.body
    assert {row["status"] for row in house.rows} == {"ok"}
    assert max(row["attempts"] for row in house.rows) == 3
    await until(house.idle)


@pytest.mark.parametrize("status", [408, 500, 502, 504])
async def test_an_engine_that_gave_up_is_followed_by_one_other(house: House, status: int) -> None:
    house.engine(status=status, body={"engine": 0})
    house.engine(status=status, body={"engine": 1})
    house.engine(status=status, body={"engine": 2})
    await house.start(retries=PLENTY)
    answer = await house.ask()
    assert answer.status == status
    assert set(answer.json) == {"engine"}  # its own words
    assert hits(house) == 2
    assert (await house.row())["attempts"] == 2
    asked = [engine.chats()[0] for engine in house.engines if engine.chats()]
    await until(lambda: all(record.answered for record in asked))


@pytest.mark.parametrize("status", [400, 403, 404, 413, 422, 501])
async def test_what_is_the_requests_fault_is_not_sent_again(house: House, status: int) -> None:
    house.engine(status=status, body={"as": "it is"})
    house.engine(status=status, body={"as": "it is"})
    await house.start(retries=PLENTY)
    answer = await house.ask(stream=True)
    assert (answer.status, answer.json, hits(house)) == (status, {"as": "it is"}, 1)


async def test_an_error_event_that_is_the_requests_fault_is_not_sent_again(house: House) -> None:
    error = {"error": {"message": "too long", "code": 400}}
    house.engine(error_first=error)
    house.engine(error_first=error)
    await house.start(retries=PLENTY)
    answer = await house.ask(stream=True)
    assert (answer.status, hits(house)) == (400, 1)


async def test_a_first_event_without_a_code_is_sent_to_one_other(house: House) -> None:
    house.engine(error_first={"error": "odd"})
    house.engine(error_first={"error": "odd"})
    house.engine(error_first={"error": "odd"})
    await house.start(retries=PLENTY)
    answer = await house.ask(stream=True)
    assert (answer.status, hits(house)) == (502, 2)


@pytest.mark.parametrize("attempts", [1, 2, 4])
async def test_attempts_are_bounded_and_told(house: House, attempts: int) -> None:
    for _ in range(5):
        house.engine(status=503)
    await house.start(retries=Retries(attempts, 1.0, 1000))
    answer = await house.ask(headers={"x_llmgw_explain": "1"})
    assert (answer.status, hits(house)) == (503, attempts)
    assert answer.headers["x-llmgw-attempts"] == str(attempts)
    assert (await house.row())["attempts"] == attempts


# -- Retry-After (A34) ---------------------------------------------------------------------------


@pytest.mark.parametrize("status", [429, 503])
@pytest.mark.parametrize(
    ("said", "told"),
    [("7", "7"), ("0.2", "1"), ("2.5", "3"), ("soon", "1"), ("-3", "1"), (None, "1"),
     ("Fri, 31 Dec 2027 23:59:59 GMT", "1")],
)  # fmt: skip
async def test_A34_a_busy_answer_says_in_seconds_when_to_come_back(
    house: House, status: int, said: str | None, told: str
) -> None:
    house.engine(status=status, retry_after=said)
    await house.start()
    wire = await house.wire()
    await wire.chat()
    head = (await wire.until(b"\r\n\r\n")).lower()
    assert head.count(b"retry-after:") == 1
    assert f"retry-after: {told}\r\n".encode() in head


def refusals() -> list[ApiError]:
    """One of each that the router makes itself."""
    values = {"str": "x", "float": 1.5, "int": 2, "str | None": None}
    found = []
    for make in vars(errors).values():
        if isinstance(make, FunctionType) and make.__annotations__.get("return") == "ApiError":
            needed = [
                each for each in signature(make).parameters.values()
                if each.default is Parameter.empty
            ]  # fmt: skip
            found.append(make(*[values[each.annotation] for each in needed]))
    return found


@pytest.mark.interpreted
def test_A34_what_is_worth_another_try_says_in_seconds_when() -> None:
    made = refusals()
    assert {error.status for error in made} >= {400, 404, 413, 500, 502, 503, 504}
    assert len(made) > 15
    for error in made:
        assert (error.retry_after_s is not None) is (error.status > 500), error.code
        assert error.retry_after_s is None or error.retry_after_s >= 1


async def test_A34_a_busy_event_has_it_too(house: House) -> None:
    house.engine(error_first=CAPACITY)
    await house.start()
    assert (await house.ask(stream=True)).headers["retry-after"] == "1"


# -- the budget (C05) ----------------------------------------------------------------------------


def test_C05_the_budget_is_a_fraction_of_what_came() -> None:
    budget = RetryBudget(0.1, 3)
    spent = offered = 0
    for tick in range(60_000):  # ten minutes at 100 rps, each of which would like two retries
        now = 50.0 + tick / 100
        budget.offer(now)
        offered += 1
        spent += budget.spend(now) + budget.spend(now)
        if now > 60.0:
            assert spent <= 0.1 * offered + 3 * ((now - 50.0) / (2 * SPAN_S) + 2)
    assert 0.09 * offered < spent < 0.12 * offered


def test_the_budget_has_a_floor_and_forgets() -> None:
    budget = RetryBudget(0.1, 3)
    assert [budget.spend(5.0) for _ in range(5)] == [True, True, True, False, False]
    assert not budget.spend(5.0 + 2 * SPAN_S - 0.1)
    assert budget.spend(5.0 + 2 * SPAN_S)
    assert not any(RetryBudget(0.0, 0).spend(n) for n in range(100))


@pytest.mark.slow
@pytest.mark.parametrize("how", [{"status": 500}, {"status": 503}, {"error_first": CAPACITY}])
async def test_C05_retries_stay_a_fraction_while_everything_fails(
    house: House, how: dict[str, Any]
) -> None:
    for _ in range(3):
        house.engine(**how)
    await house.start(fallbacks=(("m", ("other",)),), breaker=NEVER_OPEN)

    async def client(number: int) -> None:
        wire = await house.wire()
        for _ in range(number):
            await wire.chat(stream="error_first" in how)
            assert (await wire.answer()).status in (500, 503)
        wire.close()

    began = trio.current_time()
    async with trio.open_nursery() as nursery:
        for _ in range(5):
            nursery.start_soon(client, 100)
    spans = (trio.current_time() - began) // SPAN_S + 2  # two are compared, and have one floor
    assert len(house.rows) == 500
    assert hits(house) == sum(row["attempts"] for row in house.rows)
    assert 500 < hits(house) <= 500 * 1.1 + 3 * math.ceil(spans / 2)
    refused = house.core.stats.retries_refused
    assert sum(refused.values()) > 100, refused
    page = {
        (family.name, *sample.labels.values()): sample.value
        for family in families([house.core.snapshot()])
        for sample in family.samples
    }
    for reason, number in refused.items():
        assert page["llmgw_upstream_retries_refused", reason] == number
    for reason, number in house.core.stats.retries.items():
        assert page["llmgw_upstream_retries", reason] == number


@pytest.mark.slow
@pytest.mark.parametrize("how", [{"status": 500}, {"status": 503}])
@pytest.mark.parametrize("own_retries", [0, openai.DEFAULT_MAX_RETRIES])
async def test_C05_one_logical_call_has_a_known_bound(
    house: House, how: dict[str, Any], own_retries: int
) -> None:
    for _ in range(4):
        house.engine(**how)
    await house.start(fallbacks=(("m", ("other",)),), retries=PLENTY)

    def call() -> None:
        url = f"http://127.0.0.1:{house.port}/v1"
        with openai.OpenAI(base_url=url, api_key="sk-test", max_retries=own_retries) as client:
            client.chat.completions.create(model="m", messages=[{"role": "user", "content": "x"}])

    with pytest.raises(openai.InternalServerError):
        await trio.to_thread.run_sync(call)
    bound = 3 if how["status"] == 500 else 4  # twice or three times, and one fallback
    assert [row["attempts"] for row in house.rows] == [bound] * (1 + own_retries)
    assert hits(house) == bound * (1 + own_retries)


# -- every hop counts for its own replica (C11) --------------------------------------------------


async def test_C11_each_failed_hop_counts_for_its_own_replica(house: House) -> None:
    house.engine(close="always")
    house.engine(status=503)
    house.engine(status=503)
    rules = BreakerRules(failures_in_row=1, pause_s=60.0, longest_pause_s=60.0)
    await house.start(retries=PLENTY, breaker=rules)
    breakers = {key: pool.breaker for key, pool in house.core.fleet.pools.items()}
    while not len(house.engines[0].chats()):
        await house.ask()
    seen = {key: (breaker.trips, breaker.phase.value) for key, breaker in breakers.items()}
    assert seen == {"e0": (1, "open"), "e1": (0, "held"), "e2": (0, "held")}
    failures = house.core.stats.upstream_failures
    assert failures[("e0", "closed_unanswered")] == 1
    assert set(failures) == {("e0", "closed_unanswered"), ("e1", "503"), ("e2", "503")}


async def test_an_error_in_the_middle_of_a_stream_counts_as_a_failure(house: House) -> None:
    house.engine(error_at=2)
    await house.start()
    pool = house.core.fleet.pools["e0"]
    assert pool.breaker.spotless
    answer = await house.ask(stream=True)
    assert json.loads(answer.events[2])["error"]
    assert not pool.breaker.spotless  # 200 at its first token, then a failure
