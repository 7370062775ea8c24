"""Scopes, keys, users, sessions and the audit over the admin API."""

from __future__ import annotations

import argon2
import httpx
import pytest

from controller.api import audit, scopes, users, views
from controller.api.access import read_tokens
from tests.api.served import TINY, Api, Context, Settings, serving, view_rows

PASSWORD = "correct horse battery"


async def test_lists_show_what_psql_shows(api, database):
    await api.good("POST", "/scopes", {"kind": "org", "name": "acme", "tags": {"cost": "7"}})
    await api.good("POST", "/scopes", {"kind": "user", "name": "ada", "parent": "acme"})
    key = {"name": "k", "scope": "acme/ada", "ips": ["10.0.0.0/8"], "tags": {"app": "x"}}
    await api.good("POST", "/keys", key)
    await api.good("POST", "/users", {"name": "ada", "password": PASSWORD, "scope": "acme"})
    lists = {
        "scopes": ("id", scopes.ScopeView),
        "keys": ("created_at, id", views.KeyView),
        "users": ("name", users.UserView),
        "audit": ("id desc", audit.AuditView),
    }
    with database.connect(database.read_url) as db:
        for name, (order, form) in lists.items():
            rows = await api.good("GET", f"/{name}")
            assert rows == view_rows(db, name, order), name
            for row in rows:
                form.model_validate(row)
    assert {row["source"] for row in await api.good("GET", "/audit")} == {"127.0.0.1"}
    assert len(await api.good("GET", "/audit?object=scope")) == 2
    assert len(await api.good("GET", "/audit?object=scope%201")) == 1
    assert await api.good("GET", "/audit?actor=nobody") == []
    assert len(await api.good("GET", "/keys?scope=acme")) == 1
    assert await api.good("GET", "/keys?state=revoked") == []
    assert [row["path"] for row in await api.good("GET", "/scopes?kind=user")] == ["acme/ada"]


async def test_scopes_are_asked_for_by_path_or_id(api):
    made = await api.good("POST", "/scopes", {"kind": "org", "name": "acme"})
    await api.good("POST", "/scopes", {"kind": "team", "name": "ml", "parent": str(made["id"])})
    renamed = await api.good("POST", "/scopes/acme/ml/rename", {"name": "nn"})
    assert renamed["path"] == "acme/nn"
    moved = await api.good("POST", "/scopes/acme%2Fnn/move", {})
    assert (moved["path"], "parent" in moved) == ("nn", False)
    await api.good("POST", f"/scopes/{moved['id']}/move", {"parent": "acme"})
    assert await api.good("DELETE", "/scopes/acme") == {
        "deleted": str(made["id"]),
        "scopes": 2,
        "keys": 0,
    }
    assert await api.good("GET", "/scopes") == []
    assert len(await api.good("GET", "/scopes?deleted=true")) == 2
    assert "no scope acme" in await api.bad(404, "DELETE", "/scopes/acme")


@pytest.mark.parametrize(
    ("path", "body", "said"),
    [
        ("/scopes", {"kind": "org", "name": "a/b"}, "without a slash"),
        ("/scopes", {"kind": "org", "name": "7"}, "no number"),
        ("/scopes", {"kind": "tribe", "name": "a"}, "'org', 'team' or 'user'"),
        ("/scopes", {"kind": "team", "name": "a", "parent": "nope"}, "no scope nope"),
        ("/scopes", {"kind": "org", "name": "a", "tags": {"x": 1}}, "tags"),
        ("/keys", {"name": "k", "scope": "nope"}, "no scope nope"),
        ("/keys", {"name": "k", "fallback": ["maybe"]}, "'unavailable', 'timeout'"),
        ("/scopes", {"kind": "org", "name": "a", "fallback": "none"}, "fallback"),
        ("/keys", {"name": "k", "ips": ["10.0.0.1/8"]}, "is no network"),
        ("/keys", {"name": "k", "expires": "1e9d"}, "expires"),
        ("/users", {"name": "Ada", "password": PASSWORD}, "small letters"),
        ("/users", {"name": "ada", "password": "short"}, "12 to 1000"),
        ("/users", {"name": "ada", "password": "x" * 1001}, "12 to 1000"),
    ],
)
async def test_what_cannot_be_is_refused_in_words(api, path, body, said):
    assert said in await api.bad(400, "POST", path, body)


