"""`ops/bench discovery`: what a fleet that reports everything costs Postgres, and one agent a node.

The fleet is real agents' code over invented hardware (ops/simulation) with a real controller. The
same fleet is measured four times: as it is, without slow facts, without fast facts, beats only.
"""

from __future__ import annotations

import hashlib
import json
import secrets
import subprocess
import sys
import tempfile
from collections import Counter
from contextlib import AsyncExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import psycopg
import trio

from agent.door import SqlDoor
from ops.benchmarks import agent_cost, postgres, processes, report
from ops.simulation.fleet import uniform
from ops.simulation.node import build
from sql.embedded import free_port
from sql.pool import asyncio_host, open_pool
from sql.settings import DatabaseSettings

if TYPE_CHECKING:
    from collections.abc import Iterator

    from agent.door import Answer, Door
    from agent.facts import Facts
    from agent.probes.scan import Scan
    from ops.simulation.fleet import SimNode
    from ops.simulation.node import SimMachine

START_S = 10.0
RESEND_S = 600.0
"""Each node says all its facts again after this long (agent.facts): spread over the fleet."""
UNREST = 0.1
"""A card of each node becomes hot or cool once in ten looks, one a minute."""
QUIET_S = 1.0
"""Between two measurements, so that reports under way have ended."""
PHASES = {
    "everything": (True, True),
    "no slow facts": (False, True),
    "no fast facts": (True, False),
    "beats only": (False, False),
}


class CountingDoor:
    """A door that counts what went through it, by kind."""

    def __init__(self, door: Door, calls: Counter[str]) -> None:
        self._door, self._calls = door, calls

    async def enroll(self, token: str, node: str, secret: str) -> None:
        """Counted as `enroll`."""
        self._calls["enroll"] += 1
        await self._door.enroll(token, node, secret)

    async def sync(self, secret: str, have_gen: int | None, report: dict[str, Any]) -> Answer:
        """Counted as `sync`."""
        self._calls["sync"] += 1
        return await self._door.sync(secret, have_gen, report)

    async def report(self, secret: str, kind: str, document: Any) -> None:
        """Counted as its kind."""
        self._calls[kind] += 1
        await self._door.report(secret, kind, document)

    async def report_log(self, secret: str, ask: int, text: str, offset: int) -> None:
        """Counted as `log`."""
        self._calls["log"] += 1
        await self._door.report_log(secret, ask, text, offset)

    async def report_scan(self, secret: str, ask: int, found: Scan) -> None:
        """Counted as `scan`."""
        self._calls["scan"] += 1
        await self._door.report_scan(secret, ask, found)


@dataclass(slots=True)
class Fleet:
    """The running nodes of a benchmark and what they have said."""

    calls: Counter[str] = field(default_factory=Counter)
    machines: list[SimMachine] = field(default_factory=list)
    facts: list[Facts] = field(default_factory=list)

    async def set(self, *, slow: bool, fast: bool) -> None:
        """Which facts are told from now on."""
        for machine, facts in zip(self.machines, self.facts, strict=True):
            machine.tells_slow, machine.tells_fast = slow, fast
            await facts.refresh(set())
        await trio.sleep(QUIET_S)

    async def say_again(self) -> None:
        """Node after node forgets what it said, as in a fleet that did not start in one instant."""
        while True:
            for machine, facts in zip(self.machines, self.facts, strict=True):
                await trio.sleep(RESEND_S / len(self.facts))
                if machine.tells_slow:
                    facts.forget()


@dataclass(frozen=True, slots=True)
class Addresses:
    """How nodes reach the database: `shared` connections for all, or 0 for a pool each."""

    url: str
    token: str
    shared: int


async def start(
    fleet: Fleet,
    nodes: list[SimNode],
    database: Addresses,
    pause_s: float,
    nursery: trio.Nursery,
    stack: AsyncExitStack,
) -> None:
    """Start all nodes, each with a pool of its own as real ones have, or with a shared one."""
    url, shared, common = database.url, database.shared, None
    if shared:
        common = await stack.enter_async_context(open_pool(_settings(url, shared), "agents"))
    for node in nodes:
        pool = common or await stack.enter_async_context(open_pool(_settings(url, 2), "agents"))
        door = CountingDoor(SqlDoor(pool), fleet.calls)
        agent, machine = build(node, uniform(1, 1).engines, door, database.token)
        machine.unrest = UNREST
        fleet.machines.append(machine)
        fleet.facts.append(agent._facts)  # noqa: SLF001 - to age them
        nursery.start_soon(agent.run)
        await trio.sleep(pause_s)


