"""Asks NVML about every GPU and prints facts as JSON lines: `python -m agent.probes.nvml_child`.

A process of its own because a driver call can hang or crash; nvml.py starts it, gives it a deadline
and reads what came before the end. Each fact is one flushed line, so nothing known is lost:

    {"driver": "590.48.01"}  {"cuda": "13.1"}  {"count": 8}
    {"gpu": 3, "field": "uuid", "value": "GPU-..."}      a fact
    {"gpu": 3, "field": "power_w", "failed": "Not Supported", "code": 3}
    {"gpu": 3, "field": "...", "begin": true}            printed before each call
    {"gpu": 3, "end": true}    {"end": true}    {"absent": "why"}    {"error": "...", "code": 9}

`fast` leaves out what does not change, `3,5` leaves out cards that hung before. `--serve` answers
such words line by line from standard input until that closes; a full question opens the driver
anew, so that a card more or less is seen.
"""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable


def emit(**fact: object) -> None:
    """One JSON line, out at once: the next call may be the last."""
    sys.stdout.write(json.dumps(fact) + "\n")
    sys.stdout.flush()


def text(value: object) -> str:
    """NVML strings are bytes in old versions of the library."""
    return value.decode("utf-8", errors="replace") if isinstance(value, bytes) else str(value)


def memory(nvml: Any, handle: Any) -> dict[str, int]:
    """Bytes: total, used and, from driver 510 on, reserved."""
    try:
        info = nvml.nvmlDeviceGetMemoryInfo(handle, version=nvml.nvmlMemory_v2)
        return {"total": info.total, "used": info.used, "reserved": info.reserved}
    except (nvml.NVMLError_FunctionNotFound, nvml.NVMLError_ArgumentVersionMismatch):
        info = nvml.nvmlDeviceGetMemoryInfo(handle)
        return {"total": info.total, "used": info.used}
    except nvml.NVMLError as error:
        if error.value != nvml.NVML_ERROR_INVALID_ARGUMENT:
            raise
        info = nvml.nvmlDeviceGetMemoryInfo(handle)  # some old drivers answer the new call so
        return {"total": info.total, "used": info.used}


def processes(nvml: Any, handle: Any) -> list[list[int | None]]:
    """[pid, bytes or null] of compute and graphics processes; a pid may be in both lists."""
    found: dict[int, int | None] = {}
    for read in (
        nvml.nvmlDeviceGetComputeRunningProcesses,
        nvml.nvmlDeviceGetGraphicsRunningProcesses,
    ):
        for process in read(handle):
            used = process.usedGpuMemory
            found[process.pid] = (
                max(found.get(process.pid) or 0, used) if used is not None else None
            )
    return [[pid, used] for pid, used in found.items()]


def remapped(nvml: Any, handle: Any) -> dict[str, bool]:
    """Memory rows waiting for a reset, or that could not be replaced."""
    _, _, pending, failed = nvml.nvmlDeviceGetRemappedRows(handle)
    return {"pending": bool(pending), "failed": bool(failed)}


def uncorrectable(nvml: Any, handle: Any) -> int:
    """Uncorrectable ECC errors since the driver was loaded."""
    return int(
        nvml.nvmlDeviceGetTotalEccErrors(
            handle, nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC
        )
    )


FAST: dict[str, Callable[[Any, Any], object]] = {
    "uuid": lambda nvml, h: text(nvml.nvmlDeviceGetUUID(h)),
    "pci_bus_id": lambda nvml, h: text(nvml.nvmlDeviceGetPciInfo(h).busId),
    "memory": memory,
    "utilization_percent": lambda nvml, h: nvml.nvmlDeviceGetUtilizationRates(h).gpu,
    "temperature_c": lambda nvml, h: nvml.nvmlDeviceGetTemperature(h, nvml.NVML_TEMPERATURE_GPU),
    "power_mw": lambda nvml, h: nvml.nvmlDeviceGetPowerUsage(h),
    "processes": processes,
}
SLOW: dict[str, Callable[[Any, Any], object]] = {
    "name": lambda nvml, h: text(nvml.nvmlDeviceGetName(h)),
    "mig": lambda nvml, h: bool(nvml.nvmlDeviceGetMigMode(h)[0]),
    "remapped": remapped,
    "retirement_pending": lambda nvml, h: bool(nvml.nvmlDeviceGetRetiredPagesPendingStatus(h)),
    "uncorrectable": uncorrectable,
}


def card(nvml: Any, index: int, fields: dict[str, Callable[[Any, Any], object]]) -> None:
    """All fields of one card, each on its own; without a handle only that failure."""
    handle: list[Any] = []
    calls = {"handle": lambda n, _: handle.append(n.nvmlDeviceGetHandleByIndex(index)), **fields}
    for field, read in calls.items():
        emit(gpu=index, field=field, begin=True)
        try:
            value = read(nvml, handle[0] if handle else None)
        except Exception as error:  # a broken binding must cost its own field only
            emit(
                gpu=index, field=field, failed=str(error)[:200], code=getattr(error, "value", None)
            )
            if field == "handle":
                break
            continue
        emit(gpu=index, field=field, value=value)
    emit(gpu=index, end=True)


def cuda(nvml: Any) -> str:
    """The newest CUDA the driver serves: 13010 is 13.1."""
    number = int(nvml.nvmlSystemGetCudaDriverVersion_v2())
    return f"{number // 1000}.{number % 1000 // 10}"


SYSTEM: dict[str, Callable[[Any], str]] = {
    "driver": lambda nvml: text(nvml.nvmlSystemGetDriverVersion()),
    "cuda": cuda,
}


class Driver:
    """NVML opened once for many fast questions."""

    def __init__(self, nvml: Any) -> None:
        self.nvml = nvml
        self.count: int | None = None

    def answer(self, words: list[str]) -> None:
        """Answer one question. After an error the parent starts anew, which loads the library."""
        fast = "fast" in words
        skip = {int(n) for word in words for n in word.split(",") if n.isdecimal()}
        try:
            count = self._open(fast)
        except self.nvml.NVMLError as error:
            missing = error.value == self.nvml.NVML_ERROR_LIBRARY_NOT_FOUND
            emit(**{"absent" if missing else "error": str(error)}, code=error.value)
            return
        emit(count=count)
        for name, read in SYSTEM.items():
            try:
                emit(**{name: read(self.nvml)})
            except Exception as error:  # as in card()
                emit(**{f"{name}_failed": str(error)[:200]})
        for index in range(count):
            if index not in skip:
                card(self.nvml, index, FAST if fast else {**FAST, **SLOW})
        emit(end=True)

    def _open(self, fast: bool) -> int:
        if self.count is not None and not fast:
            self.nvml.nvmlShutdown()
            self.count = None
        if self.count is None:
            self.nvml.nvmlInit()
            self.count = int(self.nvml.nvmlDeviceGetCount())
        return self.count


def main(arguments: list[str]) -> None:
    """Entry of the child process."""
    try:
        import pynvml
    except ImportError as error:
        emit(absent=str(error))
        return
    driver = Driver(pynvml)
    if "--serve" not in arguments:
        driver.answer(arguments)
        return
    for line in sys.stdin:
        driver.answer(line.split())


if __name__ == "__main__":
    main(sys.argv[1:])
