"""The classes of error events: XIDs and SXIDs of NVIDIA's driver, a few events of AMD's. Pure.

`Event` is what agent/probes/kernel_log.py reads from the kernel log and nvml.py from NVML;
`finding` says what one means for a card. Numbers and what NVIDIA advises for them are facts of its
public XID catalogue (immediate action); the words are ours.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final, Literal

from agent import health

Cause = Literal["application", "driver", "hardware"]
What = Literal["xid", "sxid", "amd", "reset", "loaded"]
"""`reset`: the card was reset. `loaded`: NVIDIA's driver was loaded. Evidence, no fault."""


@dataclass(frozen=True, slots=True)
class Event:
    """One event of a card or, for an SXID, of an NVSwitch. `count` repeats were folded into it.

    `at` is seconds of the kernel's clock since boot, None when unknown. `code` names what
    happened: `xid_79`, `sxid_12028`, `amd_ring_timeout`. Repeats have the text of the first and
    the time of the last.
    """

    what: What
    code: str
    number: int | None = None
    pci_bus_id: str | None = None
    uuid: str | None = None
    text: str = ""
    at: float | None = None
    pid: int | None = None
    process: str | None = None
    count: int = 1


@dataclass(frozen=True, slots=True)
class Cursor:
    """How far the kernel log was read: its sequence number, and seconds of its clock."""

    seq: int | None = None
    at: float | None = None


@dataclass(frozen=True, slots=True)
class Class:
    """What a number means: who caused it, how it heals, whether the card is kept out meanwhile."""

    cause: Cause
    kind: health.Kind
    unhealthy: bool
    words: str
    action: str


_APP: Final = "restart the application, and look for its bug if it comes back"
_RESET: Final = "stop what uses the card and reset it or reboot"
_REBOOT: Final = "reboot the machine, and have the card, its slot and its power checked"
_WATCH: Final = "nothing needs doing now; ask the vendor if it comes often"
_NOTED: Final = "nothing needs doing"
_LINK: Final = "stop what uses the card, reset it, and check the link's cable, bridge and switch"
_REPLACE: Final = "have the card replaced"


def _row(
    numbers: str, cause: Cause, kind: health.Kind, unhealthy: bool, words: str, action: str
) -> dict[int, Class]:
    """Rows for `"1 3-5"`: the same class for every number."""
    found: dict[int, Class] = {}
    for part in numbers.split():
        first, _, last = part.partition("-")
        for number in range(int(first), int(last or first) + 1):
            found[number] = Class(cause, kind, unhealthy, words, action)
    return found


XIDS: Final[dict[int, Class]] = {
    # The application's own faults: the card is fine, and is asked again.
    **_row("8", "application", "passing", True, "a channel of the card went idle too long", _APP),
    **_row("11 25 32 80", "application", "passing", True, "invalid commands to the card", _APP),
    **_row("13", "application", "passing", True, "exception of a kernel on the card", _APP),
    **_row("31", "application", "passing", True, "memory page fault on the card", _APP),
    **_row("39-41 70-72 75-77 85", "application", "passing", True, "copy engine error", _APP),
    **_row("126-135", "application", "passing", True, "copy engine error", _APP),
    **_row("60 65 68 73", "application", "passing", True, "video engine error", _APP),
    **_row("83-84 86 88-89", "application", "passing", True, "video engine error", _APP),
    **_row("96-98 139 142", "application", "passing", True, "video engine error", _APP),
    **_row("82 99-105", "application", "passing", True, "JPEG engine error", _APP),
    **_row("69", "application", "passing", True, "invalid class of a command to the card", _APP),
    **_row("94", "application", "passing", True, "contained memory error", _APP),
    **_row("159", "application", "passing", True, "error of the coherent link to the CPU", _APP),
    **_row("43", "application", "passing", False, "an application's channel was stopped", _NOTED),
    **_row("45", "application", "passing", False, "an application's channels were removed", _NOTED),
    **_row("37 44 66-67", "application", "passing", False, "invalid access by software", _WATCH),
    **_row("108 137", "application", "passing", False, "NVLink access that a peer refused", _WATCH),
    **_row("141", "application", "passing", False, "error on CUDA's fast path", _WATCH),
    # The driver and the firmware: healed by loading them anew.
    **_row("38 59 61", "driver", "reset", True, "the driver's firmware failed", _RESET),
    **_row("46 158", "driver", "reset", True, "the card stopped working", _RESET),
    **_row("109", "driver", "reset", True, "switching between applications timed out", _RESET),
    **_row("119", "driver", "reset", True, "the card's firmware (GSP) does not answer", _RESET),
    **_row("120", "driver", "reset", True, "the card's firmware (GSP) failed", _RESET),
    **_row("151", "driver", "reset", True, "rotating keys failed (confidential computing)", _RESET),
    **_row("155", "driver", "reset", True, "NVLink error found by software", _LINK),
    **_row("78", "driver", "passing", False, "a virtual GPU could not start", "update the driver"),
    **_row("56 81 111-118", "driver", "passing", False, "error of the display part", _NOTED),
    **_row("122-124", "driver", "passing", False, "the card's settings memory failed", _WATCH),
    **_row("152-153", "driver", "passing", False, "error of the deep-learning unit", _WATCH),
    **_row("160-161", "driver", "passing", False, "a channel was taken out of use", _WATCH),
    **_row("166 170", "driver", "passing", False, "confidential traffic was refused", _WATCH),
    **_row("106-107", "driver", "passing", False, "test message of the management bus", _NOTED),
    # The hardware.
    **_row("48", "hardware", "reset", True, "memory error that ECC could not correct", _RESET),
    **_row("171-172", "hardware", "reset", True, "memory error that ECC could not correct", _RESET),
    **_row("140", "hardware", "reset", True, "memory error that ECC could not correct", _RESET),
    **_row("95", "hardware", "reset", True, "memory error that touches all programs", _RESET),
    **_row("57-58", "hardware", "reset", True, "error of the card's memory", _RESET),
    **_row("62 169", "hardware", "reset", True, "a controller inside the card halted", _RESET),
    **_row("110", "hardware", "reset", True, "security fault", _RESET),
    **_row("143", "hardware", "reset", True, "the card could not be initialised", _RESET),
    **_row("156", "hardware", "reset", True, "a part of the card was taken out of use", _RESET),
    **_row("74", "hardware", "reset", True, "NVLink error", _LINK),
    **_row("136", "hardware", "reset", True, "NVLink could not be trained", _LINK),
    **_row("144-150", "hardware", "reset", True, "NVLink error", _LINK),
    **_row("79", "hardware", "reset", True, "the card has fallen off the bus", _REBOOT),
    **_row("167", "hardware", "reset", True, "PCIe timed out", _REBOOT),
    **_row("54", "hardware", "reset", True, "the card's power cable is missing", "plug it in"),
    **_row("154", "hardware", "reset", True, "the driver asks for recovery", "do as it asks"),
    **_row("64", "hardware", "hardware", True, "repairing the card's memory failed", _REPLACE),
    **_row("63", "hardware", "passing", False, "a repair of the card's memory was noted", _NOTED),
    **_row("92", "hardware", "reset", False, "many memory errors that ECC corrected", _WATCH),
    **_row("93 125", "hardware", "passing", False, "the card's settings memory is worn", _WATCH),
    **_row("121", "hardware", "reset", False, "error of the link to the CPU (C2C)", _WATCH),
    **_row("157", "hardware", "reset", False, "taking out a broken part failed", _WATCH),
    **_row("162-165", "hardware", "passing", False, "state of the power smoothing", _WATCH),
    **_row("168", "hardware", "reset", False, "the card gives less memory than it has", _WATCH),
}
"""By number. Those left out are unused or unknown: passing, and shown."""

