"""Replicas over several nodes in the database: all shards or none, ports, what agents are told."""

from __future__ import annotations

import threading
from functools import partial

import pytest
from psycopg.types.json import Jsonb

from tests.sql.fleet import connected
from tests.sql.test_fencing import DEADLINE_S, ended, in_thread

PORT, MEETING = 20500, 20600


@pytest.fixture
def second(database):
    """Another controller's connection."""
    with connected(database, database.controller_url) as connection:
        yield connection


def told(nodes=2):
    """The document that each shard gets."""
    return {"head": "10.0.0.1", "master_port": MEETING, "nodes": nodes,
            "transport": "infiniband", "hcas": ["mlx5_0:1"]}  # fmt: skip


def gang(fleet, replica, nodes, *gpus, **more):
    """A placement over these nodes, the first of which is the head."""
    parts = [
        fleet.part(n, *gpus, gang=told(len(nodes)), master_port=MEETING if rank == 0 else None)
        for rank, n in enumerate(nodes)
    ]
    parts[0] |= more
    return fleet.place(replica, *parts)


@pytest.fixture
def pair(fleet):
    """Two nodes of one card each, and a model."""
    fleet.model("m")
    return [fleet.node(name, gpus=1) for name in ("n1", "n2")]


def test_each_agent_is_told_of_the_others(fleet, pair):
    replica = fleet.replica("m")
    assert fleet.commit(gang(fleet, replica, pair, 0)) == ["ok"]
    documents = [fleet.sync(node)["assignments"][0] for node in pair]
    assert [d["gang"] for d in documents] == [told(), told()]
    assert [(d["rank"], d["shards"]) for d in documents] == [(0, 2), (1, 2)]
    rows = fleet.rows("select rank, master_port from llmgw_core.shard order by rank")
    assert rows == [{"rank": 0, "master_port": MEETING}, {"rank": 1, "master_port": None}]
    detail = fleet.value("select detail from llmgw_core.decision where kind = 'place'")
    assert detail["shards"][1]["gang"] == told(), "what they were told is kept"


def test_one_node_is_told_of_no_others(fleet, pair):
    replica = fleet.replica("m")
    assert fleet.commit(fleet.place(replica, fleet.part(pair[0], 0, gang=None))) == ["ok"]
    assert "gang" not in fleet.sync(pair[0])["assignments"][0]


@pytest.mark.parametrize(
    ("held", "wanted"),
    [
        ({}, {"port": MEETING, "master_port": PORT}),
        ({}, {"port": MEETING, "master_port": MEETING + 1}),
        ({}, {"port": PORT + 1, "master_port": PORT}),
        ({}, {"port": PORT + 1, "master_port": MEETING}),
        ({}, {"port": PORT, "master_port": PORT + 1}),
        ({"master_port": None}, {"port": PORT + 1, "master_port": PORT}),
        ({"master_port": None}, {"port": PORT + 1, "master_port": PORT + 1}),
    ],
)
def test_a_port_is_never_held_twice_whatever_it_is_for(fleet, pair, held, wanted):
    first, other = fleet.replica("m"), fleet.replica("m")
    here = {"port": PORT, "master_port": MEETING} | held
    assert fleet.commit(gang(fleet, first, pair, **here)) == ["ok"]
    [outcome] = fleet.commit(gang(fleet, other, pair, **wanted))
    assert "port" in outcome
    assert outcome != "ok"
    assert fleet.value("select state from llmgw_core.replica where id = %s", other) == "pending"
    assert fleet.value("select count(*) from llmgw_core.shard where replica_id = %s", other) == 0
    fleet.admin.execute("update llmgw_core.shard set state = 'stopped'")
    assert fleet.commit(gang(fleet, other, pair, **(wanted | {"port": PORT + 9}))) == ["ok"]


def test_D14_a_dead_shard_stops_the_others_and_its_words_are_kept(fleet, pair):
    replica = fleet.replica("m")
    assert fleet.commit(gang(fleet, replica, pair, 0)) == ["ok"]
    head, other = (row["id"] for row in fleet.rows("select id from llmgw_core.shard order by rank"))
    fleet.say(pair[0], "starting", "ready", shard=head)
    fleet.say(pair[1], "starting", "ready", shard=other)
    assert fleet.move(replica, "ready") == ["ok"]
    port = fleet.value("select port from llmgw_core.shard where rank = 0")
    assert fleet.value("select endpoint from llmgw.replicas") == f"http://10.0.0.1:{port}"
    fleet.say(pair[1], "failed", shard=other, error="killed", exit_code=-9, log_tail="last words")
    assert fleet.move(replica, "failed", error="shard 1 on n2 failed: killed") == ["ok"]
    assert fleet.value("select endpoint from llmgw.replicas") is None
    answers = [fleet.sync(node)["assignments"] for node in pair]
    assert [[(a["shard"], a["desired"]) for a in found] for found in answers] == [
        [(head, "stopped")],
        [],
    ]
    kept = "select exit_code, log_tail from llmgw_core.shard where id = %s"
    assert fleet.rows(kept, other) == [{"exit_code": -9, "log_tail": "last words"}]
    assert fleet.value("select count(*) from llmgw_core.gpu_claim") == 1, "the head is not over"
    fleet.say(pair[0], "stopped", shard=head)
    assert fleet.move(replica, "pending") == ["ok"]
    assert fleet.commit(gang(fleet, replica, pair, 0)) == ["ok"]
    assert fleet.value("select launch from llmgw_core.replica") == 2


@pytest.mark.slow
def test_D13_two_plans_for_the_last_nodes_make_one_whole_gang(fleet, second, pair):
    term = fleet.lead()
    plan = "select outcome from llmgw_core.commit_plan_v1(%s, %s)"
    for _ in range(30):
        replicas = [fleet.replica("m") for _ in range(2)]
        items = [gang(fleet, replicas[0], pair, 0), gang(fleet, replicas[1], pair[::-1], 0)]
        gate = threading.Barrier(2)

        def commit(connection, item, gate=gate):
            gate.wait(DEADLINE_S)
            return connection.execute(plan, (term, Jsonb([item]))).fetchone()["outcome"]

        runs = [
            in_thread(partial(commit, connection, item))
            for connection, item in zip((fleet.controller, second), items, strict=True)
        ]
        for thread, _found in runs:
            ended(thread)
        assert sorted(found[0] == "ok" for _thread, found in runs) == [False, True], runs
        live = "select replica_id from llmgw_core.shard where state = 'assigned'"
        holders = [row["replica_id"] for row in fleet.rows(live)]
        assert len(holders) == 2
        assert len(set(holders)) == 1
        fleet.admin.execute("update llmgw_core.shard set state = 'stopped'")
