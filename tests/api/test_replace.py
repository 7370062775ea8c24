"""Replacing replicas over the API."""

from __future__ import annotations

from tests.api.served import TINY


async def test_a_replica_and_a_models_replicas_are_marked_and_unmarked(api, fleet, pool):
    await api.good("POST", "/models", TINY)
    marked = {"model": "tiny", "replicas": [1], "force": False, "cancelled": False}
    assert await api.good("POST", "/replicas/1/replace", {}) == marked
    shown = await api.good("GET", "/replicas/1")
    assert shown["stale"] is True
    assert shown["replace_asked"]
    done = await api.good("POST", "/models/tiny/replace", {"cancel": True})
    assert done == marked | {"cancelled": True}
    assert "replace_asked" not in await api.good("GET", "/replicas/1")
    done = await api.good("POST", "/models/tiny/replace", {"force": True, "stale": True})
    assert done == marked | {"force": True}
    rows = await pool.fetch("select action, object from llmgw.events where action ~ 'replace'")
    assert [tuple(row.values()) for row in rows] == [
        ("replace", "replica 1"), ("cancel replace", "model tiny"), ("replace", "model tiny"),
    ]  # fmt: skip


async def test_what_cannot_be_replaced_is_refused_with_the_reason(api, fleet):
    await api.good("POST", "/models", TINY)
    said = await api.bad(409, "POST", "/replicas/2/replace", {})
    assert "pending: nothing of it runs" in said
    assert "no replica 77" in await api.bad(404, "POST", "/replicas/77/replace", {})
    assert "no replica id" in await api.bad(400, "POST", "/replicas/x/replace", {})
    assert "no model nope" in await api.bad(404, "POST", "/models/nope/replace", {})
    said = await api.bad(400, "POST", "/replicas/1/replace", {"forced": True})
    assert "did you mean 'force'" in said
