"""Logs: asked through Postgres, answered by a node's next sync."""

from __future__ import annotations

import pytest

from tests.api.served import LINES, Agent


@pytest.fixture
async def agent(api, fleet, agent_pool, nursery):
    token = (await api.good("POST", "/nodes/enroll", {"node": "n1"}))["token"]
    found = Agent(agent_pool)
    await found.enroll(token)
    nursery.start_soon(found.run)
    return found


async def test_a_tail_as_text(api, agent, nursery):
    answer = await api("GET", "/nodes/n1/logs?lines=7&shard=1")
    assert (answer.status_code, answer.text) == (200, LINES)
    assert answer.headers["content-type"].startswith("text/plain")
    assert [(a["lines"], a["shard"]) for a in agent.asked] == [(7, 1)]
    nursery.cancel_scope.cancel()


async def test_who_cannot_be_asked(api, fleet):
    assert "no node nope" in await api.bad(404, "GET", "/nodes/nope/logs")
    assert "no shard 77" in await api.bad(404, "GET", "/nodes/n1/logs?shard=77")
    assert "n3 is lost (silent for" in await api.bad(409, "GET", "/nodes/n3/logs")
    assert "lines" in await api.bad(400, "GET", "/nodes/n1/logs?lines=0")


async def test_an_agent_that_does_not_answer(api, fleet, monkeypatch):
    monkeypatch.setattr("controller.api.logs.ANSWER_S", 0.3)
    assert "did not answer within 0 s" in await api.bad(504, "GET", "/nodes/n1/logs")
