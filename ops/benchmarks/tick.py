"""`ops/bench tick`: what the leader's tick costs over fleets of several sizes, by stage.

A real Postgres filled with a fleet at rest; a real ticker in a process of its own. Measured are the
first tick, which reads everything, idle ones, and the one that places a thousand replicas.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import psycopg

from ops.benchmarks import postgres, processes, report
from ops.benchmarks.large_fleet import fill

if TYPE_CHECKING:
    from collections.abc import Sequence

REPLICAS = 4
"""Ready ones on each node of eight cards."""
NODES_FOR_MODEL = 10
WANTED = 1000
"""New replicas at once, where the fleet has so many free cards."""
LONG_S = 600
GOALS = (
    "goals at 5,000 nodes: idle decide < 50 ms, idle tick < 100 ms, 1,000 placements decided < 1 s,"
    " leader < 600 MiB; growth near linear"
)


@click.command()
@click.option("--nodes", type=click.IntRange(10, 20_000), multiple=True, default=(100, 1000, 5000))
@click.option("--ticks", type=click.IntRange(3), default=20, show_default=True, help="Idle ones.")
@click.option("--json", "file", type=click.Path(path_type=Path), help="Write all figures there.")
def tick(nodes: Sequence[int], ticks: int, file: Path | None) -> None:
    """What the leader's tick costs over fleets of these numbers of nodes."""
    sizes = " ".join(f"--nodes {count}" for count in nodes)
    machine = processes.machine()
    report.heading(f"ops/bench tick {sizes} --ticks {ticks}", machine)
    print(f"{GOALS}\n{HEAD}")
    fleets = []
    for count in nodes:
        fleets.append(_measure(count, ticks))
        print(_line(fleets[-1]), flush=True)
    if file is not None:
        file.write_text(json.dumps({"machine": machine, "fleets": fleets}, indent=1))


HEAD = (
    "\nnodes  cards replicas  idle tick, ms: read decide whole slowest  CPU ms: leader Postgres"
    "  first, ms  place: n decide commit, ms  leader MiB"
)


def _line(found: dict[str, Any]) -> str:
    idle, placed = found["idle"], found["placed"]
    ms = {name: 1000 * value for name, value in idle.items()}
    return (
        f"{found['nodes']:5} {found['cards']:6} {found['replicas']:8}"
        f"  {ms['read']:19.1f} {ms['decide']:6.1f} {ms['whole']:5.1f} {ms['slowest']:7.1f}"
        f"  {ms['cpu']:14.1f} {1000 * found['postgres_cpu_s']:8.1f}"
        f"  {1000 * found['first']['whole']:9.0f}"
        f"  {found['items']['place']:8} {1000 * placed['decide']:6.0f}"
        f" {1000 * placed['commit']:10.0f}  {found['rss_mib']:10.0f}"
    )


def _measure(nodes: int, ticks: int) -> dict[str, Any]:
    replicas, models = nodes * REPLICAS, max(1, nodes // NODES_FOR_MODEL)
    with postgres.database(60) as database:
        with psycopg.connect(database.server.url, autocommit=True) as connection:
            fill(connection, nodes=nodes, replicas=replicas, models=models)
        meter = postgres.Meter(database.server)
        try:
            found = _lead(database, meter, models, ticks)
        finally:
            meter.close()
    return {"nodes": nodes, "cards": nodes * 8, "replicas": replicas, **found}


def _lead(
    database: postgres.Database, meter: postgres.Meter, models: int, ticks: int
) -> dict[str, Any]:
    """The child's words put together; it goes on when it is told to."""
    argv = [sys.executable, "-m", "ops.benchmarks.tick_child", str(ticks)]
    environment = os.environ | {"LLMGW_DATABASE_URL": database.controller_url}
    with subprocess.Popen(
        argv, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as child:
        try:
            found = _hear(child)
            before = meter.read()
            _go_on(child)
            found |= _hear(child)
            spent_s = meter.read().cpu_s - before.cpu_s
            with psycopg.connect(database.server.url, autocommit=True) as connection:
                more = max(1, WANTED // models)
                connection.execute(
                    "update llmgw_core.model set min_replicas = min_replicas + %(n)s,"
                    " max_replicas = max_replicas + %(n)s",
                    {"n": more},
                )
            for _ in range(3):
                _go_on(child)
                found |= {k: v for k, v in _hear(child).items() if k != "idle"}
            _go_on(child)
            child.wait(LONG_S)
        finally:
            child.kill()
    return found | {"postgres_cpu_s": spent_s / (ticks + 1)}


def _go_on(child: subprocess.Popen[str]) -> None:
    assert child.stdin is not None
    child.stdin.write("\n")
    child.stdin.flush()


def _hear(child: subprocess.Popen[str]) -> dict[str, Any]:
    assert child.stdout is not None
    line = child.stdout.readline()
    if not line:
        raise click.ClickException("the leader's process ended; its last words are above")
    found: dict[str, Any] = json.loads(line)
    return found
