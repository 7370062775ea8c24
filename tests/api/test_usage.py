"""Reports of use: sums by scope, key and model, and single requests in pages."""

from __future__ import annotations

import base64
import json

import pytest

from tests.api.served import view_rows
from tests.usage_made import Made


@pytest.fixture
def made(database):
    with database.connect() as db:
        yield Made(db)


async def test_use_is_told_by_team_and_adds_up(api, made):
    made.month()
    found = {row["id"]: row for row in await api.good("GET", "/usage")}
    assert found.keys() == {str(made.ml), str(made.web), "-"}
    ml = found[str(made.ml)]
    assert ml.pop("last_at")
    assert ml == {
        "scope": "team", "id": str(made.ml), "name": "acme/ml", "keys": 1, "requests": 4,
        "prompt_tokens": 12, "cached_tokens": 0, "completion_tokens": 8, "reasoning_tokens": 0,
        "cost_micros": 28, "errors": 0,
    }  # fmt: skip
    assert (found[str(made.web)]["unpriced"], found[str(made.web)]["cost_micros"]) == (2, 0)
    assert (found["-"]["name"], found["-"]["errors"], found["-"]["prompt_tokens"]) == (
        "no team", 2, 0,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("by", "names"),
    [
        ("org", {"acme": 6, "no org": 2}),
        ("team", {"acme/ml": 4, "acme/web": 2, "no team": 2}),
        ("user", {"acme/ml/ann": 4, "no user": 4}),
        ("key", {"name of kann00": 4, "name of kweb00": 2, "name of kout00": 2}),
        ("model", {"m": 6, "free": 2}),
    ],
)
async def test_every_grouping_has_the_same_total(api, made, by, names):
    made.month()
    found = await api.good("GET", f"/usage?by={by}")
    assert {row["name"]: row["requests"] for row in found} == names
    assert {row["scope"] for row in found} == {by}
    assert sum(row["cost_micros"] for row in found) == 28


@pytest.mark.parametrize(
    ("span", "requests"),
    [
        ("since=10m", 4), ("since=2h", 8), ("since=24h", 8), ("since=7d", 12), ("since=30d", 16),
        ("since=55d", 20), ("since=55d&until=40d", 4), ("since=30d&until=26h", 4),
        ("since=90300s&until=2h", 4), ("since=7d&until=30m", 8), ("since=2h&until=30m", 4),
    ],
)  # fmt: skip
async def test_a_span_counts_what_lies_in_it(api, made, span, requests):
    made.month()
    found = await api.good("GET", f"/usage?by=org&{span}")
    assert sum(row["requests"] for row in found) == requests


async def test_a_span_may_be_of_times(api, made, database):
    made.month()
    with database.connect() as db:
        since, until = db.execute(
            "select (now() - interval '2 hours')::text, (now() - interval '30 min')::text"
        ).fetchone()
    path = f"/usage?by=org&since={since}&until={until}".replace(" ", "T").replace("+", "%2B")
    assert sum(row["requests"] for row in await api.good("GET", path)) == 4
    day = since[:10]
    assert await api.good("GET", f"/usage?by=org&since={day}")


async def test_within_a_scope_only_its_use_counts(api, made):
    made.month()
    for within in (made.ml, "acme/ml"):
        found = await api.good("GET", f"/usage?by=key&within={within}")
        assert [row["id"] for row in found] == ["kann00"]
    found = await api.good("GET", "/usage?by=team&within=acme")
    assert {row["name"] for row in found} == {"acme/ml", "acme/web"}


async def test_use_of_a_deleted_scope_keeps_its_name(api, made, database):
    made.month()
    with database.connect() as db:
        db.execute("select llmgw.scope_delete_v1('test', 'acme/ml')")
    found = {row["name"]: row["requests"] for row in await api.good("GET", "/usage")}
    assert found["acme/ml"] == 4
    within = await api.good("GET", f"/usage?by=key&within={made.ml}")
    assert [row["requests"] for row in within] == [4]


async def test_the_dearest_come_first_with_top(api, made):
    made.month()
    found = await api.good("GET", "/usage?by=key&top=2")
    assert [(row["id"], row["cost_micros"]) for row in found] == [("kann00", 28), ("kout00", 0)]


@pytest.mark.parametrize(
    ("query", "said"),
    [
        ("by=planet", "by"), ("since=yesterday", "is not a duration"), ("since=-1h", "or a time"),
        ("until=2026-13-01", "no time"), ("since=2026-01-01T00:00", "no zone"),
        ("since=1h&until=2h", "until is after since"), ("within=nobody", "no scope nobody"),
        ("top=0", "top"), ("sort=cost", "sort"),
    ],
)  # fmt: skip
async def test_what_cannot_be_asked_is_told(api, made, query, said):
    assert said in await api.bad(400, "GET", f"/usage?{query}")


async def test_nothing_used_is_an_empty_list(api, made):
    assert await api.good("GET", "/usage") == []
    assert await api.good("GET", "/usage/rows") == []


async def test_rows_tell_what_psql_tells(api, made, database):
    made.month()
    found = await api.good("GET", "/usage/rows?since=100d")
    with database.connect() as db:
        assert found == view_rows(db, "usage_rows", "at desc, id desc")
    assert len(found) == 20
    assert {flag for row in found for flag in row["flags"]} == {"unpriced"}


