"""A driver library that misbehaves as told: stands in for NVIDIA's binding in a child process.

SCENARIO, by a card's number as text ("0/1" is MIG device 1 of card 0; "0:3" a pair, for topology):

    {"count": 8, "later": 7,                    cards, and cards after the library is opened anew
     "fail": {"3": {"power_mw": 15, "*": 999}}, error codes by field; "pair" for topology
     "crash": {"5": "memory"}, "hang": {"2": ...},
     "values": {"0": {"name": "..."}}, "init": 18, "system": 18,
     "mig": {"0": [[{"uuid": ...}, ...], ...]}  layouts, one for each time that device 0 is opened
     "events": [[0, 79], 15, ...],              XIDs by card, or error codes of the wait
     "file": "path"}                            a scenario that replaces this one when opened
"""

from __future__ import annotations

import ctypes
import json
import threading
from pathlib import Path
from types import SimpleNamespace as Record

SCENARIO: dict = {}
OPENED = {"library": 0}

NVML_TEMPERATURE_GPU = 0
NVML_CLOCK_SM = 1
NVML_CLOCK_MEM = 2
NVML_AFFINITY_SCOPE_NODE = 0
nvmlMemory_v2 = 2
LINKS = 18
SWITCH = 2
ZERO = "00000000-0000-0000-0000-000000000000"
MESSAGES = {
    2: "Invalid Argument",
    3: "Not Supported",
    4: "Insufficient Permissions",
    6: "Not Found",
    10: "Timeout",
    13: "Function Not Found",
    15: "GPU is lost",
    18: "RM mismatch",
    25: "Argument Version Mismatch",
}


class NVMLError(Exception):
    def __init__(self, value: int) -> None:
        self.value = value

    def __str__(self) -> str:
        return MESSAGES.get(self.value, "Unknown Error")


class c_nvmlGpuFabricInfo_t(ctypes.Structure):
    _fields_ = [
        ("clusterUuid", ctypes.c_uint8 * 16),
        ("status", ctypes.c_uint),
        ("cliqueId", ctypes.c_uint32),
        ("state", ctypes.c_uint),
    ]


class c_nvmlGpuFabricInfo_v2_t(c_nvmlGpuFabricInfo_t):
    _fields_ = [("healthMask", ctypes.c_uint32)]


class c_nvmlGpuFabricInfo_v3_t(c_nvmlGpuFabricInfo_v2_t):
    _fields_ = [("healthSummary", ctypes.c_uint8)]


def _at(call: str, handle: object, value: object = None) -> object:
    """What a call answers for a card, or what it does instead."""
    key = str(handle)
    if SCENARIO.get("crash", {}).get(key) == call:
        ctypes.string_at(0)
    if SCENARIO.get("hang", {}).get(key) == call:
        threading.Event().wait()
    failures = SCENARIO.get("fail", {}).get(key, {})
    if code := failures.get(call, failures.get("*")):
        raise NVMLError(code)
    return SCENARIO.get("values", {}).get(key, {}).get(call, value)


def _field(call: str, value: object) -> object:
    return lambda handle, *_ignored, **_named: _at(call, handle, value)


def nvmlInit() -> None:
    if path := SCENARIO.get("file"):
        SCENARIO.update(json.loads(Path(path).read_text()))
    OPENED["library"] += 1
    if code := SCENARIO.get("init"):
        raise NVMLError(code)


def nvmlShutdown() -> None:
    SCENARIO["count"] = SCENARIO.get("later", SCENARIO.get("count", 1))


def nvmlDeviceGetCount() -> int:
    return SCENARIO.get("count", 1)


def nvmlErrorString(code: int) -> str:
    return str(NVMLError(code))


def nvmlSystemGetDriverVersion() -> bytes:
    return SCENARIO.get("driver", "590.48.01").encode()


def nvmlSystemGetCudaDriverVersion_v2() -> int:
    if code := SCENARIO.get("system"):
        raise NVMLError(code)
    return 13010


def nvmlDeviceGetHandleByIndex(index: int) -> int:
    _at("handle", index)
    return index


def nvmlDeviceGetUUID(handle: object) -> str:
    if "/" in str(handle):
        return _slice(handle)["uuid"]
    return _at("uuid", handle, f"GPU-{handle:08d}-aaaa-bbbb-cccc-0123456789ab")