async def test_a_key_is_rotated_and_moved(api):
    made = await api.good("POST", "/keys", {"name": "k"})
    await api.good("POST", "/scopes", {"kind": "org", "name": "acme"})
    path = f"/keys/{made['id']}"
    new = await api.good("POST", f"{path}/rotate", {"grace": "1h"})
    assert new["id"] == made["id"]
    assert new["key"] != made["key"]
    assert new["key"].startswith(f"sk-{made['id']}-")
    [row] = await api.good("GET", "/keys")
    assert row["old_until"] == new["old_until"]
    assert await api.good("POST", f"{path}/move", {"scope": "acme"}) == {
        "id": made["id"],
        "scope": "acme",
    }
    assert await api.good("POST", f"{path}/move", {}) == {"id": made["id"]}
    assert "grace" in await api.bad(400, "POST", f"{path}/rotate", {"grace": "100d"})
    assert "no key nope" in await api.bad(404, "POST", "/keys/nope/rotate", {})
    await api.good("DELETE", path)
    assert "revoked" in await api.bad(409, "POST", f"{path}/rotate", {})


async def test_what_is_named_of_a_key_changes_and_the_rest_stays(api):
    await api.good("POST", "/models", TINY)
    tags = {"app": "x"}
    made = await api.good("POST", "/keys", {"name": "k", "expires": "1d", "tags": tags})
    path = f"/keys/{made['id']}/change"
    bounds = {"models": ["small"], "ips": ["10.0.0.0/8"]}
    changed = await api.good("POST", path, bounds)
    assert bounds.items() <= changed.items()
    assert (changed["name"], changed["tags"]) == ("k", tags)
    assert changed["expires_at"] == made["expires_at"]
    changed = await api.good("POST", path, {"models": None, "ips": None, "expires": None})
    assert not {"models", "ips", "expires_at"} & changed.keys()
    assert (await api.good("POST", path, {"tags": {}, "name": "n"}))["tags"] == {}
    odd = {"has a name": {"name": None}, "alias o": {"models": ["o"]}, "network": {"ips": ["x"]}}
    for said, body in ({"nothing": {}} | odd).items():
        assert said in await api.bad(400, "POST", path, body)
    assert "no key" in await api.bad(404, "POST", "/keys/nope/change", {"name": "n"})
    changes = await api.good("GET", f"/audit?object=key%20{made['id']}")
    assert [row["action"] for row in changes] == ["change"] * 3 + ["create"]
    await api.good("DELETE", f"/keys/{made['id']}")
    assert "revoked" in await api.bad(400, "POST", path, {"name": "m"})


async def test_C10_scopes_and_keys_say_when_to_fall_back(api):
    body = {"kind": "org", "name": "acme", "fallback": ["timeout", "error", "error"]}
    assert (await api.good("POST", "/scopes", body))["fallback"] == ["error", "timeout"]
    made = await api.good("POST", "/keys", {"name": "k", "scope": "acme", "fallback": []})
    [row] = await api.good("GET", "/keys")
    assert row["fallback"] == []
    for path in ("/scopes/acme/change", f"/keys/{made['id']}/change"):
        changed = await api.good("POST", path, {"fallback": ["refusal"]})
        assert changed["fallback"] == ["refusal"]
        assert "fallback" not in await api.good("POST", path, {"fallback": None})
        assert "fallback" in await api.bad(400, "POST", path, {"fallback": ["refuse"]})
    assert "fallback" in await api.bad(400, "POST", "/scopes/acme/change", {})
    assert "no scope" in await api.bad(404, "POST", "/scopes/no/change", {"fallback": []})
    details = [row["detail"] for row in await api.good("GET", "/audit")]
    assert [detail.get("fallback") for detail in details] == [
        None, ["refusal"], None, ["refusal"], [], ["error", "timeout"],
    ]  # fmt: skip


