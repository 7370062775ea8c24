"""What the kernel log says of cards: XIDs, SXIDs, lost cards, resets, loads of the driver.

Called by inventory.py once in each look; agent/health_ledger.py takes the events in. `parse` is
pure, and reads the records of /dev/kmsg, the lines of dmesg and syslog, and journalctl's JSON.
`read` tries /dev/kmsg, then dmesg, then journalctl: many machines let only root see the log.
"""

from __future__ import annotations

import json
import os
import re
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Final, TypeVar

from agent.probes import kernel_messages, values
from agent.probes.root import bounded
from agent.xids import Cursor, Event

if TYPE_CHECKING:
    from agent.probes.root import Root

Number = TypeVar("Number", int, float)

KMSG: Final = "/dev/kmsg"
RESTRICT: Final = "/proc/sys/kernel/dmesg_restrict"
MAX_EVENTS: Final = 1000
"""Events returned of one reading; the oldest are dropped. Repeats are folded before that."""
MAX_UUIDS: Final = 256
LINE_LIMIT: Final = 16384
"""Characters taken of one line; journalctl's JSON has about 1,000 for one."""
TAIL: Final = 65536
TAIL_LINES: Final = 50
"""How much of the end is searched for the last number and time; JSON lines are long."""
KMSG_RECORD: Final = 16384
KMSG_LIMIT: Final = 64 * 2**20
"""Bytes read of /dev/kmsg at most; the kernel keeps 128 KiB to a few MiB of log."""
JOURNAL_LINES: Final = 5000
TOOL_TIMEOUT_S: Final = 5.0
KMSG_TIMEOUT_S: Final = 5.0

_MARK: Final = re.compile("|".join([*kernel_messages.MARKS, r"\[78, ?86, ?82, ?77"]))
"""The last is "NVRM" where journalctl writes a message as bytes."""
_RECORD: Final = re.compile(r"([0-9]{1,10}),([0-9]{1,19}),([0-9]{1,19})(?:,[^;]{0,200})?;(.*)")
_ANSI: Final = re.compile(r"\x1b\[[0-9;]{0,20}[A-Za-z]")
_SYSLOG: Final = re.compile(
    r"(?:<[0-9]{1,4}>)?"
    r"(?:[A-Z][a-z]{2} [ 0-9][0-9] [0-9:]{8}|[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9:.,]{8,20}\S{0,6})"
    r" \S{1,255} kernel: ?"
)
_BRACKET: Final = re.compile(r"(?:<[0-9]{1,4}>)?\[ *([0-9]{1,10}\.[0-9]{1,9})\] ?")
_DATED: Final = re.compile(r"\[[A-Z][a-z]{2} [A-Z][a-z]{2} [ 0-9][0-9] [0-9:]{8} [0-9]{4}\] ")
_CALLER: Final = re.compile(r"\[ *[TC][0-9]{1,10}\] ")


@dataclass(frozen=True, slots=True)
class KernelLog:
    """New events in the log's order, and how far it was read.

    `uuids` gives the UUID of cards by address where the log names it; `readable` says that there
    were lines at all, `error` why the log is not known, or not wholly, `source` who gave it
    (`/dev/kmsg`, `dmesg`, `journalctl`).
    """

    events: tuple[Event, ...] = ()
    cursor: Cursor | None = None
    uuids: Mapping[str, str] = field(default_factory=dict)
    readable: bool = False
    error: str | None = None
    source: str | None = None


@dataclass(slots=True)
class _Line:
    seq: int | None
    at: float | None
    text: str


def parse(text: str, after: Cursor | None = None) -> KernelLog:
    """Events that came after the cursor; all of them without one.

    A line without a time counts only when there is no cursor, as it may be an old one. Only lines
    with a driver's mark are taken apart, and the last ones, which tell how far the log goes.
    """
    found = _Found()
    cursor, readable = after, False
    for raw in _marked(text):
        line = _line(raw)
        if line is not None:
            found.take(line, new=_is_new(line, after))
            cursor = _further(cursor, line)
    for raw in text[-TAIL:].split("\n")[-TAIL_LINES:]:
        line = _line(raw[:LINE_LIMIT])
        if line is not None:
            readable, cursor = True, _further(cursor, line)
    events = tuple(
        replace(event, uuid=found.uuids.get(event.pci_bus_id or ""))
        for event in found.events.values()
    )
    return KernelLog(events, cursor, found.uuids, readable or bool(events))


def _further(cursor: Cursor | None, line: _Line) -> Cursor:
    last = cursor or Cursor()
    return Cursor(_later(last.seq, line.seq), _later(last.at, line.at))


def _is_new(line: _Line, after: Cursor | None) -> bool:
    if after is None:
        return True
    if line.seq is not None and after.seq is not None:
        return line.seq > after.seq
    return line.at is not None and (after.at is None or line.at > after.at)


def _later(one: Number | None, other: Number | None) -> Number | None:
    return other if one is None else one if other is None else max(one, other)


class _Found:
    """Events so far. Repeats of one event are folded until a reset or a load comes between them."""

    def __init__(self) -> None:
        self.events: OrderedDict[tuple[int, str, str | None], Event] = OrderedDict()
        self.uuids: dict[str, str] = {}
        self.epoch = 0

    def take(self, line: _Line, *, new: bool) -> None:
        named = kernel_messages.named_card(line.text)
        if named and len(self.uuids) < MAX_UUIDS:
            self.uuids[named[0]] = named[1]
        event = kernel_messages.event(line.text) if new else None
        if event is None:
            return
        if event.what in {"reset", "loaded"}:
            self.epoch += 1
        key = (self.epoch, event.code, event.pci_bus_id)
        former = self.events.get(key)
        if former is None:
            self.events[key] = replace(event, at=line.at)
            if len(self.events) > MAX_EVENTS:
                self.events.popitem(last=False)
        else:
            self.events[key] = replace(former, at=line.at, count=former.count + 1)


