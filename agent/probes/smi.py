"""`nvidia-smi -q -x` as GPUs: the way in where NVML's Python library cannot be used.

Called by inventory.py. The parser knows the document types v10 to v13 (drivers 418 to 610), takes
every field on its own and ignores what it does not know. Pure, and raises nothing.
"""

from __future__ import annotations

import re
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Final
from xml.etree import ElementTree as ET

from agent.probes import values
from agent.probes.card import Gpu, Gpus, Process
from agent.probes.root import bounded

if TYPE_CHECKING:
    from collections.abc import Iterator

    from agent.probes.root import Root

TIMEOUT_S: Final = 20.0
"""Without the persistence daemon the driver wakes every card first: seconds on eight of them."""
PARSE_TIMEOUT_S: Final = 5.0
MAX_GPUS: Final = 256
_LOST: Final = re.compile(
    r"(?:handle for|GPU)\s{0,4}(?:GPU\s{0,4})?"
    r"((?:[0-9A-Fa-f]{4,8}:)?[0-9A-Fa-f]{2}:[0-9A-Fa-f]{2}\.[0-7])"
    r"[^\n]{0,40}?(Unknown Error|GPU is lost[^\n]{0,80}|lost[^\n]{0,80})",
)
_ECC: Final = re.compile(r"(sram|dram)_uncorrectable(_parity|_secded)?")


def parse(text: str) -> Gpus:
    """Cards of `-q -x` output. Text that is no document gives no cards and says why.

    Lines about lost cards may stand before, after or instead of the document.
    """
    lost = tuple(_lost_cards(text))
    begin, end = text.find("<nvidia_smi_log"), text.rfind("</nvidia_smi_log>")
    if begin < 0 or end < begin:
        first = next((line.strip() for line in text.splitlines() if line.strip()), "no output")
        return Gpus(cards=lost, error=f"nvidia-smi -q -x: {first[:200]}")
    try:
        # Only the element itself, without the document type: no entity can be declared.
        log = ET.fromstring(text[begin : end + len("</nvidia_smi_log>")])  # noqa: S314
    except (ET.ParseError, ValueError) as error:
        return Gpus(cards=lost, error=f"nvidia-smi -q -x: not readable: {error}")
    cards = [_card(gpu, index) for index, gpu in enumerate(log.findall("gpu")[:MAX_GPUS])]
    known = {card.pci_bus_id for card in cards}
    return Gpus(
        cards=(*cards, *(card for card in lost if card.pci_bus_id not in known)),
        driver_version=_version(log, "kmd_version", "driver_version"),
        cuda_version=_version(log, "cuda_umd_version", "cuda_version"),
    )


def _lost_cards(text: str) -> Iterator[Gpu]:
    for match in islice(_LOST.finditer(text), MAX_GPUS):
        why = match[2].strip().rstrip(".")
        yield Gpu(
            pci_bus_id=values.pci_bus_id(match[1]), problems=(f"lost: nvidia-smi says {why!r}",)
        )


def _version(log: ET.Element, *tags: str) -> str | None:
    found = (values.version(_text(log, tag)) for tag in tags)
    return next((version for version in found if version), None)


def _text(element: ET.Element, *paths: str) -> str | None:
    """The first of several spellings of a field that is there, stripped."""
    for path in paths:
        text = element.findtext(path)
        if text is not None and text.strip():
            return text.strip()
    return None


def _card(gpu: ET.Element, position: int) -> Gpu:
    total = values.mib(_text(gpu, "fb_memory_usage/total"))
    reserved = values.mib(_text(gpu, "fb_memory_usage/reserved"))
    power = _text(
        gpu,
        "gpu_power_readings/instant_power_draw",
        "gpu_power_readings/power_draw",
        "gpu_power_readings/average_power_draw",
        "power_readings/power_draw",
    )
    mig = (_text(gpu, "mig_mode/current_mig") or "").lower()
    return Gpu(
        uuid=_identifier(_text(gpu, "uuid")),
        index=position,
        name=_identifier(_text(gpu, "product_name")),
        pci_bus_id=values.pci_bus_id(_text(gpu, "pci/pci_bus_id") or gpu.get("id")),
        memory_mib=plannable(total, reserved),
        memory_used_mib=values.mib(_text(gpu, "fb_memory_usage/used")),
        utilization_percent=values.number(_text(gpu, "utilization/gpu_util"), "%"),
        temperature_c=values.number(_text(gpu, "temperature/gpu_temp"), "c"),
        power_w=values.number(power, "w"),
        mig={"enabled": True, "disabled": False}.get(mig),
        processes=_processes(gpu),
        problems=tuple(dict.fromkeys(_problems(gpu))),
    )


