"""The retry budget of one router process: retries stay a fraction of the requests. Pure.

Layers that retry multiply the load exactly when engines have none to spare (case C05). A ratio
needs no talk between routers: each keeps its own, and the sum of fractions is the fraction of the
sum. The floor lets a quiet router retry at all; it is per process, so it is small.
"""

from __future__ import annotations

SPAN_S = 5.0
"""Requests and retries of this span and the one before it are compared."""


class RetryBudget:
    """Counts requests as they come; `spend` says whether one more retry is within the budget."""

    __slots__ = (
        "_floor", "_offered", "_offered_before", "_ratio", "_span_end", "_spent", "_spent_before",
    )  # fmt: skip

    def __init__(self, ratio: float, floor: int) -> None:
        """At most `ratio` retries per request, and `floor` more in two spans (10 s)."""
        self._ratio = ratio
        self._floor = floor
        self._offered = self._offered_before = 0
        self._spent = self._spent_before = 0
        self._span_end = 0.0

    def offer(self, now: float) -> None:
        """A client's request came in at `now` (monotonic seconds)."""
        if now >= self._span_end:
            self._turn(now)
        self._offered += 1

    def affords(self, now: float) -> bool:
        """Whether one more retry is within the budget."""
        if now >= self._span_end:
            self._turn(now)
        spent = self._spent + self._spent_before
        return spent + 1 <= self._floor + self._ratio * (self._offered + self._offered_before)

    def spend(self, now: float) -> bool:
        """Take one retry; False when the budget is exhausted."""
        if not self.affords(now):
            return False
        self._spent += 1
        return True

    def _turn(self, now: float) -> None:
        adjacent = now < self._span_end + SPAN_S
        self._offered_before = self._offered if adjacent else 0
        self._spent_before = self._spent if adjacent else 0
        self._offered = self._spent = 0
        self._span_end = (now // SPAN_S + 1) * SPAN_S
