"""One accelerator as values, whoever told of it: NVML, nvidia-smi, amd-smi or the kernel. Pure.

Filled by nvml.py, smi_card.py and amd.py; read by health.py, doctor.py and inventory.py. Every
field may be unknown (None) on its own. Sizes are MiB, temperatures Celsius, clocks MHz, power W.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, Literal

Path = str
"""How two devices reach each other, best to worst: NV<links>, PIX, PXB, PHB, NODE, SYS."""

ZERO_UUID: Final = "00000000-0000-0000-0000-000000000000"
FabricState = Literal["not_supported", "not_started", "in_progress", "completed"]
MemoryKind = Literal["dedicated", "coherent", "unified"]
"""coherent: the card's own memory that Linux also lists as a NUMA node without CPUs (GH200, GB200);
unified: no memory of its own, the host's is shared (GB10)."""
Throttle = Literal[
    "hw_thermal", "sw_thermal", "hw_power_brake", "hw_slowdown", "sw_power_cap", "sync_boost"
]
"""Reasons that hold clocks down; idle and clock settings of the operator are none."""


@dataclass(frozen=True, slots=True)
class Process:
    """A process on a GPU; its memory in MiB is unknown under WDDM and for some driver versions."""

    pid: int
    memory_mib: int | None = None


@dataclass(frozen=True, slots=True)
class Pcie:
    """The card's PCIe link now and at best: generation (1 to 7) and lanes.

    An idle card lowers its generation, so only `width` below `width_max` says something is wrong.
    """

    gen: int | None = None
    gen_max: int | None = None
    width: int | None = None
    width_max: int | None = None


@dataclass(frozen=True, slots=True)
class Clocks:
    """Clocks in MHz."""

    sm: int | None = None
    sm_max: int | None = None
    memory: int | None = None
    memory_max: int | None = None


@dataclass(frozen=True, slots=True)
class Ecc:
    """ECC error counts. Volatile ones are since the driver was loaded, aggregate ones for ever."""

    enabled: bool | None = None
    corrected: int | None = None
    uncorrected: int | None = None
    corrected_aggregate: int | None = None
    uncorrected_aggregate: int | None = None


@dataclass(frozen=True, slots=True)
class Repair:
    """Memory repairs: rows remapped (Ampere and later) or pages retired (before).

    `pending` needs a reset of the card; `failed` needs a new card.
    """

    corrected: int | None = None
    uncorrected: int | None = None
    pending: bool | None = None
    failed: bool | None = None


@dataclass(frozen=True, slots=True)
class Fabric:
    """What the driver says of the card's NVLink fabric. `status` is Success or the driver's error.

    `bandwidth` is full or degraded, `health` healthy, unhealthy or limited, each when told;
    `faults` are further words of the driver (`route_unhealthy`, `incorrect configuration: ...`).
    """

    state: FabricState | None = None
    status: str | None = None
    cluster_uuid: str | None = None
    clique: int | None = None
    bandwidth: Literal["full", "degraded"] | None = None
    health: Literal["healthy", "unhealthy", "limited"] | None = None
    faults: tuple[str, ...] = ()

    @property
    def joined(self) -> bool | None:
        """Whether the card is in a multi-node NVLink domain; None when the state is unknown.

        A completed fabric with a UUID of zeros is the NVSwitch of one machine: no domain.
        """
        if self.state is None:
            return None
        return (
            self.state == "completed"
            and (self.status or "").lower() == "success"
            and self.cluster_uuid not in (None, ZERO_UUID)
        )


@dataclass(frozen=True, slots=True)
class NvLink:
    """One NVLink of a card. `peer` is the other end: gpu, switch, cpu or None when unknown."""

    link: int
    active: bool | None = None
    gb_per_s: float | None = None
    peer: Literal["gpu", "switch", "cpu"] | None = None
    peer_bus_id: str | None = None


@dataclass(frozen=True, slots=True)
class MigDevice:
    """A slice of a card, with its own UUID: a unit that a shard can be given.

    `memory_mib` can be planned with: where compute instances share a GPU instance, their part.
    """

    uuid: str | None = None
    index: int | None = None
    gi: int | None = None
    ci: int | None = None
    profile: str | None = None
    memory_mib: int | None = None
    memory_used_mib: int | None = None
    multiprocessors: int | None = None


@dataclass(frozen=True, slots=True)
class Gpu:
    """One card. `memory_mib` is what can be planned with: the total less the driver's reserve.

    `processes` is None when the driver does not tell, which is not the same as no process;
    `throttle` and `nvlinks` likewise. `paths` leads to the other cards by their index as text and
    to NICs by their device name. `problems` are what the probe itself met (a lost card, a crash).
    """

    uuid: str | None = None
    index: int | None = None
    name: str | None = None
    vendor: Literal["nvidia", "amd"] = "nvidia"
    pci_bus_id: str | None = None
    memory_mib: int | None = None
    memory_used_mib: int | None = None
    memory_kind: MemoryKind | None = None
    utilization_percent: float | None = None
    temperature_c: float | None = None
    power_w: float | None = None
    power_limit_w: float | None = None
    clocks: Clocks = Clocks()
    throttle: tuple[Throttle, ...] | None = None
    pcie: Pcie = Pcie()
    persistence: bool | None = None
    ecc: Ecc = Ecc()
    repair: Repair = Repair()
    recovery_action: str | None = None
    """What the driver asks for (`GPU Reset`, `Node Reboot`, `Drain P2P`...), None for nothing."""
    fabric: Fabric = Fabric()
    nvlinks: tuple[NvLink, ...] | None = None
    numa: int | None = None
    numa_memory: int | None = None
    """The NUMA node that the card's own coherent memory is."""
    cpu_affinity: str | None = None
    """CPUs near the card as a kernel list: `0-63,128-191`."""
    paths: Mapping[str, Path] = field(default_factory=dict)
    nearest_nic: str | None = None
    nic_path: Path | None = None
    mig: bool | None = None
    slices: tuple[MigDevice, ...] = ()
    processes: tuple[Process, ...] | None = None
    problems: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Gpus:
    """All cards of a machine and the driver; `error` says why something is missing.

    `source` names who told: nvml, nvidia-smi or amd-smi, rocm-smi; None when nobody did.
    """

    cards: tuple[Gpu, ...] = ()
    driver_version: str | None = None
    cuda_version: str | None = None
    error: str | None = None
    source: str | None = None
