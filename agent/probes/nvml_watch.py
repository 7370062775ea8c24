"""Waits for XIDs, the driver's own error events: `nvml_child --events`. One JSON line for each:

    {"watching": 8}   {"xid": 79, "pci_bus_id": "00000000:1B:00.0", "uuid": "GPU-..."}
    {"alive": true}   printed when nothing happened, so that a hang is told from silence
    {"unsupported": "why"}   {"error": "GPU is lost", "code": 15}   and the end of the process

Part of the child process; nvml_events.py reads the lines and starts it anew. What a card was named
is remembered from before the event: a card that fell off the bus can no longer tell.
"""

from __future__ import annotations

from ctypes import c_void_p, cast
from typing import TYPE_CHECKING, Any, Final

from agent.probes.nvml_slices import quiet, text

if TYPE_CHECKING:
    from collections.abc import Callable

    Emit = Callable[..., None]

WAIT_MS: Final = 5000
TIMEOUT: Final = 10
XID: Final = 8
"""The bit of an event type that is an XID."""


def watch(nvml: Any, emit: Emit, refuse: Callable[[Any], None]) -> None:
    """Print events until the driver fails; a card that has no events is passed over."""
    try:
        nvml.nvmlInit()
        events = nvml.nvmlEventSetCreate()
        names, refused = register(nvml, events)
    except nvml.NVMLError as error:
        refuse(error)
        return
    if not names:
        emit(unsupported=refused or "no card")
        return
    emit(watching=len(names))
    while True:
        try:
            event = nvml.nvmlEventSetWait(events, WAIT_MS)
        except nvml.NVMLError as error:
            if error.value != TIMEOUT:
                # Most often a lost card, which would answer at once from now on: start over.
                emit(error=str(error), code=error.value)
                return
            emit(alive=True)
            continue
        if event.eventType & XID:
            bus, uuid = names.get(_key(event.device), (None, None))
            emit(xid=int(event.eventData), pci_bus_id=bus, uuid=uuid)


def register(nvml: Any, events: Any) -> tuple[dict[object, tuple[str | None, str | None]], str]:
    """Names of the cards that are watched, by handle, and why another one is not."""
    names: dict[object, tuple[str | None, str | None]] = {}
    refused = ""
    for index in range(int(nvml.nvmlDeviceGetCount())):
        try:
            handle = nvml.nvmlDeviceGetHandleByIndex(index)
            nvml.nvmlDeviceRegisterEvents(handle, XID, events)
        except nvml.NVMLError as error:
            refused = str(error)
            continue
        names[_key(handle)] = name(nvml, handle)
    return names, refused


def name(nvml: Any, handle: Any) -> tuple[str | None, str | None]:
    """Address and UUID of a card; either may be unknown, even of one that was lost just now."""
    try:
        bus = quiet(lambda: text(nvml.nvmlDeviceGetPciInfo(handle).busId))
        return bus, quiet(lambda: text(nvml.nvmlDeviceGetUUID(handle)))
    except nvml.NVMLError:
        return None, None


def _key(handle: Any) -> object:
    """A handle is a pointer, made anew for each answer: what it points to is the same."""
    return handle if isinstance(handle, int) else cast(handle, c_void_p).value