def _settings(url: str, size: int) -> DatabaseSettings:
    return DatabaseSettings(url=url, pool_size=size, command_timeout_s=30)


@contextmanager
def controller(url: str, log: Path, port: int = 0) -> Iterator[subprocess.Popen[bytes]]:
    """One real control process, its admin API on this port or on any."""
    arguments = ["--role", "control", "--admin-listen", f"127.0.0.1:{port or free_port()}"]
    env = {"LLMGW_DATABASE_URL": url, "PATH": "/usr/bin:/bin"}
    with log.open("wb") as file:
        process = subprocess.Popen(
            [sys.executable, "-m", "controller", *arguments], env=env, stdout=file, stderr=file
        )
        try:
            yield process
        finally:
            process.terminate()
            process.wait(30)


def token(url: str, uses: int) -> str:
    """An enrolment token for any new node."""
    made = secrets.token_urlsafe(24)
    digest = hashlib.sha256(made.encode()).digest()
    with psycopg.connect(url, autocommit=True) as connection:
        enrol = "select llmgw.node_enroll_v1('bench', null, %s, %s, 3600)"
        connection.execute(enrol, (digest, uses))
    return made


async def measure_fleet(
    count: int, seconds: float, settle_s: float, *, shared: int = 0, start_s: float = START_S
) -> dict[str, dict[str, Any]]:
    """Every phase of one fleet, by name."""
    # Two connections a node at most, the controller's, the meter's.
    with (
        postgres.database(connections=2 * count + 50) as database,
        tempfile.TemporaryDirectory() as folder,
        controller(database.controller_url, Path(folder) / "controller.log") as control,
    ):
        meter, fleet = postgres.Meter(database.server), Fleet()
        admits = token(database.controller_url, count)
        phases: dict[str, dict[str, Any]] = {}
        async with asyncio_host(), AsyncExitStack() as stack, trio.open_nursery() as nursery:
            nodes, reach = uniform(count, 8).nodes(), Addresses(database.agent_url, admits, shared)
            async with report.period(phases, "start", meter, control.pid, fleet.calls):
                await start(fleet, nodes, reach, start_s / count, nursery, stack)
                # Now, not later: it makes every backend plan anew.
                await trio.to_thread.run_sync(meter.vacuum)
                await trio.sleep(settle_s)
            nursery.start_soon(fleet.say_again)
            for name, (slow, fast) in PHASES.items():
                await fleet.set(slow=slow, fast=fast)
                async with report.period(phases, name, meter, control.pid, fleet.calls):
                    await trio.sleep(seconds)
            nursery.cancel_scope.cancel()
        meter.close()
    return phases


async def _fleet(count: int, seconds: float, settle_s: float, shared: int) -> dict[str, Any]:
    return await measure_fleet(count, seconds, settle_s, shared=shared)


@click.command()
@click.option("--nodes", type=click.IntRange(1, 2000), default=200, show_default=True)
@click.option("--seconds", type=float, default=60.0, show_default=True, help="Of each measurement.")
@click.option("--settle", type=float, default=30.0, show_default=True, help="Seconds before it.")
@click.option(
    "--connections", type=int, default=0, help="Share so many, instead of a pool per node."
)
@click.option("--part", type=click.Choice(["fleet", "agent", "all"]), default="all")
@click.option("--json", "file", type=click.Path(path_type=Path), help="Write all figures there.")
def discovery(
    nodes: int, seconds: float, settle: float, connections: int, part: str, file: Path | None
) -> None:
    """What discovery costs: Postgres with a fleet that reports everything, and one idle agent."""
    asked = f"ops/bench discovery --nodes {nodes} --seconds {seconds:g} --settle {settle:g}"
    command = f"{asked} --connections {connections} --part {part}"
    result: dict[str, Any] = {"command": command, "machine": processes.machine()}
    if part != "agent":
        result["fleet"] = trio.run(_fleet, nodes, seconds, settle, connections)
    if part != "fleet":
        result["agent"] = trio.run(agent_cost.measure, seconds, settle)
    if file is not None:
        file.write_text(json.dumps(result, indent=1))
    report.show(result)
