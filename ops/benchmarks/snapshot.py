"""`ops/bench snapshot`: what a sync costs while a psql or a dashboard holds an old snapshot.

No version of a row that nodes write can be removed then. They report all that real agents do, with
engines on half their cards. Time runs faster: settings in seconds are divided, and so is the pace.
"""

from __future__ import annotations

import json
import secrets
import time
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from statistics import quantiles
from typing import TYPE_CHECKING, Any

import click
import psycopg
import trio
from psycopg.types.json import Jsonb

from ops.benchmarks import postgres, processes, report
from ops.benchmarks.large_fleet import fill
from ops.simulation.fleet import uniform
from ops.simulation.node import SimMachine

if TYPE_CHECKING:
    from collections.abc import Iterator

TABLES = ("beat", "node_load", "shard")
ENGINES = 4
"""On each node of eight cards."""
LOAD_EVERY_S = 5
"""How often an agent takes its fast facts and what its engines use."""
QUARTER_S = 900
FASTER = """update llmgw_core.setting
    set value = case name when 'syncs_per_second' then value * %(n)s else value / %(n)s end
    where name in
        ('unreachable_after', 'lost_after', 'load_stale', 'poll_idle', 'syncs_per_second')"""
BOOT = "00000000-0000-0000-0000-000000000001"
SYNC = "select * from agent.sync(%s, 4, %s)"
GOAL = "goal (F16): after an hour p99 is under 2 times the base"