def _marked(text: str) -> Iterator[str]:
    """Lines with a driver's mark, each cut at LINE_LIMIT."""
    end = 0
    while (mark := _MARK.search(text, end)) is not None:
        start = text.rfind("\n", end, mark.start()) + 1 or end
        end = text.find("\n", mark.end())
        end = len(text) if end < 0 else end
        yield text[start : min(end, start + LINE_LIMIT)]


def _line(raw: str) -> _Line | None:
    """A line with its number and time; None for one that is no record (a tool's remark)."""
    if raw.startswith("-- ") or (raw.startswith(" ") and "=" in raw):
        return None  # journalctl's remarks; /dev/kmsg's further facts of the record before
    if record := _RECORD.match(raw):
        return _Line(int(record[2]), int(record[3]) / 1e6, record[4])
    if raw.startswith("{"):
        return _journal(raw)
    text = _ANSI.sub("", raw).rstrip("\r") if "\x1b" in raw or "\r" in raw else raw
    if syslog := _SYSLOG.match(text):
        text = text[syslog.end() :]
    at = None
    if stamp := _BRACKET.match(text):
        at, text = float(stamp[1]), text[stamp.end() :]
    elif dated := _DATED.match(text):
        text = text[dated.end() :]
    if caller := _CALLER.match(text):
        text = text[caller.end() :]
    return _Line(None, at, text) if text.strip() else None


def _journal(raw: str) -> _Line | None:
    try:
        record = json.loads(raw)
    except (ValueError, RecursionError):
        return None
    message = record.get("MESSAGE")
    if isinstance(message, list):  # journald writes a message that is no clean text as bytes
        message = bytes(b for b in message if isinstance(b, int) and 0 <= b < 256).decode(
            errors="replace"
        )
    if not isinstance(message, str):
        return None
    stamp = record.get("_SOURCE_MONOTONIC_TIMESTAMP", record.get("__MONOTONIC_TIMESTAMP"))
    at = values.whole(stamp) if isinstance(stamp, str) else None
    return _Line(None, None if at is None else at / 1e6, message.split("\n")[0])


async def read(root: Root, after: Cursor | None = None) -> KernelLog:
    """New events of the machine's kernel log, from the first source that gives any line."""
    reasons: list[str] = []
    kept = await bounded(partial(_kmsg, root, after), key="kmsg", timeout_s=KMSG_TIMEOUT_S)
    if isinstance(kept, KernelLog):
        return kept
    reasons.append(kept or f"{KMSG}: no answer within {KMSG_TIMEOUT_S:g} s")
    for argv in (["dmesg"], _journalctl()):
        result = await root.run(argv, TOOL_TIMEOUT_S)
        reading = partial(parse, result.stdout, after)
        log = await bounded(reading, key=f"parse {argv[0]}", timeout_s=TOOL_TIMEOUT_S)
        log = log or KernelLog()
        if log.readable and log.cursor is not None and log.cursor.at is not None:
            return replace(log, source=argv[0])
        if log.readable and result.exit_code == 0:
            note = f"{argv[0]}: the kernel log has no times, so only its first reading counts"
            return replace(log, source=argv[0], error=note)
        said = (result.stderr.strip().splitlines() or result.stdout[:500].strip().splitlines())[:1]
        reasons.append(": ".join([result.error or f"{argv[0]}: no lines", *said])[:160])
    hint = await bounded(partial(_hint, root), key="dmesg_restrict", timeout_s=2)
    error = "; ".join(reasons)[:500]
    return KernelLog(cursor=after, error=f"kernel log not readable: {error}{hint or ''}")


def _journalctl() -> list[str]:
    lines = str(JOURNAL_LINES)
    return ["journalctl", "--dmesg", "--boot", "--no-pager", "--output=json", f"--lines={lines}"]


def _hint(root: Root) -> str:
    if (root.read(RESTRICT, 16) or "").strip() != "1":
        return ""
    return f"; only root may read it ({RESTRICT} is 1): run the agent as root to see XIDs"


def _kmsg(root: Root, after: Cursor | None) -> KernelLog | str:
    kept = read_kmsg(root)
    if isinstance(kept, OSError):
        return f"{KMSG}: {kept.strerror or kept}"
    log = parse(kept, after)
    return replace(log, source=KMSG) if log.readable else f"{KMSG}: no records"


def read_kmsg(root: Root) -> str | OSError:
    """All records that the kernel still holds, or why they cannot be read. Blocking, quick.

    Each read gives one record. EPIPE says that the kernel dropped the next one meanwhile.
    """
    kept = bytearray()
    try:
        descriptor = os.open(root.at(KMSG), os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except (OSError, ValueError) as error:
        return error if isinstance(error, OSError) else OSError(str(error))
    try:
        while len(kept) < KMSG_LIMIT and (record := _record(descriptor)):
            kept += record
    except OSError as error:
        if not kept:
            return error
    finally:
        os.close(descriptor)
    return kept.decode("utf-8", errors="replace")


def _record(descriptor: int) -> bytes:
    for _ in range(1000):
        try:
            return os.read(descriptor, KMSG_RECORD)
        except BrokenPipeError:
            continue
        except BlockingIOError:
            return b""
    return b""
