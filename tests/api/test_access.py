"""Who may use the admin port, what it says without a database, and its own description."""

from __future__ import annotations

import hashlib
import re

import httpx
import pytest
from openapi_spec_validator import validate

from controller.api import node_views, views
from controller.api.access import is_loopback, read_tokens
from controller.api.capacity import CapacityView
from controller.api.routes import PREFIX, ROUTES
from controller.api.server import make_app
from controller.api.usage import UsageRowView
from sql.pool import open_pool
from sql.settings import DatabaseSettings
from tests.api.served import TINY, Api, Context, Settings, command, serving

TOKEN = "correct-horse-battery-staple"


async def test_A37_foreign_pages_are_refused_and_own_ones_not(api, url):
    own = {"Origin": url}
    for origin in ("http://evil.example", "null", "http://127.0.0.1:1"):
        answer = await api("GET", "/nodes", headers={"Origin": origin})
        assert answer.status_code == 403
        assert "CORS is off" in answer.json()["error"]
        assert "access-control-allow-origin" not in answer.headers
        written = await api("POST", "/models", TINY, headers={"Origin": origin})
        assert written.status_code == 403
    preflight = {"Origin": "http://evil.example", "Access-Control-Request-Method": "POST"}
    asked = await api("OPTIONS", "/models", headers=preflight)
    assert "access-control-allow-origin" not in asked.headers
    assert (await api("OPTIONS", "/models")).headers["allow"]
    assert (await api("HEAD", "/nodes")).status_code == 200
    assert (await api("GET", "/nodes", headers=own)).status_code == 200
    assert await api.good("GET", "/models") == []


async def test_another_host_name_is_refused_on_loopback(api):
    answer = await api("GET", "/nodes", headers={"Host": "evil.example:9090"})
    assert answer.status_code == 403
    assert "loopback" in answer.json()["error"]
    for host in ("localhost:1234", "[::1]:9090", "127.0.0.2"):
        assert (await api("GET", "/nodes", headers={"Host": host})).status_code == 200
    assert not is_loopback("localhost.evil.example")


async def test_the_actor_is_recorded(api, pool):
    for given, kept in (
        ("ada", "ada"),
        ("a%C3%A9%20b", "aé b"),
        ("x\t<y>", "x?y?"),
        (None, "unnamed"),
    ):
        headers = {} if given is None else {"X-Llmgw-Actor": given}
        await api("POST", "/keys", {"name": "k"}, headers=headers)
        assert (
            await pool.fetchval("select actor from llmgw.events order by id desc limit 1") == kept
        )


async def test_other_addresses_need_a_token(pool, tmp_path):
    file = tmp_path / "tokens"
    hashed = hashlib.sha256(b"another-long-token").hexdigest()
    file.write_text(f"# admins\n{TOKEN} ada\nsha256:{hashed}\n")
    settings = Settings("0.0.0.0:9090", file)
    async with (
        serving(Context(pool, settings)) as url,
        httpx.AsyncClient(base_url=url, timeout=60) as client,
    ):
        api = Api(client)
        for headers in (
            {},
            {"Authorization": "Bearer nope"},
            {"Authorization": f"Basic {TOKEN}"},
            {"Authorization": "Bearer"},
        ):
            answer = await api("GET", "/nodes", headers=headers)
            assert answer.status_code == 401
            assert answer.headers["www-authenticate"] == "Bearer"
        assert (await client.get("/nothing")).status_code == 401
        good = {"Authorization": f"bearer {TOKEN}", "X-Llmgw-Actor": "root"}
        assert (
            await api("GET", "/nodes", headers=good | {"Host": "gw.example"})
        ).status_code == 200
        assert (await api("POST", "/keys", {"name": "k"}, headers=good)).status_code == 200
        assert await pool.fetchval("select actor from llmgw.events") == "root (ada)"
        other = {"Authorization": "Bearer another-long-token"}
        assert (await api("POST", "/keys", {"name": "k"}, headers=other)).status_code == 200
        assert (
            await pool.fetchval("select actor from llmgw.events order by id desc limit 1")
            == f"token {hashed[:8]}"
        )


def test_short_tokens_are_refused(tmp_path):
    (tmp_path / "t").write_text("short")
    with pytest.raises(ValueError, match="line 1: a token has at least 16"):
        read_tokens(tmp_path / "t")


async def test_without_a_store_501(asyncio_loop):
    async with serving(Context(None)) as url, httpx.AsyncClient(base_url=url, timeout=60) as client:
        api = Api(client)
        for route in ROUTES:
            fields = route.query.model_fields.values() if route.query is not None else ()
            bare = "{" not in route.path and not any(field.is_required() for field in fields)
            if route.verb == "GET" and bare:
                assert "would survive a restart" in await api.bad(501, "GET", route.path)
        assert "restart" in await api.bad(501, "POST", "/models", command("m"))
        assert (await api("GET", "/openapi.json")).status_code == 200


async def test_database_away_503(asyncio_loop):
    nobody = DatabaseSettings(
        url="postgresql://u:p@127.0.0.1:9/x", connect_timeout_s=1, command_timeout_s=1
    )
    async with (
        open_pool(nobody) as pool,
        serving(Context(pool)) as url,
        httpx.AsyncClient(base_url=url, timeout=60) as client,
    ):
        answer = await Api(client)("GET", "/nodes")
        assert answer.status_code == 503
        assert answer.headers["retry-after"] == "2"
        assert "nothing was answered or changed" in answer.json()["error"]


async def test_a_schema_that_is_not_ours_503(empty_database, asyncio_loop):
    async with open_pool(DatabaseSettings(url=empty_database)) as pool:
        context = Context(pool, schema="it is empty")
        async with serving(context) as url, httpx.AsyncClient(base_url=url, timeout=60) as client:
            said = await Api(client).bad(503, "GET", "/nodes")
    assert said == "the database cannot be used by this controller: it is empty"


async def test_a_fault_of_our_own_shows_no_inside(api, database):
    with database.connect() as db:
        db.execute("drop view llmgw.nodes cascade")
    said = await api.bad(500, "GET", "/nodes")
    assert "its log has the details" in said
    assert "Traceback" not in said
    assert "select" not in said


async def test_the_description_is_valid_and_complete(api, pool):
    document = await api.good("GET", "/openapi.json")
    validate(document)
    described = {
        (verb.upper(), path) for path, verbs in document["paths"].items() for verb in verbs
    }
    app = make_app(Context(pool))
    served = {
        (verb, re.sub(r"<(?:path:)?(\w+)>", r"{\1}", rule.rule))
        for rule in app.url_map.iter_rules()
        for verb in rule.methods - {"HEAD", "OPTIONS"}
        if rule.rule.startswith(PREFIX) and not rule.rule.endswith("openapi.json")
    }
    assert described == served == {(r.verb, PREFIX + r.path) for r in ROUTES}


VIEWS = {
    "nodes": node_views.NodeView,
    "models": views.ModelView,
    "capacity": CapacityView,
    "replicas": views.ReplicaView,
    "decisions": views.DecisionView,
    "keys": views.KeyView,
    "weights": views.WeightView,
    "usage_rows": UsageRowView,
}


@pytest.mark.parametrize("name", VIEWS)
async def test_answers_are_the_columns_of_the_views(pool, name):
    rows = await pool.fetch(
        "select column_name from information_schema.columns"
        " where table_schema = 'llmgw' and table_name = $1",
        name,
    )
    assert {row["column_name"] for row in rows} == set(VIEWS[name].model_fields)
