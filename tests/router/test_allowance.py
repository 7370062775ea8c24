"""What a process may use without asking, what requests may come to: the pure parts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from controller.router.allowance import Allowance, Kind, Told
from controller.router.auth import Key
from controller.router.body import Asked
from controller.router.bounds import Bounds
from controller.router.reservation import Price, cost_of, most_cost, most_tokens
from controller.router.routes import Route, find
from controller.router.tokens import Tokens

if TYPE_CHECKING:
    from tests.conftest import Database

NOBODY = Told(0, 0, 0, 0, 0, 100, 0, 5.0, 60.0)


def told(amount: int, **more: Any) -> Told:
    return NOBODY._replace(amount=amount, ahead=amount, **more)


def granted(kind: Kind, amount: int, **more: Any) -> Allowance:
    """An allowance that was asked for at 1 s."""
    one = Allowance(kind, 1, 100)
    one.ask(1.0, 0, 0)
    one.told(told(amount, **more), 1.0, 1.0)
    return one


def test_what_is_named_in_an_ask_is_all_that_is_used_until_the_answer() -> None:
    one = granted(Kind.MONEY, 90)
    one.take(10)
    assert one.left(1.1) == 80
    asked = one.ask(2.0, 0, 0)
    assert (asked.hold, asked.keep) == (10, 20)  # twice what is taken in a second
    assert one.left(2.0) == 20
    one.told(told(30), 2.0, 2.0)
    assert one.left(2.1) == 20


def test_an_amount_ends_with_its_time() -> None:
    one = granted(Kind.SLOTS, 5)
    assert (one.left(5.9), one.left(6.0)) == (5, 0)
    assert one.lacks(1, 6.0)
    one.gone = True
    assert not one.lacks(1, 6.0)


def test_money_stays_used_until_its_row_is_written() -> None:
    one = granted(Kind.MONEY, 90)
    one.take(50)
    one.settle(50, 30, 0)
    assert one.used == 30
    assert one.ask(2.0, 1, 0).hold == 30  # a row was made, none is written
    one.told(told(30), 2.0, 2.0)
    one.take(1)
    assert one.ask(3.0, 1, 1).hold == 1
    one.told(told(1), 3.0, 3.0)
    assert one.used == 1


def test_an_answer_that_was_lost_loses_nothing() -> None:
    one = granted(Kind.MONEY, 90)
    one.take(50)
    one.settle(50, 30, 0)
    one.ask(2.0, 1, 1)  # its answer never comes
    assert one.ask(3.0, 1, 1).hold == 0
    one.told(told(0), 3.0, 3.0)
    assert one.used == 0


def test_another_minute_begins_with_nothing_used() -> None:
    one = granted(Kind.TOKENS, 60, minute=7)
    one.take(40)
    one.ask(2.0, 0, 0)
    one.told(told(60, minute=8), 2.0, 2.0)
    assert one.left(2.0) == 60
    one.settle(40, 55, 7)  # of the minute before: nothing of this one
    assert one.left(2.0) == 60
    one.take(10)
    one.settle(10, 25, 8)
    assert one.left(2.0) == 35


def test_a_refusal_is_fresh_and_never_while_asked() -> None:
    one = granted(Kind.SLOTS, 0)
    assert one.refuses(1, 1.05)
    assert not one.refuses(1, 1.5)
    one.told(told(0), 1.0, 2.0)  # an answer that nobody waits for
    assert not one.refuses(1, 1.5)
    one.ask(1.05, 0, 0)
    assert not one.refuses(1, 1.06)
    one.told(told(0, spare=1), 1.05, 1.06)
    assert not one.refuses(1, 1.07)  # others hold it unused and are told to bring it back


def test_who_lacks_what_others_use_waits_a_little_and_a_flood_not_again() -> None:
    one = granted(Kind.SLOTS, 0, busy=2)
    assert one.refuses(3, 1.0)  # more than there is
    assert one.refuses(1, 1.0, patient=False)
    assert not one.refuses(2, 1.01)
    for at, refused in ((1.3, False), (1.32, True), (2.3, True), (2.32, False), (2.7, True)):
        one.ask(at, 0, 0)
        one.told(told(0, busy=2), at, at)
        assert one.refuses(2, at) is refused, at
    counted = granted(Kind.REQUESTS, 0, busy=2)
    assert counted.refuses(1, 1.0)  # a request that was sent is not given back


def test_an_ask_names_the_least_that_a_waiting_request_takes() -> None:
    one = Allowance(Kind.MONEY, 1, 100)
    for n in (30, 20, 20):
        one.want(n)
    asked = one.ask(1.0, 0, 0)
    assert (asked.need, asked.least) == (70, 20)
    one.unwant(20)
    one.unwant(20)
    asked = one.ask(2.0, 0, 0)
    assert (asked.need, asked.least) == (30, 30)
    one.unwant(30)
    assert one.ask(3.0, 0, 0).least == 0


def test_a_call_that_came_late_says_nothing() -> None:
    one = granted(Kind.SLOTS, 5)
    one.ask(2.0, 0, 0)
    before = one.amount
    one.told(NOBODY._replace(amount=None, spare=None, busy=None, free=None, ahead=None), 2.0, 2.0)
    assert one.amount == before


def row(number: int, **more: Any) -> dict[str, Any]:
    plain = {"id": number, "scope_id": None, "key_id": None, "level": "org", "gone": False}
    return {**plain, "micros": 5, "period": "day", **more}


def limit(number: int, **more: Any) -> dict[str, Any]:
    bounds = dict.fromkeys(("model", "requests_per_min", "tokens_per_min", "parallel"))
    return {**row(number), **bounds, **more}


def test_a_key_has_the_bounds_of_all_above_it_as_they_are_now() -> None:
    bounds = Bounds()
    key, other = Key("k", chain=(1, 2)), Key("other", chain=(3,))
    assert bounds.of(key) == ()
    bounds.learn([row(1, scope_id=1), row(2, scope_id=2), row(3, scope_id=3)], [])
    bounds.learn([row(4, key_id="k")], [limit(1, key_id="k", parallel=2, requests_per_min=9)])
    assert [(b.kind, b.id) for b in bounds.of(key)] == [
        (Kind.MONEY, 1), (Kind.MONEY, 2), (Kind.MONEY, 4), (Kind.REQUESTS, 1), (Kind.SLOTS, 1),
    ]  # fmt: skip
    assert [b.id for b in bounds.of(other)] == [3]
    moved = Key("k", chain=(3,))
    assert [b.id for b in bounds.of(moved) if b.kind is Kind.MONEY] == [3, 4]
    held = bounds.allowance(bounds.of(moved)[0])
    held.until = 1e9
    bounds.learn([row(3, scope_id=3)], [])
    assert held.until == 1e9  # nothing changed
    bounds.learn(
        [row(3, scope_id=3, micros=4), row(4, key_id="k", gone=True)],
        [limit(1, key_id="k", gone=True)],
    )
    assert held.until == 0
    assert [(b.id, b.whole) for b in bounds.of(moved)] == [(3, 4)]
    assert len(bounds) == 3


CHAT = find(b"POST", b"/v1/chat/completions")
LENGTHS = [
    ({"max_tokens": 5}, 5),
    ({"max_completion_tokens": 6, "max_tokens": 5}, 6),
    ({"max_output_tokens": 7}, 7),
    ({"max_tokens": 5, "n": 3}, 15),
    ({"max_tokens": 5, "best_of": 4, "n": 3}, 20),
    ({"max_tokens": 5, "prompt": ["a", "b"], "n": 2}, 20),
    ({"max_tokens": 5, "prompt": [1, 2, 3]}, 5),  # one prompt of three tokens
    ({}, 100),
    *(({"max_tokens": odd}, 100) for odd in (0, -1, "5", 1.5, True, None, [], float("nan"))),
    ({"max_tokens": 10**30}, 10**9),
    ({"max_tokens": 10, "n": 10**30}, 10 * 10_000),
]


@pytest.mark.parametrize(("fields", "most"), LENGTHS)
def test_an_answer_may_come_to_what_the_request_allows(fields: dict[str, Any], most: int) -> None:
    assert isinstance(CHAT, Route)
    asked = Asked(b"x" * 41, {"model": "m", **fields}, "m", stream=False)
    assert most_tokens(CHAT, asked, 100) == (11, most)


def test_what_has_no_answer_reserves_none() -> None:
    asked = Asked(b"x" * 40, {"max_tokens": 5}, "m", stream=False)
    for path, expected in ((b"/v1/embeddings", (10, 0)), (b"/tokenize", (0, 0))):
        route = find(b"POST", path)
        assert isinstance(route, Route)
        assert most_tokens(route, asked, 100) == expected


def test_a_budget_that_is_spent_stops_what_costs_nothing_too() -> None:
    assert most_cost([Price()], 100, 100) == 1
    assert most_cost([Price(1, None, 1), Price(2_000_000, None, 500_000)], 10, 4) == 22


COUNT = st.one_of(st.none(), st.integers(0, 10**7))
PRICE = st.one_of(st.none(), st.integers(0, 10**9))


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(counts=st.tuples(COUNT, COUNT, COUNT), prices=st.tuples(PRICE, PRICE, PRICE))
def test_the_router_reckons_costs_as_postgres_does(
    database: Database, counts: tuple[Any, Any, Any], prices: tuple[Any, Any, Any]
) -> None:
    prompt, completion, cached = counts
    ask = (
        "select ceil(llmgw_core.cost_of('ok', 'x', %s::bigint, %s::bigint, %s::bigint, %s::bigint,"
        " %s::bigint, %s::bigint))::numeric"
    )
    with database.connect() as connection:
        asked = (prompt, cached, completion, prices[0], prices[1], prices[2])
        found = connection.execute(ask, asked).fetchone()
    assert found is not None
    assert cost_of(Price(*prices), Tokens(prompt, completion, cached)) == (found[0] or 0)
