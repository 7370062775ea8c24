"""One card of nvidia-smi's tree as a `card.Gpu`.

Called by smi.py with the trees of smi_tree.py. Pure, and raises nothing. Every field is taken on
its own. What is a fault of the card's health (ECC, repairs, fabric, heat) is told in the fields and
judged by health.py; `problems` holds only what the probe itself met: the driver has lost the card.
"""

from __future__ import annotations

import re
from collections import defaultdict
from typing import TYPE_CHECKING, Final, Literal, TypeVar

from agent.probes import smi_fields as fields
from agent.probes import values
from agent.probes.card import (
    Clocks,
    Ecc,
    Fabric,
    FabricState,
    Gpu,
    MemoryKind,
    MigDevice,
    Pcie,
    Process,
    Repair,
    Throttle,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from agent.probes.smi_tree import Tree

T = TypeVar("T")
Key = tuple[int, str | None, str | None]

CORRECTED: Final = ("sram_correctable", "dram_correctable")
UNCORRECTED: Final = (
    "sram_uncorrectable",
    "sram_uncorrectable_parity",
    "sram_uncorrectable_secded",
    "sram_uncorrectable_sec_ded",
    "dram_uncorrectable",
)
THROTTLES: Final[dict[str, Throttle]] = {
    "hw_thermal_slowdown": "hw_thermal",
    "sw_thermal_slowdown": "sw_thermal",
    "hw_power_brake_slowdown": "hw_power_brake",
    "hw_slowdown": "hw_slowdown",
    "sw_power_cap": "sw_power_cap",
    "sync_boost": "sync_boost",
}
RECOVERIES: Final = {
    "reset": "GPU Reset",
    "gpu reset": "GPU Reset",
    "reboot": "Node Reboot",
    "node reboot": "Node Reboot",
    "drain p2p": "Drain P2P",
    "drain and reset": "Drain and Reset",
}
STATES: Final[dict[str, FabricState]] = {
    "n/a": "not_supported",
    "not supported": "not_supported",
    "not started": "not_started",
    "in progress": "in_progress",
    "completed": "completed",
}
VITAL: Final = ("uuid", "total", "utilization", "temperature")
"""Fields that a working card never has an error in; a fan may well print `ERR!`."""
_UUID: Final = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")


def read(tree: Tree, index: int | None) -> Gpu:
    """The card of a tree; `index` is its place in nvidia-smi's order."""
    kind, memory, used = _memory(tree)
    return Gpu(
        uuid=fields.word(tree, "uuid"),
        index=index,
        name=fields.word(tree, "name"),
        pci_bus_id=values.pci_bus_id(fields.text(tree, "pci")),
        memory_mib=memory,
        memory_used_mib=used,
        memory_kind=kind,
        utilization_percent=fields.number(tree, "utilization", "%"),
        temperature_c=fields.number(tree, "temperature", "c"),
        power_w=fields.number(tree, "power", "w"),
        power_limit_w=fields.number(tree, "power_limit", "w"),
        clocks=Clocks(
            sm=fields.whole(tree, "sm", "mhz"),
            sm_max=fields.whole(tree, "sm_max", "mhz"),
            memory=fields.whole(tree, "memory_clock", "mhz"),
            memory_max=fields.whole(tree, "memory_clock_max", "mhz"),
        ),
        throttle=_throttle(tree),
        pcie=Pcie(
            gen=fields.whole(tree, "gen"),
            gen_max=fields.whole(tree, "gen_max"),
            width=fields.whole(tree, "width", "x"),
            width_max=fields.whole(tree, "width_max", "x"),
        ),
        persistence=fields.switch(tree, "persistence"),
        ecc=_ecc(tree),
        repair=_repair(tree),
        recovery_action=_recovery(tree),
        fabric=_fabric(tree),
        numa_memory=fields.whole(tree, "numa_memory"),
        mig=fields.switch(tree, "mig"),
        slices=_slices(tree),
        processes=_processes(tree),
        problems=tuple(_problems(tree)),
    )


def plannable(total_mib: int | None, reserved_mib: int | None) -> int | None:
    """Memory to plan with: the driver keeps `reserved` for itself. A total of 0 is unknown."""
    if not total_mib:
        return None
    return total_mib - reserved_mib if reserved_mib and reserved_mib < total_mib else total_mib


def _memory(tree: Tree) -> tuple[MemoryKind | None, int | None, int | None]:
    """Kind, plannable and used MiB. A part without own memory has none of its own to report:
    some drivers then print the host's, others nothing, and both must give the same card.
    """
    if values.integrated(fields.word(tree, "name")):
        return "unified", None, None
    memory = plannable(fields.mib(tree, "total"), fields.mib(tree, "reserved"))
    used = fields.mib(tree, "used")
    if memory is None:
        return None, None, used
    ats = (fields.text(tree, "addressing") or "").upper() == "ATS"
    coherent = ats or fields.whole(tree, "numa_memory") is not None
    return ("coherent" if coherent else "dedicated"), memory, used


def _throttle(tree: Tree) -> tuple[Throttle, ...] | None:
    """Reasons that are active; None when the driver tells of none whether it is."""
    told: dict[str, str] = {}
    for group in ("clocks_event_reasons", "clocks_throttle_reasons"):
        found = fields.at(tree, group)
        for key, value in found.items() if isinstance(found, dict) else ():
            reason = re.sub(r"^clocks_(event|throttle)_reason_", "", key)
            if isinstance(value, str) and value.lower() in {"active", "not active"}:
                told.setdefault(reason, value.lower())
    known = [reason for reason in THROTTLES if reason in told]
    return tuple(THROTTLES[r] for r in known if told[r] == "active") if known else None


def _ecc(tree: Tree) -> Ecc:
    return Ecc(
        enabled=fields.switch(tree, "ecc"),
        corrected=_errors(tree, "volatile", CORRECTED, "single_bit"),
        uncorrected=_errors(tree, "volatile", UNCORRECTED, "double_bit"),
        corrected_aggregate=_errors(tree, "aggregate", CORRECTED, "single_bit"),
        uncorrected_aggregate=_errors(tree, "aggregate", UNCORRECTED, "double_bit"),
    )


def _errors(tree: Tree, span: str, parts: Sequence[str], old: str) -> int | None:
    """The sum of the counts that are told; cards before Turing print a total instead."""
    texts = [fields.at(tree, f"ecc_errors/{span}/{part}") for part in (*parts, f"{old}/total")]
    counts = [values.whole(text) for text in texts if isinstance(text, str)]
    known = [count for count in counts if count is not None and count >= 0]
    return sum(known) if known else None


def _repair(tree: Tree) -> Repair:
    pending = [fields.switch(tree, field) for field in ("channel_repair", "tpc_repair")]
    return Repair(
        corrected=fields.whole(tree, "repair_corrected"),
        uncorrected=fields.whole(tree, "repair_uncorrected"),
        pending=True if any(pending) else fields.switch(tree, "repair_pending"),
        failed=fields.switch(tree, "unrepairable") or fields.switch(tree, "repair_failed"),
    )


def _recovery(tree: Tree) -> str | None:
    """What the driver asks for; drivers before 565 have two switches instead."""
    if (action := fields.word(tree, "recovery")) is not None:
        return RECOVERIES.get(action.lower().replace("_", " "), action[:60])
    if fields.switch(tree, "reset_required"):
        return "GPU Reset"
    return "Drain and Reset" if fields.switch(tree, "drain_recommended") else None


def _fabric(tree: Tree) -> Fabric:
    cluster = (fields.word(tree, "cluster") or "").lower()
    return Fabric(
        state=STATES.get((fields.text(tree, "fabric_state") or "").strip("[]").lower()),
        status=_status(fields.text(tree, "fabric_status")),
        cluster_uuid=cluster if _UUID.fullmatch(cluster) else None,
        clique=fields.whole(tree, "clique"),
        bandwidth=_one_of(tree, "fabric_bandwidth", _BANDWIDTHS),
        health=_one_of(tree, "fabric_health", _HEALTHS),
        faults=tuple(_faults(tree)),
    )


def _status(text: str | None) -> str | None:
    """The driver's word for how joining ended: here an error is the value and not a lack of one."""
    return None if values.reason(text) == "absent" else (text or "")[:60]


_BANDWIDTHS: Final[dict[str, Literal["full", "degraded"]]] = {
    "full": "full",
    "degraded": "degraded",
}
_HEALTHS: Final[dict[str, Literal["healthy", "unhealthy", "limited"]]] = {
    "healthy": "healthy",
    "unhealthy": "unhealthy",
    "limited capacity": "limited",
    "limited": "limited",
}


def _one_of(tree: Tree, field: str, words: dict[str, T]) -> T | None:
    return words.get((fields.text(tree, field) or "").lower())


def _faults(tree: Tree) -> Iterator[str]:
    for field in ("route_unhealthy", "route_recovery", "access_timeout_recovery"):
        if fields.switch(tree, field):
            yield field
    wrong = fields.word(tree, "incorrect_configuration")
    if wrong is not None and wrong.lower() not in {"no", "false"}:
        yield f"incorrect configuration: {wrong[:60]}"


def _group(tree: Tree, key: str) -> list[Tree]:
    found = tree.get(key)
    return found if isinstance(found, list) else []


def _slices(tree: Tree) -> tuple[MigDevice, ...]:
    """MIG devices. Those in one GPU instance see all of its memory: each gets its part by SMs."""
    devices = [device for device in _group(tree, "mig_devices") if device]
    shares: dict[int | None, list[int | None]] = defaultdict(list)
    for device in devices:
        shares[fields.whole(device, "gi")].append(fields.whole(device, "multiprocessors"))
    return tuple(_slice(device, shares) for device in devices)


def _slice(device: Tree, shares: dict[int | None, list[int | None]]) -> MigDevice:
    gi, own = fields.whole(device, "gi"), fields.whole(device, "multiprocessors")
    siblings = shares[gi] if gi is not None else [own]
    known = [count for count in siblings if count]
    share = own / sum(known) if own and len(known) == len(siblings) else 1 / len(siblings)
    memory = plannable(fields.mib(device, "total"), fields.mib(device, "reserved"))
    used = fields.mib(device, "used")
    return MigDevice(
        uuid=fields.word(device, "uuid"),
        index=fields.whole(device, "index"),
        gi=gi,
        ci=fields.whole(device, "ci"),
        memory_mib=None if memory is None else int(memory * share),
        memory_used_mib=None if used is None else int(used * share),
        multiprocessors=own,
    )


def _processes(tree: Tree) -> tuple[Process, ...] | None:
    """Processes by pid, added up over the instances that they run in.

    One that computes and draws may be listed once for each, with the same memory: counted once.
    """
    listed = tree.get("processes")
    if not isinstance(listed, list):
        return () if isinstance(listed, str) and listed in {"", "None"} else None
    memory: dict[Key, dict[str | None, int | None]] = defaultdict(dict)
    for process in listed:
        pid, used = (
            values.whole(fields.text(process, "pid")),
            fields.mib(process, "process_memory"),
        )
        if pid is not None and pid > 0:
            by_type = memory[pid, fields.text(process, "gi"), fields.text(process, "ci")]
            kind = fields.text(process, "type")
            by_type[kind] = _sum(by_type.get(kind, 0), used)
    total: dict[int, int | None] = {}
    for (pid, _, _), by_type in memory.items():
        known = [used for used in by_type.values() if used is not None]
        total[pid] = _sum(total.get(pid, 0), max(known) if known else None)
    return tuple(Process(pid, used) for pid, used in total.items())


def _sum(first: int | None, second: int | None) -> int | None:
    return None if first is None or second is None else first + second


def _problems(tree: Tree) -> Iterator[str]:
    for field in VITAL:
        text = fields.text(tree, field)
        why = values.reason(text)
        if text is not None and why in {"lost", "error"}:
            told = f"driver says {text[:60]!r} for {field}"
            yield f"lost: {told}" if why == "lost" else told