@dataclass(slots=True)
class Agent:
    """One node's words."""

    token: str
    machine: SimMachine
    shards: list[int]
    second: int = -1
    """Of the fleet's time, when it came last."""
    words: list[dict[str, Any]] = field(default_factory=list)

    def report(self, second: int) -> dict[str, Any]:
        """What it says in this second: fast facts and use of engines are taken every few."""
        taken = second // LOAD_EVERY_S > self.second // LOAD_EVERY_S
        self.second = second
        fast = trio.run(self.machine.fast, set()) if taken else {}
        if taken:
            self.words = [self._word(shard, second) for shard in self.shards]
        clock = {"boot": BOOT, "applied_gen": 4, "clock": time.time()}
        return {**clock, "shards": self.words, "leaving": False, **fast}

    def _word(self, shard: int, second: int) -> dict[str, Any]:
        """An engine whose use of cores moves as requests come and go."""
        use = {"cpu_cores": 1.0 + (second // LOAD_EVERY_S + shard) % 5, "memory_bytes": 8 << 30}
        return {"shard": shard, "state": "ready", "pid": 100, **use}


@click.command()
@click.option("--nodes", type=click.IntRange(1, 2000), default=200, show_default=True)
@click.option(
    "--seconds",
    type=click.IntRange(60),
    default=3600,
    show_default=True,
    help="Of the fleet's time.",
)
@click.option(
    "--faster", type=click.IntRange(1, 30), default=30, show_default=True, help="Than real time."
)
@click.option("--json", "file", type=click.Path(path_type=Path), help="Write all figures there.")
def snapshot(nodes: int, seconds: int, faster: int, file: Path | None) -> None:
    """What a sync costs while somebody holds an old snapshot."""
    machine = processes.machine()
    result = {
        "command": f"ops/bench snapshot --nodes {nodes} --seconds {seconds} --faster {faster}",
        "machine": machine,
        "periods": measure(nodes, seconds, faster),
    }
    if file is not None:
        file.write_text(json.dumps(result, indent=1))
    report.heading(result["command"], machine)
    print(f"{GOAL}\n{HEAD}")
    for found in result["periods"]:
        print(line(found, result["periods"][0]))


HEAD = (
    "\nsnapshot  syncs of  p50    p99    ratios to the    Postgres"
    "  of each table: updates, of them HOT, dead rows"
    "\nheld for  each node ms     ms     base: p50, p99   CPU ms, ratio"
)


def line(found: dict[str, Any], base: dict[str, Any]) -> str:
    """One period against the first. Pure."""
    tables = "; ".join(
        f"{name} {row['updated']}, {row['hot_percent'] or 0:.0f} %, {row['dead']}"
        for name, row in found["tables"].items()
    )
    p50, p99, cpu = (found[name] / base[name] for name in ("p50_ms", "p99_ms", "cpu_ms"))
    return (
        f"{found['held_s'] / 60:4.0f} min {found['syncs_per_node']:8.0f}"
        f"   {found['p50_ms']:6.2f} {found['p99_ms']:6.2f}   {p50:8.2f} {p99:6.2f}"
        f"  {found['cpu_ms']:7.3f} {cpu:7.2f}   {tables}"
    )


def measure(nodes: int, seconds: int, faster: int) -> list[dict[str, Any]]:
    """A period without the snapshot, then those while it is held."""
    with postgres.database(30) as database:
        meter = postgres.Meter(database.server)
        try:
            with (
                psycopg.connect(database.server.url, autocommit=True) as admin,
                psycopg.connect(database.agent_url, autocommit=True) as door,
                psycopg.connect(database.controller_url) as holder,
            ):
                agents = list(_agents(admin, nodes))
                admin.execute(FASTER, {"n": faster})
                length = min(QUARTER_S, seconds)
                found = [_period(door, meter, agents, 0, length, faster)]
                holder.execute("set transaction isolation level repeatable read")
                holder.execute("select count(*) from llmgw.nodes")
                for begun in range(0, seconds, length):
                    period = _period(door, meter, agents, length + begun, length, faster)
                    found.append(period | {"held_s": begun + length})
        finally:
            meter.close()
    return found


def _agents(admin: psycopg.Connection[Any], nodes: int) -> Iterator[Agent]:
    """A fleet at rest, every node of which has an agent."""
    fill(admin, nodes=nodes, replicas=nodes * ENGINES, models=8 + nodes // 10)
    simulated = uniform(nodes, 8).nodes()
    listed = "select node_id, array_agg(id order by id) from llmgw_core.shard group by 1 order by 1"
    for (node, shards), like in zip(admin.execute(listed).fetchall(), simulated, strict=True):
        token = secrets.token_urlsafe(32)
        admin.execute(
            "update llmgw_core.node set secret_hash = %s, enrolled_at = now() where id = %s",
            (sha256(token.encode()).digest(), node),
        )
        yield Agent(token, SimMachine(like), shards)


def _period(
    door: psycopg.Connection[Any],
    meter: postgres.Meter,
    agents: list[Agent],
    begun: int,
    length: int,
    faster: int,
) -> dict[str, Any]:
    """So many seconds of the fleet's time, of which each agent syncs once in each that it can."""
    before, took = meter.read(), []
    start = time.monotonic()
    while (second := int((time.monotonic() - start) * faster)) < length:
        due = [agent for agent in agents if agent.second < begun + second]
        for agent in due:
            words = Jsonb(agent.report(begun + second))
            at = time.perf_counter()
            door.execute(SYNC, (agent.token, words)).fetchall()
            took.append(time.perf_counter() - at)
    door.execute("select pg_stat_force_next_flush()")
    after = meter.read()
    spent = postgres.between(before, after)
    cuts = quantiles(took, n=100, method="inclusive")
    return {
        "held_s": 0,
        "syncs_per_node": round(len(took) / len(agents), 1),
        "p50_ms": round(1000 * cuts[49], 3),
        "p99_ms": round(1000 * cuts[98], 3),
        "cpu_ms": round(1000 * (after.cpu_s - before.cpu_s) / len(took), 4),
        "wal_bytes_per_sync": round(spent["wal_bytes_per_s"] * spent["seconds"] / len(took)),
        "tables": {k: v for k, v in spent["tables"].items() if k in TABLES},
    }
