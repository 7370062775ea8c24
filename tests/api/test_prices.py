"""Prices: their history, and that unpriced is never free."""

from __future__ import annotations

import json

import pytest

from controller.catalog.faults import CatalogError
from controller.catalog.reading import parse
from tests.api.served import TINY, command
from tests.cli.served import Ctl

CHARGED = TINY | {"prices": {"prompt": 150_000, "cached": 0, "completion": 600_000}}


async def history(pool, model="tiny"):
    rows = await pool.fetch(
        "select prompt, cached, completion, until is null as open, set_by"
        " from llmgw.prices where model = $1 order by since",
        model,
    )
    return [tuple(row.values()) for row in rows]


async def test_unpriced_is_absent_and_zero_is_a_price(api, pool):
    await api.good("POST", "/models", command("plain"))
    await api.good("POST", "/models", CHARGED)
    shown = {m["name"]: m.get("prices") for m in await api.good("GET", "/models")}
    assert shown["plain"] is None
    since = shown["tiny"].pop("since")
    assert shown["tiny"] == {"prompt": 150_000, "cached": 0, "completion": 600_000}
    (row,) = await api.good("GET", "/prices")
    assert (row["model"], row["since"], row["cached"]) == ("tiny", since, 0)
    assert "until" not in row
    assert await api.good("GET", "/prices?model=plain") == []
    answer = await api("GET", "/prices?model=plian")
    assert answer.status_code == 404
    assert "did you mean 'plain'?" in answer.text
    rows = await pool.fetch("select prices from llmgw.models where name = 'plain'")
    assert [row["prices"] for row in rows] == [None]


async def test_a_change_of_price_is_for_later_requests_only(api, pool):
    """Each time has one row: those before keep theirs, whatever is said later."""
    await api.good("POST", "/models", CHARGED)
    assert (await api.good("POST", "/models", CHARGED))["action"] == "unchanged"
    before = await pool.fetchval("select clock_timestamp()")
    dearer = CHARGED | {"prices": {"prompt": 200_000}}
    assert (await api.good("POST", "/models", dearer))["action"] == "changed"
    assert [row[:4] for row in await history(pool)] == [
        (150_000, 0, 600_000, False),
        (200_000, None, None, True),
    ]
    then = (
        "select prompt from llmgw.prices"
        " where model = 'tiny' and since <= $1 and $1 < coalesce(until, 'infinity')"
    )
    assert await pool.fetchval(then, before) == 150_000
    assert (await api.good("POST", "/models", TINY))["action"] == "changed"
    assert "prices" not in (await api.good("GET", "/models"))[0]
    now = await pool.fetchval("select clock_timestamp()")
    assert await pool.fetchval(then, now) is None
    assert [row[3] for row in await history(pool)] == [False, False]
    newest = [row["prompt"] for row in await api.good("GET", "/prices?model=tiny")]
    assert newest == [200_000, 150_000]


async def test_prices_outlive_their_model_and_do_not_come_back_with_its_name(api, pool):
    await api.good("POST", "/models", CHARGED)
    await api.good("DELETE", "/models/tiny")
    assert [row[3] for row in await history(pool)] == [False]
    await api.good("POST", "/models", TINY)
    assert "prices" not in (await api.good("GET", "/models"))[0]


async def test_a_clock_set_back_brings_no_old_price_back(api, pool, database):
    await api.good("POST", "/models", CHARGED)
    with database.connect() as db:
        db.execute("update llmgw_core.price set since = clock_timestamp() + interval '1 day'")
    await api.good("POST", "/models", CHARGED | {"prices": {"prompt": 1}})
    assert (await api.good("GET", "/models"))[0]["prices"]["prompt"] == 1


@pytest.mark.parametrize(
    ("prices", "reason"),
    [
        ({"prompt": 0.15}, "0.15 is not in micros: 0.15 per million tokens is 150000"),
        ({"prompt": 3.0}, "3.0 is not in micros: 3 per million tokens is 3000000"),
        ({"prompt": float("nan")}, "nan is no whole number of micros"),
        ({"prompt": True}, "True is no whole number of micros"),
        ({"prompt": "5"}, "'5' is no whole number of micros"),
        ({"prompt": -1}, "must be greater than or equal to 0, not '-1'"),
        ({"prompt": 10**13}, "less than or equal to 1000000000000"),
        ({"promt": 1}, "unknown field 'promt', did you mean 'prompt'?"),
        ({}, "prices names none of prompt, cached, completion"),
        ({"cached": 1}, "a price for cached tokens needs one for prompt tokens"),
    ],
)
def test_faults_of_prices_are_named(prices, reason):
    with pytest.raises(CatalogError) as caught:
        parse({"models": [TINY | {"prices": prices}]}, "c")
    assert "model tiny" in str(caught.value)
    assert reason in str(caught.value)


async def test_pages_of_prices_are_whole(api, pool):
    for price in range(1, 6):
        for name in ("a", "b"):
            await api.good("POST", "/models", command(name, prices={"prompt": price}))
    seen = []
    cursor = ""
    while True:
        answer = await api("GET", f"/prices?limit=3{cursor}")
        seen += [(row["model"], row["prompt"]) for row in answer.json()]
        following = answer.headers.get("X-Llmgw-Next-Cursor")
        if following is None:
            break
        cursor = f"&cursor={following}"
    assert seen == [(name, price) for name in ("a", "b") for price in range(5, 0, -1)]


async def test_the_command_shows_prices_and_who_has_none(url, tmp_path):
    ctl = Ctl(url)
    for name, model in (("plain", command("plain")), ("tiny", CHARGED)):
        (tmp_path / name).write_text(json.dumps(model))
        await ctl.good("model", "add", str(tmp_path / name))
    head, plain, tiny, said = (await ctl.good("models", "--prices")).splitlines()
    assert head.split()[:4] == ["MODEL", "PROMPT", "CACHED", "COMPLETION"]
    assert plain.split() == ["plain", "-", "-", "-", "-", "-", "-"]
    assert tiny.split()[:4] == ["tiny", "150000", "0", "600000"]
    assert said == "Micros per million tokens; - is unpriced, not free."
    assert len(json.loads(await ctl.good("models", "--prices", "--json"))) == 1
