"""`ops/bench usage`: what a usage row costs the router, and Postgres, from its end to its sums.

The router's own code (rows, spool, writer) without HTTP around it, on a Postgres with safe
settings: 1,000 keys below 50 teams with budgets, five models with prices.
"""

from __future__ import annotations

import json
import tempfile
import uuid
from pathlib import Path
from statistics import median
from time import perf_counter, process_time
from typing import TYPE_CHECKING, Any

import click
import psycopg
import trio

from controller.router.config import RouterConfig
from controller.router.core import Core
from controller.router.segment import Owner
from controller.router.spool import Spool
from controller.router.tokens import Tokens
from controller.router.usage import UsageRow
from controller.router.usage_writer import UsageWriter
from ops.benchmarks import postgres, processes
from sql import queries
from sql.pool import asyncio_host, open_pool
from sql.settings import DatabaseSettings

if TYPE_CHECKING:
    from collections.abc import Iterator

KEYS, TEAMS, MODELS = 1000, 50, 5
MANY = 20_000
STEP_S = 0.01
TENANCY = f"""
insert into llmgw_core.scope (kind, name, created_by)
    select 'team', 't' || i, 'bench' from generate_series(1, {TEAMS}) i;
insert into llmgw_core.api_key (id, hash, name, created_by, scope_id)
    select 'key' || lpad(i::text, 6, '0'), sha256(i::text::bytea), 'k', 'bench', 1 + i % {TEAMS}
    from generate_series(0, {KEYS} - 1) i;
insert into llmgw_core.price (model, since, prompt, cached, completion, set_by)
    select 'model-' || i, now() - interval '1 day', 150000, 50000, 600000, 'bench'
    from generate_series(0, {MODELS} - 1) i;
insert into llmgw_core.budget (scope_id, micros, period, warn, created_by)
    select id, 1000000000000, '30d', '{{}}', 'bench' from llmgw_core.scope;
"""
GOAL = "goal: 2,000 rows/s beside the router, on two cores"


def rows(core: Core) -> Iterator[UsageRow]:
    """Rows as requests of many keys leave them, without end; they end when they are taken."""
    number = 0
    while True:
        number += 1
        now = trio.current_time()
        yield UsageRow(
            core.row_ids.take(), f"key{number % KEYS:06}", "some-model", f"model-{number % MODELS}",
            7, "chat.completions", "ok", 200, number % 2 == 0, Tokens(700, 300, 256), 0.12, 3.5, 1,
            None, b"req-%032x" % number, now, 0.0, core.keys.now(),
            scopes=(None, 1 + number % KEYS % TEAMS, None),
            upstream_id="chatcmpl-5f2c1d3e4b5a69788796a5b4c3d2e1f0",
        )  # fmt: skip


def keep(core: Core) -> dict[str, float]:
    """What it costs to keep a row: rendered, and copied into the spool."""
    made = rows(core)
    batch = [next(made) for _ in range(MANY // 2)]
    began = process_time()
    for row in batch:
        row.rendered()
    rendered = process_time() - began
    began = process_time()
    for row in batch:
        core.usage.add(row)
    kept = process_time() - began
    count = len(batch) / 1e6
    return {"render_us": rendered / count, "render_and_keep_us": kept / count}


async def pour(core: Core, rate: int, seconds: float) -> None:
    """So many rows a second."""
    made, begun, poured = rows(core), trio.current_time(), 0
    while (past := trio.current_time() - begun) < seconds:
        for _ in range(int(past * rate) - poured):
            core.usage.add(next(made))
            poured += 1
        await trio.sleep(STEP_S)


async def steady(core: Core, writer: UsageWriter, rate: int, seconds: float) -> dict[str, float]:
    """A flush each second, as `report.py` makes them, while rows come."""
    took: list[float] = []
    behind = 0
    async with trio.open_nursery() as nursery:
        nursery.start_soon(pour, core, rate, seconds)
        for number in range(int(seconds)):
            await trio.sleep_until(trio.current_time() + 1)
            began = perf_counter()
            await writer.flush()
            took.append(perf_counter() - began)
            behind = max(behind, len(core.usage)) if number else behind
    return {
        "rows_per_s": rate,
        "flush_p50_ms": 1000 * median(took),
        "flush_max_ms": 1000 * max(took),
        "most_rows_left_after_a_flush": behind,
    }


async def flat_out(core: Core, writer: UsageWriter) -> float:
    """Rows a second that one router hands over when so many wait."""
    made = rows(core)
    for _ in range(MANY):
        core.usage.add(next(made))
    began = perf_counter()
    while len(core.usage):
        await writer.flush()
    return MANY / (perf_counter() - began)


async def measure(rate: int, seconds: float) -> dict[str, Any]:
    """All figures, on a server of its own."""
    with postgres.database(connections=20) as database, tempfile.TemporaryDirectory() as folder:
        with psycopg.connect(database.server.url, autocommit=True) as connection:
            connection.execute(TENANCY)  # type: ignore[call-overload]
        meter = postgres.Meter(database.server)
        settings = DatabaseSettings(url=database.controller_url, command_timeout_s=30)
        result: dict[str, Any] = {}
        async with asyncio_host(), open_pool(settings, "router") as pool, trio.open_nursery() as n:
            core = Core(RouterConfig(id=str(uuid.uuid4())), n)
            core.keys.set_clock(float(await pool.fetchval(queries("router")["route_now"])))
            owner = Owner(uuid.UUID(core.router_id), uuid.uuid4())
            core.usage.spool = Spool(Path(folder), owner, core.config.limits.spool_bytes)
            n.start_soon(core.usage.spool.run)
            await trio.sleep(1)  # its first files are made
            writer = UsageWriter(core, pool, queries("router"))
            result["keep"] = keep(core)
            result["flat_out_rows_per_s"] = await flat_out(core, writer)
            before, own = await trio.to_thread.run_sync(meter.read), process_time()
            result["steady"] = await steady(core, writer, rate, seconds)
            spent = process_time() - own
            found = postgres.between(before, await trio.to_thread.run_sync(meter.read))
            result["steady"] |= {
                "postgres_cpu_percent": found["cpu_percent"],
                "writer_cpu_percent": 100 * spent / found["seconds"],
                "wal_mib_per_s": found["wal_bytes_per_s"] / 2**20,
            }
            result["rows"] = dict(core.stats.usage_rows)
            n.cancel_scope.cancel()
        meter.close()
    return result


@click.command()
@click.option("--rate", type=click.IntRange(1), default=2000, show_default=True, help="Rows/s.")
@click.option("--seconds", type=click.FloatRange(3), default=20.0, show_default=True)
@click.option("--json", "file", type=click.Path(path_type=Path), help="Write all figures there.")
def usage(rate: int, seconds: float, file: Path | None) -> None:
    """What usage rows cost the router and Postgres."""
    result = {
        "command": f"ops/bench usage --rate {rate} --seconds {seconds:g}",
        "machine": processes.machine(),
        **trio.run(measure, rate, seconds),
    }
    if file is not None:
        file.write_text(json.dumps(result, indent=1))
    for name, value in result.items():
        parts = value.items() if isinstance(value, dict) else [("", value)]
        for part, figure in parts:
            told = f"{figure:.2f}" if isinstance(figure, float) else figure
            print(f"{name} {part}".ljust(46), told)
    print(GOAL)
