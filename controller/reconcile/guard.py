"""When the silence of nodes may be ours and not theirs. Used by the tick.

After a new leader, a pause of ours or a restart of the database, beats are missing that were never
lost: for the fleet's setting `guard` nobody is declared lost then, and the plan says why.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from controller.reconcile.snapshot import Seen

GAP_S = 15.0
"""No look at the fleet for this long, and what seems silent may only be us."""


class Guard:
    """Times are trio.current_time(), but for what `Seen` says of the database's clock."""

    def __init__(self) -> None:
        self._term: int | None = None
        self._looked_at: float | None = None
        self._until = -1.0
        self._why = ""

    def is_new(self, term: int) -> bool:
        """Whether nothing was seen under this term yet."""
        return term != self._term

    def why(self, seen: Seen, term: int, now: float) -> str | None:
        """Why silence is not believed now, or None."""
        if self.is_new(term):
            self._hold("a new leader has just begun", now + seen.guard_s)
        elif self._looked_at is not None and now - self._looked_at > GAP_S:
            self._hold("there was no tick for a while", now + seen.guard_s)
        self._term, self._looked_at = term, now
        left_s = seen.server_started_at + seen.guard_s - seen.now
        if left_s > 0:
            self._hold("the database has just started", now + left_s)
        return self._why if now < self._until else None

    def looked(self, now: float) -> None:
        """A tick is through: its own length is no gap."""
        self._looked_at = now

    def _hold(self, why: str, until: float) -> None:
        if until >= self._until:
            self._why, self._until = why, until
