"""A gang of four trays in a simulated NVL72: it starts, loses a shard, and starts again whole."""

from __future__ import annotations

import pytest
import trio
from psycopg.types.json import Jsonb

from agent.door import SqlDoor
from ops.simulation.fleet import uniform
from ops.simulation.node import build
from sql.pool import open_pool
from tests.sim.test_settle import PROFILE, controller, until
from tests.sql.fleet import open_fleet

TRAYS = 6
READY = "select state = 'ready' and launch = {} from llmgw_core.replica"
LAUNCH = """
    select rank, node_id, port, master_port, state, exit_code, log_tail, spec->'gang' as gang
    from llmgw_core.shard where launch = $1 order by rank"""


async def launch(pool, number):
    """The shards of one launch by rank."""
    return [dict(row) for row in await pool.fetch(LAUNCH, number)]


@pytest.mark.slow
async def test_D14_a_gang_that_loses_a_shard_starts_again_whole(database, tmp_path):
    profile = PROFILE | {"gpus": 4, "shards": 4, "fabric": "nvlink-domain"}
    document = {"name": "m", "source": "file:/models/1", "min_replicas": 1, "max_replicas": 1,
                "aliases": [], "fallbacks": [], "profiles": [profile]}  # fmt: skip
    with open_fleet(database) as fleet:
        token = fleet.token(None, uses=TRAYS)
        fleet.controller.execute(
            "select * from llmgw_core.catalog_apply_v1('test', '[]', %s, 'api', null, false)",
            (Jsonb([document]),),
        )
    built = uniform(TRAYS, 4, start_s=[0.1, 0.3])
    agents = database.settings(database.agent_url, pool_size=4, command_timeout_s=30)
    with controller(database, tmp_path):
        async with open_pool(agents) as speaking, trio.open_nursery() as nursery:
            door, machines = SqlDoor(speaking), {}
            for node in built.nodes():
                agent, machines[node.name] = build(node, built.engines, door, token)
                nursery.start_soon(agent.run)
            async with open_pool(database.settings(command_timeout_s=30)) as pool:
                await until(pool, READY.format(1), 60)
                first = await launch(pool, 1)
                assert [s["rank"] for s in first] == [0, 1, 2, 3]
                assert len({s["node_id"] for s in first}) == 4
                assert {s["gang"]["transport"] for s in first} == {"nvlink"}
                assert {s["gang"]["master_port"] for s in first} == {first[0]["master_port"]}
                assert len({s["gang"]["head"] for s in first}) == 1
                endpoint = await pool.fetchval("select endpoint from llmgw.replicas")
                assert endpoint == f"http://{first[0]['gang']['head']}:{first[0]['port']}"

                lost = await pool.fetchrow(
                    "select id, node_id from llmgw_core.shard where rank = 2 and state = 'ready'"
                )
                machines[lost["node_id"]].shards.crash(lost["id"])
                await until(pool, READY.format(2), 60)
                before, after = await launch(pool, 1), await launch(pool, 2)
                assert [s["state"] for s in before] == ["stopped", "stopped", "failed", "stopped"]
                assert (before[2]["exit_code"], before[2]["log_tail"]) == (
                    -9,
                    "simulated last words",
                )
                assert [s["state"] for s in after] == ["ready"] * 4
                assert after[0]["master_port"] != before[0]["master_port"]
                assert await pool.fetchval("select restarts from llmgw_core.replica") == 1
                assert await pool.fetchval("select count(*) from llmgw_core.gpu_claim") == 16
                refused = "select count(*) from llmgw.decisions where kind = 'refuse'"
                assert await pool.fetchval(refused) == 0
            nursery.cancel_scope.cancel()
