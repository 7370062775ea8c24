"""One simulated node: agent.loop.Agent as it is, over invented facts, fake engines and no disk."""

from __future__ import annotations

import hashlib
import random
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import trio

from agent.facts import Facts
from agent.health import Finding
from agent.loop import Agent
from agent.probes import fast
from agent.probes.ib_counters import Counters
from agent.probes.scan import Scan
from agent.shards import Shards
from agent.weights import Weights
from agent.weights_collect import Collector
from agent.work import News
from ops.simulation import hardware
from ops.simulation.engine import SimShard

if TYPE_CHECKING:
    from agent.assignment import Assignment
    from agent.door import Door
    from agent.probes.card import Gpu
    from agent.state import Record
    from ops.simulation.fleet import Engines, SimNode

NOWHERE = Path("/nonexistent/llmgw-simulation")
STALLS = ("cpu_some", "memory_some", "memory_full", "io_some", "io_full")
HOT = Finding(
    code="thermal",
    kind="passing",
    text="held down by heat: look at fans and inlets",
    evidence="throttle reason hw_thermal at 91 C",
    unhealthy=False,
)


class SimMachine:
    """Probes of a machine that does not exist."""

    def __init__(self, node: SimNode) -> None:
        self._node = node
        self._cards = node.cards()
        # Seeded by the node, so that a run can be repeated.
        self._chance = random.Random(node.name)
        self._ports = {
            (name, 1): Counters(
                self._chance.randrange(10**15),
                self._chance.randrange(10**15),
                {"link_downed": number % 4},
            )
            for number, name in enumerate(hardware.nics(node))
        }
        self._ports_at: float | None = None
        self._hot: dict[int, tuple[Finding, ...]] = {}
        self.woken = trio.Event()
        self.shards: SimShards | None = None
        """What runs on it, to break."""
        self.missing: set[str] = set()
        """UUIDs of cards that have fallen off the bus."""
        self.unrest = 0.0
        """Share of slow looks at which a card has become hot, or the hot one cool again."""
        self.tells_slow = self.tells_fast = True
        """For measurements: what each kind of facts costs."""

    async def slow(self) -> dict[str, Any]:
        """All slow facts by kind."""
        if not self.tells_slow:
            return {}
        if self._cards and self._chance.random() < self.unrest:
            at = self._chance.randrange(len(self._cards))
            self._hot = {} if self._hot else {at: (HOT,)}
        return hardware.slow(self._node, hardware.look(self._node, self._hot, self.missing))

    async def fast(self, pids: set[int]) -> dict[str, Any]:
        """Load, cards and ports now: figures that move as those of busy machines do."""
        if not self.tells_fast:
            return {}
        chance = self._chance
        cards = [
            document
            for card in self._cards
            if card.uuid not in self.missing
            for document in fast.card_use(self._used(card), pids)
        ]
        before, at = self._ports, trio.current_time()
        seconds = at - (self._ports_at or at - 5.0)
        self._ports_at = at
        self._ports = {key: self._sent(counters, seconds) for key, counters in before.items()}
        return {
            "load": {
                "cpu_percent": round(chance.uniform(1, 60), 1),
                "memory_used_mib": self._node.group.memory_mib // 10 + chance.randrange(4096),
                **{name: round(chance.uniform(0, 90), 2) for name in ("load1", "load5", "load15")},
                "pressure": {name: round(chance.uniform(0, 3), 2) for name in STALLS},
            },
            "gpus": cards,
            "ports": fast.port_use(before, self._ports, seconds),
        }

    def _used(self, card: Gpu) -> Gpu:
        chance = self._chance
        return replace(
            card,
            # A few MiB: nobody computes here but whom the controller sends.
            memory_used_mib=chance.randrange(1, 500),
            utilization_percent=float(chance.randrange(101)),
            temperature_c=float(chance.randrange(30, 80)),
            power_w=round(chance.uniform(70, 700), 1),
        )

    def _sent(self, counters: Counters, seconds: float) -> Counters:
        speed = self._chance.randrange(50 * 10**9)
        return Counters(
            (counters.tx_bytes or 0) + round(speed * seconds),
            (counters.rx_bytes or 0) + round(speed * seconds),
            counters.errors,
        )

    async def watch(self) -> None:
        """Nothing happens by itself here."""
        await trio.sleep_forever()

    async def scan_fabric(self, hca: str, port: int) -> Scan:
        """There is no fabric."""
        return Scan("", 0, f"{hca}/{port} is simulated")


class SimWeights:
    """Stands where agent.probes.weights_scan.WeightsScan does: an invented filer."""

    def __init__(self, node: SimNode) -> None:
        self._node = node

    async def read(self, local: list[str]) -> list[dict[str, Any]]:
        """Models on the filer."""
        return hardware.weights(self._node)


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

    def crash(self, shard: int) -> None:
        """Kill the fake engine of a shard; KeyError when none runs here."""
        task = self._tasks[shard]
        assert isinstance(task, SimShard)
        task.crash()

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
    shards = machine.shards = SimShards(SimSite(node.name, state, News()), node.address, engines)
    agent = Agent(
        node=node.name,
        secret=secret_of(node.name),
        enrolment_token=enrolment_token,
        door=door,
        state=state,
        shards=shards,
        facts=Facts(machine, SimWeights(node), shards.sources),  # type: ignore[arg-type]
        engine_log_bytes=1 << 20,
        collector=Collector(Weights(NOWHERE, {}), shards.sources_in_use),
    )
    return agent, machine
