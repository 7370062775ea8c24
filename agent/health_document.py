"""The health ledger as a JSON document, for the agent's state folder. Pure.

A document that was damaged, or written by another version, gives what can be read of it; nothing
here raises. What is lost is found again by the next looks, except for events of the past.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Final, cast

from agent import health
from agent.health_ledger import (
    LOOKS,
    MAX_CARDS,
    MAX_FINDINGS,
    Entry,
    Ledger,
    Remembered,
    Source,
)
from agent.xids import Cursor

VERSION: Final = 1
_TEXT: Final = 1000
"""Characters of a text that are read back."""
_COUNT: Final = 2**53


def to_document(ledger: Ledger) -> dict[str, Any]:
    """The ledger as values that JSON can hold. `from_document` gives an equal ledger back."""
    return {
        "version": VERSION,
        "boot_id": ledger.boot_id,
        "driver": ledger.driver,
        "cursor": None if ledger.cursor is None else [ledger.cursor.seq, ledger.cursor.at],
        "cards": {
            key: {
                "pci_bus_id": card.pci_bus_id,
                "entries": [_entry_document(entry) for entry in card.entries.values()],
            }
            for key, card in ledger.cards.items()
        },
    }


def _entry_document(entry: Entry) -> dict[str, Any]:
    finding = entry.finding
    return {
        "code": finding.code,
        "kind": finding.kind,
        "text": finding.text,
        "evidence": finding.evidence,
        "unhealthy": finding.unhealthy,
        "source": entry.source,
        "since": entry.since,
        "last": entry.last,
        "seen": entry.seen,
        "clean": entry.clean,
        "counts": entry.counts,
        "count": entry.count,
        "event_at": entry.event_at,
        "booted": entry.booted,
    }


def from_document(document: object) -> Ledger:
    """The ledger of a document without what does not fit: an empty one in the worst case."""
    if not isinstance(document, Mapping) or document.get("version") != VERSION:
        return Ledger()
    cards: dict[str, Remembered] = {}
    told = document.get("cards")
    for key, card in told.items() if isinstance(told, Mapping) else ():
        if len(cards) >= MAX_CARDS:
            break
        if isinstance(key, str) and len(key) <= _TEXT and isinstance(card, Mapping):
            cards[key] = Remembered(_text(card.get("pci_bus_id")), _entries(card.get("entries")))
    return Ledger(
        cards=cards,
        boot_id=_text(document.get("boot_id")),
        driver=_text(document.get("driver")),
        cursor=_cursor(document.get("cursor")),
    )


def _entries(listed: object) -> dict[str, Entry]:
    found = (_entry(item) for item in listed[:MAX_FINDINGS]) if isinstance(listed, list) else ()
    return {entry.finding.code: entry for entry in found if entry is not None}


def _entry(item: object) -> Entry | None:
    if not isinstance(item, Mapping):
        return None
    code, text, evidence = (_text(item.get(name)) for name in ("code", "text", "evidence"))
    since, last = _number(item.get("since")), _number(item.get("last"))
    kind, source = item.get("kind"), item.get("source")
    if None in (code, text, evidence, since, last):
        return None
    if kind not in ("passing", "reset", "hardware") or source not in ("state", "event"):
        return None
    finding = health.Finding(
        code=code or "",
        kind=cast("health.Kind", kind),
        text=text or "",
        evidence=evidence or "",
        unhealthy=item.get("unhealthy") is not False,
    )
    return Entry(
        finding=finding,
        source=cast("Source", source),
        since=since or 0.0,
        last=last or 0.0,
        seen=_count(item.get("seen"), 0, LOOKS),
        clean=_count(item.get("clean"), 0, LOOKS),
        counts=item.get("counts") is not False,
        count=_count(item.get("count"), 1, _COUNT),
        event_at=_number(item.get("event_at")),
        booted=item.get("booted") is True,
    )


def _cursor(value: object) -> Cursor | None:
    if not isinstance(value, list) or len(value) != 2:
        return None
    seq, at = value
    return Cursor(_count(seq, 0, 2**64) if _whole(seq) else None, _number(at))


def _text(value: object) -> str | None:
    return value if isinstance(value, str) and len(value) <= _TEXT else None


def _whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _count(value: object, least: int, most: int) -> int:
    return min(max(value, least), most) if isinstance(value, int) and _whole(value) else least


def _number(value: object) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) else None
