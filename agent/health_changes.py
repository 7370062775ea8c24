"""What changed in the cards' health between two ledgers: the rows of a node's history. Pure.

Called after each `health_ledger.observe`, with the ledger before and after it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from agent import health_ledger

if TYPE_CHECKING:
    from agent import health


@dataclass(frozen=True, slots=True)
class Change:
    """A finding that came, went or became another one: a row of the node's history.

    `was` and `now` are the texts, None for nothing; `evidence` is why.
    """

    card: str
    code: str
    was: str | None
    now: str | None
    evidence: str
    unhealthy: bool

    @property
    def what(self) -> Literal["found", "healed", "changed"]:
        """One word for the kind of change."""
        if self.was is None:
            return "found"
        return "healed" if self.now is None else "changed"


def changes(before: health_ledger.Ledger, after: health_ledger.Ledger) -> list[Change]:
    """What counts in one ledger and not in the other, or counts differently. Repeats are none."""
    found: list[Change] = []
    for key in sorted({*before.cards, *after.cards}):
        old = {finding.code: finding for finding in before.findings(key)}
        new = {finding.code: finding for finding in after.findings(key)}
        for code in sorted({*old, *new}):
            change = _change(key, old.get(code), new.get(code))
            if change is None:
                continue
            if change.now is None:
                entry = before.cards[key].entries[code]
                change = replace(change, evidence=_why_healed(before, after, entry))
            found.append(change)
    return found


def _change(key: str, old: health.Finding | None, new: health.Finding | None) -> Change | None:
    one = new or old
    if one is None or (old and new and (old.kind, old.unhealthy) == (new.kind, new.unhealthy)):
        return None
    return Change(
        card=key,
        code=one.code,
        was=old.text if old else None,
        now=new.text if new else None,
        evidence=one.evidence,
        unhealthy=one.unhealthy,
    )


def _why_healed(
    before: health_ledger.Ledger, after: health_ledger.Ledger, entry: health_ledger.Entry
) -> str:
    if entry.source == "state":
        return "the driver no longer reports it"
    if before.boot_id != after.boot_id:
        return "the machine was rebooted"
    if entry.finding.kind == "hardware":
        return "the card answers without a fault since the reboot"
    if before.driver != after.driver:
        return "the driver was loaded anew"
    if entry.finding.kind == "passing":
        return f"not again for {health_ledger.QUIET_S:g} s, and the card answers; or it was reset"
    return "the card was reset or its driver loaded anew"
