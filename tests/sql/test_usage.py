"""Usage rows in Postgres: what each value becomes, what it costs, sums, and what comes twice."""

from __future__ import annotations

import uuid
from concurrent.futures import ThreadPoolExecutor
from decimal import Decimal

import psycopg
import pytest
from psycopg.types.json import Jsonb

from tests.usage_columns import listed

NOW = "select extract(epoch from clock_timestamp())::float8"
FLUSH = "select llmgw_core.usage_flush_v3(%s, %s) as told"
ROUTER = uuid.UUID(int=7)
SUMS = """requests, errors, prompt_tokens, cached_tokens, completion_tokens, reasoning_tokens,
    cost_micros, unpriced, estimated, degraded"""


def row(number, at, **more):
    return {
        "id": uuid.UUID(int=number).hex, "at": at, "key_id": "k", "model": "m",
        "endpoint": "chat.completions", "status": "ok", "stream": False, "total_ms": 100.0, **more,
    }  # fmt: skip


def flush(fleet, *rows):
    sent = Jsonb([listed(one) for one in rows])
    return fleet.controller.execute(FLUSH, (ROUTER, sent)).fetchone()["told"]


def price(fleet, age_s, model="m", **prices):
    fleet.admin.execute(
        "insert into llmgw_core.price (model, since, prompt, cached, completion, set_by)"
        " values (%s, clock_timestamp() - make_interval(secs => %s), %s, %s, %s, 'test')",
        (model, age_s, *(prices.get(part) for part in ("prompt", "cached", "completion"))),
    )


@pytest.fixture
def now(fleet):
    return fleet.value(NOW)


def test_each_value_of_a_row_lands_in_its_column(fleet, now):
    sent = row(
        1, now, key_id="k", model_asked="asked", replica_id=3, endpoint="chat", status="partial",
        http_status=502, error_code="bad", stream=True, prompt_tokens=1, cached_tokens=2,
        completion_tokens=3, ttft_ms=4.5, attempts=2, request_id="r", reasoning_tokens=6,
        estimated=True, queue_ms=7.5, degraded=True, org_id=5, user_id=7, upstream_id="chatcmpl-'1",
        tried=[["5", "m", "connect_failed", 1.5]],
    )  # fmt: skip
    assert flush(fleet, sent) == {"written": 1, "unpriced": 1}
    (kept,) = fleet.rows(
        "select *, extract(epoch from at)::float8 as at, id::text from llmgw_core.usage_event"
    )
    assert kept == {
        **sent, "id": str(uuid.UUID(int=1)), "team_id": None,
        "cost_micros": None, "unpriced": True, "tags": None,
    }  # fmt: skip


def scope(fleet, kind, name, parent=None):
    made = fleet.admin.execute(
        "insert into llmgw_core.scope (kind, name, parent, created_by) values (%s, %s, %s, 'test')"
        " returning id",
        (kind, name, parent),
    )
    return made.fetchone()["id"]


def test_tags_are_those_of_the_key(fleet, now):
    fleet.admin.execute(
        "insert into llmgw_core.api_key (id, hash, name, created_by, tags)"
        " values ('abcdef', sha256('x'), 'n', 'test', '{\"cost_centre\": \"7\"}')"
    )
    flush(fleet, row(1, now, key_id="abcdef"), row(2, now, key_id="gone00"))
    tags = fleet.rows("select tags from llmgw_core.usage_event order by id")
    assert [found["tags"] for found in tags] == [{"cost_centre": "7"}, None]


COSTS = [
    ({"prompt_tokens": 7, "completion_tokens": 3}, "2.85"),
    ({"prompt_tokens": 7, "cached_tokens": 4, "completion_tokens": 3}, "2.45"),
    ({"prompt_tokens": 1}, "0.15"),
    ({"completion_tokens": 1}, "0.6"),
    ({"prompt_tokens": 2, "cached_tokens": 9}, "0.1"),  # an engine that cannot count
    ({"prompt_tokens": 0, "completion_tokens": 0}, "0"),
    ({"prompt_tokens": 10**9, "completion_tokens": 10**9}, "750000000"),
    ({}, None),  # nothing is known: not nothing
    ({"status": "error", "prompt_tokens": 5}, "0"),
    ({"status": "partial"}, "0"),
    ({"status": "partial", "prompt_tokens": 1}, "0.15"),
    ({"status": "client_closed", "prompt_tokens": 1, "completion_tokens": 1}, "0.75"),
    ({"endpoint": "tokenize"}, "0"),
]


