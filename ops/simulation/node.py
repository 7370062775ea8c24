"""One simulated node: agent.loop.Agent as it is, over invented facts, fake engines and no disk."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agent.facts import Facts
from agent.loop import Agent
from agent.shards import Shards
from agent.work import News
from ops.simulation.engine import SimShard

if TYPE_CHECKING:
    import trio

    from agent.assignment import Assignment
    from agent.door import Door
    from agent.state import Record
    from ops.simulation.fleet import Engines, SimNode

NOWHERE = Path("/nonexistent/llmgw-simulation")


class SimMachine:
    """Probes of a machine that does not exist."""

    def __init__(self, node: SimNode) -> None:
        self._node = node
        self.missing: set[str] = set()
        """UUIDs of cards that have fallen off the bus."""

    async def slow(self) -> dict[str, Any]:
        """All slow facts by kind."""
        disk = {"mount": "/", "filesystem": "simulated", "kind": "local"}
        return {
            "host": self._node.host(),
            "gpus": [card for card in self._node.gpus() if card["uuid"] not in self.missing],
            "engines": self._node.engines(),
            "disks": [{**disk, "total_mib": 1 << 21, "free_mib": 1 << 20}],
        }

    async def fast(self, pids: set[int]) -> dict[str, Any]:
        """Load and cards now: nothing else uses them."""
        cards = [
            {
                "uuid": card["uuid"],
                "memory_used_mib": 0,
                "memory_foreign_mib": 0,
                "utilization_percent": 0,
            }
            for card in self._node.gpus()
            if card["uuid"] not in self.missing
        ]
        return {"load": {"cpu_percent": 1.0, "load1": 0.1}, "gpus": cards}


class SimState:
    """A state directory in memory: what agent.loop and agent.shards ask of agent.state.StateDir."""

    path = logs = agent_log = NOWHERE

    def __init__(self) -> None:
        self._gen: int | None = None

    def highest_gen(self) -> int | None:
        """The highest generation ever applied."""
        return self._gen

    def save_gen(self, gen: int | None) -> None:
        """Keep it."""
        self._gen = gen

    def log_of(self, shard: int) -> Path:
        """No engine writes a log here."""
        return NOWHERE

    def save(self, record: Record) -> None:
        """Nothing outlives the simulation."""

    def remove_old_logs(self) -> None:
        """There are none."""

    def forget(self, shard: int) -> None:
        """Nothing outlives the simulation."""


class SimSite:
    """What SimShards needs of agent.supervise.Site."""

    def __init__(self, node: str, state: SimState, news: News) -> None:
        self.node, self.state, self.news = node, state, news


class SimShards(Shards):
    """The agent's own bookkeeping with fake engines under it."""

    def __init__(self, site: SimSite, address: str, engines: Engines) -> None:
        super().__init__(site, address)  # type: ignore[arg-type]
        self._engines = engines

    async def restore(self, nursery: trio.Nursery) -> None:
        """Nothing ran before."""
        self._nursery = nursery

    def _make(self, record: Record, assignment: Assignment) -> SimShard:
        return SimShard(record, assignment, self._engines, self._site.news)


def secret_of(name: str) -> str:
    """A simulated node's secret: the same in every run, so that a second run resumes."""
    return hashlib.sha256(f"simulated {name}".encode()).hexdigest()


def build(
    node: SimNode, engines: Engines, door: Door, enrolment_token: str
) -> tuple[Agent, SimMachine]:
    """The agent of one simulated node, and its machine to break."""
    state, machine = SimState(), SimMachine(node)
    shards = SimShards(SimSite(node.name, state, News()), node.address, engines)
    agent = Agent(
        node=node.name,
        secret=secret_of(node.name),
        enrolment_token=enrolment_token,
        door=door,
        state=state,
        shards=shards,
        facts=Facts(machine, NOWHERE, shards.sources),
        engine_log_bytes=1 << 20,
    )
    return agent, machine
