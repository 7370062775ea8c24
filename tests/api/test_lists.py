"""Lists: the same rows as psql, stable pages, signed cursors."""

from __future__ import annotations

import base64

import pytest

from controller.api import node_views, results, views
from tests.api.served import TINY, command, view_rows, without_ages

DECISION = "insert into llmgw_core.decision (at, term, kind, model, reason)"
LISTS = {
    "nodes": ("id", node_views.NodeView),
    "models": ("name", views.ModelView),
    "replicas": ("id", views.ReplicaView),
    "keys": ("created_at, id", views.KeyView),
    "weights": ("node, path", views.WeightView),
    "prices": ("model, since desc", views.PriceView),
    "controllers": ("started_at, id", views.ControllerView),
    "decisions": ("at desc, id desc", views.DecisionView),
}


@pytest.fixture
async def full(fleet, api, pool):
    join = "select llmgw_core.controller_join_v1(gen_random_uuid(), 'control', 'gw', 1, 'v')"
    await pool.execute(join)
    await api.good("POST", "/models", TINY)
    await api.good("POST", "/models", command("other", fallbacks=["tiny"], prices={"prompt": 0}))
    await api.good("POST", "/keys", {"name": "k1", "models": ["small"], "expires": "90d"})
    await api.good("POST", "/keys", {"name": "k2"})
    return api


async def test_lists_show_what_psql_shows(full, database):
    with database.connect(database.read_url) as db:
        for name, (order, form) in LISTS.items():
            rows = await full.good("GET", f"/{name}")
            assert without_ages(rows) == without_ages(view_rows(db, name, order)), name
            assert rows, name
            for row in rows:
                form.model_validate(row)


async def test_summary_and_explanation_fit_their_forms(full):
    summary = await full.good("GET", "/summary")
    results.Summary.model_validate(summary)
    assert summary["gpus"] == [
        {"class": "H100", "total": 4, "used": 1, "free": 2, "unhealthy": 1, "unavailable": 0}
    ]
    assert summary["nodes"] == {"ready": 1, "cordoned": 1, "lost": 1}
    assert summary["models"]["unplaceable"] == [
        {"name": "tiny", "reason": "the node is cordoned (1 of 1 candidates)"}
    ]
    assert summary["idle_replicas"][0]["name"] == "tiny"
    explained = await full.good("GET", "/explain-placement?model=tiny")
    views.ExplainView.model_validate(explained)
    assert explained["outcome"] == "could not be placed"
    assert explained["rejections"] == [
        {
            "profile": "cpu",
            "node": "n2",
            "code": "node_cordoned",
            "reason": "the node is cordoned",
            "need": "ready",
        }
    ]
    never = await full.good("GET", "/explain-placement?model=other")
    assert (never["placed"], never["outcome"]) == (False, "no attempt yet")
    assert "rejections" not in never


async def test_unknown_is_absent(full):
    unknown = await full.good("GET", "/nodes/n3")
    assert unknown["state"] == "lost"
    assert set(unknown) == {
        "id",
        "state",
        "state_reason",
        "gpu_total",
        "gpu_free",
        "replicas",
        "last_seen_ago",
    }
    known = await full.good("GET", "/nodes/n1")
    assert known["gpus"][0]["utilization_percent"] == 93
    assert "utilization_percent" not in known["gpus"][1]
    assert known["unhealthy_gpus"] == ["gpu 3: Xid 79: fell off the bus"]
    replicas = await full.good("GET", "/replicas?model=tiny")
    assert [r["idle_seconds"] < 0 for r in replicas] == [False, True]
    one = await full.good("GET", f"/replicas/{replicas[0]['id']}")
    assert one["shards"][0]["fetch"]["percent"] == 50
    assert one["stale"] is True


