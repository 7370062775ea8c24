"""Requests for models whose ready replicas are all full or held: they wait here, in fair order.

Full is a replica with `depth` requests of this router in flight. Who finds room is sent at once
and never comes here. Of those that wait, a request leaves as soon as a replica has room for it
(`room`, in the same turn of the reactor) and fair turns decide which (`fairqueue.py`). Whoever
cannot have its turn before its deadline at the pace the queue drains now is refused at once: a
client that is told early goes elsewhere, one that waits in vain has cost a place.
"""

from __future__ import annotations

import math
from functools import partial
from typing import TYPE_CHECKING, Final

from controller.router import errors
from controller.router.clock import monotonic
from controller.router.fairqueue import FairQueue
from controller.router.pace import Pace
from controller.router.stats import QUEUED
from controller.router.waiters import AT_A_TIME, Waiters, patience

if TYPE_CHECKING:
    from collections.abc import Iterable

    from controller.router.attempts import Attempts
    from controller.router.core import Core
    from controller.router.errors import ApiError
    from controller.router.fairqueue import Names, Weighted
    from controller.router.http1 import Request
    from controller.router.pool import Pool, Target

INTERACTIVE, BATCH = ("interactive", 9.0), ("batch", 1.0)
"""Classes and their weights: while both wait, one turn in ten is a batch request's."""
KINDS: Final = {b"": INTERACTIVE, b"interactive": INTERACTIVE, b"batch": BATCH}
"""By the value of X-Llmgw-Priority."""
AGAIN_S: Final = 5.0
"""When to come back, as long as nobody knows how fast the queue drains."""
AWAY_S: Final = 1.0
"""When no replica is asked for longer than this, none is only busy."""
MOST_ASIDE: Final = 16
"""So many of those that a replica has failed are looked past for one that can go."""
AGAIN_MAX_S: Final = 60.0
"""Official SDKs do not obey a longer Retry-After."""


class Line:
    """What waits for one model. Who was failed by a replica and waits for the others does so apart
    and goes first where it can: else it would keep those away for whom any replica will do. There
    are few of these: the retry budget bounds them."""

    __slots__ = ("again", "model", "pace", "queue")

    def __init__(self, model: str) -> None:
        self.model = model
        self.queue: FairQueue[Attempts] = FairQueue()
        self.again: FairQueue[Attempts] = FairQueue()
        self.pace = Pace()

    def __len__(self) -> int:
        return len(self.queue) + len(self.again)

    def of(self, attempts: Attempts) -> FairQueue[Attempts]:
        """Where it waits, or would."""
        return self.again if attempts.tried else self.queue

    def items(self) -> list[Attempts]:
        """All that wait, in no order that matters."""
        return [*self.queue.items(), *self.again.items()]

    def eldest(self) -> float:
        """Since when the next ones have waited."""
        return min([q.first().waits_since for q in (self.queue, self.again) if q], default=math.inf)