async def collect(api, path, limit):
    seen, cursor = [], ""
    while True:
        answer = await api("GET", f"{path}&limit={limit}{cursor}")
        assert answer.status_code == 200, answer.text
        seen += answer.json()
        if "x-llmgw-next-cursor" not in answer.headers:
            return seen
        cursor = f"&cursor={answer.headers['x-llmgw-next-cursor']}"


async def test_G04_requests_that_ended_at_once_are_each_on_one_page(api, made, database):
    rows = [made.row("kann00", 600) for _ in range(25)]
    for row in rows:
        row["at"] = rows[0]["at"]
    made.used(*rows)
    ids = sorted(json.dumps(row["id"]) for row in rows)
    for order in ("newest", "oldest"):
        first = await api("GET", f"/usage/rows?since=1h&order={order}&limit=10")
        newer, older = made.row("kweb00", 1), made.row("kweb00", 3000)
        made.used(newer, older)
        seen = first.json()
        cursor = first.headers["x-llmgw-next-cursor"]
        while cursor:
            path = f"/usage/rows?since=1h&order={order}&limit=10&cursor={cursor}"
            page = await api("GET", path)
            seen += page.json()
            cursor = page.headers.get("x-llmgw-next-cursor")
        own = [json.dumps(row["id"].replace("-", "")) for row in seen if row["key"] == "kann00"]
        assert sorted(own) == ids
        assert own == sorted(own, reverse=order == "newest")


async def test_G05_microseconds_survive_and_a_cursor_is_for_its_own_list(api, made):
    second = int(made.row("kann00", 600)["at"])
    for micros in (0.123456, 0.123999, 0.123457):
        made.used({**made.row("kann00"), "at": second + micros})
    rows = await collect(api, "/usage/rows?since=1h", 1)
    assert [row["at"][-12:-6] for row in rows] == ["123999", "123457", "123456"]
    answer = await api("GET", "/usage/rows?since=1h&key=kann00&limit=1")
    cursor = answer.headers["x-llmgw-next-cursor"]
    raw = bytearray(base64.urlsafe_b64decode(cursor))
    raw[-3] ^= 1
    for path in (
        f"/usage/rows?since=1h&key=kann00&cursor={base64.urlsafe_b64encode(raw).decode()}",
        f"/usage/rows?since=1h&key=kweb00&cursor={cursor}",
        f"/usage/rows?since=1h&key=kann00&order=oldest&cursor={cursor}",
        f"/usage/rows?since=1h&key=kann00&within=acme&cursor={cursor}",
        f"/usage?cursor={cursor}",
    ):
        assert "cursor" in await api.bad(400, "GET", path), path


async def test_sums_page_in_a_stable_order(api, made):
    made.month()
    for by in ("team", "key", "model"):
        whole = await api.good("GET", f"/usage?by={by}")
        assert await collect(api, f"/usage?by={by}", 1) == whole


async def test_today_is_what_was_used_since_midnight(made, database):
    made.used(made.row("kann00", 0), made.row("kann00", 0), made.row("kweb00", 0, model="free"))
    made.used(made.row("kout00", 2 * 86400))
    with database.connect(database.read_url) as reader:
        shown = reader.execute(
            'select key, name, org, team, "user", model, requests, cost_micros, unpriced'
            " from llmgw.usage_today"
        ).fetchall()
    assert shown == [
        ("kann00", "name of kann00", "acme", "ml", "ann", "m", 2, 14, 0),
        ("kweb00", "name of kweb00", "acme", "web", None, "free", 1, 0, 1),
    ]


async def test_attempts_are_children_of_their_request(made, database):
    tried = [["5", "m", "connect_failed", 1.5], ["6", "m", "503", 20.0]]
    made.used(
        made.row("kann00", attempts=3, replica_id=7, tried=tried),
        made.row("kweb00", attempts=1, tried=[["5", "m", "503", 2.0]], status="error"),
        made.row("kout00", attempts=0, status="error"),
    )
    with database.connect(database.read_url) as reader:
        shown = reader.execute(
            "select r.key, a.number, a.replica, a.why, a.ms from llmgw.usage_attempts a"
            " join llmgw.usage_rows r using (at, id) order by 1, 2"
        ).fetchall()
    assert shown == [
        ("kann00", 1, "5", "connect_failed", 1.5), ("kann00", 2, "6", "503", 20.0),
        ("kann00", 3, "7", None, 50.0), ("kweb00", 1, "5", "503", 2.0),
    ]  # fmt: skip


async def test_the_budget_of_a_scope_or_key_stands_beside_its_own_use_only(api, made, database):
    with database.connect() as db:
        for scope, key, micros, period in (
            (made.acme, None, 1000, "30d"),
            (made.ml, None, 100, "30d"),
            (made.ml, None, 28, "7d"),
            (None, "kann00", 14, "30d"),
        ):
            db.execute(
                "insert into llmgw_core.budget (scope_id, key_id, micros, period, warn, created_by)"
                " values (%s, %s, %s, %s, '{}', 'test')",
                (scope, key, micros, period),
            )
    made.used(made.row("kann00"), made.row("kann00"), made.row("kweb00"))

    async def budgets(by):
        return {
            row["id"]: (row["budget_micros"], row["budget_period"], row["fraction"])
            for row in await api.good("GET", f"/usage?by={by}")
            if "budget_micros" in row
        }

    assert await budgets("org") == {str(made.acme): (1000, "30d", 0.021)}
    assert await budgets("team") == {str(made.ml): (28, "7d", 0.5)}
    assert await budgets("key") == {"kann00": (14, "30d", 1.0)}
    assert await budgets("user") == {}
