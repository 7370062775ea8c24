"""Everything that probing one machine found, as one value. Made by inventory.py.

Read by agent/doctor.py, agent/documents.py and the `probe` command. A part that could not be looked
at is None or has its reason in an `error`; an empty part was looked at and is empty.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from agent.probes.card import Gpus
from agent.probes.cgroup import Limits
from agent.probes.domain import Domain
from agent.probes.host import Host, Memory
from agent.probes.ib import Ports
from agent.probes.pci import Pci

if TYPE_CHECKING:
    from agent.health import Finding
    from agent.probes.disks import Disk
    from agent.probes.engines import Engine
    from agent.probes.imex import Imex
    from agent.probes.local_ports import LocalPorts
    from agent.probes.services import Service
    from agent.probes.topo import P2P

NVIDIA_SERVICES = ("nvidia-fabricmanager", "nvidia-imex", "nvidia-persistenced")


@dataclass(frozen=True, slots=True)
class Found:
    """One look at a machine.

    `usable` is the memory that the agent's control group leaves of the host's, `cpus` likewise the
    cores. `findings` are those that count against a card, by gpus.key. `signs` are files that say
    that an NVIDIA driver is here. `p2p` is asked only where NVLink should work and is None else.
    `wiring_error` is why a tool did not tell how cards are wired; sysfs may have told it.
    """

    host: Host | None = None
    limits: Limits = field(default_factory=Limits)
    usable: Memory = field(default_factory=Memory)
    cpus: float | None = None
    gpus: Gpus = field(default_factory=Gpus)
    findings: Mapping[str, tuple[Finding, ...]] = field(default_factory=dict)
    pci: Pci = field(default_factory=Pci)
    signs: tuple[str, ...] = ()
    services: Mapping[str, Service] = field(default_factory=dict)
    domain: Domain = field(default_factory=lambda: Domain("unknown"))
    imex: Imex | None = None
    ports: Ports = field(default_factory=Ports)
    p2p: P2P | None = None
    wiring_error: str | None = None
    kernel_log_error: str | None = None
    disks: tuple[Disk, ...] = ()
    engines: tuple[Engine, ...] = ()
    local_ports: LocalPorts | None = None
