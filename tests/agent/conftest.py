"""One node for the agent's tests: its folder, its shards, and no process left behind."""

from __future__ import annotations

import os
import signal
import sys
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import trio

from agent import procfs
from agent.config import engine_environment
from agent.facts import Facts
from agent.loop import Agent
from agent.probes.scan import Scan
from agent.probes.weights_scan import WeightsScan
from agent.process import marked_shard
from agent.shards import Shards
from agent.state import StateDir
from agent.supervise import Site, nothing_held
from agent.weights import Weights
from agent.weights_collect import Collector
from sql.embedded import free_port
from tests.agent.paper_door import PaperDoor
from tests.tiny_model import tiny_gguf

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence

ODD = str(Path(__file__).with_name("odd_engine.py"))
DEADLINE_S = 60.0


async def until(
    true: Callable[[], bool | Awaitable[bool]], what: str, within_s: float = DEADLINE_S
) -> None:
    """Poll until something holds; fail the test saying what did not."""
    with trio.move_on_after(within_s):
        while True:
            found = true()
            if found if isinstance(found, bool) else await found:
                return
            await trio.sleep(0.02)
    pytest.fail(f"not within {within_s:g} s: {what}")


class PaperProbes:
    """A machine made of words: the probes have tests of their own. `scans` counts fabric scans."""

    def __init__(self) -> None:
        self.woken = trio.Event()
        self.facts: dict[str, Any] = {"gpus": [], "engines": [], "disks": []}
        self.events: list[dict[str, Any]] = []
        self.looks = self.scans = 0
        self.scan_may_end = trio.Event()

    async def slow(self) -> dict[str, Any]:
        self.woken = trio.Event()
        self.looks += 1
        events, self.events = self.events, []
        return {"host": {"hostname": "n1"}, **self.facts, "events": events}

    async def fast(self, pids: set[int]) -> dict[str, Any]:
        return {"load": {}, "gpus": [], "ports": []}

    async def watch(self) -> None:
        await trio.sleep_forever()

    async def scan_fabric(self, hca: str, port: int) -> Scan:
        self.scans += 1
        await self.scan_may_end.wait()
        return Scan(f"map through {hca}/{port}", 12, None)


@dataclass
class Node:
    """One node's folder; `agent()` is one life of its agent."""

    folder: Path
    name: str = "n1"
    door: PaperDoor = field(default_factory=lambda: PaperDoor(secret="s" * 43))
    probes: PaperProbes = field(default_factory=PaperProbes)
    shards: Shards | None = None
    released: Callable[[Sequence[str]], Awaitable[str | None]] = nothing_held
    """What the machine says of cards' memory after their processes ended."""

    @property
    def agent_dir(self) -> str:
        return str(self.folder.resolve())

    def site(self, state: StateDir) -> Site:
        env = engine_environment()
        weights = Weights(self.folder / "weights", env, reserve_bytes=0)
        return Site(node=self.name, state=state, weights=weights, env=env, released=self.released)

    def agent(self, state: StateDir, token: str | None = None, secret: str = "s" * 43) -> Agent:
        site = self.site(state)
        self.shards = Shards(site, "127.0.0.1")
        return Agent(
            node=self.name,
            secret=secret,
            enrolment_token=token,
            door=self.door,
            state=state,
            shards=self.shards,
            facts=Facts(self.probes, WeightsScan([self.folder / "weights"]), self.shards.sources),
            engine_log_bytes=1 << 20,
            collector=Collector(site.weights, self.shards.sources_in_use),
        )

    @asynccontextmanager
    async def running(
        self, token: str | None = None, secret: str = "s" * 43
    ) -> AsyncIterator[Agent]:
        """An agent for the time of the block; leaving it is as sudden as a kill."""
        state = StateDir(self.folder)
        try:
            async with trio.open_nursery() as nursery:
                agent = self.agent(state, token, secret)
                nursery.start_soon(agent.run)
                yield agent
                nursery.cancel_scope.cancel()
        finally:
            state.close()

    def processes(self, shard: int | None = None) -> list[int]:
        """Live processes with this node's mark."""
        found = {p.pid: marked_shard(p.pid, self.name, self.agent_dir) for p in procfs.processes()}
        return [p for p, s in found.items() if s is not None and shard in (None, s)]

    async def state(self, shard: int, wanted: str, within_s: float = DEADLINE_S) -> dict[str, Any]:
        """Wait until the database knows this state; the last word about the shard."""
        await until(
            lambda: self.door.states.get(shard) == wanted,
            f"shard {shard} is {wanted}",
            within_s,
        )
        return self.door.words[shard]

    def read(self, shard: int) -> str:
        """A shard's log."""
        return (self.folder / "logs" / f"shard-{shard}.log").read_text()


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    """A node; whatever it started and left is killed afterwards."""
    made = Node(tmp_path / "state")
    yield made
    for pid in made.processes():
        with suppress(ProcessLookupError):  # it ended with another of them
            os.kill(pid, signal.SIGKILL)


@pytest.fixture
def odd() -> Callable[..., dict[str, Any]]:
    """Make an assignment of the odd engine; flags as words, fields as keywords."""

    def make(shard: int, *flags: str, **fields: Any) -> dict[str, Any]:
        port = fields.pop("port", None) or free_port()
        return {
            "shard": shard,
            "replica": shard * 10,
            "model": "m",
            "profile": "p",
            "rank": 0,
            "shards": 1,
            "desired": "running",
            "engine": "command",
            "command": [sys.executable, ODD, "--port", "{port}", "--model", "{model}", *flags],
            "health_path": "/health",
            "source": None,
            "args": [],
            "env": {},
            "gpus": [],
            "port": port,
            "host": "127.0.0.1",
            "start_deadline_s": 60,
            "stop_grace_s": 5,
            **fields,
        }

    return make


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model's file."""
    return tiny_gguf(tmp_path_factory.mktemp("tiny") / "tiny.gguf")


@pytest.fixture
def llama(odd: Callable[..., dict[str, Any]], tiny: Path) -> Callable[..., dict[str, Any]]:
    """Make an assignment of the real llama.cpp server with the tiny model."""

    def make(shard: int, **fields: Any) -> dict[str, Any]:
        more = {"engine": "llamacpp", "command": None, "source": f"file:{tiny}", "cpus": 1.0}
        return odd(shard, **{**more, "args": ["-c", "512"], **fields})

    return make
