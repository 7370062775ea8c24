"""What is asked with every sync: load, use of cards, traffic of ports. Quick, never raises.

Called by agent/machine.py, which keeps the counters that the next sample is measured against.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import trio

from agent.probes import cgroup, gpus, host, ib_counters, inventory
from agent.probes.pressure import read_pressure
from agent.probes.root import bounded

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from agent.probes.card import Gpu, MigDevice
    from agent.probes.inventory import Child
    from agent.probes.pressure import Pressure
    from agent.probes.root import Root

COUNTERS_TIMEOUT_S: Final = 5.0
MAX_FOREIGN_PIDS: Final = 8
"""Process numbers named per card: enough to find who computes there."""

Key = tuple[str, int]


@dataclass(frozen=True, slots=True)
class Sample:
    """Counters of one moment; `at` is seconds of trio's clock."""

    cpu: host.CpuTimes | None = None
    ports: Mapping[Key, ib_counters.Counters] = field(default_factory=dict)
    at: float = 0.0


@dataclass(frozen=True, slots=True)
class FastFacts:
    """Documents of one sync, and the sample that the next one is measured against."""

    load: dict[str, Any]
    gpus: list[dict[str, Any]]
    ports: list[dict[str, Any]]
    sample: Sample


def known(**fields: object) -> dict[str, Any]:
    """A document without its unknown fields."""
    return {name: value for name, value in fields.items() if value is not None}


async def read(
    root: Root,
    own_pids: Collection[int],
    before: Sample,
    *,
    child: Child | None = None,
    slices: Mapping[str, tuple[MigDevice, ...]] | None = None,
    unified: Collection[str] = (),
    own_mib: int | None = None,
) -> FastFacts:
    """Facts now. `own_pids` are all processes of our engines: other use of a card is foreign.

    `slices` are those of cards in MIG mode as last seen: quick questions do not tell them.
    `unified` are UUIDs of cards whose memory is the host's, `own_mib` what our engines hold of
    that. Memory in use is what cannot be had; page cache can (case E14).
    """
    load, times = await bounded(
        partial(_load, root, before.cpu), key="kernel load", timeout_s=inventory.KERNEL_TIMEOUT_S
    ) or ({}, None)
    counters = await bounded(
        partial(ib_counters.read_counters, root), key="ib counters", timeout_s=COUNTERS_TIMEOUT_S
    )
    now = trio.current_time()
    found = await inventory.read_gpus(root, fast=True, child=child)
    pool = None if not unified else (load.get("memory_used_mib"), own_mib)
    cards = [
        document
        for card in (_sliced(card, slices or {}) for card in found.cards)
        for document in card_use(card, own_pids, pool if card.uuid in unified else None)
    ]
    ports = port_use(before.ports, counters or {}, now - before.at)
    return FastFacts(load, cards, ports, Sample(times or before.cpu, counters or {}, now))


def _sliced(card: Gpu, slices: Mapping[str, tuple[MigDevice, ...]]) -> Gpu:
    return card if card.slices else replace(card, slices=slices.get(card.uuid or "", ()))


def card_use(
    card: Gpu, own_pids: Collection[int], pool: tuple[int | None, int | None] | None = None
) -> list[dict[str, Any]]:
    """Use of a card and of its slices; nothing of a card of which nothing is known. Pure.

    `pool` is host memory in use and what our engines hold of it, for a card that shares it (E02).
    """
    key = gpus.key(card)
    others = [p.pid for p in card.processes or () if p.pid not in own_pids]
    document = known(
        uuid=key,
        memory_used_mib=card.memory_used_mib,
        memory_foreign_mib=gpus.foreign_memory(card, own_pids),
        foreign_pids=others[:MAX_FOREIGN_PIDS] or None,
        utilization_percent=card.utilization_percent,
        temperature_c=card.temperature_c,
        power_w=card.power_w,
    )
    if pool is not None:
        used, own = pool
        foreign = None if used is None or own is None else max(0, used - own)
        document |= {"memory_used_mib": used, "memory_foreign_mib": foreign}
    if key is None or len(document) == 1:
        return []
    named = (number for number, part in enumerate(card.slices) if part.uuid is not None)
    return [document, *(slice_use(card, number, own_pids) for number in named)]


def slice_use(card: Gpu, number: int, own_pids: Collection[int]) -> dict[str, Any]:
    """Use of one slice. Processes are known by card only, so foreign ones count on every slice."""
    part = card.slices[number]
    foreign = gpus.foreign_memory(card, own_pids)
    if foreign and part.memory_used_mib is not None:
        foreign = min(foreign, part.memory_used_mib)
    return known(uuid=part.uuid, memory_used_mib=part.memory_used_mib, memory_foreign_mib=foreign)


def port_use(
    before: Mapping[Key, ib_counters.Counters],
    after: Mapping[Key, ib_counters.Counters],
    seconds: float,
) -> list[dict[str, Any]]:
    """Bytes per second since the last sample, and error counters that are not zero. Pure."""
    speeds = ib_counters.rates(before, after, seconds) if before else {}
    documents = []
    for (hca, port), counters in sorted(after.items()):
        sent, received = speeds.get((hca, port), (None, None))
        errors = ib_counters.not_zero(counters.errors)
        documents.append(
            known(
                hca=hca,
                port=port,
                tx_bytes=None if sent is None else round(sent),
                rx_bytes=None if received is None else round(received),
                errors=dict(errors) or None,
            )
        )
    return documents


def _load(
    root: Root, previous: host.CpuTimes | None
) -> tuple[dict[str, Any], host.CpuTimes | None]:
    times = host.parse_cpu_times(root.read("/proc/stat") or "")
    average = host.parse_loadavg(root.read("/proc/loadavg") or "") or (None, None, None)
    memory = cgroup.effective_memory(host.read_memory(root), cgroup.read_limits(root))
    used = None
    if memory.total_mib is not None and memory.available_mib is not None:
        used = memory.total_mib - memory.available_mib
    return known(
        cpu_percent=host.cpu_percent(previous, times) if previous and times else None,
        memory_used_mib=used,
        **dict(zip(("load1", "load5", "load15"), average, strict=True)),
        pressure=stalls(read_pressure(root)) or None,
    ), times


def stalls(pressure: Pressure) -> dict[str, float]:
    """Pressure as the document has it; what the kernel does not measure is left out. Pure."""
    return known(
        cpu_some=pressure.cpu.some,
        memory_some=pressure.memory.some,
        memory_full=pressure.memory.full,
        io_some=pressure.io.some,
        io_full=pressure.io.full,
    )