def plannable(total_mib: int | None, reserved_mib: int | None) -> int | None:
    """Memory to plan with: the driver keeps `reserved` for itself. A total of 0 is unknown."""
    if not total_mib:
        return None
    return total_mib - reserved_mib if reserved_mib and reserved_mib < total_mib else total_mib


def _identifier(text: str | None) -> str | None:
    return None if text is None or values.reason(text) is not None else text[:200]


def _processes(gpu: ET.Element) -> tuple[Process, ...] | None:
    """Processes by pid; one that is listed for several instances has its memory added up."""
    listed = gpu.find("processes")
    if listed is None or values.reason(listed.text) == "not_supported":
        return None
    memory: dict[int, int | None] = {}
    for info in listed.findall("process_info"):
        pid, used = values.whole(_text(info, "pid")), values.mib(_text(info, "used_memory"))
        if pid is not None:
            before = memory.get(pid, 0)
            memory[pid] = None if used is None or before is None else before + used
    return tuple(Process(pid, used) for pid, used in memory.items())


def _problems(gpu: ET.Element) -> Iterator[str]:
    for path in ("uuid", "fb_memory_usage/total", "utilization/gpu_util", "temperature/gpu_temp"):
        text = _text(gpu, path)
        if text is not None and values.reason(text) in {"lost", "error"}:
            yield f"driver says {text[:60]!r} for {path.rsplit('/', maxsplit=1)[-1]}"
    if _text(gpu, "remapped_rows/remapped_row_pending") == "Yes":
        yield "memory row remap pending: reset the GPU"
    if _text(gpu, "remapped_rows/remapped_row_failure") == "Yes":
        yield "memory row remap failed: replace the GPU"
    if _text(gpu, "retired_pages/pending_retirement", "retired_pages/pending_blacklist") == "Yes":
        yield "memory page retirement pending: reset the GPU"
    if errors := _uncorrectable(gpu):
        yield f"{errors} uncorrectable ECC errors since the driver was loaded: reset the GPU"
    action = _text(gpu, "gpu_recovery_action")
    if action is not None and values.reason(action) is None:
        yield f"driver asks for recovery: {action[:60]}"


def _uncorrectable(gpu: ET.Element) -> int:
    """Volatile uncorrectable errors. Aggregate counts are history and never heal: not counted."""
    volatile = gpu.find("ecc_errors/volatile")
    if volatile is None:
        return 0
    counts = [values.whole(field.text) for field in volatile if _ECC.fullmatch(field.tag)]
    counts.append(values.whole(_text(volatile, "double_bit/total")))
    return sum(count for count in counts if count is not None and count > 0)


async def read(root: Root, timeout_s: float = TIMEOUT_S) -> Gpus:
    """Run nvidia-smi found in the root's PATH. No such tool means no cards and no error."""
    result = await root.run(["nvidia-smi", "-q", "-x"], timeout_s)
    if result.exit_code is None and not result.stdout:
        missing = result.error is None or result.error.endswith("no such program in PATH")
        return Gpus(error=None if missing else result.error)
    text = f"{result.stdout}\n{result.stderr}"
    # In a thread: a tool gone wild prints megabytes, and reading them must not hold up the loop.
    found = await bounded(
        partial(parse, text), key="nvidia-smi document", timeout_s=PARSE_TIMEOUT_S
    )
    return found or Gpus(error=f"nvidia-smi -q -x: {len(text)} characters not read in time")
