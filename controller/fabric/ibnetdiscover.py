"""Read what `ibnetdiscover` printed: the main form (with `--full` or `-g`), `-p` and `-l`.

Pure. Called by whoever turns a stored scan into a graph (graph.py). Never raises: a line that
cannot be read is counted and the first one is quoted in `Discovery.notes`. Each line is matched
alone by patterns without nested repetition, so time grows with the length of the text only.
"""

from __future__ import annotations

import re
from typing import Final, Literal

from controller.fabric.model import Device, Discovery, Kind, Port

MAX_CHARS: Final = 32 * 2**20
"""5,000 hosts with 8 adapters each behind 2,000 switches print about 20 MiB."""
MAX_LINE: Final = 512
"""A description has 64 bytes; the rest of a line needs less than 150."""
MAX_DEVICES: Final = 100_000
MAX_PORTS: Final = 500_000
MAX_QUOTE: Final = 100

LANE_GBPS: Final = {
    "SDR": 2.5,
    "DDR": 5.0,
    "QDR": 10.0,
    "FDR10": 10.0,
    "FDR": 14.0,
    "EDR": 25.0,
    "HDR": 50.0,
    "NDR": 100.0,
    "XDR": 200.0,
}
"""Gb/s of one lane, as the kernel and the agents count."""
LANES: Final = {"1x": 1, "2x": 2, "4x": 4, "8x": 8, "12x": 12}
_OLD_TOOL: Final = {"1": "FDR", "2": "EDR", "4": "HDR", "8": "NDR"}
"""`e=` of `--full`: what a tool that is older than the link prints as ???."""

_HEX: Final = "([0-9a-fA-F]{1,16})"
_ALL_HEX: Final = "([0-9a-fA-F]{16})"
_EXT: Final = r"(?:\[ext [0-9]{1,5}\])?"
_PORT: Final = re.compile(
    rf'\[([0-9]{{1,5}})\]{_EXT}\s*(?:\({_HEX}\)\s*)?"([SHR])-{_HEX}"\[([0-9]{{1,5}})\]{_EXT}'
    rf"\s*(?:\({_HEX}\)\s*)?(?:#(.*))?$"
)
_PORT_END: Final = re.compile(
    r'\s*(?:lid ([0-9]{1,6}) lmc [0-9]{1,3}\s*)?"(.*)"\s*(?:lid ([0-9]{1,6})\s*)?'
    r"(?:([0-9]{1,2}x|\?\?)([A-Z0-9]{3,5}|\?\?\?))?(.*)"
)
_HEADER: Final = re.compile(
    rf'(Switch|Ca|Rt)\s+([0-9]{{1,6}})\s+"[SHR]-{_HEX}"\s*(?:#\s*"(.*)"(.*)|.*)$'
)
_LISTED: Final = re.compile(
    rf"(Switch|Ca|Router)\s*:\s*0x{_HEX} ports ([0-9]{{1,6}})"
    r'(?: devid 0x([0-9a-fA-F]{1,8}))?(?: vendid 0x[0-9a-fA-F]{1,8})?\s*(?:"(.*)")?'
)
_IDENTITY: Final = re.compile(
    rf"(vendid|devid|sysimgguid|switchguid|caguid|rtguid)=0x{_HEX}(?:\({_HEX}\))?(.*)"
)
_REPORT: Final = re.compile(
    rf"(CA|SW|RT)\s+([0-9]{{1,6}})\s+([0-9]{{1,5}})\s+0x{_ALL_HEX}\s+(\S{{1,5}})\s+(\S{{1,5}})(.*)"
)
_REPORT_PEER: Final = re.compile(
    rf"\s+-\s+(CA|SW|RT)\s+([0-9]{{1,6}})\s+([0-9]{{1,5}})\s+0x{_ALL_HEX}\s*(?:\((.*)\))?"
)
_WHOLE_NAME: Final = re.compile(r"\s*(?:'.*'|(?!- )[^'\s].*)?$")
"""Behind a port without a cable: a name in quotes, one without, or none."""
_LID: Final = re.compile(r"\blid ([0-9]{1,6})\b")
_CHASSIS: Final = re.compile(r"# Chassis ([0-9]{1,6})")
_EXTENDED: Final = re.compile(r"\be=([0-9]{1,3})\b")
_ESCAPES: Final = re.compile(r"\x1b\[[0-9;?]{0,32}[A-Za-z]")
_HARMLESS: Final = re.compile(r"#|Chassis [0-9]|Non-Chassis Nodes|Hostname: ")
_COMPLAINT: Final = re.compile(r"\bib(?:warn|error|panic)\b|ibnetdiscover:|libibnetdisc|failed")
_KINDS: Final[dict[str, Kind]] = {
    **dict.fromkeys(("S", "Switch", "SW", "switchguid"), "switch"),
    **dict.fromkeys(("H", "Ca", "CA", "caguid"), "ca"),
    **dict.fromkeys(("R", "Rt", "RT", "Router", "rtguid"), "router"),
}
_NO_GUID: Final = "0" * 16


