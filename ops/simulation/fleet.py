"""Fleets as YAML: groups of equal nodes. Read by the simulator and by tests.

groups:
  - name: gpu-{:04d}          # one name per node, counted from 0
    count: 200
    gpus: {count: 8, class: H100, memory_mib: 81559}
    cpus: 96
    memory_mib: 1048576
    engines: {vllm: "0.32.0"}
    labels: {role: gpu, rack: "r{rack}"}
    rack: 18                   # nodes of one NVLink domain
engines: {start_s: [0.2, 1.0], fail_share: 0.0}
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import yaml
from pydantic import BaseModel, ConfigDict, Field

from ops.simulation import hardware

if TYPE_CHECKING:
    from agent.probes.card import Gpu

PORTS_PER_NODE = 1000
NETWORK = 1 + os.getpid() % 200
"""Two simulations on one machine share no address, as long as their numbers are near."""


class Strict(BaseModel):
    """A typo in a fleet file is an error that names it."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class Cards(Strict):
    """The GPUs of one node."""

    count: int = Field(ge=1, le=64)
    class_: str = Field(alias="class")
    memory_mib: int = Field(gt=0)


class Group(Strict):
    """Nodes that are alike."""

    name: str
    count: int = Field(ge=1, le=10_000)
    gpus: Cards | None = None
    cpus: float = 16
    memory_mib: int = 65536
    engines: dict[str, str] = {"vllm": "0.32.0"}
    labels: dict[str, str] = {}
    """``{rack}`` in a value is the number of the node's rack within the group."""
    rack: int = Field(18, ge=0, le=1000)
    """Nodes that share one NVLink domain and one IMEX service; 0: NVLink ends at the machine."""
    joining: list[int] = []
    """Numbers of nodes whose upper half of cards has not joined the domain yet."""
    imex_twice: list[int] = []
    """Numbers of nodes on which two things run IMEX (E17)."""
    arch: str = "x86_64"
    infiniband: int = Field(8, ge=0, le=64)
    ethernet: int = Field(4, ge=0, le=64)
    """Ports that carry RDMA."""
    subnet_manager: str = Field("946dae03008aeb40", pattern="^[0-9a-f]{16}$")
    """GUID: which InfiniBand fabric it is."""
    network: str = "10.1.0.0/16"
    """Of the ports that carry RDMA."""
    weights: int = Field(20, ge=0, le=2000)
    """Models on the filer that every node mounts."""


class Engines(Strict):
    """How fake engines behave."""

    start_s: Annotated[list[float], Field(min_length=2, max_length=2)] = [0.2, 1.0]
    fail_share: float = Field(0.0, ge=0, le=1)
    """This share of launches exits with code 1 instead of becoming ready."""


class Fleet(Strict):
    """A whole fleet."""

    groups: list[Group] = Field(min_length=1)
    engines: Engines = Engines()

    def nodes(self) -> list[SimNode]:
        """Every node, in order; raises ValueError when two have one name."""
        every = ((at, n) for at, group in enumerate(self.groups) for n in range(group.count))
        found = [
            SimNode(self.groups[at], number, index, at) for index, (at, number) in enumerate(every)
        ]
        names = {node.name for node in found}
        if len(names) != len(found):
            raise ValueError(
                "two nodes of the fleet have one name: give each group a name with {} in it"
            )
        return found


class SimNode:
    """One invented machine: its name, its address, its hardware."""

    def __init__(self, group: Group, number: int, index: int, at: int) -> None:
        """The ``number``-th of the ``at``-th group, and the ``index``-th of all."""
        self.name = group.name.format(number)
        self.group = group
        self.number = number
        self.index = index
        self.rack = number // (group.rack or 1)
        # Like real ones: a domain is a cluster and a clique of it.
        self.domain = (f"6b1e{at:04x}-0000-4000-8000-{self.rack:012x}", self.rack % 4)
        self.labels = {k: v.replace("{rack}", str(self.rack)) for k, v in group.labels.items()}
        # Loopback holds 16 million addresses, so each node has its own and ports may repeat.
        self.address = f"127.{NETWORK + index // 62500}.{index // 250 % 250}.{1 + index % 250}"
        self.ports = (20000, 20000 + PORTS_PER_NODE - 1)

    def cards(self) -> list[Gpu]:
        """Its cards as a driver that finds nothing wrong would tell of them, idle."""
        count = self.group.gpus.count if self.group.gpus else 0
        return [hardware.gpu(self, index) for index in range(count)]


def read(path: Path) -> Fleet:
    """A fleet file; raises pydantic's ValidationError or YAML's error with the place."""
    return Fleet.model_validate(yaml.safe_load(path.read_text()))


def uniform(nodes: int, gpus: int, **engines: Any) -> Fleet:
    """A fleet of equal GPU nodes, for tests and benchmarks."""
    group = {
        "name": "gpu-{:04d}",
        "count": nodes,
        "gpus": {"count": gpus, "class": "H100", "memory_mib": 81559},
        "cpus": 96,
        "memory_mib": 1 << 20,
    }
    return Fleet.model_validate({"groups": [group], "engines": engines})
