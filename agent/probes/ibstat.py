"""What `ibstat` and `ibstatus` print, and the spellings of a port's values. Pure.

Called by ib.py: the small parsers also read the files of sysfs, the two big ones a machine of
which only the tools' output is at hand. Nothing raises: what cannot be read is None.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final, Literal

from agent.probes import values

if TYPE_CHECKING:
    from agent.probes.root import ToolResult

READ_LIMIT: Final = 2**19
"""Characters looked at; 512 ports print half of that."""
MAX_PORTS: Final = 512
_ANSI: Final = re.compile(r"\x1b\[[0-9;]{0,20}[A-Za-z]")
_CARD: Final = re.compile(r"CA '([^'\s/]{1,64})'")
_PORT: Final = re.compile(r"Port ([0-9]{1,3}):?")
_STATUS: Final = re.compile(r"Infiniband device '([^'\s/]{1,64})' port ([0-9]{1,3})", re.IGNORECASE)
_COMPLAINT: Final = re.compile(r"ibpanic|ibwarn|iberror|fatal error|can't open", re.IGNORECASE)
_NO_CARD: Final = re.compile(
    r"fatal error: {1,4}(?:no devices|device '\*': sys files)", re.IGNORECASE
)
_NUMBERED: Final = re.compile(r"\s*(?:[0-9]{1,2}\s*:)?\s*([A-Za-z][A-Za-z _]{0,40})")


@dataclass(frozen=True, slots=True)
class Printed:
    """A port as one of the tools prints it; every field but the first two may be unknown."""

    hca: str
    port: int
    link_layer: Literal["InfiniBand", "Ethernet"] | None = None
    state: str | None = None
    phys_state: str | None = None
    rate_gbps: float | None = None
    node_guid: str | None = None
    port_guid: str | None = None
    lid: int | None = None
    sm_lid: int | None = None
    gid_prefix: str | None = None
    firmware: str | None = None


def state(text: str | None) -> str | None:
    """Logical state, as sysfs spells it: `4: ACTIVE` and `Active` -> `ACTIVE`."""
    match = _NUMBERED.match(text or "")
    word = match[1].strip().replace(" ", "_").upper() if match else None
    return {"INITIALIZING": "INIT", "INITIALIZE": "INIT"}.get(word or "", word)


def phys_state(text: str | None) -> str | None:
    """Physical state in one word: `5: LinkUp` -> `LinkUp`, `7: Phy Test` -> `PhyTest`."""
    match = _NUMBERED.match(text or "")
    return match[1].replace(" ", "") if match else None


_WHOLE_LINE: Final = re.compile(
    r"|State: (Active|Down|Initializing|Armed)|Physical state: (LinkUp|Polling|Disabled|Sleep)"
    r"|Link layer: (InfiniBand|Ethernet)|link_layer:\s{0,16}(InfiniBand|Ethernet)"
    r"|(Node|Port|System image) GUID: 0x[0-9a-f]{16}"
)
"""Last lines without an end that are no cut ones."""


def rate(text: str | None) -> float | None:
    """Gbit/s of `400 Gb/sec (4X NDR)` or `400`; 0 (width not known to the driver) is unknown."""
    match = re.match(r"\s*([0-9]{1,6}(?:\.[0-9]{1,3})?)\s*(?:Gb|\(|$)", text or "")
    return float(match[1]) or None if match else None


def guid(text: str | None) -> str | None:
    """16 lower-case digits of `0x...`, `xxxx:xxxx:xxxx:xxxx` or bare ones; zero is no GUID."""
    digits = (text or "").strip().lower().removeprefix("0x").replace(":", "")
    if not re.fullmatch(r"[0-9a-f]{1,16}", digits) or not int(digits, 16):
        return None
    return digits.zfill(16)


def lid(text: str | None) -> int | None:
    """A local identifier, `0x33bf` or decimal. 0 is kept: it says that there is none."""
    match = re.fullmatch(r"\s*(?:0x([0-9a-f]{1,8})|([0-9]{1,10}))\s*", text or "", re.IGNORECASE)
    if match is None:
        return None
    return int(match[1], 16) if match[1] else int(match[2])


def _lines(text: str) -> list[str]:
    """Lines that are not empty, without colours and indentation."""
    plain = _ANSI.sub("", text[:READ_LIMIT]).replace("\0", "")
    return [line for line in map(str.strip, plain.splitlines()) if line]


def parse(text: str) -> tuple[Printed, ...]:
    """Ports in `ibstat`'s output, indented or not; an `ibpanic` line after good ones is passed."""
    found: list[Printed] = []
    hca, card, port = "", dict[str, str](), dict[str, str]()
    number: int | None = None

    def close() -> None:
        if number is not None and len(found) < MAX_PORTS:
            found.append(_printed(hca, number, card, port))

    for line in _lines(values.settled(text, _WHOLE_LINE)):
        if match := _CARD.fullmatch(line):
            close()
            hca, card, number = match[1], {}, None
        elif hca and (match := _PORT.fullmatch(line)):
            close()
            number, port = int(match[1]), {}
        elif hca:
            key, _, value = line.partition(":")
            (card if number is None else port).setdefault(key.strip().lower(), value.strip())
    close()
    return tuple(found)


