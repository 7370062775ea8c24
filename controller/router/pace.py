"""How fast a queue drains: requests that left it for a replica, per second of waiting. Pure.

Older turns count less (`WINDOW_S`). Only time in which something waited counts, so an idle hour
is no slow hour. Before `ENOUGH` turns were seen nothing is known, and nothing is said.
"""

from __future__ import annotations

from math import exp, inf

WINDOW_S = 30.0
ENOUGH = 10


class Pace:
    """One queue's. All moments are seconds of one monotonic clock."""

    __slots__ = ("_at", "_seen", "_served", "_time", "_took_at")

    def __init__(self) -> None:
        self._at = 0.0
        self._took_at = 0.0
        self._seen = 0
        self._served = 0.0
        self._time = 0.0

    def start(self, now: float) -> None:
        """Nothing waited until now: that time does not count, and turns older than the window say
        nothing. Who is refused for them waits for nothing, so no newer ones would ever be seen.
        """
        if now - self._took_at > WINDOW_S:
            self._seen, self._served, self._time = 0, 0.0, 0.0
        self._at = now

    def took(self, now: float) -> None:
        """One had its turn."""
        self._served, self._time = self._aged(now)
        self._served += 1
        self._seen += 1
        self._at = self._took_at = now

    def seconds(self, turns: float, now: float) -> float | None:
        """How long so many turns take, while something waits; None as long as nobody knows."""
        if self._seen < ENOUGH:
            return None
        served, time = self._aged(now)
        return turns * time / served if served else inf

    def _aged(self, now: float) -> tuple[float, float]:
        fade = exp((self._at - now) / WINDOW_S)
        return self._served * fade, self._time * fade + WINDOW_S * (1 - fade)