@pytest.mark.parametrize(("used", "cost"), COSTS, ids=range(len(COSTS)))
def test_a_row_costs_what_its_tokens_do_exactly(fleet, now, used, cost):
    price(fleet, 3600, prompt=150_000, cached=50_000, completion=600_000)
    told = flush(fleet, row(1, now, **used))
    (kept,) = fleet.rows("select cost_micros, unpriced from llmgw_core.usage_event")
    assert kept == {
        "cost_micros": None if cost is None else Decimal(cost),
        "unpriced": cost is None,
    }
    assert told["unpriced"] == (cost is None)


def test_cached_tokens_without_a_price_of_their_own_cost_as_prompt(fleet, now):
    price(fleet, 3600, prompt=1_000_000, completion=0)
    flush(fleet, row(1, now, prompt_tokens=5, cached_tokens=4, completion_tokens=9))
    assert fleet.value("select cost_micros from llmgw_core.usage_event") == 5


def test_B07_use_without_a_price_is_flagged_and_never_zero(fleet, now):
    price(fleet, 3600, model="half", prompt=10)
    price(fleet, 3600, model="was", prompt=10, completion=10)
    price(fleet, 60, model="was")
    used = {"prompt_tokens": 1, "completion_tokens": 1}
    models = ["never", "half", "was", None]
    rows = [row(n, now, model=model, **used) for n, model in enumerate(models)]
    assert flush(fleet, *rows, row(9, now, model="never", stream=True, **used)) == {
        "written": 5, "unpriced": 5,
    }  # fmt: skip
    kept = fleet.rows("select cost_micros, unpriced from llmgw_core.usage_event")
    assert kept == [{"cost_micros": None, "unpriced": True}] * 5
    (told,) = fleet.rows(
        "select cost_micros, unpriced from llmgw_core.usage_day where model is null"
    )
    assert told == {"cost_micros": 0, "unpriced": 1}
    # With no tokens a missing price does not matter.
    assert flush(fleet, row(10, now, model="half", prompt_tokens=4))["unpriced"] == 0


def test_B07_use_without_a_price_is_trouble_where_others_have_one(fleet, now):
    trouble = "select object, why from llmgw.trouble where what = 'use without a price'"
    flush(fleet, row(1, now, model="free", prompt_tokens=1), row(2, now, prompt_tokens=1))
    assert fleet.rows(trouble) == [], "nobody asks for prices here"
    price(fleet, 60, prompt=1)
    flush(fleet, row(3, now, model="free", prompt_tokens=1), row(4, now, prompt_tokens=1))
    told = {found["object"]: found["why"] for found in fleet.rows(trouble)}
    assert told.keys() == {"model free", "model m"}
    assert told["model free"].startswith("2 requests")


def test_a_price_counts_for_requests_that_began_under_it(fleet, now):
    price(fleet, 60, prompt=2_000_000)
    price(fleet, 30, prompt=5_000_000)
    flush(
        fleet,
        row(1, now, prompt_tokens=1, total_ms=20_000.0),
        row(2, now, prompt_tokens=1, total_ms=40_000.0),
        row(3, now, prompt_tokens=1, total_ms=90_000.0),
    )
    costs = fleet.rows("select cost_micros from llmgw_core.usage_event order by id")
    assert [cost["cost_micros"] for cost in costs] == [5, 2, None]


def test_the_model_that_served_is_priced_not_the_one_asked_for(fleet, now):
    price(fleet, 60, model="big", prompt=9_000_000)
    price(fleet, 60, model="small", prompt=1_000_000)
    flush(fleet, row(1, now, model_asked="big", model="small", prompt_tokens=1))
    assert fleet.value("select cost_micros from llmgw_core.usage_event") == 1


def sums(fleet, table):
    (found,) = fleet.rows(
        f"select {', '.join(f'sum({name.strip()}) as {name.strip()}' for name in SUMS.split(','))}"
        f" from llmgw_core.{table}"
    )
    return {name: int(value) for name, value in found.items()}


