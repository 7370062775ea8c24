"""NVML's facts as cards (card.py). Pure: every field on its own, nonsense is unknown.

Called by nvml.py. Numbers are NVML's: bytes, milliwatts, MB/s, masks and enumerations.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from agent.probes import values
from agent.probes.card import Clocks, Ecc, Gpu, Pcie, Process, Repair
from agent.probes.gpus import cpu_words, plannable, shares_host_memory
from agent.probes.nvml_facts import NOT_SUPPORTED
from agent.probes.nvml_links import fabric, nvlinks
from agent.probes.nvml_mig import slices
from agent.probes.nvml_values import mapping, mib, number, truth, whole, word

if TYPE_CHECKING:
    from collections.abc import Mapping

    from agent.probes.card import MemoryKind, Throttle
    from agent.probes.nvml_facts import Answers

    Facts = Mapping[str, Any]

THROTTLE: Final[Mapping[int, Throttle]] = {
    0x40: "hw_thermal",
    0x20: "sw_thermal",
    0x80: "hw_power_brake",
    0x08: "hw_slowdown",
    0x04: "sw_power_cap",
    0x10: "sync_boost",
}
RECOVERY: Final = {
    1: "GPU Reset",
    2: "Node Reboot",
    3: "Drain P2P",
    4: "Drain and Reset",
    5: "Recover IMEX Domain",
    6: "Bus Reset",
    7: "System Reboot",
}
ADDRESS_TRANSLATION: Final = 2
ON_CHIP_BUS: Final = 3
"""FPCI: how the processors with a built-in GPU show it."""


def card(index: int, answers: Answers) -> Gpu:
    """One card, from whatever has been answered."""
    facts, codes = answers.facts[index], answers.codes.get(index, {})
    memory = mapping(facts.get("memory"))
    kind = memory_kind(facts, codes)
    dedicated = kind != "unified"
    mig = facts.get("mig")
    return Gpu(
        uuid=word(facts.get("uuid")),
        index=index,
        name=word(facts.get("name")),
        pci_bus_id=values.pci_bus_id(word(facts.get("pci_bus_id"))),
        memory_mib=_plannable(memory) if dedicated else None,
        memory_used_mib=mib(memory.get("used")) if dedicated else None,
        memory_kind=kind,
        utilization_percent=number(facts.get("utilization_percent")),
        temperature_c=number(facts.get("temperature_c")),
        power_w=_watts(facts.get("power_mw")),
        power_limit_w=_watts(facts.get("power_limit_mw")),
        clocks=_clocks(facts),
        throttle=_throttle(facts.get("throttle")),
        pcie=_pcie(facts),
        persistence=truth(facts.get("persistence")),
        ecc=_ecc(facts),
        repair=_repair(facts),
        recovery_action=_recovery(facts.get("recovery_action")),
        fabric=fabric(facts.get("fabric"), codes.get("fabric")),
        nvlinks=nvlinks(facts.get("nvlinks"), mig=mig is True),
        numa=whole(facts.get("numa")),
        numa_memory=whole(facts.get("numa_memory")),
        cpu_affinity=_cpus(facts.get("cpu_affinity")),
        mig=truth(mig),
        slices=slices(facts.get("slices"), mib(memory.get("total"))),
        processes=_processes(facts.get("processes")),
        problems=tuple(answers.problems.get(index, ())),
    )


def memory_kind(facts: Facts, codes: Mapping[str, int]) -> MemoryKind | None:
    """Whose memory the card works in.

    A unified card either has no memory for NVML or claims the host's, so its name decides. One
    that we do not know by name is unified when NVML has no memory for it and it shares the host's
    page tables, sits on the chip's own bus or is linked to the processor: other cards always have
    memory.
    """
    numa_memory = whole(facts.get("numa_memory"))
    if shares_host_memory(word(facts.get("name"))):
        return "unified"
    shares_pages = facts.get("addressing") == ADDRESS_TRANSLATION
    if numa_memory is not None:
        return "coherent"
    if mib(mapping(facts.get("memory")).get("total")):
        return "coherent" if shares_pages else "dedicated"
    near = shares_pages or facts.get("bus_type") == ON_CHIP_BUS or facts.get("c2c") is True
    return "unified" if near and codes.get("memory") == NOT_SUPPORTED else None


def _plannable(memory: Facts) -> int | None:
    return plannable(mib(memory.get("total")), mib(memory.get("reserved")))


def _watts(value: object) -> float | None:
    milliwatts = number(value)
    return milliwatts / 1000 if milliwatts is not None else None


def _clocks(facts: Facts) -> Clocks:
    return Clocks(
        sm=whole(facts.get("sm_mhz")),
        sm_max=whole(facts.get("sm_max_mhz")),
        memory=whole(facts.get("memory_mhz")),
        memory_max=whole(facts.get("memory_max_mhz")),
    )


def _throttle(mask: object) -> tuple[Throttle, ...] | None:
    if type(mask) is not int or mask < 0:
        return None
    return tuple(reason for bit, reason in THROTTLE.items() if mask & bit)


def _pcie(facts: Facts) -> Pcie:
    names = ("pcie_gen", "pcie_gen_max", "pcie_width", "pcie_width_max")
    return Pcie(*(whole(facts.get(name)) or None for name in names))


def _ecc(facts: Facts) -> Ecc:
    return Ecc(
        enabled=truth(facts.get("ecc")),
        corrected=whole(facts.get("corrected")),
        uncorrected=whole(facts.get("uncorrected")),
        corrected_aggregate=whole(facts.get("corrected_aggregate")),
        uncorrected_aggregate=whole(facts.get("uncorrected_aggregate")),
    )


def _repair(facts: Facts) -> Repair:
    """Remapped rows where the card has them, else retired pages; the latter never fail."""
    rows = facts.get("remapped")
    if isinstance(rows, list) and len(rows) == 4:
        corrected, uncorrected, pending, failed = (whole(value) for value in rows)
        return Repair(
            corrected,
            uncorrected,
            None if pending is None else pending > 0,
            None if failed is None else failed > 0,
        )
    return Repair(
        corrected=whole(facts.get("retired_corrected")),
        uncorrected=whole(facts.get("retired_uncorrected")),
        pending=truth(facts.get("retired_pending")),
    )


def _recovery(value: object) -> str | None:
    """The action's name; one of a newer driver is told by its number."""
    action = whole(value)
    return RECOVERY.get(action, f"action {action}") if action else None


def _cpus(value: object) -> str | None:
    if not isinstance(value, list):
        return None
    return cpu_words({cpu for cpu in value[:65536] if whole(cpu) is not None}) or None


def _processes(value: object) -> tuple[Process, ...] | None:
    if not isinstance(value, list):
        return None
    pairs = [pair for pair in value if isinstance(pair, list) and len(pair) == 2]
    return tuple(Process(pid, mib(used)) for pid, used in pairs if type(pid) is int and pid > 0)
