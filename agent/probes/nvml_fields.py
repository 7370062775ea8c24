"""What is asked of NVML for each card: one small reader a field, each failing on its own.

Part of NVML's child process (nvml_child.py), so nothing but the standard library and the binding is
imported. Values are sent as the driver has them; nvml_card.py turns them into a card. FAST is asked
with every sync, SLOW once a minute.
"""

from __future__ import annotations

from ctypes import byref
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Final

from agent.probes.nvml_slices import CARD_IS_BROKEN, memory, processes, quiet, slices, text

if TYPE_CHECKING:
    from collections.abc import Callable

    Reader = Callable[[Any, Any], object]

UNKNOWN_CALL: Final = frozenset({2, 13, 25, None})
"""Invalid argument, function not found, argument version: an older driver or library. None: the
binding itself does not have the call."""
NO_MORE_LINKS: Final = frozenset({2, 3})
NO_LINK_ANSWERS: Final = CARD_IS_BROKEN | {13}
MAX_LINKS: Final = 36
CPU_WORDS: Final = 64
"""Words of 64 CPUs for the affinity mask: a mask that is too short is an error."""
RECOVERY_ACTION: Final = 230
NVLINK_SPEED: Final = 164
"""Field ids. The speed is per link, in MB/s for each direction."""


def newest(*calls: Callable[[], object]) -> object:
    """The answer of the first call that this driver knows; newest first."""
    for call in calls[:-1]:
        try:
            return call()
        except Exception as error:
            if getattr(error, "value", None) not in UNKNOWN_CALL:
                raise
    return calls[-1]()


def temperature(nvml: Any, handle: Any) -> object:
    """Degrees Celsius; the call without a version goes away with CUDA 14."""
    return newest(
        lambda: nvml.nvmlDeviceGetTemperatureV(handle, nvml.NVML_TEMPERATURE_GPU),
        lambda: nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU),
    )


def throttle(nvml: Any, handle: Any) -> object:
    """The bit mask of reasons that hold clocks down; renamed in driver 535."""
    return newest(
        lambda: nvml.nvmlDeviceGetCurrentClocksEventReasons(handle),
        lambda: nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle),
    )


def remapped(nvml: Any, handle: Any) -> list[int]:
    """Rows remapped after correctable and uncorrectable errors, pending, failed (Ampere on)."""
    return [int(value) for value in nvml.nvmlDeviceGetRemappedRows(handle)[:4]]


def retired(cause: int) -> Reader:
    """How many pages are retired for a cause: 0 many single-bit errors, 1 a double-bit error."""
    return lambda nvml, handle: len(nvml.nvmlDeviceGetRetiredPages(handle, cause))


def errors(kind: int, counter: int) -> Reader:
    """ECC errors: kind 0 corrected, 1 uncorrected; counter 0 since driver load, 1 for ever."""
    return lambda nvml, handle: nvml.nvmlDeviceGetTotalEccErrors(handle, kind, counter)


def field_value(answer: Any) -> object:
    """The member of a field's union that its type names; None when the driver refused the field."""
    if answer.nvmlReturn != 0:
        return None
    members = ("dVal", "uiVal", "ulVal", "ullVal", "sllVal", "siVal", "usVal")
    known = 0 <= answer.valueType < len(members)
    return getattr(answer.value, members[answer.valueType]) if known else None


def recovery_action(nvml: Any, handle: Any) -> object:
    """The number of the action that the driver asks for; 0 is none."""
    return field_value(nvml.nvmlDeviceGetFieldValues(handle, [RECOVERY_ACTION])[0])


def fabric(nvml: Any, handle: Any) -> object:
    """State, status, UUID and clique; health from driver 550 on, its summary from 590 on."""

    def ask(structure: str, call: str) -> dict[str, object]:
        info = getattr(nvml, structure)()
        getattr(nvml, call)(handle, byref(info))
        digits = bytes(info.clusterUuid).hex()
        cuts = (0, 8, 12, 16, 20, 32)
        return {
            "state": info.state,
            "status": status(nvml, info.status),
            "uuid": "-".join(digits[a:b] for a, b in pairwise(cuts)),
            "clique": info.cliqueId,
            "mask": getattr(info, "healthMask", None),
            "summary": getattr(info, "healthSummary", None),
        }

    return newest(
        lambda: ask("c_nvmlGpuFabricInfo_v3_t", "nvmlDeviceGetGpuFabricInfoV"),
        lambda: ask("c_nvmlGpuFabricInfo_v2_t", "nvmlDeviceGetGpuFabricInfoV"),
        lambda: ask("c_nvmlGpuFabricInfo_t", "nvmlDeviceGetGpuFabricInfo"),
    )


def status(nvml: Any, code: int) -> str:
    """`Success`, or what the library calls the error."""
    if code == 0:
        return "Success"
    return text(quiet(lambda: nvml.nvmlErrorString(code)) or f"error {code}")


