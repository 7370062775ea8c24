"""`ops/bench scale`: how long after a scale request an agent has the assignment.

Real Postgres, a real control process, real agents' code over invented hardware. Each round asks the
admin API for one replica more, at a random moment between two polls of an idle node. An agent has
an assignment when its sync returns with it. The goal is that node's own poll interval + 200 ms.
"""

from __future__ import annotations

import http.client
import json
import random
import tempfile
import time
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import quantiles
from typing import TYPE_CHECKING, Any

import click
import trio

from agent.door import SqlDoor
from ops.benchmarks import postgres, processes, report
from ops.benchmarks.discovery import controller, token
from ops.simulation.fleet import uniform
from ops.simulation.node import build
from sql.embedded import free_port
from sql.pool import asyncio_host, open_pool
from sql.settings import DatabaseSettings

if TYPE_CHECKING:
    from agent.door import Answer
    from sql.pool import Pool

CARDS = 8
OVER_MS = 200.0
"""What the goal allows beside the poll interval."""
ROUND_S = 30.0
JOIN_S = 120.0
MODEL = {
    "name": "bench",
    "source": "file:/models/bench.gguf",
    "min_replicas": 0,
    "max_replicas": 1,
    "profiles": [{"name": "p", "engine": "vllm", "gpus": 1, "gpu_class": "H100"}],
}
READY = "select count(*) from llmgw.replicas where state = 'ready'"
WRITTEN = (
    "select extract(epoch from created_at)::double precision from llmgw_core.shard where id = $1"
)
JOINED = "select count(*) from llmgw.nodes where state = 'ready'"


@dataclass(frozen=True, slots=True)
class Round:
    """One request, in milliseconds after it was sent; `poll_ms` was the node's interval."""

    answered_ms: float
    written_ms: float
    seen_ms: float
    poll_ms: int

    @property
    def over_ms(self) -> float:
        """What it took beside the poll interval."""
        return self.seen_ms - self.poll_ms


class Watch:
    """Which assignments agents have, and since when."""

    def __init__(self) -> None:
        self.seen: dict[int, tuple[float, int]] = {}
        """Shard -> the moment, and the poll interval that its node had been told before."""
        self.news = trio.Event()

    def take(self, shard: int, poll_ms: int) -> None:
        """A sync returned with this shard."""
        if shard not in self.seen:
            self.seen[shard] = (time.time(), poll_ms)
            self.news.set()


class WatchedDoor(SqlDoor):
    """A node's door that tells what came through it."""

    def __init__(self, pool: Pool, watch: Watch) -> None:
        super().__init__(pool)
        self._watch, self._poll_ms = watch, 0

    async def sync(self, secret: str, have_gen: int | None, report: dict[str, Any]) -> Answer:
        """The agent's sync."""
        answer = await super().sync(secret, have_gen, report)
        for assignment in answer.assignments or ():
            self._watch.take(assignment["shard"], self._poll_ms)
        self._poll_ms = answer.poll_ms
        return answer


