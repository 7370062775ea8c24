"""All probes together as the documents that agent/loop.py sends to Postgres.

`slow_facts` (host, GPUs, engines, disks) are for each minute and on change, `fast_facts` for each
sync. Every function returns, whatever the machine does: unknown fields are left out, and none
takes longer than the deadlines of its probes together. Run them beside the sync, not within it:
a hanging driver costs `slow_facts` up to a minute and `fast_facts` thirteen seconds. Open one
`nvml.converse()` for the life of the agent and hand it in as `child`.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final, TypeVar

import trio

import agent
from agent.probes import cgroup, disks, engines, gpus, host, nvml, smi, warnings
from agent.probes.card import Gpus
from agent.probes.root import bounded

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

    from agent.probes.conversation import Conversation
    from agent.probes.root import Root

    Child = Sequence[str] | Conversation

T = TypeVar("T")

KERNEL_TIMEOUT_S: Final = 5.0
"""For files of /proc and /sys, which answer in microseconds unless the machine is stuck."""
FAST_SMI_TIMEOUT_S: Final = 5.0
NVIDIA_SIGNS: Final = (
    "/proc/driver/nvidia/version",
    "/dev/nvidiactl",
    "/dev/dxg",
    "/usr/lib/wsl/lib/libnvidia-ml.so.1",
)
"""Without any of these (the last two: WSL) there is no driver, and no child is started."""


@dataclass(frozen=True, slots=True)
class ProbeConfig:
    """What probes need from the agent's settings. Paths as strings, real directories."""

    mgmt_addr: str | None = None
    labels: Mapping[str, str] = field(default_factory=dict)
    ports: tuple[int, int] | None = None
    weights: Sequence[str] = ()
    engine_venvs: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class SlowFacts:
    """The documents of agent.report_host, report_gpus, report_engines and report_disks.

    `gpus` is None when they could not be asked: that is not the word that all cards are gone.
    """

    host: dict[str, Any]
    gpus: list[dict[str, Any]] | None
    engines: list[dict[str, Any]]
    disks: list[dict[str, Any]]


@dataclass(frozen=True, slots=True)
class FastFacts:
    """`load` and `gpus` of one sync; hand `cpu_times` to the next call, it measures between."""

    load: dict[str, Any]
    gpus: list[dict[str, Any]]
    cpu_times: host.CpuTimes | None


def known(**fields: object) -> dict[str, Any]:
    """A document without its unknown fields."""
    return {name: value for name, value in fields.items() if value is not None}


async def slow_facts(root: Root, config: ProbeConfig, *, child: Child | None = None) -> SlowFacts:
    """All slow reports, asked for side by side; the host's warnings name GPUs out of reach."""
    engine_reports: list[dict[str, Any]] = []
    space: tuple[disks.Disk, ...] = ()

    async def ask_engines() -> None:
        nonlocal engine_reports
        engine_reports = await engine_facts(root, config)

    async def ask_disks() -> None:
        nonlocal space
        space = await disks.read_disks(root, config.weights)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(ask_engines)
        nursery.start_soon(ask_disks)
        cards, error = await gpu_facts(root, child=child)
    return SlowFacts(
        host=await _host_report(root, config, space, error),
        gpus=None if error and not cards else cards,
        engines=engine_reports,
        disks=_disk_reports(space),
    )


async def host_facts(root: Root, config: ProbeConfig) -> dict[str, Any]:
    """The host report; figures of the machine beside what our control group leaves of them."""
    return await _host_report(root, config, await disks.read_disks(root, config.weights), None)


async def _host_report(
    root: Root, config: ProbeConfig, space: Sequence[disks.Disk], gpu_error: str | None
) -> dict[str, Any]:
    facts = await _kernel(partial(host.read_host, root), "host")
    limits = await _kernel(partial(cgroup.read_limits, root), "cgroup") or cgroup.Limits()
    cpu = facts.cpu if facts else host.Cpu()
    memory = facts.memory if facts else host.Memory()
    usable = cgroup.effective_memory(memory, limits)
    return known(
        hostname=facts.hostname if facts else None,
        mgmt_addr=config.mgmt_addr,
        os=facts.os if facts else None,
        kernel=facts.kernel if facts else None,
        arch=cpu.arch,
        cpu_model=cpu.model,
        cpu_flags=list(cpu.flags) or None,
        cpus_host=cpu.count,
        cpus_effective=cgroup.least(float(cpu.count) if cpu.count else None, limits.cpus),
        memory_host_mib=memory.total_mib,
        memory_effective_mib=usable.total_mib,
        memory_available_mib=usable.available_mib,
        labels=dict(config.labels),
        agent_version=agent.__version__,
        ports=list(config.ports) if config.ports else None,
        warnings=[*warnings.cpu(cpu), *warnings.disks(space), *warnings.gpus(gpu_error)],
    )


