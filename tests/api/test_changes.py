"""Writes: what they answer, what they leave behind, how they are refused."""

from __future__ import annotations

import hashlib

from tests.api.served import TINY, command


async def test_model_add_scale_remove(api, pool):
    assert await api.good("POST", "/models", TINY) == {"added": "tiny", "action": "added"}
    assert await api.good("POST", "/models", TINY) == {"added": "tiny", "action": "unchanged"}
    body = {"min": 0, "max": 3, "idle_timeout": "5m"}
    assert await api.good("POST", "/models/tiny/scale", body) == {
        "model": "tiny", "min": 0, "max": 3, "idle_timeout": 300.0, "on_demand": True,
    }  # fmt: skip
    assert (await api.good("POST", "/models/tiny/scale", {"min": 2}))["max"] == 2
    assert "min" in await api.bad(400, "POST", "/models/tiny/scale", {"min": -1})
    assert "max 1 is under min 2" in await api.bad(
        400, "POST", "/models/tiny/scale", {"min": 2, "max": 1}
    )
    assert "no model nope" in await api.bad(404, "POST", "/models/nope/scale", {"min": 1})
    alias = "there is no model small: it is an alias of model tiny"
    assert alias in await api.bad(404, "POST", "/models/small/scale", {"min": 1})
    assert alias in await api.bad(404, "DELETE", "/models/small")
    assert await api.good("DELETE", "/models/tiny") == {"removed": "tiny"}
    assert "no model tiny" in await api.bad(404, "DELETE", "/models/tiny")
    actions = [r["action"] for r in await pool.fetch("select action from llmgw.events order by id")]
    assert actions == ["added", "scale", "scale", "removed"]


async def test_names_with_slashes_are_one_name(api):
    await api.good("POST", "/models", command("org/name"))
    await api.good("POST", "/models/org%2Fname/scale", {"min": 2})
    assert await api.good("DELETE", "/models/org/name") == {"removed": "org/name"}


async def test_a_typo_is_named(api):
    said = await api.bad(400, "POST", "/models", TINY | {"alias": []})
    assert said == "tiny: unknown field 'alias', did you mean 'aliases'?"
    assert "did you mean 'reason'" in await api.bad(
        400, "POST", "/nodes/n1/state", {"state": "ready", "reasons": ""}
    )
    assert "did you mean 'limit'" in await api.bad(400, "GET", "/nodes?limits=1")
    assert "2 times" in await api.bad(400, "GET", "/nodes?limit=1&limit=2")
    assert "did you mean '/api/v1/nodes'" in await api.bad(404, "GET", "/node")
    assert "GET" in await api.bad(405, "PUT", "/nodes", {})


async def test_node_states(api, fleet, pool):
    for word, state in {
        "cordon": "cordoned",
        "drain": "draining",
        "uncordon": "ready",
        "cordoned": "cordoned",
    }.items():
        answer = await api.good("POST", "/nodes/n1/state", {"state": word, "reason": "disk"})
        assert answer == {"id": "n1", "state": state}
    assert (await api.good("GET", "/nodes/n1"))["state_reason"] == "disk"
    said = await api.bad(400, "POST", "/nodes/n1/state", {"state": "asleep"})
    assert "'cordon'" in said
    assert "'drain'" in said
    assert "no node nope" in await api.bad(404, "POST", "/nodes/nope/state", {"state": "drain"})


async def test_D11_cordon_outlives_a_new_enrolment(api, agent_pool):
    await api.good("POST", "/nodes/enroll", {"node": "n1"})
    await api.good("POST", "/nodes/n1/state", {"state": "cordon"})
    token = (await api.good("POST", "/nodes/enroll", {"node": "n1"}))["token"]
    await agent_pool.fetchval("select agent.enroll($1, 'n1', $2)", token, "s" * 40)
    report = {"boot": "11111111-1111-1111-1111-111111111111", "applied_gen": 0}
    await agent_pool.fetchrow("select * from agent.sync($1, 0, $2)", "s" * 40, report)
    assert (await api.good("GET", "/nodes/n1"))["state"] == "cordoned"
    assert await api.good("POST", "/nodes/n1/revoke", {}) == {"revoked": "n1"}
    assert "no node nope" in await api.bad(404, "POST", "/nodes/nope/revoke", {})


async def test_keys_are_shown_once_and_kept_as_a_hash(api, pool):
    await api.good("POST", "/models", TINY)
    made = await api.good("POST", "/keys", {"name": "team", "models": ["small"], "expires": "90d"})
    assert made["key"].startswith(f"sk-{made['id']}-")
    stored = await pool.fetchrow("select id, hash from llmgw_core.api_key")
    assert stored["hash"] == hashlib.sha256(made["key"].encode()).digest()
    listed = await api.good("GET", "/keys")
    assert made["key"] not in str(listed)
    assert await api.good("DELETE", f"/keys/{made['id']}") == {"revoked": made["id"]}
    assert (await api.good("GET", "/keys"))[0]["state"] == "revoked"
    assert "no key nope" in await api.bad(404, "DELETE", "/keys/nope")
    assert "no model or alias other" in await api.bad(
        400, "POST", "/keys", {"name": "x", "models": ["other"]}
    )


async def test_apply_a_catalog(api):
    body = {"file": "/etc/c.toml", "pools": {"cpu": {"labels": {"role": "cpu"}}}, "models": [TINY]}
    dry = await api.good("POST", "/catalog?dry_run=1", body)
    assert dry == {
        "file": "/etc/c.toml", "dry_run": True,
        "changes": [
            {"action": "added", "kind": "pool", "name": "cpu"},
            {"action": "added", "kind": "model", "name": "tiny"},
        ],
    }  # fmt: skip
    assert await api.good("GET", "/models") == []
    assert (await api.good("POST", "/catalog", body))["changes"] == dry["changes"]
    assert "declared by the catalog file /etc/c.toml" in await api.bad(
        409, "POST", "/models/tiny/scale", {"min": 2}
    )
    assert "declared by the catalog file" in await api.bad(409, "DELETE", "/models/tiny")
    assert "declared by the catalog file" in await api.bad(409, "POST", "/models", TINY)
    said = await api.bad(400, "POST", "/models", command("b", aliases=["small"]))
    assert said == "model b: the alias small is an alias of model tiny: choose another"


async def test_odd_bodies(api):
    post = api.client.post
    json_type = {"Content-Type": "application/json"}
    for content, headers, status in (
        (b"{}", {"Content-Type": "text/plain"}, 415),
        (b"{", json_type, 400),
        (b"[]", json_type, 400),
        (b"\xff", json_type, 400),
        (b'{"name": "a\\u0000b"}', json_type, 400),
        (b'{"name": "a\\ud800b"}', json_type, 400),
        (b"[" * 100_000, json_type, 400),
        (b" " * (5 * 1024 * 1024), json_type, 413),
    ):
        answer = await post("/api/v1/keys", content=content, headers=headers)
        assert answer.status_code == status, (content[:30], answer.text)
        assert list(answer.json()) == ["error"]
    assert (await api("DELETE", "/models/a%00b")).status_code == 404
    assert (await api("GET", "/replicas?model=a%00b")).status_code == 400