def gbps(width: str | None, speed: str | None) -> float | None:
    """Gb/s of a link such as `4x` `NDR`; None when one of the words is not known."""
    lanes, lane = LANES.get(width or ""), LANE_GBPS.get(speed or "")
    return lanes * lane if lanes and lane else None


def parse(text: str) -> Discovery:
    """All devices and links of one scan, whichever form it was printed in."""
    reader = _Reader()
    if len(text) > MAX_CHARS:
        reader.notes.append(f"the text is cut after {MAX_CHARS >> 20} MiB of {len(text) >> 20}")
        text = text[:MAX_CHARS]
    if "\x1b" in text:
        text = _ESCAPES.sub("", text)
    for number, line in enumerate(text.split("\n"), 1):
        stripped = line.strip()
        if stripped and (len(stripped) > MAX_LINE or not reader.take(stripped)):
            reader.refuse(number, stripped)
    return reader.discovery()


class _Draft:
    """A device while its lines are read."""

    __slots__ = ("facts", "guid", "kind", "lid", "listed", "ports")

    def __init__(self, kind: Kind, guid: str, listed: bool = True) -> None:
        self.kind, self.guid, self.listed = kind, guid, listed
        self.lid: int | None = None
        self.facts: dict[str, str] = {}
        self.ports: dict[int, Port] = {}

    def device(self) -> Device:
        facts, ports = self.facts, tuple(self.ports[n] for n in sorted(self.ports))
        lid = self.lid
        if lid is None and self.kind != "switch":
            lid = next((port.lid for port in ports if port.lid is not None), None)
        return Device(
            self.kind,
            self.guid,
            system_guid=facts.get("sysimgguid"),
            description=facts.get("description", ""),
            lid=lid,
            port_count=int(facts["count"]) if "count" in facts else None,
            device_id=int(facts["devid"], 16) if "devid" in facts else None,
            chassis=facts.get("chassis"),
            ports=ports,
            listed=self.listed,
        )