def nvmlDeviceGetName(handle: object) -> bytes:
    default = _slice(handle).get("name", "") if "/" in str(handle) else "NVIDIA H100 80GB HBM3"
    return _at("name", handle, default).encode()


def nvmlDeviceGetPciInfo(index: int) -> Record:
    return Record(busId=_at("pci_bus_id", index, f"000000{index:02X}:1B:00.0").encode())


def nvmlDeviceGetMemoryInfo(handle: object, version: int | None = None) -> Record:
    if version and (code := SCENARIO.get("old")):
        raise NVMLError(code)
    default = [81559 * 2**20, 1000 * 2**20, 551 * 2**20]
    if "/" in str(handle):
        default = _slice(handle).get("memory", default)
    total, used, reserved = _at("memory", handle, default)
    return Record(total=total, used=used, reserved=reserved)


def nvmlDeviceGetUtilizationRates(index: int) -> Record:
    return Record(gpu=_at("utilization_percent", index, 7))


def nvmlDeviceGetTemperature(index: int, _sensor: int) -> int:
    return _at("temperature_c", index, 36)


def nvmlDeviceGetTemperatureV(_index: int, _sensor: int) -> int:
    raise NVMLError(13)


def nvmlDeviceGetComputeRunningProcesses(handle: object) -> list[Record]:
    listed = _at("processes", handle, [])
    return [
        Record(pid=pid, usedGpuMemory=used, gpuInstanceId=gi, computeInstanceId=0)
        for pid, used, gi in ([*process, 0xFFFFFFFF][:3] for process in listed)
    ]


nvmlDeviceGetGraphicsRunningProcesses = nvmlDeviceGetComputeRunningProcesses
nvmlDeviceGetCurrentClocksEventReasons = _field("throttle", 0x1)
nvmlDeviceGetPowerUsage = _field("power_mw", 66920)
nvmlDeviceGetPowerManagementLimit = _field("power_limit_mw", 700000)
nvmlDeviceGetCurrPcieLinkGeneration = _field("pcie_gen", 5)
nvmlDeviceGetMaxPcieLinkGeneration = _field("pcie_gen_max", 5)
nvmlDeviceGetCurrPcieLinkWidth = _field("pcie_width", 16)
nvmlDeviceGetMaxPcieLinkWidth = _field("pcie_width_max", 16)
nvmlDeviceGetPersistenceMode = _field("persistence", 1)
nvmlDeviceGetEccMode = _field("ecc", [1, 1])
nvmlDeviceGetRemappedRows = _field("remapped", [0, 0, 0, 0])
nvmlDeviceGetRetiredPagesPendingStatus = _field("retired_pending", 0)
nvmlDeviceGetAddressingMode = _field("addressing", 0)
nvmlDeviceGetBusType = _field("bus_type", 2)
nvmlDeviceGetMigMode = _field("mig", [0, 0])


def nvmlDeviceGetNumaNodeId(index: int) -> int:
    if (node := _at("numa_memory", index)) is None:
        raise NVMLError(3)
    return node


def nvmlDeviceGetClockInfo(index: int, kind: int) -> int:
    return _at("sm_mhz", index, 1980) if kind == NVML_CLOCK_SM else _at("memory_mhz", index, 2619)


def nvmlDeviceGetMaxClockInfo(index: int, kind: int) -> int:
    if kind == NVML_CLOCK_SM:
        return _at("sm_max_mhz", index, 1980)
    return _at("memory_max_mhz", index, 2619)


def nvmlDeviceGetTotalEccErrors(index: int, kind: int, counter: int) -> int:
    name = ("corrected", "uncorrected")[kind] + ("", "_aggregate")[counter]
    return _at(name, index, 0)


def nvmlDeviceGetRetiredPages(index: int, cause: int) -> list[int]:
    return [0] * _at(("retired_corrected", "retired_uncorrected")[cause], index, 0)


def nvmlDeviceGetC2cModeInfoV(index: int) -> Record:
    return Record(isC2cEnabled=_at("c2c", index, 0))


def _mask(numbers: list[int], words: int) -> list[int]:
    return [
        sum(1 << (n - 64 * w) for n in numbers if 64 * w <= n < 64 * w + 64) for w in range(words)
    ]


def nvmlDeviceGetCpuAffinity(index: int, words: int) -> list[int]:
    return _mask(_at("cpu_affinity", index, [*range(56), *range(112, 168)]), words)


