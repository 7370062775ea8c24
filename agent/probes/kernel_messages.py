"""Messages of NVIDIA's and AMD's drivers in the kernel log, as events. Pure.

Called by agent/probes/kernel_log.py with the text of each line, without its time. A message has to
begin with the driver's mark: a device that names itself "NVRM: Xid" proves nothing.
"""

from __future__ import annotations

import re
from typing import Final

from agent.probes import values
from agent.xids import Event, What, recovery_action

MESSAGE_LIMIT: Final = 2000
"""Characters looked at; the drivers' own messages are below 500."""
MARKS: Final = ("NVRM", "SXid", "amdgpu")
"""A line without any of these is none of ours, which is quick to see."""

_AT: Final = r"(?: at)? (?:PCI:)?([0-9a-f]{1,8}:[0-9a-f]{2}:[0-9a-f]{2}(?:\.[0-7])?)"
_XID: Final = re.compile(
    r"(?:NVRM: ?){1,3}Xid \(([^()]{1,80})\): ?([0-9]{1,6})(?:, *|\s*$)(.*)", re.IGNORECASE
)
_PROCESS: Final = re.compile(r"pid='?([0-9]{1,10}|<[^>]{0,20}>)'?, *(?:name=([^,]{0,100}), *)?")
_SXID: Final = re.compile(
    r"(?:nvidia-nvswitch[0-9]{1,4}|NVRM):? ?SXid \(([^()]{1,80})\): ?([0-9]{1,6})(?:, *|\s*$)(.*)",
    re.IGNORECASE,
)
_UUID: Final = re.compile(rf"NVRM: GPU{_AT}: (GPU-[0-9a-f-]{{8,64}})\b", re.IGNORECASE)
_FALLEN: Final = re.compile(
    rf"NVRM: (?:The NVIDIA )?GPU{_AT}\b.{{0,300}}?has fallen off the bus", re.IGNORECASE
)
_LOADED: Final = re.compile(r"NVRM: loading NVIDIA UNIX .{0,80}?Kernel Module .{0,80}?([0-9.]{3,})")
_AMD: Final = re.compile(r"amdgpu ([0-9a-f:.]{7,20}): (.*)", re.IGNORECASE)
_ADDRESS: Final = re.compile(
    r"(?:PCI:)?(?:([0-9a-f]{1,8}):)?([0-9a-f]{1,4}):([0-9a-f]{1,2})(?:\.[0-7])?(?: .*)?",
    re.IGNORECASE,
)
_AMD_WORDS: Final[tuple[tuple[str, What, str], ...]] = (
    (r"ring \S{1,40} timeout", "amd", "amd_ring_timeout"),
    (r"GPU reset begin", "amd", "amd_reset_begin"),
    (r"GPU reset(?:\([0-9]{1,9}\))? succeeded", "reset", "reset"),
    (r"GPU reset(?:\([0-9]{1,9}\))? failed", "amd", "amd_reset_failed"),
    (r"GPU reset end with ret = -[0-9]", "amd", "amd_reset_failed"),
    (r"[1-9][0-9]{0,9} (?:new )?uncorrectable hardware errors", "amd", "amd_uncorrectable"),
)


def event(text: str) -> Event | None:
    """The event of one message (without its time), None when it is none of ours."""
    text = text[:MESSAGE_LIMIT]
    if match := _XID.match(text):
        return _xid(match)
    if match := _SXID.match(text):
        address, number = pci_address(match[1]), int(match[2])
        return Event("sxid", f"sxid_{number}", number, address, text=match[3].strip())
    if match := _FALLEN.match(text):
        if address := pci_address(match[1]):
            return Event("xid", "xid_79", 79, address, text="GPU has fallen off the bus")
        return None
    if match := _LOADED.match(text):
        return Event("loaded", "loaded", text=match[1])
    return _amd(text)


def _xid(match: re.Match[str]) -> Event:
    address, number, rest = pci_address(match[1]), int(match[2]), match[3].strip()
    process = _PROCESS.match(rest + ", ")
    words = rest[process.end() :].strip() if process else rest
    if number == 154 and (recovery_action(words) or "").lower() == "none":
        return Event("reset", "reset", pci_bus_id=address, text=words)
    return Event(
        what="xid",
        code=f"xid_{number}",
        number=number,
        pci_bus_id=address,
        text=words,
        pid=values.whole(process[1]) if process else None,
        process=process[2] if process and not (process[2] or "<").startswith("<") else None,
    )


def _amd(text: str) -> Event | None:
    match = _AMD.match(text)
    address = pci_address(match[1]) if match else None
    if match is None or address is None:
        return None
    for pattern, what, code in _AMD_WORDS:
        if re.search(pattern, match[2]):
            words = match[2].removeprefix("amdgpu: ").strip()
            return Event(what, code, pci_bus_id=address, text=words)
    return None


def named_card(text: str) -> tuple[str, str] | None:
    """Address and UUID of a message that names a card: `NVRM: GPU at PCI:0000:01:00: GPU-...`."""
    match = _UUID.match(text[:MESSAGE_LIMIT])
    address = pci_address(match[1]) if match else None
    if match is None or address is None:
        return None
    return address, match[2].lower().replace("gpu-", "GPU-", 1)


def pci_address(text: str) -> str | None:
    """An address as the driver prints it (`PCI:0000:3b:00 GPU-I:05`), as sysfs writes it.

    The function is not printed, it is 0. Drivers of long ago print the bus with four digits.
    """
    match = _ADDRESS.fullmatch(text.strip())
    if match is None:
        return None
    bus = int(match[2], 16)
    return values.pci_bus_id(f"{match[1] or 0}:{bus:x}:{match[3]}.0") if bus < 256 else None
