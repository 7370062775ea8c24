"""`ops/bench snapshot`: what a sync costs while a psql or a dashboard holds an old snapshot.

No version of a row that nodes write can be removed then. They report all that real agents do, with
engines on half their cards. An hour's writes are made as fast as they go: with silence judged
within a second each sync writes. Measured are syncs in their usual mixture, one in ten of which do.
"""

from __future__ import annotations

import json
import secrets
import time
from dataclasses import dataclass
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
MIXTURE = 10
"""Syncs of a node from one that writes to the next, once a second."""
LOAD_EVERY = 5
"""Every so manieth sync carries fast facts, and another use of the engines."""
BEATS = 450
"""Of a node in an hour: written after 8 to 10 s."""
SOONEST_S = 0.34
"""Fast facts are not written more often than a third of the shortest silence."""
SILENCE = "update llmgw_core.setting set value = %s where name = 'unreachable_after'"
JUDGED_S = 30
MINUTE = 7
"""Beats in a minute: with the first of each the use of engines is written."""
NEXT_MINUTE = "update llmgw_core.beat set seen_at = seen_at - interval '1 min'"
BOOT = "00000000-0000-0000-0000-000000000001"
SYNC = "select * from agent.sync(%s, 4, %s)"
MIXTURES = 3
GOAL = "goal (F16): after an hour p99 is under 2 times the base"


@dataclass(slots=True)
class Agent:
    """One node's words."""

    token: str
    machine: SimMachine
    shards: list[int]

    async def report(self, number: int) -> dict[str, Any]:
        """What it says in its sync of this number."""
        fast = {} if number % LOAD_EVERY else await self.machine.fast(set())
        clock = {"boot": BOOT, "applied_gen": 4, "clock": time.time()}
        words = [self._word(shard, number // LOAD_EVERY) for shard in self.shards]
        return {**clock, "shards": words, "leaving": False, **fast}

    def _word(self, shard: int, look: int) -> dict[str, Any]:
        """An engine whose use of cores moves as requests come and go."""
        use = {"cpu_cores": 1.0 + (look + shard) % 5, "memory_bytes": 8 << 30}
        return {"shard": shard, "state": "ready", "pid": 100, **use}


@click.command()
@click.option("--nodes", type=click.IntRange(1, 2000), default=200, show_default=True)
@click.option("--beats", type=click.IntRange(4), default=BEATS, show_default=True, help="Of each.")
@click.option("--json", "file", type=click.Path(path_type=Path), help="Write all figures there.")
def snapshot(nodes: int, beats: int, file: Path | None) -> None:
    """What a sync costs while somebody holds an old snapshot for an hour."""
    machine = processes.machine()
    command = f"ops/bench snapshot --nodes {nodes} --beats {beats}"
    report.heading(command, machine)
    print(f"{GOAL}\n{HEAD}")
    periods: list[dict[str, Any]] = []
    for found in measure(nodes, beats):
        periods.append(found)
        print(line(found, periods[0]), flush=True)
    if file is not None:
        result = {"command": command, "machine": machine, "periods": periods}
        file.write_text(json.dumps(result, indent=1))


HEAD = (
    "\nbeats of  p50    p99    ratios to the    Postgres"
    "         of each table: updates so far, of them HOT, dead rows"
    "\neach node ms     ms     base: p50, p99   CPU ms, ratio"
)


def line(found: dict[str, Any], base: dict[str, Any]) -> str:
    """One period against the first. Pure."""
    tables = "; ".join(
        f"{name} {row['updated']}, {row['hot_percent'] or 0:.0f} %, {row['dead']}"
        for name, row in found["tables"].items()
    )
    p50, p99, cpu = (found[name] / base[name] for name in ("p50_ms", "p99_ms", "cpu_ms"))
    return (
        f"{found['beats']:6}  {found['p50_ms']:6.2f} {found['p99_ms']:6.2f}   {p50:8.2f} {p99:6.2f}"
        f"  {found['cpu_ms']:7.3f} {cpu:7.2f}   {tables}"
    )


def measure(nodes: int, beats: int) -> Iterator[dict[str, Any]]:
    """Syncs before the snapshot is held, then after each quarter of so many beats of each node."""
    with postgres.database(30) as database:
        meter = postgres.Meter(database.server)
        try:
            with (
                psycopg.connect(database.server.url, autocommit=True) as admin,
                psycopg.connect(database.agent_url, autocommit=True) as door,
                psycopg.connect(database.controller_url) as holder,
            ):
                fleet = Fleet(admin, door, meter, list(_agents(admin, nodes)))
                fleet.live(MIXTURE)  # every row is there, every statement planned
                start = fleet.read()
                yield fleet.measured(start) | {"beats": 0}
                holder.execute("set transaction isolation level repeatable read")
                holder.execute("select count(*) from llmgw.nodes")
                for quarter in range(1, 5):
                    fleet.live(beats * quarter // 4 - beats * (quarter - 1) // 4)
                    yield fleet.measured(start) | {"beats": beats * quarter // 4}
        finally:
            meter.close()


@dataclass(slots=True)
class Fleet:
    """All agents, over one connection."""

    admin: psycopg.Connection[Any]
    door: psycopg.Connection[Any]
    meter: postgres.Meter
    agents: list[Agent]
    number: int = 0
    """Of the next sync of each."""

    def sync(self, *, writes: bool) -> list[float]:
        """One sync of each agent: seconds that each took."""
        self.admin.execute(SILENCE, (1 if writes else JUDGED_S,))
        words, took = trio.run(self._reports), []
        for agent, said in zip(self.agents, words, strict=True):
            at = time.perf_counter()
            self.door.execute(SYNC, (agent.token, said)).fetchall()
            took.append(time.perf_counter() - at)
        self.number += 1
        return took

    async def _reports(self) -> list[Jsonb]:
        return [Jsonb(await agent.report(self.number)) for agent in self.agents]

    def live(self, beats: int) -> None:
        """So many beats of each node, and what is written with them."""
        for beat in range(beats):
            begun = time.monotonic()
            if beat % MINUTE == 0:
                self.admin.execute(NEXT_MINUTE)  # as many dead rows more
            self.number += -self.number % LOAD_EVERY
            self.sync(writes=True)
            time.sleep(max(0.0, begun + SOONEST_S - time.monotonic()))

    def read(self) -> postgres.Reading:
        """All counters, with what the agents' session has not told yet."""
        self.door.execute("select pg_stat_force_next_flush()")
        return self.meter.read()

    def measured(self, start: postgres.Reading) -> dict[str, Any]:
        """The usual mixture of syncs; tables since the start."""
        self.number += -self.number % MIXTURE
        before, took = self.read(), []
        for second in range(MIXTURE * MIXTURES):
            took += self.sync(writes=second % MIXTURE == 0)
        after = self.read()
        cuts = quantiles(took, n=100, method="inclusive")
        tables = postgres.between(start, after)["tables"]
        return {
            "p50_ms": round(1000 * cuts[49], 3),
            "p99_ms": round(1000 * cuts[98], 3),
            "cpu_ms": round(1000 * (after.cpu_s - before.cpu_s) / len(took), 4),
            "wal_bytes": (after.counters["wal_bytes"] - before.counters["wal_bytes"]) // len(took),
            "tables": {name: row for name, row in tables.items() if name in TABLES},
        }


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
