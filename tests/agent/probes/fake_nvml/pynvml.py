"""A driver library that misbehaves as told: stands in for NVIDIA's binding in a child process.

SCENARIO: {"count": 8, "fail": {"3": {"power": 15}}, "crash": {"5": "memory"}, "hang": {"2": ...},
"values": {"0": {"name": "..."}}, "init": 18}. Calls are named as in CALLS below.
"""

from __future__ import annotations

import ctypes
import threading
from types import SimpleNamespace as Record

SCENARIO: dict = {}

NVML_ERROR_INVALID_ARGUMENT = 2
NVML_ERROR_LIBRARY_NOT_FOUND = 12
NVML_TEMPERATURE_GPU = 0
NVML_MEMORY_ERROR_TYPE_UNCORRECTED = 1
NVML_VOLATILE_ECC = 0
nvmlMemory_v2 = 2

MESSAGES = {3: "Not Supported", 4: "Insufficient Permissions", 15: "GPU is lost", 18: "RM mismatch"}


class NVMLError(Exception):
    def __init__(self, value: int) -> None:
        self.value = value

    def __str__(self) -> str:
        return MESSAGES.get(self.value, "Unknown Error")


class NVMLError_FunctionNotFound(NVMLError):
    pass


class NVMLError_ArgumentVersionMismatch(NVMLError):
    pass


def _at(call: str, index: int, value: object) -> object:
    """What a call answers for a card, or what it does instead."""
    key = str(index)
    if SCENARIO.get("crash", {}).get(key) == call:
        ctypes.string_at(0)
    if SCENARIO.get("hang", {}).get(key) == call:
        threading.Event().wait()
    failures = SCENARIO.get("fail", {}).get(key, {})
    if code := failures.get(call, failures.get("*")):
        raise NVMLError(code)
    return SCENARIO.get("values", {}).get(key, {}).get(call, value)


def nvmlInit() -> None:
    if code := SCENARIO.get("init"):
        raise NVMLError(code)


def nvmlShutdown() -> None:
    SCENARIO["count"] = SCENARIO.get("later", SCENARIO.get("count", 1))


def nvmlDeviceGetCount() -> int:
    return SCENARIO.get("count", 1)


def nvmlSystemGetDriverVersion() -> bytes:
    return SCENARIO.get("driver", "590.48.01").encode()


def nvmlSystemGetCudaDriverVersion_v2() -> int:
    return 13010


def nvmlDeviceGetHandleByIndex(index: int) -> int:
    _at("handle", index, None)
    return index


def nvmlDeviceGetUUID(index: int) -> str:
    return _at("uuid", index, f"GPU-{index:08d}-aaaa-bbbb-cccc-0123456789ab")


def nvmlDeviceGetName(index: int) -> bytes:
    return _at("name", index, "NVIDIA H100 80GB HBM3").encode()


def nvmlDeviceGetPciInfo(index: int) -> Record:
    return Record(busId=_at("pci", index, f"000000{index:02X}:1B:00.0").encode())


def nvmlDeviceGetMemoryInfo(index: int, version: int | None = None) -> Record:
    if version and SCENARIO.get("old"):
        raise NVMLError_FunctionNotFound(13)
    total, used, reserved = _at("memory", index, [81559 * 2**20, 1000 * 2**20, 551 * 2**20])
    return Record(total=total, used=used, reserved=reserved)


def nvmlDeviceGetUtilizationRates(index: int) -> Record:
    return Record(gpu=_at("utilization", index, 7))


def nvmlDeviceGetTemperature(index: int, _sensor: int) -> int:
    return _at("temperature", index, 36)


def nvmlDeviceGetPowerUsage(index: int) -> int:
    return _at("power", index, 66920)


def nvmlDeviceGetComputeRunningProcesses(index: int) -> list[Record]:
    pairs = _at("processes", index, [])
    return [Record(pid=pid, usedGpuMemory=used) for pid, used in pairs]


def nvmlDeviceGetGraphicsRunningProcesses(index: int) -> list[Record]:
    return nvmlDeviceGetComputeRunningProcesses(index)


def nvmlDeviceGetMigMode(index: int) -> list[int]:
    return [_at("mig", index, 0), 0]


def nvmlDeviceGetRemappedRows(index: int) -> list[int]:
    return _at("remapped", index, [0, 0, 0, 0])


def nvmlDeviceGetRetiredPagesPendingStatus(index: int) -> int:
    return _at("retired", index, 0)


def nvmlDeviceGetTotalEccErrors(index: int, _kind: int, _counter: int) -> int:
    return _at("ecc", index, 0)