def test_B02_sums_by_minute_and_day_are_those_of_the_rows_whatever_comes_again(fleet, now):
    price(fleet, 90_000, prompt=1_000_000, completion=1_000_000)
    words = ["ok", "error", "client_closed", "partial"]
    rows = [
        row(
            n, now - n * 37, key_id=f"k{n % 3}", model="m" if n % 5 else None,
            status=words[n % 4], prompt_tokens=n, cached_tokens=n // 2, completion_tokens=1,
            reasoning_tokens=1, estimated=n % 7 == 0, degraded=n % 11 == 0,
        )
        for n in range(200)
    ]  # fmt: skip
    for batch in (rows[:50], rows[:50], rows[25:150], rows[100:], rows):
        flush(fleet, *batch)
    told = {
        "requests": 200, "errors": 100, "prompt_tokens": sum(range(200)),
        "cached_tokens": sum(n // 2 for n in range(200)), "completion_tokens": 200,
        "reasoning_tokens": 200, "estimated": 29, "degraded": 19,
        "cost_micros": sum(n + 1 for n in range(200) if n % 4 != 1 and n % 5),
        "unpriced": sum(1 for n in range(200) if n % 4 != 1 and n % 5 == 0),
    }  # fmt: skip
    assert sums(fleet, "usage_minute") == told
    assert sums(fleet, "usage_day") == told
    assert fleet.value("select count(*) from llmgw_core.usage_day") <= 12


def test_routers_that_flush_at_once_wait_for_each_other_in_one_order(fleet, database, now):
    """Batches with the same keys in the opposite order: a deadlock would be an error here."""
    keys = [f"k{n:03}" for n in range(300)]

    def flood(first, order):
        with psycopg.connect(database.controller_url, autocommit=True) as connection:
            for start in range(first, first + 10 * len(keys), len(keys)):
                batch = [
                    listed(row(start + n, now, key_id=key, prompt_tokens=1))
                    for n, key in enumerate(order)
                ]
                connection.execute(FLUSH, (ROUTER, Jsonb(batch)))

    with ThreadPoolExecutor() as pool:
        floods = [pool.submit(flood, 10_000, keys), pool.submit(flood, 20_000, keys[::-1])]
        for flooding in floods:
            flooding.result(60)
    assert sums(fleet, "usage_minute")["requests"] == 6000
    assert sums(fleet, "usage_day")["prompt_tokens"] == 6000


def test_B10_ids_of_engines_are_data(fleet, now):
    ids = ["", None, "same", "same", "x'; drop table y --", '"' * 128]
    assert flush(fleet, *(row(n, now, upstream_id=name) for n, name in enumerate(ids)))[
        "written"
    ] == len(ids)
    kept = fleet.rows("select upstream_id from llmgw_core.usage_event order by id")
    assert [found["upstream_id"] for found in kept] == ids


@pytest.mark.parametrize(
    "bad",
    [
        {"status": "lost"}, {"prompt_tokens": -1}, {"prompt_tokens": 2**70}, {"id": "no uuid"},
        {"at": "noon"}, {"total_ms": -1}, {"endpoint": None},
    ],
)  # fmt: skip
def test_a_row_that_cannot_be_is_refused_as_bad_and_writes_nothing(fleet, now, bad):
    sent = Jsonb([listed(row(1, now)), listed({**row(2, now), **bad})])
    with pytest.raises(psycopg.Error) as caught:
        fleet.controller.execute(FLUSH, (ROUTER, sent))
    assert caught.value.sqlstate[:2] in ("22", "23")
    assert fleet.value("select count(*) from llmgw_core.usage_event") == 0
    assert fleet.value("select count(*) from llmgw_core.usage_day") == 0


def test_rows_of_a_day_that_is_long_gone_are_in_the_sums_of_days(fleet, now):
    flush(fleet, row(1, now - 60 * 86400, prompt_tokens=3))
    assert fleet.value("select count(*) from llmgw_core.usage_event") == 1
    assert fleet.value("select sum(prompt_tokens) from llmgw_core.usage_day") == 3


def test_sums_of_days_are_dropped_after_their_retention(fleet, now):
    flush(fleet, row(1, now))
    fleet.admin.execute(
        "insert into llmgw_core.usage_day select day - 1201, key_id, model, org_id, team_id,"
        " user_id, requests, errors, prompt_tokens, cached_tokens, completion_tokens,"
        " reasoning_tokens, cost_micros, unpriced, estimated, degraded, last_at"
        " from llmgw_core.usage_day"
    )
    term = fleet.lead("housekeeping")
    fleet.controller.execute("select llmgw_core.housekeep_v1(%s)", (term,))
    assert fleet.value("select count(*) from llmgw_core.usage_day") == 1


def test_the_database_has_an_identity_that_stays(fleet):
    ask = "select llmgw_core.database_id() as id"
    told = {fleet.controller.execute(ask).fetchone()["id"] for _ in range(2)}
    assert len(told) == 1
    assert isinstance(told.pop(), uuid.UUID)
