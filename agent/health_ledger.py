"""What is remembered of the cards' health over time: when a finding counts and when it heals. Pure.

The caller takes a `Look` at every card (agent/health.py), reads the new events of the kernel log
and of NVML (agent/xids.py), calls `observe`, and keeps `to_document()` in the agent's state folder.
A finding comes from the card's state, which is asked again in each look, or from an event, which is
told only once. When it counts, and what heals it:

| kind     | from  | counts after         | heals by                                               |
| -------- | ----- | -------------------- | ------------------------------------------------------ |
| passing  | state | two looks running (1)| two looks running that could tell and did not find it  |
| passing  | event | the event            | QUIET_S without another one and a look that is         |
|          |       |                      | answered; a reset, a reload of the driver, a reboot    |
| reset    | state | one look             | one look that could tell and did not find it: these    |
|          |       |                      | words of the driver only go by a reset (2)             |
| reset    | event | the event            | a reset of the card (3), a reload of the driver, or a  |
|          |       |                      | reboot                                                 |
| hardware | state | one look             | one look that could tell and did not find it           |
| hardware | event | the event            | a reboot and then a look that is answered and finds    |
|          |       |                      | nothing of kind reset or hardware                      |

(1) `health.AT_ONCE` counts after one look. (2) The recovery action takes two, as "none" looks the
same as no answer. (3) Known from the kernel log, or from the recovery action that was set and went.
What a look could not tell (a lost card, an old driver) heals nothing. The kernel log's own order
says which events a reset came after. Events of NVML have no time: give them only where the log
cannot be read, as it holds them all.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, Literal

from agent import health, xids

QUIET_S: Final = 300.0
"""An event of kind passing heals when no further one came for this long."""
MAX_CARDS: Final = 64
MAX_FINDINGS: Final = 50
"""Findings kept per card. Passing ones go first, then the oldest."""
LOOKS: Final = 2

Source = Literal["state", "event"]


@dataclass(frozen=True, slots=True)
class Entry:
    """A finding and how long it has been there. Times are seconds of the caller's clock.

    `seen` and `clean` count looks running, up to LOOKS. `event_at` is the kernel's own time of the
    last event, `booted` says that a reboot came after it.
    """

    finding: health.Finding
    source: Source
    since: float
    last: float
    seen: int = 1
    clean: int = 0
    counts: bool = True
    count: int = 1
    event_at: float | None = None
    booted: bool = False


Entries = Mapping[str, Entry]


@dataclass(frozen=True, slots=True)
class Remembered:
    """One card: its address when last seen, and its findings by their code."""

    pci_bus_id: str | None = None
    entries: Entries = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Ledger:
    """All cards by their key: the UUID, or `PCI-<address>` where there is none (NVSwitches too)."""

    cards: Mapping[str, Remembered] = field(default_factory=dict)
    boot_id: str | None = None
    driver: str | None = None
    cursor: xids.Cursor | None = None

    def findings(self, key: str | None) -> tuple[health.Finding, ...]:
        """What counts against a card now, by code."""
        card = self.cards.get(key or "", Remembered())
        return tuple(e.finding for _, e in sorted(card.entries.items()) if e.counts)

    def healthy(self, key: str | None) -> bool:
        """Whether placement may use the card, as far as this machine knows."""
        return not any(finding.unhealthy for finding in self.findings(key))

    def read_until(self, boot_id: str | None) -> xids.Cursor | None:
        """Where to go on in the kernel log; None to read all of it, after a reboot for one."""
        return self.cursor if boot_id is not None and boot_id == self.boot_id else None


def observe(
    ledger: Ledger,
    seen: Mapping[str, health.Look],
    events: Sequence[xids.Event] = (),
    *,
    boot_id: str | None,
    driver: str | None,
    now: float,
    cursor: xids.Cursor | None = None,
) -> Ledger:
    """The ledger after one look at the cards.

    `seen` is by gpus.key; a card left out is unchanged. `events` are those since the last call, in
    order. `driver` is anything that changes when the driver is loaded anew (its version); None for
    `boot_id` or `driver` is unknown and proves nothing. `now` is seconds since boot (monotonic).
    `cursor` is how far the kernel log was read for `events`.
    """
    booted = None not in (boot_id, ledger.boot_id) and boot_id != ledger.boot_id
    reloaded = None not in (driver, ledger.driver) and driver != ledger.driver
    fresh = ledger.read_until(boot_id) is not None
    cards = _adopt(ledger.cards, seen)
    if booted:
        cards = {key: _after_boot(card, now) for key, card in cards.items()}
    elif reloaded:
        cards = {key: _after_reset(card) for key, card in cards.items()}
    for key, look in seen.items():
        cards[key] = _after_look(cards.get(key, Remembered()), look, now)
    for event in events:
        _apply(cards, event, now, fresh=fresh)
    return Ledger(
        cards=_bounded(cards, seen),
        boot_id=boot_id or ledger.boot_id,
        driver=driver or ledger.driver,
        cursor=cursor or ledger.read_until(boot_id),
    )


def _adopt(
    cards: Mapping[str, Remembered], seen: Mapping[str, health.Look]
) -> dict[str, Remembered]:
    """Give what was noted under an address to the card whose UUID is known by now."""
    adopted = dict(cards)
    for key, look in seen.items():
        nameless = adopted.get(f"PCI-{look.pci_bus_id}")
        if nameless is None or key == f"PCI-{look.pci_bus_id}":
            continue
        del adopted[f"PCI-{look.pci_bus_id}"]
        own = adopted.get(key, Remembered())
        adopted[key] = replace(own, entries={**nameless.entries, **own.entries})
    return adopted


def _after_boot(card: Remembered, now: float) -> Remembered:
    """A reboot resets every card. Times of the former boot mean nothing in this one."""
    kept: dict[str, Entry] = {}
    for code, entry in card.entries.items():
        if entry.source == "state" or entry.finding.kind == "hardware":
            booted = entry.source == "event"
            kept[code] = replace(entry, since=now, last=now, event_at=None, booted=booted)
    return replace(card, entries=kept)


def _after_reset(card: Remembered, at: float | None = None) -> Remembered:
    """Forget what a reset heals: events before `at` (kernel's clock; None when not known)."""
    kept = {
        code: entry
        for code, entry in card.entries.items()
        if entry.source == "state"
        or entry.finding.kind == "hardware"
        or (at is not None and entry.event_at is not None and entry.event_at > at)
    }
    return replace(card, entries=kept)


def _after_look(card: Remembered, look: health.Look, now: float) -> Remembered:
    found = {finding.code: finding for finding in look.findings}
    entries: dict[str, Entry] = {}
    reset = False
    for code, entry in card.entries.items():
        if code in found and entry.source == "state":
            continue  # noted below
        stays = _unseen(entry, look, now) if code not in found else entry
        if stays is not None:
            entries[code] = stays
        elif code == "recovery_action":
            reset = True
    for code, finding in found.items():
        entries[code] = _seen(card.entries.get(code), finding, now)
    after = Remembered(look.pci_bus_id or card.pci_bus_id, entries)
    return _after_reset(after) if reset else after


def _seen(former: Entry | None, finding: health.Finding, now: float) -> Entry:
    at_once = finding.kind != "passing" or finding.code in health.AT_ONCE
    if former is None or former.source != "state":
        return Entry(finding, "state", since=now, last=now, counts=at_once)
    seen = min(former.seen + 1, LOOKS)
    counts = at_once or former.counts or seen >= LOOKS
    return replace(former, finding=finding, last=now, seen=seen, clean=0, counts=counts)


def _unseen(entry: Entry, look: health.Look, now: float) -> Entry | None:
    """The entry after a look that did not find it, None when it is healed."""
    if entry.source == "event":
        return None if _event_healed(entry, look, now) else entry
    if entry.finding.code not in look.told:
        return replace(entry, clean=0)
    patient = entry.finding.kind == "passing" or entry.finding.code == "recovery_action"
    if not patient or not entry.counts or entry.clean + 1 >= LOOKS:
        return None
    return replace(entry, seen=0, clean=entry.clean + 1)


def _event_healed(entry: Entry, look: health.Look, now: float) -> bool:
    if entry.finding.kind == "passing":
        return look.answers and abs(now - entry.last) >= QUIET_S
    if entry.finding.kind == "hardware":
        sound = not any(finding.kind in {"reset", "hardware"} for finding in look.findings)
        return entry.booted and look.answers and sound
    return False


def _apply(cards: dict[str, Remembered], event: xids.Event, now: float, *, fresh: bool) -> None:
    """Take in one event. `fresh`: it came since the last look, else it may be days old."""
    if event.what == "loaded":
        for name, loaded in cards.items():
            if not any(code.startswith("amd_") for code in loaded.entries):
                cards[name] = _after_reset(loaded, event.at)
        return
    key = _key_of(cards, event)
    if key is None:
        return
    card = cards.get(key, Remembered(event.pci_bus_id))
    if event.what == "reset":
        cards[key] = _after_reset(card, event.at)
        return
    finding = xids.finding(event)
    last = now if fresh or event.at is None else min(event.at, now)
    if finding.kind == "passing" and now - last >= QUIET_S:
        return  # over before we looked for the first time
    entry = _noted(card.entries.get(finding.code), finding, event, last)
    cards[key] = replace(card, entries={**card.entries, finding.code: entry})


def _noted(former: Entry | None, finding: health.Finding, event: xids.Event, last: float) -> Entry:
    if former is None:
        return Entry(finding, "event", last, last, count=event.count, event_at=event.at)
    known = event.at is not None and former.event_at is not None and event.at <= former.event_at
    return replace(
        former,
        finding=finding if _weight(finding) >= _weight(former.finding) else former.finding,
        last=max(last, former.last),
        count=former.count + (0 if known else event.count),
        event_at=event.at if former.event_at is None else max(event.at or 0.0, former.event_at),
        booted=former.booted and known,
    )


def _weight(finding: health.Finding) -> tuple[bool, int]:
    """A fatal NVLink error is not made harmless by a further one that was recovered."""
    return finding.unhealthy, ("passing", "reset", "hardware").index(finding.kind)


def _key_of(cards: Mapping[str, Remembered], event: xids.Event) -> str | None:
    if event.uuid is not None and event.uuid in cards:
        return event.uuid
    if event.pci_bus_id is not None:
        known = [key for key, card in cards.items() if card.pci_bus_id == event.pci_bus_id]
        return known[0] if known else event.uuid or f"PCI-{event.pci_bus_id}"
    return event.uuid


def _bounded(
    cards: Mapping[str, Remembered], seen: Mapping[str, health.Look]
) -> dict[str, Remembered]:
    """Drop cards without findings that are gone, and what is too much."""
    kept = [(key, card) for key, card in cards.items() if card.entries or key in seen]
    kept.sort(key=lambda item: (item[0] not in seen, not item[1].entries, item[0]))
    return {key: replace(card, entries=_most(card.entries)) for key, card in kept[:MAX_CARDS]}


def _most(entries: Entries) -> Entries:
    if len(entries) <= MAX_FINDINGS:
        return entries
    order = sorted(entries.items(), key=lambda item: (_weight(item[1].finding), item[1].last))
    return dict(order[-MAX_FINDINGS:])