def post(port: int, path: str, body: dict[str, Any]) -> None:
    """What llmgwctl sends. Blocking; RuntimeError with the answer when it is no success."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    try:
        headers = {"Content-Type": "application/json"}
        connection.request("POST", f"/api/v1{path}", json.dumps(body), headers)
        answer = connection.getresponse()
        text = answer.read()
        if answer.status >= 300:
            raise RuntimeError(f"POST {path}: {answer.status} {text[:500]!r}")
    finally:
        connection.close()


async def until(pool: Pool, query: str, count: int, limit_s: float = ROUND_S) -> None:
    """Wait until a query counts so many; trio.TooSlowError after ``limit_s``."""
    with trio.fail_after(limit_s):
        while await pool.fetchval(query) != count:  # noqa: ASYNC110
            await trio.sleep(0.05)


async def listening(port: int) -> None:
    """Wait until the admin API takes connections; trio.TooSlowError after ROUND_S."""
    with trio.fail_after(ROUND_S):
        while True:
            try:
                await (await trio.open_tcp_stream("127.0.0.1", port)).aclose()
            except OSError:
                await trio.sleep(0.05)
            else:
                return


async def one(pool: Pool, port: int, watch: Watch, wanted: int) -> Round:
    """Ask for this many replicas, one more than there are, and wait for the agent."""
    watch.news, known = trio.Event(), set(watch.seen)
    asked = time.time()
    await trio.to_thread.run_sync(post, port, "/models/bench/scale", {"min": wanted})
    answered = time.time()
    with trio.fail_after(ROUND_S):
        await watch.news.wait()
    (shard,) = set(watch.seen) - known
    at, poll_ms = watch.seen[shard]
    written = await pool.fetchval(WRITTEN, shard)
    after = [round(1000 * (moment - asked), 1) for moment in (answered, written, at)]
    return Round(*after, poll_ms)


async def measure(nodes: int, rounds: int, seed: int = 1) -> list[Round]:
    """All rounds of one fleet. ValueError when it has no card for each of them."""
    if rounds > nodes * CARDS:
        raise ValueError(f"{rounds} rounds need as many cards, {nodes} nodes have {nodes * CARDS}")
    chance, watch, port = random.Random(seed), Watch(), free_port()
    found = []
    with (
        postgres.database(connections=2 * nodes + 50) as database,
        tempfile.TemporaryDirectory() as folder,
        controller(database.controller_url, Path(folder) / "controller.log", port),
    ):
        admits, fleet = token(database.controller_url, nodes), uniform(nodes, CARDS)
        async with asyncio_host(), AsyncExitStack() as stack, trio.open_nursery() as nursery:
            settings = DatabaseSettings(url=database.controller_url, pool_size=2)
            pool = await stack.enter_async_context(open_pool(settings))
            for node in fleet.nodes():
                settings = DatabaseSettings(url=database.agent_url, pool_size=2)
                door = WatchedDoor(await stack.enter_async_context(open_pool(settings)), watch)
                nursery.start_soon(build(node, fleet.engines, door, admits)[0].run)
            await until(pool, JOINED, nodes, JOIN_S)
            await listening(port)
            await trio.to_thread.run_sync(post, port, "/models", MODEL)
            for wanted in range(1, rounds + 1):
                # Somewhere between two polls of a node that has nothing to do.
                await trio.sleep(1.0 + chance.uniform(0.0, 2.2))
                found.append(await one(pool, port, watch, wanted))
                await until(pool, READY, wanted)
            nursery.cancel_scope.cancel()
    return found


def figures(values: list[float]) -> dict[str, float]:
    """p50, p99 and the largest of at least two values."""
    cuts = quantiles(values, n=100, method="inclusive")
    return {"p50": round(cuts[49], 1), "p99": round(cuts[98], 1), "max": max(values)}


def summary(rounds: list[Round]) -> dict[str, Any]:
    """What is told of all rounds. Pure."""
    stages = {
        "request answered": [r.answered_ms for r in rounds],
        "assignment written": [r.written_ms for r in rounds],
        "agent has it": [r.seen_ms for r in rounds],
        "poll interval": [float(r.poll_ms) for r in rounds],
        "beside the interval": [round(r.over_ms, 1) for r in rounds],
    }
    kept = sum(r.over_ms <= OVER_MS for r in rounds)
    return {"stages_ms": {k: figures(v) for k, v in stages.items()}, "goal_kept": kept}


@click.command()
@click.option("--nodes", type=click.IntRange(1, 500), default=20, show_default=True)
@click.option("--rounds", type=click.IntRange(2, 4000), default=60, show_default=True)
@click.option("--json", "file", type=click.Path(path_type=Path), help="Write all figures there.")
def scale(nodes: int, rounds: int, file: Path | None) -> None:
    """How long a scale request takes until an agent has its assignment."""
    machine = processes.machine()
    found = trio.run(measure, nodes, rounds)
    result = {
        "command": f"ops/bench scale --nodes {nodes} --rounds {rounds}",
        "machine": machine,
        **summary(found),
        "rounds": [asdict(r) for r in found],
    }
    if file is not None:
        file.write_text(json.dumps(result, indent=1))
    report.heading(result["command"], machine)
    print("                          p50       p99       max  (ms after the request was sent)")
    for name, stage in result["stages_ms"].items():
        print(f"{name:20} " + " ".join(f"{stage[key]:9.1f}" for key in ("p50", "p99", "max")))
    print(f"goal (poll interval + {OVER_MS:g} ms) kept: {result['goal_kept']} of {rounds}")
