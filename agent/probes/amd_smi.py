"""`amd-smi list|static|metric|process --json`: the cards of four documents joined. Pure.

Called by agent/probes/amd.py. Each document may be missing or unreadable on its own, each value as
well. Documents are a list of cards, or an object with such a list as `gpu_data` (ROCm 7).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from agent.probes import amd_json, values
from agent.probes.amd_sysfs import pcie_generation, product_name, unique_id
from agent.probes.card import Clocks, Ecc, Gpu, Gpus, Pcie, Process, Throttle

MAX_CARDS: Final = 256
MAX_PROCESSES: Final = 4096
_UUID: Final = re.compile(
    r"([0-9a-f]{2})[0-9a-f]{6}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{2}([0-9a-f]{2})-([0-9a-f]{12})"
)
_VIOLATIONS: Final[Mapping[str, Throttle]] = {
    "socket_thermal": "hw_thermal",
    "vr_thermal": "hw_thermal",
    "hbm_thermal": "hw_thermal",
    "prochot": "hw_slowdown",
    "ppt": "sw_power_cap",
}


@dataclass(frozen=True, slots=True)
class Documents:
    """What the four calls printed; empty for one that printed nothing."""

    listed: str = ""
    static: str = ""
    metric: str = ""
    process: str = ""


def parse(documents: Documents) -> Gpus:
    """Cards by amd-smi's index. No card gives the first line that was printed as the reason."""
    listed, static, metric, process = (
        _records(text)
        for text in (documents.listed, documents.static, documents.metric, documents.process)
    )
    indices = sorted(listed.keys() | static.keys() | metric.keys())[:MAX_CARDS]
    if not indices:
        printed = documents.static or documents.listed or documents.metric
        return Gpus(error=f"amd-smi: {amd_json.said(printed)}", source="amd-smi")
    cards = (_card(i, listed.get(i), static.get(i), metric.get(i), process.get(i)) for i in indices)
    versions = (amd_json.text(static.get(i), "driver", "version") for i in indices)
    others = (amd_json.text(static.get(i), "driver", "driver_version") for i in indices)
    version = next((v for v in (*versions, *others) if v), None)
    return Gpus(tuple(cards), driver_version=values.version(version), source="amd-smi")


def _records(text: str) -> dict[int, Mapping[str, object]]:
    """Records by card index; one without an index has that of its place."""
    found = amd_json.document(text)
    if isinstance(found, Mapping):
        inner = found.get("gpu_data")
        found = inner if isinstance(inner, list) else [found] if "gpu" in found else []
    records: dict[int, Mapping[str, object]] = {}
    for place, record in enumerate(found if isinstance(found, list) else []):
        if isinstance(record, Mapping) and len(records) < MAX_CARDS:
            index = amd_json.whole(record, "gpu")
            records.setdefault(place if index is None else index, record)
    return records


def _card(index: int, listed: object, static: object, metric: object, process: object) -> Gpu:
    text, number = amd_json.text, amd_json.number
    power = [
        number(metric, ("power", f"{which}socket_power"), "w")
        for which in ("", "current_", "average_")
    ]
    numa = values.whole(text(static, "numa", "node"))
    hotspot = number(metric, ("temperature", "hotspot"), "c")
    return Gpu(
        vendor="amd",
        index=index,
        uuid=_uuid(listed, static),
        name=product_name(
            text(static, "asic", "market_name"),
            text(static, "board", "product_name"),
            device=text(static, "asic", "device_id"),
        ),
        pci_bus_id=values.pci_bus_id(
            text(static, "bus", "bdf") or text(listed, "bdf") or text(static, "bdf")
        ),
        memory_mib=amd_json.mib(metric, "mem_usage", "total_vram")
        or amd_json.mib(static, "vram", "size")
        or None,
        memory_used_mib=amd_json.mib(metric, "mem_usage", "used_vram"),
        utilization_percent=number(metric, ("usage", "gfx_activity"), "%"),
        # Hotspot (junction) is what the card throttles by; edge where it is not told.
        temperature_c=number(metric, ("temperature", "edge"), "c") if hotspot is None else hotspot,
        power_w=next((watts for watts in power if watts is not None), None),
        power_limit_w=_power_limit(static),
        clocks=_clocks(metric),
        throttle=_throttle(metric),
        pcie=_pcie(static, metric),
        ecc=Ecc(
            enabled=_ecc_enabled(static),
            corrected=amd_json.whole(metric, "ecc", "total_correctable_count"),
            uncorrected=amd_json.whole(metric, "ecc", "total_uncorrectable_count"),
        ),
        numa=numa if numa is not None and numa >= 0 else None,
        processes=_processes(process),
    )