async def gpu_facts(
    root: Root, *, child: Child | None = None
) -> tuple[list[dict[str, Any]], str | None]:
    """The GPU report, and why it may be short. A machine without NVIDIA has none and no reason.

    No cards with a reason is not the word that the cards are gone: keep what was reported before.
    """
    found = await read_gpus(root, child=child)
    nameless = [warnings.nameless(card) for card in found.cards if gpus.key(card) is None]
    reasons = [*([found.error] if found.error else []), *nameless]
    return _gpu_reports(found), "; ".join(reasons) or None


def _gpu_reports(found: Gpus) -> list[dict[str, Any]]:
    reports = []
    for card in found.cards:
        if (key := gpus.key(card)) is None:
            continue  # nothing to file it under: the reason names it
        report = known(
            uuid=key,
            index=card.index,
            name=card.name,
            memory_mib=card.memory_mib,
            healthy=not card.problems,
            problems=list(card.problems),
            pci_bus_id=card.pci_bus_id,
            numa=card.numa,
            driver_version=found.driver_version,
            cuda_version=found.cuda_version,
        )
        reports.append(report | known(**{"class": gpus.gpu_class(card.name)}))
    return reports


async def read_gpus(root: Root, *, fast: bool = False, child: Child | None = None) -> Gpus:
    """NVML first, nvidia-smi where that is missing or blind; lost cards named by the kernel.

    `child` asks a given program instead of NVML's (tests); below a prefix NVML would answer for
    the machine we run on, so a captured machine has its nvidia-smi only.
    """
    asks = child is not None or (
        root.live and bool(await _kernel(partial(_driver, root), "driver"))
    )
    found, works = Gpus(), False
    if asks:
        found, works = await nvml.read(root, fast=fast, child=child or nvml.CHILD)
    if not works:
        other = await smi.read(root, FAST_SMI_TIMEOUT_S if fast else smi.TIMEOUT_S)
        found = other if other.cards else replace(found, error=found.error or other.error)
    if fast:
        return found
    return await _complete(root, found)


async def _complete(root: Root, found: Gpus) -> Gpus:
    def look() -> Gpus:
        error = found.error if not found.cards else None
        cards = gpus.add_missing(found.cards, gpus.read_kernel_gpus(root), error)
        return replace(found, cards=tuple(gpus.placed(root, card) for card in cards))

    return await _kernel(look, "gpus") or found


def _driver(root: Root) -> bool:
    return any(root.exists(sign) for sign in NVIDIA_SIGNS)


async def engine_facts(root: Root, config: ProbeConfig) -> list[dict[str, Any]]:
    """The engine report: what can be started here."""
    return [
        known(engine=found.engine, version=found.version, path=found.path, state="installed")
        for found in await engines.read(root, config.engine_venvs)
    ]


async def disk_facts(root: Root, config: ProbeConfig) -> list[dict[str, Any]]:
    """The disk report: each filesystem once; one that does not answer has no sizes."""
    return _disk_reports(await disks.read_disks(root, config.weights))


def _disk_reports(space: Sequence[disks.Disk]) -> list[dict[str, Any]]:
    return [
        known(
            mount=disk.mount,
            filesystem=disk.filesystem,
            kind=disk.kind,
            total_mib=disk.total_mib,
            free_mib=disk.free_mib,
            holds_weights=disk.holds_weights,
        )
        for disk in space
    ]


async def fast_facts(
    root: Root,
    own_pids: Collection[int],
    previous: host.CpuTimes | None = None,
    *,
    child: Child | None = None,
) -> FastFacts:
    """Load and GPU use now. `own_pids` are all processes of our engines: other use is foreign.

    `memory_used_mib` is what cannot be had of `memory_effective_mib`; page cache can (case E14).
    """
    load, times = await _kernel(partial(_load, root, previous), "load") or ({}, None)
    found = await read_gpus(root, fast=True, child=child)
    reports = [
        known(
            uuid=card.uuid,
            memory_used_mib=card.memory_used_mib,
            memory_foreign_mib=gpus.foreign_memory(card, own_pids),
            utilization_percent=card.utilization_percent,
            temperature_c=card.temperature_c,
            power_w=card.power_w,
        )
        for card in found.cards
        if card.uuid is not None
    ]
    return FastFacts(load, reports, times)


def _load(
    root: Root, previous: host.CpuTimes | None
) -> tuple[dict[str, Any], host.CpuTimes | None]:
    times = host.parse_cpu_times(root.read("/proc/stat") or "")
    average = host.parse_loadavg(root.read("/proc/loadavg") or "") or (None, None, None)
    memory = cgroup.effective_memory(host.read_memory(root), cgroup.read_limits(root))
    used = None
    if memory.total_mib is not None and memory.available_mib is not None:
        used = memory.total_mib - memory.available_mib
    percent = host.cpu_percent(previous, times) if previous and times else None
    names = ("load1", "load5", "load15")
    averages = dict(zip(names, average, strict=True))
    return known(cpu_percent=percent, memory_used_mib=used, **averages), times


async def _kernel(function: Callable[[], T], key: str) -> T | None:
    return await bounded(function, key=f"kernel {key}", timeout_s=KERNEL_TIMEOUT_S)