NEEDS_TEXT: Final = frozenset({*range(144, 151), 154})
"""Only the kernel log tells how bad these are: 154 may mean that all is well again. Where NVML gave
just the number, the card's recovery action decides."""
UNKNOWN: Final = Class("driver", "passing", False, "unknown error event", _WATCH)
_SXID_FATAL: Final = Class(
    "hardware",
    "reset",
    True,
    "fatal NVSwitch error",
    "stop what uses the cards, reset them all, and read the fabric manager's log",
)
_SXID_OTHER: Final = Class("hardware", "passing", False, "NVSwitch error", _WATCH)
_AMD: Final[dict[str, Class]] = {
    "amd_ring_timeout": Class("application", "passing", True, "work on the card hung", _APP),
    "amd_reset_begin": Class("driver", "passing", True, "the driver resets the card", _APP),
    "amd_reset_failed": Class("driver", "reset", True, "resetting the card failed", _REBOOT),
    "amd_uncorrectable": Class("hardware", "reset", True, "uncorrectable memory error", _RESET),
}
_RECOVERY: Final = re.compile(r"to 0x[0-9a-f]{1,8} \(([^()]{1,60})\)", re.IGNORECASE)


def from_nvml(pci_bus_id: str, number: int) -> Event:
    """An XID that NVML told, which gives the number only. Needed where the log is not readable."""
    return Event("xid", f"xid_{number}", number, pci_bus_id)


def recovery_action(text: str) -> str | None:
    """What an XID 154 changes to, in the driver's words (`GPU Reset Required`, `None`)."""
    match = _RECOVERY.search(text[:1000])
    return match[1].strip() if match else None


def classify(event: Event) -> Class:
    """What an event means. NVLink errors (144 to 150) and SXIDs carry their own severity."""
    if event.what == "sxid":
        return _SXID_FATAL if _severity(event.text) == "fatal" else _SXID_OTHER
    if event.what == "amd":
        return _AMD.get(event.code, UNKNOWN)
    known = XIDS.get(event.number if event.number is not None else -1, UNKNOWN)
    if event.number in range(144, 151) and _severity(event.text) == "nonfatal":
        return Class(known.cause, "passing", False, f"{known.words} that was recovered", _WATCH)
    if event.number in NEEDS_TEXT and not event.text:
        return Class(known.cause, "passing", False, known.words, "see the card's recovery action")
    return known


def _severity(text: str) -> str | None:
    """`fatal` or `nonfatal` where a text says it: `..., Non-fatal, Link 32`, `RLW Nonfatal XC0`."""
    match = re.search(r"\b(non-?)?fatal\b", text[:500], re.IGNORECASE)
    return None if match is None else "nonfatal" if match[1] else "fatal"


def finding(event: Event) -> health.Finding:
    """The finding that an event leaves on its card."""
    means = classify(event)
    name = {"xid": f"XID {event.number}", "sxid": f"SXID {event.number}"}.get(event.what, "amdgpu")
    what = f"{means.words} ({means.cause})"
    if event.number == 154 and (action := recovery_action(event.text)):
        what = f"{means.words}: {action}"
    return health.Finding(
        code=event.code[:64],
        kind=means.kind,
        text=f"{name}: {what}; {means.action}",
        evidence=event.text[: health.WORD_LIMIT] or f"{name}, told without words",
        unhealthy=means.unhealthy,
    )