def _uuid(listed: object, static: object) -> str | None:
    """As ROCR_VISIBLE_DEVICES takes it. amd-smi's own UUID has its bytes spread over the groups:
    `deff740f-0000-1000-8082-87300da37c72` is `GPU-de8287300da37c72`.
    """
    hip = amd_json.text(listed, "hip_uuid") or ""
    if re.fullmatch(r"GPU-[0-9a-fA-F]{16}", hip):
        return hip[:4] + hip[4:].lower()
    serial = unique_id(amd_json.text(static, "asic", "asic_serial"))
    if serial is not None:
        return serial
    told = (amd_json.text(listed, "uuid") or amd_json.text(static, "uuid") or "").lower()
    match = _UUID.fullmatch(told)
    return unique_id("".join(match.groups())) if match else None


def _power_limit(static: object) -> float | None:
    """The limit in force, else the highest; ROCm 7 has them below `ppt0`."""
    limits = (
        ("socket_power",),
        ("ppt0", "socket_power_limit"),
        ("max_power",),
        ("ppt0", "max_power_limit"),
    )
    found = (amd_json.number(static, ("limit", *keys), "w") for keys in limits)
    return next((watts for watts in found if watts is not None), None)


def _clocks(metric: object) -> Clocks:
    return Clocks(
        sm=_fastest(metric, "gfx", "clk"),
        sm_max=_fastest(metric, "gfx", "max_clk"),
        memory=_fastest(metric, "mem", "clk"),
        memory_max=_fastest(metric, "mem", "max_clk"),
    )


def _fastest(metric: object, kind: str, field: str) -> int | None:
    """Each die of a card has its own clock (`gfx_0` to `gfx_7`); the fastest in MHz."""
    names = (kind, *(f"{kind}_{die}" for die in range(16)))
    found = (amd_json.number(metric, ("clock", name, field), "mhz") for name in names)
    return max((int(mhz) for mhz in found if mhz is not None and 0 <= mhz < 1e6), default=None)


def _throttle(metric: object) -> tuple[Throttle, ...] | None:
    """Reasons that are active now; None when the driver does not tell."""
    told = {
        name: state.upper()
        for name in _VIOLATIONS
        if (state := amd_json.text(metric, "throttle", f"{name}_violation_status")) is not None
    }
    calm = (amd_json.text(metric, "power", "throttle_status") or "").upper() == "UNTHROTTLED"
    if not told and not calm:
        return None
    active = (_VIOLATIONS[name] for name, state in told.items() if state == "ACTIVE")
    return tuple(dict.fromkeys(active))


def _pcie(static: object, metric: object) -> Pcie:
    speed = amd_json.number(metric, ("pcie", "speed"), "gt/s")
    fastest = amd_json.number(static, ("bus", "max_pcie_speed"), "gt/s")
    return Pcie(
        gen=pcie_generation(speed),
        gen_max=pcie_generation(fastest),
        width=amd_json.whole(metric, "pcie", "width") or None,
        width_max=amd_json.whole(static, "bus", "max_pcie_width") or None,
    )


def _ecc_enabled(static: object) -> bool | None:
    """Whether the memory controller (UMC) corrects errors: by name, or in a list of blocks."""
    blocks = amd_json.at(static, "ras", "ecc_block_state")
    if isinstance(blocks, list):
        named = (block for block in blocks[:64] if amd_json.text(block, "block") == "UMC")
        state = next((amd_json.text(block, "status") for block in named), None)
    else:
        state = amd_json.text(blocks, "UMC")
    return {"ENABLED": True, "DISABLED": False}.get((state or "").upper())


def _processes(process: object) -> tuple[Process, ...] | None:
    """Processes with their VRAM; a card without any lists a sentence instead of one."""
    listed = amd_json.at(process, "process_list")
    if not isinstance(listed, list):
        return None
    found: dict[int, int | None] = {}
    for entry in listed[:MAX_PROCESSES]:
        info = amd_json.at(entry, "process_info")
        info = info if isinstance(info, Mapping) else entry
        pid = amd_json.whole(info, "pid")
        if pid:
            used = amd_json.mib(info, "memory_usage", "vram_mem")
            found[pid] = amd_json.mib(info, "vram_mem") if used is None else used
    return tuple(Process(pid, used) for pid, used in found.items())