def _printed(hca: str, number: int, card: dict[str, str], port: dict[str, str]) -> Printed:
    return Printed(
        hca=hca,
        port=number,
        link_layer=_layer(port.get("link layer") or port.get("link_layer")),
        state=state(port.get("state")),
        phys_state=phys_state(port.get("physical state") or port.get("phys state")),
        rate_gbps=rate(port.get("rate")),
        node_guid=guid(card.get("node guid")),
        port_guid=guid(port.get("port guid")),
        lid=lid(port.get("base lid")),
        sm_lid=lid(port.get("sm lid")),
        firmware=(card.get("firmware version") or "")[:64] or None,
    )


def _layer(text: str | None) -> Literal["InfiniBand", "Ethernet"] | None:
    known: dict[str, Literal["InfiniBand", "Ethernet"]] = {
        "infiniband": "InfiniBand",
        "ib": "InfiniBand",
        "ethernet": "Ethernet",
    }
    return known.get((text or "").lower())


def parse_ibstatus(text: str) -> tuple[Printed, ...]:
    """Ports in `ibstatus`'s output, with the halves of GID 0 as prefix and port GUID."""
    found: list[Printed] = []
    name: tuple[str, int] | None = None
    fields: dict[str, str] = {}
    whole = values.settled(text, _WHOLE_LINE)
    for line in [*_lines(whole), "Infiniband device '-' port 0"]:
        if match := _STATUS.match(line):
            if name is not None and len(found) < MAX_PORTS:
                found.append(_with_gid(_printed(*name, {}, fields), fields.get("default gid")))
            name, fields = (match[1], int(match[2])), {}
        elif name is not None:
            key, _, value = line.partition(":")
            fields.setdefault(key.strip().lower(), value.strip())
    return tuple(found)


def _with_gid(port: Printed, gid: str | None) -> Printed:
    digits = (gid or "").replace(":", "").lower()
    if not re.fullmatch(r"[0-9a-f]{32}", digits):
        return port
    return replace(port, gid_prefix=guid(digits[:16]), port_guid=guid(digits[16:]))


def failure(result: ToolResult) -> str | None:
    """Why a tool's answer may be short. No such tool and no card are answers, not failures."""
    if not_installed(result) or _NO_CARD.search(f"{result.stdout[:4096]}\n{result.stderr}"):
        return None
    reasons = [part for part in (result.error, complaint(result)) if part]
    return ": ".join(reasons) or None


def unread(result: ToolResult) -> str | None:
    """Why nothing was found in what ibstat printed; printing nothing is how it says: no card."""
    lines = [line for line in _lines(result.stdout) if not re.fullmatch(r"\[.*\]", line)]
    if not lines or _NO_CARD.search(result.stdout[:4096]):
        return None
    words = re.sub(r"[^\x20-\x7e]", "?", lines[0][:80])
    return f"ibstat: no port in its output, which begins with {words!r}"


def not_installed(result: ToolResult) -> bool:
    """Whether there is no such tool on the machine."""
    return result.error is not None and result.error.endswith("no such program in PATH")


def complaint(result: ToolResult) -> str | None:
    """The line in which one of the InfiniBand tools complains, else the first of its stderr."""
    ends = (result.stdout[:4096], result.stdout[-4096:], result.stderr)
    lines = [line.strip() for end in ends for line in end.splitlines()]
    errors = filter(None, map(str.strip, result.stderr.splitlines()))
    telling = next(filter(_COMPLAINT.search, lines), None) or next(errors, None)
    return re.sub(r"\[[0-9]{1,10}\] ?", "", telling[:300]).strip() if telling else None