def nvlinks(nvml: Any, handle: Any) -> list[dict[str, object]]:
    """Each link: whether it is up, the far end's kind and address, and its speed in MB/s."""
    links: list[dict[str, object]] = []
    for link in range(MAX_LINKS):
        active: bool | None = None
        try:
            active = bool(nvml.nvmlDeviceGetNvLinkState(handle, link))
        except nvml.NVMLError as error:
            if error.value in NO_MORE_LINKS:
                break
            if error.value in NO_LINK_ANSWERS:
                raise
        links.append({"link": link, "active": active, **far_end(nvml, handle, link)})
    wanted = [(NVLINK_SPEED, link["link"]) for link in links]
    answers = quiet(lambda: nvml.nvmlDeviceGetFieldValues(handle, wanted)) if wanted else None
    for link_facts, answer in zip(links, answers or (), strict=False):
        link_facts["mb_per_s"] = field_value(answer)
    return links


def far_end(nvml: Any, handle: Any, link: int) -> dict[str, object]:
    """What a link leads to; both are unknown for a link that is down."""
    return {
        "type": quiet(lambda: nvml.nvmlDeviceGetNvLinkRemoteDeviceType(handle, link)),
        "bus": quiet(lambda: text(nvml.nvmlDeviceGetNvLinkRemotePciInfo(handle, link).busId)),
    }


def cpu_affinity(nvml: Any, handle: Any) -> list[int]:
    """CPUs near the card, as the driver sees them."""
    return bits(nvml.nvmlDeviceGetCpuAffinity(handle, CPU_WORDS))


def numa(nvml: Any, handle: Any) -> int | None:
    """The NUMA node whose memory is nearest; on coherent machines the card's own come after it."""
    nodes = bits(nvml.nvmlDeviceGetMemoryAffinity(handle, CPU_WORDS, nvml.NVML_AFFINITY_SCOPE_NODE))
    return nodes[0] if nodes else None


def bits(words: Any) -> list[int]:
    """Numbers of the bits that are set in words of 64."""
    found = enumerate(int(word) for word in words)
    return [64 * at + bit for at, word in found if word for bit in range(64) if word >> bit & 1]


FAST: Final[dict[str, Reader]] = {
    "uuid": lambda nvml, h: text(nvml.nvmlDeviceGetUUID(h)),
    "pci_bus_id": lambda nvml, h: text(nvml.nvmlDeviceGetPciInfo(h).busId),
    "name": lambda nvml, h: text(nvml.nvmlDeviceGetName(h)),
    "memory": memory,
    "utilization_percent": lambda nvml, h: nvml.nvmlDeviceGetUtilizationRates(h).gpu,
    "temperature_c": temperature,
    "power_mw": lambda nvml, h: nvml.nvmlDeviceGetPowerUsage(h),
    "throttle": throttle,
    "processes": processes,
}
SLOW: Final[dict[str, Reader]] = {
    "power_limit_mw": lambda nvml, h: nvml.nvmlDeviceGetPowerManagementLimit(h),
    "sm_mhz": lambda nvml, h: nvml.nvmlDeviceGetClockInfo(h, nvml.NVML_CLOCK_SM),
    "sm_max_mhz": lambda nvml, h: nvml.nvmlDeviceGetMaxClockInfo(h, nvml.NVML_CLOCK_SM),
    "memory_mhz": lambda nvml, h: nvml.nvmlDeviceGetClockInfo(h, nvml.NVML_CLOCK_MEM),
    "memory_max_mhz": lambda nvml, h: nvml.nvmlDeviceGetMaxClockInfo(h, nvml.NVML_CLOCK_MEM),
    "pcie_gen": lambda nvml, h: nvml.nvmlDeviceGetCurrPcieLinkGeneration(h),
    "pcie_gen_max": lambda nvml, h: nvml.nvmlDeviceGetMaxPcieLinkGeneration(h),
    "pcie_width": lambda nvml, h: nvml.nvmlDeviceGetCurrPcieLinkWidth(h),
    "pcie_width_max": lambda nvml, h: nvml.nvmlDeviceGetMaxPcieLinkWidth(h),
    "persistence": lambda nvml, h: bool(nvml.nvmlDeviceGetPersistenceMode(h)),
    "ecc": lambda nvml, h: bool(nvml.nvmlDeviceGetEccMode(h)[0]),
    "corrected": errors(0, 0),
    "uncorrected": errors(1, 0),
    "corrected_aggregate": errors(0, 1),
    "uncorrected_aggregate": errors(1, 1),
    "remapped": remapped,
    "retired_corrected": retired(0),
    "retired_uncorrected": retired(1),
    "retired_pending": lambda nvml, h: bool(nvml.nvmlDeviceGetRetiredPagesPendingStatus(h)),
    "recovery_action": recovery_action,
    "addressing": lambda nvml, h: nvml.nvmlDeviceGetAddressingMode(h),
    "c2c": lambda nvml, h: bool(nvml.nvmlDeviceGetC2cModeInfoV(h).isC2cEnabled),
    "bus_type": lambda nvml, h: nvml.nvmlDeviceGetBusType(h),
    "numa": numa,
    "numa_memory": lambda nvml, h: nvml.nvmlDeviceGetNumaNodeId(h),
    "cpu_affinity": cpu_affinity,
    "mig": lambda nvml, h: bool(nvml.nvmlDeviceGetMigMode(h)[0]),
    "slices": slices,
    "nvlinks": nvlinks,
    "fabric": fabric,
}