class Admission(Waiters):
    """All queues of one process."""

    def __init__(self, core: Core) -> None:
        super().__init__(core, QUEUED)
        self._lines: dict[str, Line] = {}
        self._wider: dict[str, None] = {}  # models that may have room, to be looked at this turn

    def queues(self, model: str) -> bool:
        """Whether requests wait for any replica of the model: who comes now waits behind them."""
        line = self._lines.get(model)
        return line is not None and len(line.queue) > 0

    def enter(self, attempts: Attempts, request: Request) -> ApiError | None:
        """Take a place, or the error for the client; `attempts.resume` or `expired` follows."""
        wait_s = patience(request, self._core.config.timeouts.queue_s, attempts.queued_s)
        line = self._lines.get(attempts.serving)
        if line is None:
            line = self._lines[attempts.serving] = Line(attempts.serving)
        now = monotonic()
        if not len(line):
            line.pace.start(now)  # before it is asked: an idle hour is no slow hour
        kind, tenant = KINDS[request.priority], attempts.key.tenancy
        queue = line.of(attempts)
        due_s = line.pace.seconds(queue.place(kind, tenant), now)
        if due_s is not None and due_s > wait_s:
            again_s = self._again(due_s - wait_s)
            return errors.overloaded(line.model, due_s, wait_s, again_s)
        if not self._makes_room(line, attempts, kind, tenant):
            return errors.queue_full(line.model, self._again(due_s))
        queue.push(attempts, kind, tenant)
        self._take(attempts, wait_s, now)
        self._core.fleet.room = self.room
        return None

    def leave(self, attempts: Attempts) -> None:
        self._lines[attempts.serving].of(attempts).remove(attempts)
        self._left(attempts)

    def comment(self, model: str) -> str:
        return f"waiting for a free place at model {model}"

    def error(self, model: str, waited_s: float) -> ApiError:
        line, now, fleet = self._lines[model], monotonic(), self._core.fleet
        back_in_s = fleet.back_at(model) - now if fleet.serves(model) else 0.0
        if back_in_s > AWAY_S:
            return errors.cooling_down(model, back_in_s)
        due_s = line.pace.seconds(len(line), now)
        return errors.queue_timeout(model, waited_s, self._again(due_s))

    def room(self, pool: Pool) -> None:
        """A request left `pool`; called by the fleet while anything waits here."""
        self.look(pool.models)

    def look(self, models: Iterable[str]) -> None:
        """These models may have room: those that wait for them are sent within this turn."""
        if not self._wider:
            self._core.reactor.call_soon(self._dispatch)
        self._wider.update(dict.fromkeys(models))

    def look_again(self) -> None:
        """Held and tripped replicas come back without a request leaving them (case C17), and
        where all have tripped meanwhile another model answers those that wait."""
        if not self.count:
            return
        models = [model for model, line in self._lines.items() if len(line)]
        for model in models:
            if self._core.fleet.fails(model):
                for attempts in self._lines[model].items():
                    attempts.flee()
        self.look(models)

    def release(self) -> None:
        """The table is new: depths and replicas are others, and models may have none any more."""
        fleet = self._core.fleet
        for model, line in list(self._lines.items()):
            if not fleet.serves(model):
                for attempts in line.items():
                    self.leave(attempts)
                    self._core.reactor.call_soon(attempts.resume)
            if not len(line) and model not in fleet.names:
                del self._lines[model]
        if self.count:
            self.look(self._lines)

    def waiting(self, model: str) -> int:
        """Requests that wait for the model."""
        line = self._lines.get(model)
        return 0 if line is None else len(line)

    def as_json(self) -> list[list[str | int]]:
        """[model, requests waiting], for the gauge."""
        return [[model, len(line)] for model, line in self._lines.items()]

    def _makes_room(self, line: Line, attempts: Attempts, kind: Weighted, tenant: Weighted) -> bool:
        """Whether there is a place, if need be that of a tenant with more than its share."""
        limits = self._core.config.limits
        if self.bytes + len(attempts.asked.raw) > limits.queue_bytes:
            return False
        if len(line) < limits.queue:
            return True
        other = line.queue.gives_way(kind, tenant, limits.queue)
        if other is None:
            return False
        self.leave(other)
        error = errors.queue_full(line.model, self._again(None))
        self._core.reactor.call_soon(partial(other.turn_away, error))
        return True

    def _dispatch(self) -> None:
        """Send who can be sent; of models that share a replica, who has waited longest first."""
        models, self._wider = self._wider, {}
        left = AT_A_TIME
        try:
            while models and left:
                model = min(models, key=self._eldest) if len(models) > 1 else next(iter(models))
                if self._admit(model):
                    left -= 1
                else:
                    del models[model]
        finally:
            if models:  # in the next turn; one request's bug does not make the others wait either
                self.look(models)

    def _eldest(self, model: str) -> float:
        line = self._lines.get(model)
        return math.inf if line is None else line.eldest()

    def _admit(self, model: str) -> bool:
        """Send the one whose turn it is, if anybody waits and a replica has room."""
        line = self._lines.get(model)
        if line is None:
            return False
        attempts, target = self._first(model, line.again)
        if target is None:
            attempts, target = self._first(model, line.queue)
        if attempts is None or target is None:
            return False
        now = monotonic()
        line.pace.took(now)
        self._core.stats.model(model).queue_wait.observe(now - attempts.waits_since)
        self._left(attempts)
        attempts.resume(target)
        return True

    def _first(
        self, model: str, queue: FairQueue[Attempts]
    ) -> tuple[Attempts | None, Target | None]:
        """The first that can be sent, taken from the queue, and where to. Who only waits for a
        replica that has not failed it keeps its turn."""
        aside: list[tuple[Attempts, Names]] = []
        try:
            return self._look_past(model, queue, aside)
        finally:
            for attempts, (kind, tenant) in reversed(aside):
                queue.push(attempts, kind, tenant, front=True)

    def _look_past(
        self, model: str, queue: FairQueue[Attempts], aside: list[tuple[Attempts, Names]]
    ) -> tuple[Attempts | None, Target | None]:
        while queue and len(aside) < MOST_ASIDE:
            attempts = queue.first()
            target = self._place_for(model, attempts)
            if target is not None:
                queue.take()
                return attempts, target
            if not attempts.tried:
                break  # there is no room: none for those behind it either
            aside.append((attempts, queue.remove(attempts)))
        return None, None

    def _place_for(self, model: str, attempts: Attempts) -> Target | None:
        fleet, tried = self._core.fleet, attempts.tried
        target = fleet.choose(model, tried, attempts.want)
        if target is None and tried and fleet.fails(model, tried):
            target = fleet.choose(model, (), attempts.want)  # those that failed it are all there is
        return target

    def _left(self, attempts: Attempts) -> None:
        super().leave(attempts)
        if not self.count:
            self._core.fleet.room = None

    def _again(self, seconds: float | None) -> int:
        """Retry-After, in whole seconds."""
        return self._core.spread(min(AGAIN_S if seconds is None else seconds, AGAIN_MAX_S / 1.5))
