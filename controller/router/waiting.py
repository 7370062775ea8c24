"""Requests for models that run on demand and have no ready replica yet: they wait for one.

Bounded in number and bytes per process. Each has a deadline; a client that leaves frees its place.
The table's next swap lets them go on (`release`), the reporter tells Postgres that the model is
wanted (`news`), which wakes it. Callers that leave change nothing about that: the load goes on.
What holds a model up is read with the table (`told`): who gives up is told so, and nobody waits
for one whose starts fail again and again.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import trio

from controller.router import errors
from controller.router.clock import monotonic
from controller.router.stats import WOKEN
from controller.router.waiters import AT_A_TIME, Waiters, patience

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from controller.router.attempts import Attempts
    from controller.router.core import Core
    from controller.router.errors import ApiError
    from controller.router.http1 import Request

REMIND_S = 5.0
"""A model that is still wanted is news again after so long."""
FORGET_S = 60.0
"""Nobody has asked for so long: the database has forgotten it too."""
HOPELESS = 2
"""One failed start may be an accident; after so many in a row clients need not wait for the next.
"""


@dataclass(frozen=True, slots=True)
class Delay:
    """What holds a model up: a row of llmgw.waking."""

    state: str
    why: str
    failures: int
    retry_s: float | None

    def error(self, model: str, waited_s: float) -> ApiError:
        """For a client that waited in vain."""
        if self.state == "failed":
            return errors.start_failed(model, self.why, self.failures, self.retry_s or 0.0)
        if self.state == "pending":
            return errors.no_place(model, waited_s, self.why)
        return errors.woken_too_late(model, waited_s, self.why)


class Line:
    """Requests that wait for one model, first come first."""

    __slots__ = ("delay", "members", "wanted_at")

    def __init__(self) -> None:
        self.members: dict[Attempts, None] = {}
        self.wanted_at = -math.inf  # monotonic
        self.delay: Delay | None = None  # None: nobody knows


class WaitingRoom(Waiters):
    """All lines of one process."""

    def __init__(self, core: Core) -> None:
        super().__init__(core, WOKEN)
        self._lines: dict[str, Line] = {}
        self.news = trio.Event()

    def enter(self, attempts: Attempts, request: Request) -> ApiError | None:
        """Take a place, or the error for the client; `attempts.resume` or `expired` follows."""
        wait_s = patience(request, self._core.config.timeouts.wake_s, attempts.queued_s)
        line = self._lines.setdefault(attempts.model, Line())
        now = monotonic()
        if now - line.wanted_at > REMIND_S:
            self.news.set()
        line.wanted_at = now
        size = len(attempts.asked.raw)
        limits = self._core.config.limits
        if self.count >= limits.waiting or self.bytes + size > limits.waiting_bytes:
            return errors.waiting_full(attempts.model)
        line.members[attempts] = None
        self._take(attempts, wait_s, now)
        return None

    def comment(self, model: str) -> str:
        line = self._lines.get(model)
        why = None if line is None or line.delay is None else line.delay.why
        return f"waiting for model {model}: {why or 'it is being started'}"

    def leave(self, attempts: Attempts) -> None:
        del self._lines[attempts.model].members[attempts]
        super().leave(attempts)

    def release(self) -> None:
        """The table is new: whoever waits for a model that serves now goes on."""
        fleet = self._core.fleet
        for model, line in self._lines.items():
            if not fleet.serves(model) and fleet.wakes(model):
                continue
            line.wanted_at = -math.inf
            self._go_on(list(line.members))

    def _go_on(self, those: list[Attempts]) -> None:
        """Some of them in the next turn, the others in those after it."""
        for attempts in those[:AT_A_TIME]:
            if attempts.waits is self:  # else it left meanwhile
                self.leave(attempts)
                self._core.reactor.call_soon(attempts.resume)
        if len(those) > AT_A_TIME:
            self._core.reactor.call_soon(partial(self._go_on, those[AT_A_TIME:]))

    def waited_for(self) -> list[str]:
        """Models that requests wait for now."""
        return [model for model, line in self._lines.items() if line.members]

    def told(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """What holds up those models. Who waits for one that fails and fails need not wait on."""
        delays = {row["model"]: _delay(row) for row in rows}
        for model, line in self._lines.items():
            line.delay = delays.get(model)
            if line.delay is None or line.delay.state != "failed":
                continue
            if line.delay.failures >= HOPELESS and not self._core.fleet.serves(model):
                for attempts in list(line.members):
                    self._core.reactor.call_soon(attempts.give_up)

    def error(self, attempts: Attempts, waited_s: float) -> ApiError:
        model = attempts.model
        line = self._lines.get(model)
        if line is None or line.delay is None:
            return errors.woken_too_late(model, waited_s, None)
        return line.delay.error(model, waited_s)

    def waiting(self, model: str) -> int:
        """Requests that wait for the model."""
        line = self._lines.get(model)
        return 0 if line is None else len(line.members)

    def wanted(self) -> dict[str, float]:
        """Models that requests did not find, by seconds since the last of these; news is over."""
        self.news = trio.Event()
        now = monotonic()
        for model in [m for m, line in self._lines.items() if _forgotten(line, now)]:
            del self._lines[model]
        return {model: now - line.wanted_at for model, line in self._lines.items()}

    def as_json(self) -> list[list[str | int]]:
        """[model, requests waiting], for the gauge."""
        return [[model, len(line.members)] for model, line in self._lines.items()]


def _delay(row: Mapping[str, Any]) -> Delay:
    return Delay(row["state"], row["why"] or "nobody knows why", row["failures"], row["retry_s"])


def _forgotten(line: Line, now: float) -> bool:
    return not line.members and now - line.wanted_at > FORGET_S
