"""Requests that wait, for whatever it is: bounded in number and bytes, each with its deadline.

The waiting room (models that are being started) and admission (replicas that are full) are kinds
of it. A stream that waits is told so from time to time; a client that leaves frees its place.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Final

from controller.router.clock import monotonic

if TYPE_CHECKING:
    from controller.router.attempts import Attempts
    from controller.router.core import Core
    from controller.router.errors import ApiError
    from controller.router.http1 import Request

AT_A_TIME: Final = 16
"""So many go on in one turn: a thousand held up everybody's streams for 0.1 s, and more with long
bodies."""


class Waiters(ABC):
    """The places of one process. `attempts.resume`, `expired` or `cancel` ends a wait."""

    def __init__(self, core: Core, word: str) -> None:
        """`word` says in metrics how those that waited here came to their engine."""
        self._core = core
        self._word = word
        self.count = 0
        self.bytes = 0

    @abstractmethod
    def comment(self, model: str) -> str:
        """What a client that waits is told meanwhile."""

    @abstractmethod
    def error(self, attempts: Attempts, waited_s: float) -> ApiError:
        """What to tell who waited in vain."""

    def leave(self, attempts: Attempts) -> None:
        """Its place is free: the client left, the deadline passed, or it goes on."""
        self.count -= 1
        self.bytes -= len(attempts.asked.raw)
        attempts.waits = None
        attempts.admitted = self._word
        attempts.queued_s += monotonic() - attempts.waits_since
        attempts.forget()

    def rest(self, attempts: Attempts, now: float) -> None:
        """Wait until the deadline; a stream tells its client from time to time that it does."""
        beat_s = self._core.config.timeouts.comment_s if attempts.asked.stream else math.inf
        self._core.deadlines.set(attempts, min(attempts.wait_until, now + beat_s))

    def _take(self, attempts: Attempts, wait_s: float, now: float) -> None:
        """It has a place for so long."""
        self.count += 1
        self.bytes += len(attempts.asked.raw)
        attempts.waits = self
        attempts.waits_since = now
        attempts.wait_until = now + wait_s
        self.rest(attempts, now)


def patience(request: Request, default_s: float, waited_s: float = 0.0) -> float:
    """Seconds to wait now: at most the default, and less where the client says how long it waits
    in all, of which it has waited `waited_s`."""
    return max(0.0, min(request.wait_s - waited_s, default_s))
