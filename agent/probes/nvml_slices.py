"""Memory, processes and MIG devices as NVML tells them, for nvml_fields.py in the child process.

The MIG layout may change between any two calls: a device that is gone by then is left out, and the
list is read again when it was not the same at the end.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, Final, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

T = TypeVar("T")

OLD_DRIVER: Final = frozenset({2, 13, 25})
"""Invalid argument, function not found, argument version mismatch."""
CARD_IS_BROKEN: Final = frozenset({15, 16})
"""Lost, reset required: never taken for "this part is unknown"."""
REFUSED: Final = frozenset({3, 4})
MAX_SLICES: Final = 64
LAYOUT_READS: Final = 3


def text(value: object) -> str:
    """NVML strings are bytes in old versions of the library."""
    return value.decode("utf-8", errors="replace") if isinstance(value, bytes) else str(value)


def quiet(call: Callable[[], T]) -> T | None:
    """The answer, or None when the driver does not tell; a broken card is still an error."""
    try:
        return call()
    except Exception as error:
        if getattr(error, "value", None) in CARD_IS_BROKEN:
            raise
        return None


def memory(nvml: Any, handle: Any) -> dict[str, int]:
    """Bytes: total, used and, from driver 510 on, reserved."""
    try:
        info = nvml.nvmlDeviceGetMemoryInfo(handle, version=nvml.nvmlMemory_v2)
        return {"total": info.total, "used": info.used, "reserved": info.reserved}
    except nvml.NVMLError as error:
        if error.value not in OLD_DRIVER:
            raise
    info = nvml.nvmlDeviceGetMemoryInfo(handle)
    return {"total": info.total, "used": info.used}


def processes(nvml: Any, handle: Any) -> list[list[int | None]]:
    """[pid, bytes or null] of compute and graphics processes.

    The card answers for its MIG devices as well. A user who may not know them all is refused: then
    the devices are asked one by one.
    """
    try:
        found = _users(nvml, handle)
    except nvml.NVMLError as error:
        devices = list(_devices(nvml, handle)) if error.value in REFUSED else []
        if not devices:
            raise
        found = {}
        for _, device in devices:
            found.update(quiet(partial(_users, nvml, device)) or {})
    totals: dict[int, int | None] = {}
    for (pid, _, _), used in found.items():
        before = totals.get(pid, 0)
        totals[pid] = None if used is None or before is None else before + used
    return [[pid, used] for pid, used in totals.items()]


def _users(nvml: Any, handle: Any) -> dict[tuple[int, int | None, int | None], int | None]:
    """Bytes by pid and instance. One that computes and draws is in both lists: counted once."""
    found: dict[tuple[int, int | None, int | None], int | None] = {}
    for kind in ("Compute", "Graphics"):
        for user in _listed(nvml, handle, f"nvmlDeviceGet{kind}RunningProcesses"):
            at = (
                user.pid,
                getattr(user, "gpuInstanceId", None),
                getattr(user, "computeInstanceId", None),
            )
            used, before = user.usedGpuMemory, found.get(at)
            found[at] = used if before is None else max(before, used or 0)
    return found


def _listed(nvml: Any, handle: Any, call: str) -> Any:
    try:
        return getattr(nvml, call)(handle)
    except Exception as error:
        # The binding wraps "no such function" in an error of its own that has no code.
        if getattr(error, "value", None) not in {*OLD_DRIVER, None}:
            raise
        return getattr(nvml, f"{call}_v2")(handle)


def _devices(nvml: Any, handle: Any) -> Iterator[tuple[int, Any]]:
    """Numbers and handles of MIG devices; numbers may have gaps."""
    count = quiet(lambda: nvml.nvmlDeviceGetMaxMigDeviceCount(handle)) or 0
    for index in range(min(count, MAX_SLICES)):
        device = quiet(partial(nvml.nvmlDeviceGetMigDeviceHandleByIndex, handle, index))
        if device is not None:
            yield index, device


def slices(nvml: Any, handle: Any) -> list[dict[str, object]]:
    """The MIG devices; empty when the mode is off."""
    if not nvml.nvmlDeviceGetMigMode(handle)[0]:
        return []
    found: list[dict[str, object]] = []
    for _ in range(LAYOUT_READS):
        found = [_slice(nvml, device, at) for at, device in _devices(nvml, handle)]
        found = [device for device in found if device["uuid"] is not None]
        now = [_uuid(nvml, device) for _, device in _devices(nvml, handle)]
        if now == [device["uuid"] for device in found]:
            break
    return found


def _uuid(nvml: Any, device: Any) -> str | None:
    return quiet(lambda: text(nvml.nvmlDeviceGetUUID(device)))


def _slice(nvml: Any, device: Any, index: int) -> dict[str, object]:
    attributes = quiet(lambda: nvml.nvmlDeviceGetAttributes(device))
    return {
        "uuid": _uuid(nvml, device),
        "index": index,
        "name": quiet(lambda: text(nvml.nvmlDeviceGetName(device))),
        "gi": quiet(lambda: nvml.nvmlDeviceGetGpuInstanceId(device)),
        "ci": quiet(lambda: nvml.nvmlDeviceGetComputeInstanceId(device)),
        "memory": quiet(lambda: memory(nvml, device)),
        "memory_mb": getattr(attributes, "memorySizeMB", None),
        "multiprocessors": getattr(attributes, "multiprocessorCount", None),
        "gpu_slices": getattr(attributes, "gpuInstanceSliceCount", None),
        "compute_slices": getattr(attributes, "computeInstanceSliceCount", None),
    }