def nvmlDeviceGetMemoryAffinity(index: int, words: int, _scope: int) -> list[int]:
    return _mask([_at("numa", index, 0)], words)


def nvmlDeviceGetFieldValues(index: int, fields: list) -> list[Record]:
    if fields == [230]:
        code, value = _at("recovery_action", index, [0, 0])
        return [Record(nvmlReturn=code, valueType=1, value=Record(uiVal=value))]
    speed = _at("speed", index, 26562)
    return [Record(nvmlReturn=0, valueType=1, value=Record(uiVal=speed)) for _ in fields]


def nvmlDeviceGetNvLinkState(index: int, link: int) -> int:
    links = _at("nvlinks", index, [1] * LINKS)
    if link >= len(links):
        raise NVMLError(3)
    return links[link]


def nvmlDeviceGetNvLinkRemoteDeviceType(index: int, link: int) -> int:
    return _at("link_types", index, [SWITCH] * 36)[link]


def nvmlDeviceGetNvLinkRemotePciInfo(index: int, link: int) -> Record:
    return Record(busId=_at("link_peers", index, ["00000000:86:00.0"] * 36)[link].encode())


def nvmlDeviceGetTopologyCommonAncestor(one: int, two: int) -> int:
    return _at("pair", f"{one}:{two}", 50)


def nvmlDeviceGetGpuFabricInfo(index: int, reference: object) -> None:
    info = reference._obj
    default = {"state": 3, "status": 0, "uuid": ZERO, "clique": 0, "mask": 2, "summary": 1}
    told = _at("fabric", index, default)
    ctypes.memmove(info.clusterUuid, bytes.fromhex(told["uuid"].replace("-", "")), 16)
    info.state, info.status, info.cliqueId = told["state"], told["status"], told["clique"]
    if isinstance(info, c_nvmlGpuFabricInfo_v2_t):
        info.healthMask = told["mask"]
    if isinstance(info, c_nvmlGpuFabricInfo_v3_t):
        info.healthSummary = told["summary"]


def nvmlDeviceGetGpuFabricInfoV(index: int, reference: object) -> None:
    newest = SCENARIO.get("fabric_version", 3)
    version = {c_nvmlGpuFabricInfo_v3_t: 3, c_nvmlGpuFabricInfo_v2_t: 2}[type(reference._obj)]
    if newest < version:
        raise NVMLError(13 if newest < 2 else 25)
    nvmlDeviceGetGpuFabricInfo(index, reference)


def _slice(handle: object) -> dict:
    """A device of the layout that is in force; one that has gone is not found any more."""
    card, _, number = str(handle).partition("/")
    layout = SCENARIO["mig"][card]
    now = layout[min(OPENED.get(card, 1) - 1, len(layout) - 1)]
    if int(number) >= len(now) or now[int(number)] is None:
        raise NVMLError(6)
    return now[int(number)]


def nvmlDeviceGetMaxMigDeviceCount(_index: int) -> int:
    return 7


def nvmlDeviceGetMigDeviceHandleByIndex(index: int, number: int) -> str:
    if number == 0:
        OPENED[str(index)] = OPENED.get(str(index), 0) + 1
    _slice(f"{index}/{number}")
    return f"{index}/{number}"


def nvmlDeviceGetGpuInstanceId(handle: str) -> int:
    return _slice(handle)["gi"]


def nvmlDeviceGetComputeInstanceId(handle: str) -> int:
    return _slice(handle).get("ci", 0)


def nvmlDeviceGetAttributes(handle: str) -> Record:
    device = _slice(handle)
    return Record(
        memorySizeMB=device.get("size", 9984),
        multiprocessorCount=16,
        gpuInstanceSliceCount=device.get("slices", 1),
        computeInstanceSliceCount=device.get("parts", device.get("slices", 1)),
    )


def nvmlEventSetCreate() -> object:
    return object()


def nvmlDeviceRegisterEvents(index: int, _kinds: int, _events: object) -> None:
    _at("events", index)


def nvmlEventSetWait(_events: object, _ms: int) -> Record:
    waiting = SCENARIO.get("events", [])
    event = waiting.pop(0) if waiting else SCENARIO.get("then", 10)
    if event == "hang" or (event == 10 and not waiting):
        threading.Event().wait()
    if isinstance(event, int):
        raise NVMLError(event)
    if event == "crash":
        ctypes.string_at(0)
    return Record(device=event[0], eventType=8, eventData=event[1])