class _Reader:
    """The lines so far. `current` is the device whose stanza is being read."""

    def __init__(self) -> None:
        self.devices: dict[str, _Draft] = {}
        self.current: _Draft | None = None
        self.ahead: dict[str, str] = {}
        """Lines of a stanza that stand before its header."""
        self.seen: dict[str, tuple[Kind, str, int | None]] = {}
        """What port lines say of the device at the other end: kind, description, LID."""
        self.forms: set[Literal["topology", "ports", "list"]] = set()
        self.duplicates: set[str] = set()
        self.notes: list[str] = []
        self.complaints: list[str] = []
        self.garbage, self.first = 0, ""
        self.ports, self.full = 0, False

    def take(self, line: str) -> bool:
        """Use one line without outer blanks; False when it cannot be understood."""
        first = line[0]
        if first == "[":
            return self._port(line)
        if first in "SCR":
            return self._header(line) or self._report(line) or self._listed(line) or _harmless(line)
        return self._identity(line) or _harmless(line)

    def refuse(self, number: int, line: str) -> None:
        """Count a line that says nothing; the tool's own complaints are kept as they are."""
        if _COMPLAINT.search(line[:MAX_LINE]):
            if len(self.complaints) < 3:
                self.complaints.append(line[:MAX_QUOTE])
            return
        self.garbage += 1
        if self.garbage == 1:
            self.first = f"line {number}: {line[:MAX_QUOTE]!r}"

    def _identity(self, line: str) -> bool:
        match = _IDENTITY.match(line)
        if match is None:
            return False
        word, value, _, rest = match.groups()
        if word == "vendid" or self.current is not None:
            self.current, self.ahead = None, {}
        if word == "sysimgguid" and (chassis := _CHASSIS.search(rest)):
            self.ahead["chassis"] = chassis[1]
        if word == "devid":
            self.ahead["devid"] = value[-8:]
        elif word != "vendid":
            self.ahead[word] = value.lower().zfill(16)
        return True

    def _header(self, line: str) -> bool:
        match = _HEADER.match(line)
        if match is None:
            return False
        word, count, guid, description, rest = match.groups()
        self.current = self._draft(_KINDS[word], guid.lower().zfill(16), "topology")
        if self.current is not None:
            facts = {"count": count, "description": description or "", **self._facts_ahead()}
            lid = _LID.search(rest or "")
            self._describe(self.current, facts, int(lid[1]) if lid else None)
        return True

    def _facts_ahead(self) -> dict[str, str]:
        facts = {k: v for k, v in self.ahead.items() if k in {"devid", "sysimgguid", "chassis"}}
        if facts.get("sysimgguid") == _NO_GUID:
            del facts["sysimgguid"]
        self.ahead = {}
        return facts

    def _headless(self) -> _Draft | None:
        """The device of a stanza whose header line was lost: its GUID stands before it too."""
        for word in ("switchguid", "caguid", "rtguid"):
            if word in self.ahead:
                draft = self._draft(_KINDS[word], self.ahead[word], "topology")
                facts = self._facts_ahead()
                if draft is not None:
                    self._describe(draft, facts, None)
                return draft
        return None

    def _port(self, line: str) -> bool:
        match = _PORT.match(line)
        if match is None:
            return False
        if self.current is None:
            self.current = self._headless()
        if self.current is None:
            return self.full
        number, guid, letter, peer, peer_port, peer_guid, rest = match.groups()
        end = _PORT_END.match(rest) if rest else None
        lid, name, peer_lid, width, speed, more = (
            end.groups() if end else (None, "", None, None, None, "")
        )
        if speed == "???" and (extended := _EXTENDED.search(more)):
            speed = _OLD_TOOL.get(extended[1])
        peer = peer.lower().zfill(16)
        self.seen.setdefault(peer, (_KINDS[letter], name, _whole(peer_lid)))
        self._add(
            self.current,
            int(number),
            guid and guid.lower().zfill(16),
            _whole(lid),
            (peer, int(peer_port), peer_guid and peer_guid.lower().zfill(16)),
            (width, speed),
        )
        return True

    def _report(self, line: str) -> bool:
        """One line of `-p`: a port, and what it is connected to."""
        match = _REPORT.match(line)
        if match is None:
            return False
        word, lid, number, guid, width, speed, rest = match.groups()
        other = _REPORT_PEER.match(rest)
        if other is None and not _WHOLE_NAME.match(rest):
            return False  # cut off inside the other end or the name: says nothing of a cable
        guid = guid.lower()
        draft = self._draft(_KINDS[word], guid, "ports")
        if draft is None:
            return self.full
        mine, theirs = _two_names(other[5] or "") if other else (_unquoted(rest), "")
        self._describe(draft, {"description": mine}, int(lid) if draft.kind == "switch" else None)
        own = None if draft.kind == "switch" else guid
        peer = None
        if other:
            kind, at = _KINDS[other[1]], other[4].lower()
            self.seen.setdefault(at, (kind, theirs, int(other[2])))
            peer = (at, int(other[3]), None if kind == "switch" else at)
        self._add(draft, int(number), own, int(lid), peer, (width, speed))
        return True

    def _listed(self, line: str) -> bool:
        match = _LISTED.match(line)
        if match is None:
            return False
        word, guid, count, devid, description = match.groups()
        draft = self._draft(_KINDS[word], guid.lower().zfill(16), "list")
        if draft is not None:
            facts = {"count": count, "description": description or ""}
            self._describe(draft, facts | ({"devid": devid} if devid else {}), None)
        return True

    def _draft(
        self, kind: Kind, guid: str, form: Literal["topology", "ports", "list"]
    ) -> _Draft | None:
        if guid == _NO_GUID:
            return None
        draft = self.devices.get(guid)
        if draft is None:
            if len(self.devices) >= MAX_DEVICES:
                self.full = True
                return None
            draft = self.devices[guid] = _Draft(kind, guid)
        elif draft.kind != kind:
            self.duplicates.add(guid)
        self.forms.add(form)
        return draft

    def _describe(self, draft: _Draft, facts: dict[str, str], lid: int | None) -> None:
        """Add facts; an entry that contradicts an earlier one makes the GUID a duplicate."""
        for name, value in facts.items():
            if value and draft.facts.setdefault(name, value) != value:
                self.duplicates.add(draft.guid)
        if lid is not None:
            draft.lid = lid if draft.lid is None else draft.lid

    def _add(
        self,
        draft: _Draft,
        number: int,
        guid: str | None,
        lid: int | None,
        peer: tuple[str, int, str | None] | None,
        rate: tuple[str | None, str | None],
    ) -> None:
        at, at_port, at_guid = peer or (None, None, None)
        # a port without a link still prints a width and a speed; they mean nothing
        width = rate[0] if at and rate[0] in LANES else None
        speed = rate[1] if at and rate[1] in LANE_GBPS else None
        port = Port(number, guid, lid, at, at_port, at_guid, width, speed, gbps(width, speed))
        known = draft.ports.get(number)
        if known is not None:
            if (known.peer, known.peer_port) != (at, at_port):
                self.duplicates.add(draft.guid)
        elif self.ports >= MAX_PORTS:
            self.full = True
        else:
            self.ports += 1
            draft.ports[number] = port

    def _imply(self) -> None:
        """Add the devices that only their neighbours name, with the mirrored ends of the links."""
        for draft in list(self.devices.values()):
            for port in draft.ports.values():
                if port.peer is None or port.peer_port is None or port.peer == _NO_GUID:
                    continue
                other = self.devices.get(port.peer)
                if other is None and len(self.devices) >= MAX_DEVICES:
                    self.full = True
                    continue
                if other is None:
                    kind, name, lid = self.seen[port.peer]
                    other = self.devices[port.peer] = _Draft(kind, port.peer, listed=False)
                    other.facts["description"], other.lid = name, lid
                if not other.listed:
                    mirrored = port._replace(
                        number=port.peer_port,
                        guid=port.peer_guid,
                        lid=None,
                        peer=draft.guid,
                        peer_port=port.number,
                        peer_guid=port.guid,
                    )
                    other.ports.setdefault(port.peer_port, mirrored)

    def discovery(self) -> Discovery:
        self._imply()
        if self.full:
            self.notes.append(
                f"more than {MAX_DEVICES} devices or {MAX_PORTS} ports: the rest is left out"
            )
        self.notes += [f"ibnetdiscover complained: {line}" for line in self.complaints]
        if self.garbage:
            lines = "1 line was" if self.garbage == 1 else f"{self.garbage} lines were"
            self.notes.append(f"{lines} not understood, first {self.first}")
        if not self.devices:
            self.notes.append("no device in the text: the scan failed or saw nothing")
        forms: tuple[Literal["topology", "ports", "list"], ...] = ("topology", "ports", "list")
        return Discovery(
            tuple(self.devices[guid].device() for guid in sorted(self.devices)),
            form=next((form for form in forms if form in self.forms), None),
            duplicates=tuple(sorted(self.duplicates)),
            notes=tuple(self.notes),
        )


def _harmless(line: str) -> bool:
    return _HARMLESS.match(line) is not None


def _whole(digits: str | None) -> int | None:
    return int(digits) if digits else None


def _unquoted(text: str) -> str:
    """A name of `-p`: inside quotes its blanks belong to it."""
    name = text.strip()
    return name[1:-1] if len(name) > 1 and name[0] == name[-1] == "'" else name


def _two_names(text: str) -> tuple[str, str]:
    """Both names of `( 'o0001 HCA-1' - 'ib-i1l1s01' )`, which some versions do not quote."""
    first, between, second = text.strip().partition("' - '")
    if between:
        return _unquoted(f"{first}'"), _unquoted(f"'{second}")
    first, _, second = text.strip().partition(" - ")
    return _unquoted(first), _unquoted(second)
