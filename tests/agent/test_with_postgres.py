"""The whole agent as a process against a real Postgres: enrol, serve, die, come back."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.agent.conftest import Node, until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.conftest import Database

ROOT = Path(__file__).parents[2]
TOKEN = "welcome-" * 4


class Host:
    """One node's agent processes and its rows."""

    def __init__(self, database: Database, node: Node) -> None:
        self._database, self._node = database, node
        self.agents: list[subprocess.Popen[bytes]] = []

    def start(self, *flags: str) -> subprocess.Popen[bytes]:
        env = {**os.environ, "LLMGW_DATABASE_URL": self._database.agent_url}
        place = ("--state-dir", str(self._node.folder))
        agent = subprocess.Popen(
            [sys.executable, "-m", "agent", "--node", "n1", *place, *flags],
            cwd=ROOT,
            env={**env, "LLMGW_ENROLMENT_TOKEN": TOKEN},
            stderr=subprocess.DEVNULL,
        )  # fmt: skip
        self.agents.append(agent)
        return agent

    def row(self, query: str, *args: object) -> tuple[Any, ...] | None:
        with self._database.connect() as connection:
            return connection.execute(query, args).fetchone()

    def assign(self, assignment: dict[str, Any]) -> int:
        """A shard as the planner would write it."""
        names = ("engine", "source", "args", "env", "command", "health_path")
        spec = {n: assignment[n] for n in (*names, "start_deadline_s", "stop_grace_s")}
        with self._database.connect() as c:
            c.execute("insert into llmgw_core.replica (model, profile, term) values ('m', 'p', 1)")
            found = c.execute(
                "insert into llmgw_core.shard (replica_id, launch, rank, node_id, port, spec)"
                " select max(id), 1, 0, 'n1', %s, %s from llmgw_core.replica returning id",
                [assignment["port"], json.dumps({**spec, "shards": 1})],
            ).fetchone()
            c.execute("update llmgw_core.node set alloc_gen = alloc_gen + 1 where id = 'n1'")
        assert found is not None
        return int(found[0])

    async def state(self, shard: int, wanted: str) -> None:
        query = "select state from llmgw_core.shard where id = %s"
        await until(lambda: self.row(query, shard) == (wanted,), f"shard {shard} is {wanted}")


@pytest.fixture
def host(database: Database, node: Node) -> Iterator[Host]:
    digest = hashlib.sha256(TOKEN.encode()).digest()
    with database.connect() as connection:
        connection.execute("select llmgw.node_enroll_v1('test', 'n1', %s, 5, 600)", [digest])
    made = Host(database, node)
    yield made
    for agent in made.agents:
        agent.kill()
        agent.wait()


@pytest.mark.slow
async def test_an_agent_enrols_serves_a_real_engine_is_killed_and_adopts_it(
    host: Host, node: Node, llama: Callable[..., dict[str, Any]]
) -> None:
    agent = host.start()
    cpus = "select cpus_host from llmgw_core.node where id = 'n1' and cpus_host is not null"
    await until(lambda: host.row(cpus) is not None, "the node is known with its CPUs")
    shard = host.assign(llama(1, model="m"))
    await host.state(shard, "ready")
    record = node.folder / f"shards/{shard}.json"
    await until(lambda: json.loads(record.read_text())["state"] == "ready", "it is noted as ready")
    [pid] = node.processes(shard)
    agent.kill()
    agent.wait()
    assert node.processes(shard) == [pid]
    boot = "select boot::text from llmgw_core.beat where node_id = 'n1'"
    before = host.row(boot)
    again = host.start("--on-exit", "stop")
    await until(lambda: host.row(boot) != before, "the next agent syncs")
    assert node.processes(shard) == [pid]
    assert host.row("select state from llmgw_core.shard where id = %s", shard) == ("ready",)
    second = host.start()
    assert second.wait(60) == 1  # one agent per folder
    again.send_signal(signal.SIGTERM)
    assert again.wait(60) == 0
    assert node.processes() == []
    await host.state(shard, "assigned")
    last = host.start()
    await host.state(shard, "ready")
    last.send_signal(signal.SIGTERM)
    assert last.wait(60) == 0
    assert len(node.processes(shard)) == 1  # keep is the default


@pytest.mark.slow
async def test_the_tail_of_a_shards_log_is_answered(
    host: Host, node: Node, odd: Callable[..., dict[str, Any]]
) -> None:
    host.start()
    beat = "select 1 from llmgw_core.beat where node_id = 'n1'"
    await until(lambda: host.row(beat) is not None, "the node is known")
    shard = host.assign(odd(1, "--exit-when-told", "--code", "4"))
    await host.state(shard, "ready")
    host.row(
        "insert into llmgw_core.ask (node_id, kind, shard_id, lines) values ('n1', 'log', %s, 5)"
        " returning id",
        shard,
    )
    answer = "select answer from llmgw_core.ask where answered_at is not null"
    await until(lambda: host.row(answer) == ("odd engine runs\n",), "the answer came")
    (node.folder / f"run/shard-{shard}/leave").touch()
    await host.state(shard, "failed")
    code = host.row("select exit_code, log_tail, error from llmgw_core.shard where id = %s", shard)
    assert code is not None
    assert code[0] == 4
    assert "last words before code 4" in code[1]