async def test_one_that_is_not_there(full):
    assert "llmgwctl nodes" in await full.bad(404, "GET", "/nodes/nope")
    assert "gone" in await full.bad(404, "GET", "/replicas/99")
    assert "no replica id" in await full.bad(400, "GET", "/replicas/abc")
    assert "no replica id" in await full.bad(400, "GET", f"/replicas/{2**63}")
    assert "no model nope" in await full.bad(404, "GET", "/explain-placement?model=nope")
    for path in ("explain-placement", "replicas", "decisions", "fit"):
        said = await full.bad(404, "GET", f"/{path}?model=tinny")
        assert said == "there is no model tinny in the catalog: did you mean 'tiny'?"
        assert "llmgwctl models" in await full.bad(404, "GET", f"/{path}?model=nope")
    alias = await full.bad(404, "GET", "/replicas?model=small")
    assert alias == "there is no model small in the catalog: it is an alias of model tiny"
    alias = await full.bad(404, "GET", "/explain-placement?model=small")
    assert "no model small in the catalog: it is an alias of model tiny" in alias
    assert "'model' is missing" in await full.bad(400, "GET", "/explain-placement")


async def collect(api, path, limit):
    seen, cursor = [], ""
    while True:
        answer = await api("GET", f"{path}{'&' if '?' in path else '?'}limit={limit}{cursor}")
        assert answer.status_code == 200, answer.text
        seen += answer.json()
        if "x-llmgw-next-cursor" not in answer.headers:
            return seen
        cursor = f"&cursor={answer.headers['x-llmgw-next-cursor']}"


async def test_G04_rows_of_one_transaction_are_each_on_one_page(api, database):
    rows = "select %s::timestamptz, 1, 'create', 'm', 'r' || i from generate_series(1, 25) i"
    with database.connect() as db:
        now = db.execute("select clock_timestamp()").fetchone()[0]
        db.execute(f"{DECISION} {rows}", (now,))
        first = await api("GET", "/decisions?limit=10")
        db.execute(f"{DECISION} values (clock_timestamp(), 1, 'create', 'm', 'newer')")
        db.execute("delete from llmgw_core.decision where reason = 'r25'")  # already shown
        seen = [row["id"] for row in first.json()]
        cursor = first.headers["x-llmgw-next-cursor"]
        while cursor:
            page = await api("GET", f"/decisions?limit=10&cursor={cursor}")
            seen += [row["id"] for row in page.json()]
            cursor = page.headers.get("x-llmgw-next-cursor")
    assert len(seen) == len(set(seen)) == 25
    assert seen == sorted(seen, reverse=True)


async def test_G05_microseconds_survive_and_cursors_are_sealed(api, database):
    with database.connect() as db:
        day = db.execute("select date_trunc('day', clock_timestamp())").fetchone()[0].date()
        for micros in ("123456", "123999", "123457"):
            db.execute(
                f"{DECISION} values (%s::timestamptz, 1, 'create', 'm', %s)",
                (f"{day} 00:00:00.{micros}+00", micros),
            )
    rows = await collect(api, "/decisions?model=m", 1)
    assert [row["reason"] for row in rows] == ["123999", "123457", "123456"]
    cursor = (await api("GET", "/decisions?model=m&limit=1")).headers["x-llmgw-next-cursor"]
    raw = bytearray(base64.urlsafe_b64decode(cursor))
    raw[-3] ^= 1
    tampered = base64.urlsafe_b64encode(raw).decode()
    for path in (
        f"/decisions?model=m&cursor={tampered}",
        f"/decisions?model=other&cursor={cursor}",
        f"/decisions?cursor={cursor}",
        f"/nodes?cursor={cursor}",
        "/nodes?cursor=nonsense",
        "/nodes?cursor=%20",
    ):
        assert "cursor" in await api.bad(400, "GET", path), path


async def test_every_list_pages_in_a_stable_order(full, database):
    for name in LISTS:
        assert without_ages(await collect(full, f"/{name}", 1)) == without_ages(
            await full.good("GET", f"/{name}")
        ), name


async def test_decisions_filter(full):
    assert len(await full.good("GET", "/decisions?model=tiny&since=1h")) == 1
    assert await full.good("GET", "/decisions?node=n1") == []
    assert "not a duration" in await full.bad(400, "GET", "/decisions?since=yesterday")
