"""Budgets and limits: set, listed as psql lists them, refused with reasons, removed."""

from __future__ import annotations

import pytest

from controller.api.budgets import BudgetEvent, BudgetView
from controller.api.limits import LimitView
from tests.api.served import TINY, view_rows

SPEND = """
select llmgw_core.spend(null, array(select r from jsonb_populate_recordset(
    null::llmgw_core.usage_event, jsonb_build_array(jsonb_build_object('key_id', $1::text,
        'cost_micros', 90.5, 'at', clock_timestamp()))) r))"""


@pytest.fixture
async def key(api):
    await api.good("POST", "/models", TINY)
    await api.good("POST", "/scopes", {"kind": "org", "name": "acme"})
    await api.good("POST", "/scopes", {"kind": "team", "name": "ml", "parent": "acme"})
    made = await api.good("POST", "/keys", {"name": "k", "scope": "acme/ml"})
    return made["id"]


async def test_what_is_set_is_listed_as_psql_lists_it(api, database, key):
    on_team = await api.good(
        "POST", "/budgets",
        {"scope": "acme/ml", "micros": 500, "period": "month", "zone": "Asia/Tokyo"},
    )  # fmt: skip
    assert (on_team["level"], on_team["scope"], on_team["warn"]) == ("team", "acme/ml", [0.8, 1])
    on_key = await api.good(
        "POST", "/budgets", {"key": key, "micros": 100, "period": "24h", "warn": [0.25, 0.9]}
    )
    assert (on_key["level"], on_key["key"], on_key["scope"]) == ("key", key, "acme/ml")
    with database.connect() as db:
        db.execute(SPEND.replace("$1", "%s"), (key,))
    listed = await api.good("GET", "/budgets")
    with database.connect(database.read_url) as db:
        assert listed == view_rows(db, "budgets", "id")
    assert [(b["spent"], b["fraction"]) for b in listed] == [(0, 0), (90.5, 0.905)]
    for row in listed:
        BudgetView.model_validate(row)
    events = await api.good("GET", f"/budget-events?budget={on_key['id']}")
    assert [(BudgetEvent.model_validate(e).threshold, e["spent"]) for e in events] == [
        (0.9, 91), (0.25, 91),
    ]  # fmt: skip
    changed = await api.good("POST", "/budgets", {"key": key, "micros": 50, "period": "24h"})
    assert (changed["id"], changed["fraction"]) == (on_key["id"], 1.81)
    assert await api.good("GET", "/budgets?scope=acme") == await api.good("GET", "/budgets")
    assert [b["id"] for b in await api.good("GET", f"/budgets?key={key}")] == [on_key["id"]]
    first = await api("GET", "/budgets?limit=1")
    after = first.headers["X-Llmgw-Next-Cursor"]
    assert [b["id"] for b in await api.good("GET", f"/budgets?limit=1&cursor={after}")] == [
        on_key["id"]
    ]
    number = on_team["id"]
    assert await api.good("DELETE", f"/budgets/{number}") == {"removed": number}
    assert f"no budget {number}" in await api.bad(404, "DELETE", f"/budgets/{number}")


async def test_limits(api, database, key):
    made = await api.good("POST", "/limits", {"key": key, "requests_per_min": 60, "parallel": 4})
    LimitView.model_validate(made)
    assert (made["requests"], made["in_parallel"], "tokens_per_min" in made) == (0, 0, False)
    of_model = await api.good(
        "POST", "/limits", {"scope": "acme", "model": "small", "tokens_per_min": 1000}
    )
    assert of_model["model"] == TINY["name"]  # an alias is resolved
    replaced = await api.good("POST", "/limits", {"key": key, "tokens_per_min": 5})
    assert replaced["id"] == made["id"]
    assert "parallel" not in replaced
    with database.connect(database.read_url) as db:
        assert await api.good("GET", "/limits") == view_rows(db, "limits", "id")
    assert await api.good("DELETE", f"/limits/{made['id']}") == {"removed": made["id"]}


BAD = [
    ("/budgets", {"period": "day", "micros": 5}, "name one of the two"),
    ("/budgets", {"scope": "acme", "key": "x", "period": "day", "micros": 5}, "one of the two"),
    ("/budgets", {"scope": "acme", "period": "monthly", "micros": 5}, "day, week or month"),
    ("/budgets", {"scope": "acme", "period": "7d", "zone": "UTC", "micros": 5}, "say nothing"),
    ("/budgets", {"scope": "acme", "period": "day", "zone": "Mars", "micros": 5}, "no time zone"),
    ("/budgets", {"scope": "nope", "period": "day", "micros": 5}, "there is no scope nope"),
    ("/budgets", {"key": "nope12", "period": "day", "micros": 5}, "there is no key nope12"),
    ("/budgets", {"scope": "acme", "period": "day", "micros": 0}, "micros"),
    ("/budgets", {"scope": "acme", "period": "day", "micros": "5"}, "micros"),
    ("/budgets", {"scope": "acme", "period": "day", "micros": 10**16}, "micros"),
    ("/budgets", {"scope": "acme", "period": "day", "micros": 5, "warn": [2]}, "fractions"),
    ("/budgets", {"scope": "acme", "period": "day", "micros": 5, "wern": []}, "wern"),
    ("/limits", {"scope": "acme"}, "give one of them"),
    ("/limits", {"scope": "acme", "parallel": 0}, "parallel"),
    ("/limits", {"scope": "acme", "parallel": 1.5}, "parallel"),
    ("/limits", {"scope": "acme", "parallel": 1, "model": "absent"}, "there is no model absent"),
]


@pytest.mark.parametrize(("path", "body", "why"), BAD)
async def test_what_says_nothing_is_refused_with_the_reason(api, key, path, body, why):
    assert why in await api.bad(400, "POST", path, body)
    assert await api.good("GET", path) == []


@pytest.mark.parametrize("number", ["x", "-1", "0", "9" * 30, "1.5"])
async def test_an_id_is_a_number(api, number):
    assert "there is no budget" in await api.bad(404, "DELETE", f"/budgets/{number}")