async def test_a_scope_at_the_top_says_how_many_turns_it_gets(api):
    assert (await api.good("POST", "/scopes", {"kind": "org", "name": "acme"}))["weight"] == 1
    await api.good("POST", "/scopes", {"kind": "team", "name": "ml", "parent": "acme"})
    change = "/scopes/acme/change"
    assert (await api.good("POST", change, {"weight": 0.3}))["weight"] == 0.3
    assert (await api.good("POST", change, {"fallback": []}))["weight"] == 0.3
    assert (await api.good("POST", change, {"weight": None}))["weight"] == 1
    for wrong in (0, 0.001, 101, "much"):
        assert "weight" in await api.bad(400, "POST", change, {"weight": wrong})
    assert "say what to change" in await api.bad(400, "POST", change, {})
    why = await api.bad(409, "POST", "/scopes/acme%2Fml/change", {"weight": 2})
    assert "as a part of acme" in why
    rows = await api.good("GET", "/scopes")
    assert ["weight" in row for row in rows] == [True, False]


async def test_a_password_is_kept_as_argon2id_and_shown_nowhere(api, pool):
    await api.good("POST", "/users", {"name": "ada", "password": PASSWORD})
    kept = await pool.fetchval("select password_hash from llmgw_core.person")
    assert kept.startswith("$argon2id$")
    assert argon2.PasswordHasher().verify(kept, PASSWORD)
    assert kept not in str(await api.good("GET", "/users"))
    assert PASSWORD not in str(await api.good("GET", "/audit"))
    said = await api.bad(400, "POST", "/users", {"name": "bob", "password": "hunter2"})
    assert "hunter2" not in said
    assert "already" in await api.bad(400, "POST", "/users", {"name": "ada", "password": PASSWORD})


async def test_logins_are_limited_and_who_is_unknown_is_not_told(api):
    await api.good("POST", "/users", {"name": "ada", "password": PASSWORD})
    wrong = [{"name": name, "password": "x" * 20} for name in ("ada", "nobody")]
    said = [await api.bad(401, "POST", "/login", body) for body in wrong]
    assert said[0] == said[1] == "the name or the password is wrong"
    for _ in range(9):
        await api.bad(401, "POST", "/login", wrong[0])
    right = {"name": "ada", "password": PASSWORD}
    answer = await api("POST", "/login", right)
    assert answer.status_code == 429
    assert 800 < int(answer.headers["retry-after"]) <= 901
    assert "wait" in answer.json()["error"]
    assert "no session" in await api.bad(400, "POST", "/logout", {})


async def test_an_admins_session_opens_the_admin_port(pool, tmp_path):
    file = tmp_path / "tokens"
    file.write_text("correct-horse-battery-staple ops\n")
    assert read_tokens(file)
    context = Context(pool, Settings("0.0.0.0:9090", file))
    async with serving(context) as url, httpx.AsyncClient(base_url=url, timeout=60) as client:
        api = Api(client)
        ops = {"Authorization": "Bearer correct-horse-battery-staple"}
        for name, admin in (("ada", True), ("bob", False)):
            body = {"name": name, "password": PASSWORD, "admin": admin}
            assert (await api("POST", "/users", body, headers=ops)).status_code == 200
        sessions = {}
        for name in ("ada", "bob"):
            made = await api.good("POST", "/login", {"name": name, "password": PASSWORD})
            sessions[name] = {"Authorization": f"Bearer {made['token']}"}
        assert (await api("GET", "/nodes", headers=sessions["bob"])).status_code == 403
        foreign = sessions["ada"] | {"Origin": "http://evil.example"}
        assert (await api("GET", "/nodes", headers=foreign)).status_code == 403
        made = await api("POST", "/keys", {"name": "k"}, headers=sessions["ada"])
        assert made.status_code == 200
        assert await pool.fetchval("select actor from llmgw.audit where action = 'create'"
                                   " and object like 'key %'") == "ada"  # fmt: skip
        assert (await api("POST", "/logout", {}, headers=sessions["ada"])).json() == {"name": "ada"}
        answer = await api("GET", "/nodes", headers=sessions["ada"])
        assert (answer.status_code, answer.headers["www-authenticate"]) == (401, "Bearer")
        assert "log in again" in answer.json()["error"]
        nobody = {"Authorization": "Bearer ls-nonsense"}
        assert (await api("GET", "/nodes", headers=nobody)).status_code == 401
        foreign = {"Origin": "http://evil.example"}
        login = {"name": "ada", "password": PASSWORD}
        assert (await api("POST", "/login", login, headers=foreign)).status_code == 403
