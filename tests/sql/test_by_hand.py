"""Rows changed in psql with every rule in force: refused with what to do, or followed up."""

from __future__ import annotations

import psycopg
import pytest

from tests.sql.fleet import refusal_of

NEVER = [
    ("update llmgw_core.replica set model = 'other'", "stays one of m and never goes back"),
    ("update llmgw_core.replica set launch = 0", "stays one of m and never goes back"),
    ("update llmgw_core.shard set node_id = 'n2'", "keeps its replica, launch, rank, node"),
    ("update llmgw_core.shard set port = port + 1", "keeps its replica, launch, rank, node"),
    ("update llmgw_core.shard set rank = 1", "keeps its replica, launch, rank, node"),
    ("delete from llmgw_core.gpu_claim", "end the shard, and the card is free"),
    ("update llmgw_core.gpu_claim set gpu_uuid = 'n1-1'", "end the shard, and the card is free"),
    ("update llmgw_core.node set alloc_gen = 0", "alloc_gen of n1 only grows"),
    ("update llmgw_core.lease set term = term - 1", "term of tick only grows"),
    ("delete from llmgw_core.lease", "term of tick only grows"),
]
OVER = {
    "replica gone": "update llmgw_core.replica set state = 'stopping';"
    " update llmgw_core.replica set state = 'gone'",
    "replica failed": "update llmgw_core.replica set state = 'failed'",
    "another launch": "update llmgw_core.replica set launch = launch + 1",
}
ENDED = {
    "replica deleted": "delete from llmgw_core.replica",
    "shard deleted": "delete from llmgw_core.shard",
    "shard failed": "update llmgw_core.shard set state = 'failed'",
}


@pytest.fixture
def running(fleet):
    """Two nodes of two cards; a replica of ``m`` runs on the first card of n1."""
    node = fleet.node("n1", gpus=2)
    fleet.node("n2", gpus=2)
    fleet.model("m", {"gpus": 1})
    _, shard = fleet.running("m", node, 0)
    return node, shard


@pytest.mark.parametrize(("statement", "told"), NEVER)
def test_what_cannot_change_is_refused(fleet, running, statement, told):
    with pytest.raises(psycopg.Error, match=told) as caught:
        fleet.admin.execute(statement)
    assert caught.value.sqlstate == "LG003"


@pytest.mark.parametrize("what", OVER)
def test_shards_of_a_replica_that_is_over_are_told_to_stop(fleet, running, what):
    node, shard = running
    gen = fleet.sync(node)["gen"]
    fleet.admin.execute(OVER[what])
    told = fleet.sync(node, gen)
    assert [(a["shard"], a["desired"]) for a in told["assignments"]] == [(shard, "stopped")]
    assert fleet.value("select count(*) from llmgw_core.gpu_claim") == 1, "until it says so"
    fleet.say(node, "stopped", shard=shard)
    assert fleet.value("select count(*) from llmgw_core.gpu_claim") == 0


@pytest.mark.parametrize("what", ENDED)
def test_an_engine_whose_row_was_ended_is_told_of_at_the_next_sync(fleet, running, what):
    node, shard = running
    gen = fleet.sync(node)["gen"]
    runs = {"shards": [{"shard": shard, "state": "ready", "pid": 100}]}
    assert fleet.sync(node, gen, **runs)["assignments"] is None
    fleet.admin.execute(ENDED[what])
    assert fleet.sync(node, fleet.sync(node)["gen"], **runs)["assignments"] == []
    ends = {"shards": [{"shard": shard, "state": "stopped"}]}
    assert fleet.sync(node, fleet.sync(node)["gen"], **ends)["assignments"] is None
    odd = {"shards": [{"shard": "x", "state": "ready"}, {"shard": None}, 7]}
    assert fleet.sync(node, fleet.sync(node)["gen"], **odd)["assignments"] is None


def test_a_claim_is_made_only_for_a_live_shard_of_its_node(fleet, running):
    claim = "insert into llmgw_core.gpu_claim (shard_id, node_id, gpu_uuid) values (%s, %s, %s)"
    _, shard = running
    for number, node, card in ((shard, "n2", "n2-0"), (999, "n1", "n1-1"), (None, "n1", "n1-1")):
        assert refusal_of(fleet.admin, claim, (number, node, card)) in ("LG003", "23502", "23503")


PAST_RULES = {
    # What only a superuser who switches the rules off can do, and what trouble says of it.
    "delete from llmgw_core.shard": "card held by nobody",
    "update llmgw_core.shard set node_id = 'n2'": "card held by nobody",
    "update llmgw_core.shard set state = 'failed'": "card held by nobody",
    "update llmgw_core.replica set state = 'gone'": "shard that nobody needs",
    "update llmgw_core.replica set launch = launch + 1": "shard that nobody needs",
}


@pytest.mark.parametrize("statement", PAST_RULES)
def test_rows_that_rules_could_not_follow_are_told_with_what_to_do(fleet, running, statement):
    told = "select what, why from llmgw.trouble where what in (%s, %s)"
    kinds = sorted(set(PAST_RULES.values()))
    assert fleet.rows(told, *kinds) == []
    with fleet.admin.transaction():
        fleet.admin.execute("set local session_replication_role = replica")
        fleet.admin.execute(statement)
    (row,) = fleet.rows(told, *kinds)
    assert row["what"] == PAST_RULES[statement]
    fleet.admin.execute(row["why"].partition(": ")[2])  # as it says
    assert fleet.rows(told, *kinds) == []


@pytest.mark.parametrize("endpoint", ["http://127.0.0.3:notaport", "garbage", "", None])
def test_a_ready_replica_that_no_router_finds_is_trouble(fleet, running, endpoint):
    told = "select why from llmgw.trouble where what = 'replica without address'"
    assert fleet.rows(told) == []
    fleet.admin.execute("update llmgw_core.replica set endpoint = %s", (endpoint,))
    [row] = fleet.rows(told)
    assert "where no router finds it: llmgwctl replace 1" in row["why"]
