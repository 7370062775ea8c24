"""A simulated fleet settles under a real controller, and stays right when cards and nodes fail."""

from __future__ import annotations

import subprocess
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest
import trio
from psycopg.types.json import Jsonb

from agent.door import SqlDoor
from ops.simulation.fleet import uniform
from ops.simulation.node import build
from sql.embedded import free_port
from sql.pool import open_pool
from tests.sql.fleet import open_fleet

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.conftest import Database

MODELS = 20
HELD_TWICE = "select count(*) - count(distinct (node_id, gpu_uuid)) from llmgw_core.gpu_claim"
PROFILE = {"name": "p", "engine": "vllm", "gpu_class": "H100", "fingerprint": "f"}


def catalog(replicas: int) -> list[dict[str, object]]:
    """Models of one to four cards that together want ``replicas`` replicas."""
    each = replicas // MODELS
    return [
        {
            "name": f"m{number:02}",
            "source": f"file:/models/{number}",
            "min_replicas": each,
            "max_replicas": each,
            "aliases": [],
            "fallbacks": [],
            "profiles": [{**PROFILE, "gpus": 1 + number % 4}],
        }
        for number in range(MODELS)
    ]


@contextmanager
def controller(database: Database, tmp_path: Path) -> Iterator[None]:
    """One real control process."""
    log = (tmp_path / "controller.log").open("wb")
    arguments = ["--role", "control", "--admin-listen", f"127.0.0.1:{free_port()}"]
    env = {"LLMGW_DATABASE_URL": database.controller_url, "PATH": "/usr/bin:/bin"}
    process = subprocess.Popen(
        [sys.executable, "-m", "controller", *arguments], env=env, stdout=log, stderr=log
    )
    try:
        yield
    finally:
        process.terminate()
        process.wait(30)
        log.close()


async def until(pool, query: str, limit_s: float) -> None:
    """Wait until a query says true."""
    with trio.fail_after(limit_s):
        while not await pool.fetchval(query):
            await trio.sleep(0.2)


async def settle(database: Database, tmp_path: Path, nodes: int, replicas: int) -> None:
    """The fleet reaches its wish, nothing is wrong on the way, and nothing is held twice."""
    with open_fleet(database) as fleet:
        token = fleet.token(None, uses=nodes)
        fleet.controller.execute(
            "select * from llmgw_core.catalog_apply_v1('test', '[]', %s, 'api', null, false)",
            (Jsonb(catalog(replicas)),),
        )
    settings = database.settings(database.agent_url, pool_size=8, command_timeout_s=30)
    with controller(database, tmp_path):
        async with open_pool(settings) as agents, trio.open_nursery() as nursery:
            door, built = SqlDoor(agents), uniform(nodes, 8, start_s=[0.1, 0.5])
            for node in built.nodes():
                nursery.start_soon(build(node, built.engines, door, token)[0].run)
            async with open_pool(database.settings(command_timeout_s=30)) as pool:
                await until(
                    pool,
                    f"select count(*) = {replicas} from llmgw.replicas where state = 'ready'",
                    300,
                )
                assert (
                    await pool.fetchval("select count(*) from llmgw.nodes where state <> 'ready'")
                    == 0
                )
                assert await pool.fetchval("select count(*) from llmgw.trouble") == 0
                assert await pool.fetchval("select sum(restarts) from llmgw.replicas") == 0
                assert await pool.fetchval(HELD_TWICE) == 0
                refused = "select count(*) from llmgw.decisions where kind = 'refuse'"
                assert await pool.fetchval(refused) == 0
            nursery.cancel_scope.cancel()


@pytest.mark.slow
@pytest.mark.timeout(400)
async def test_20_nodes_settle(database, tmp_path):
    await settle(database, tmp_path, nodes=20, replicas=40)


@pytest.mark.slow
@pytest.mark.timeout(400)
async def test_200_nodes_of_8_gpus_and_400_replicas_settle_without_error(database, tmp_path):
    await settle(database, tmp_path, nodes=200, replicas=400)
