"""Fleets as YAML: groups of equal nodes. Pure; read by the simulator and by tests.

groups:
  - name: gpu-{:04d}          # one name per node, counted from 0
    count: 200
    gpus: {count: 8, class: H100, memory_mib: 81559}
    cpus: 96
    memory_mib: 1048576
    engines: {vllm: "0.32.0"}
    labels: {role: gpu}
engines: {start_s: [0.2, 1.0], fail_share: 0.0}
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import yaml
from pydantic import BaseModel, ConfigDict, Field

PORTS_PER_NODE = 1000


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
    arch: str = "x86_64"


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
        found = [
            SimNode(group.name.format(number), group, index)
            for index, (group, number) in enumerate(
                (group, number) for group in self.groups for number in range(group.count)
            )
        ]
        names = {node.name for node in found}
        if len(names) != len(found):
            raise ValueError(
                "two nodes of the fleet have one name: give each group a name with {} in it"
            )
        return found


class SimNode:
    """One invented machine and the documents that its agent would report."""

    def __init__(self, name: str, group: Group, index: int) -> None:
        self.name = name
        self.group = group
        # Loopback holds 16 million addresses, so each node has its own and ports may repeat.
        self.address = f"127.{1 + index // 62500}.{index // 250 % 250}.{1 + index % 250}"

    def host(self) -> dict[str, Any]:
        """The document of agent.report_host."""
        group = self.group
        return {
            "hostname": self.name,
            "mgmt_addr": self.address,
            "os": "simulated",
            "arch": group.arch,
            "cpu_model": "simulated",
            "cpu_flags": ["avx2"],
            "cpus_host": group.cpus,
            "cpus_effective": group.cpus,
            "memory_host_mib": group.memory_mib,
            "memory_effective_mib": group.memory_mib,
            "labels": group.labels,
            "ports": [20000, 20000 + PORTS_PER_NODE - 1],
            "agent_version": "simulated",
        }

    def gpus(self) -> list[dict[str, Any]]:
        """The document of agent.report_gpus."""
        cards = self.group.gpus
        if cards is None:
            return []
        return [
            {
                "uuid": f"GPU-{self.name}-{index}",
                "index": index,
                "name": f"Simulated {cards.class_}",
                "class": cards.class_,
                "memory_mib": cards.memory_mib,
                "healthy": True,
                "problems": [],
            }
            for index in range(cards.count)
        ]

    def engines(self) -> list[dict[str, Any]]:
        """The document of agent.report_engines."""
        return [
            {"engine": name, "version": version} for name, version in self.group.engines.items()
        ]


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
