"""Requests for models whose ready replicas are all full or held: they wait here, in fair order.

Full is a replica with `depth` requests of this router in flight. Who finds room is sent at once
and never comes here. Of those that wait, a request leaves as soon as a replica has room for it
(`room`, in the same turn of the reactor) and fair turns decide which (`fairqueue.py`), each in the
lane of those for whom the same replicas will do: any of the model, the one that holds what a chain
goes on from, or those that have not failed it. Whoever cannot have its turn before its deadline at
the pace the queue drains now is refused at once: a client that is told early goes elsewhere, one
that waits in vain has cost a place.
"""

from __future__ import annotations

import math
from functools import partial
from typing import TYPE_CHECKING, Final

from controller.router import errors
from controller.router.clock import monotonic
from controller.router.fairqueue import FairQueue
from controller.router.fleet import USUAL
from controller.router.pace import Pace
from controller.router.stats import QUEUED
from controller.router.turns import ANY
from controller.router.waiters import AT_A_TIME, Waiters, patience

if TYPE_CHECKING:
    from collections.abc import Iterable

    from controller.router.attempts import Attempts
    from controller.router.choose import Want
    from controller.router.core import Core
    from controller.router.errors import ApiError
    from controller.router.fairqueue import Weighted
    from controller.router.http1 import Request
    from controller.router.pool import Pool, Target
    from controller.router.turns import Lane

INTERACTIVE, BATCH = ("interactive", 9.0), ("batch", 1.0)
"""Classes and their weights: while both wait, one turn in ten is a batch request's."""
KINDS: Final = {b"": INTERACTIVE, b"interactive": INTERACTIVE, b"batch": BATCH}
"""By the value of X-Llmgw-Priority."""
AGAIN_S: Final = 5.0
"""When to come back, as long as nobody knows how fast the queue drains."""
AWAY_S: Final = 1.0
"""When no replica is asked for longer than this, none is only busy."""
AGAIN_MAX_S: Final = 60.0
"""Official SDKs do not obey a longer Retry-After."""


class Line:
    """What waits for one model. Who was failed by a replica waits for the others apart and goes
    first where it can. There are few of these: the retry budget bounds them."""

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

    def has_before(self, lane: Lane) -> bool:
        """Whether somebody waits for all that one in this lane waits for who comes now."""
        return ANY in self.queue.lanes or lane in self.queue.lanes or lane in self.again.lanes

    def wants(self, pool: Pool) -> bool:
        """Whether somebody waits for this replica, among few others or none."""
        if pool.key in self.queue.lanes:
            return True
        return any(isinstance(failed, tuple) and pool not in failed for failed in self.again.lanes)


class Admission(Waiters):
    """All queues of one process."""

    def __init__(self, core: Core) -> None:
        super().__init__(core, QUEUED)
        self._lines: dict[str, Line] = {}
        self._wider: dict[str, None] = {}  # models that may have room, to be looked at this turn

    def place(self, model: str, lane: Lane, want: Want) -> Target | None:
        """Where one that comes now can go at once, unless it would overtake who waits for that."""
        line = self._lines.get(model)
        if line is not None and line.has_before(lane):
            return None
        target = self._place(model, lane, want)
        if target is not None and line is not None and line.wants(target.pool):
            self.look((model,))  # it has room, so their turn is near, and that of who comes now
            return None
        return target

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
        due_s = line.pace.seconds(queue.place(kind, tenant, attempts.lane), now)
        if due_s is not None and due_s > wait_s:
            again_s = self._again(due_s - wait_s)
            return errors.overloaded(attempts.where, due_s, wait_s, again_s)
        if not self._makes_room(line, attempts, kind, tenant):
            return errors.queue_full(attempts.where, self._again(due_s))
        queue.push(attempts, kind, tenant, attempts.lane)
        self._take(attempts, wait_s, now)
        self._core.fleet.room = self.room
        return None

    def leave(self, attempts: Attempts) -> None:
        self._lines[attempts.serving].of(attempts).remove(attempts)
        self._left(attempts)

    def comment(self, model: str) -> str:
        return f"waiting for a free place at model {model}"

    def error(self, attempts: Attempts, waited_s: float) -> ApiError:
        model, now, fleet = attempts.serving, monotonic(), self._core.fleet
        line = self._lines[model]
        back_in_s = fleet.back_at(model) - now if fleet.serves(model) else 0.0
        if back_in_s > AWAY_S:
            return errors.cooling_down(model, back_in_s)
        due_s = line.pace.seconds(len(line), now)
        return errors.queue_timeout(attempts.where, waited_s, self._again(due_s))

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
            for attempts in line.items():
                if not attempts.is_served():
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
        error = errors.queue_full(other.where, self._again(None))
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
        """Since when the next one has waited."""
        found = self._next(model)
        return math.inf if found is None else found[1].waits_since

    def _admit(self, model: str) -> bool:
        """Send the one whose turn it is, if anybody waits and a replica has room."""
        found = self._next(model)
        if found is None:
            return False
        line, attempts = found
        target = self._place(model, attempts.lane, attempts.want)
        assert target is not None, "its lane is open"
        line.of(attempts).take(attempts)
        now = monotonic()
        line.pace.took(now)
        self._core.stats.model(model).queue_wait.observe(now - attempts.waits_since)
        self._left(attempts)
        attempts.resume(target)
        return True

    def _next(self, model: str) -> tuple[Line, Attempts] | None:
        """Whose turn it is of those who can go; None when nobody can."""
        line = self._lines.get(model)
        if line is None:
            return None
        for queue in (line.again, line.queue):
            closed = [lane for lane in queue.lanes if self._place(model, lane, USUAL) is None]
            if len(closed) < len(queue.lanes):
                attempts = queue.first(closed)
                assert attempts is not None, "somebody waits in each of its lanes"
                return line, attempts
        return None

    def _place(self, model: str, lane: Lane, want: Want) -> Target | None:
        """Where one that waits in this lane can go now."""
        fleet = self._core.fleet
        if lane == ANY:
            return fleet.choose(model, (), want)
        if isinstance(lane, str):
            return fleet.with_room(model, lane)
        assert isinstance(lane, tuple)
        target = fleet.choose(model, lane, want)
        if target is None and fleet.fails(model, lane):
            target = fleet.choose(model, (), want)  # those that failed it are all there is
        return target

    def _left(self, attempts: Attempts) -> None:
        super().leave(attempts)
        if not self.count:
            self._core.fleet.room = None

    def _again(self, seconds: float | None) -> int:
        """Retry-After, in whole seconds."""
        return self._core.spread(min(AGAIN_S if seconds is None else seconds, AGAIN_MAX_S / 1.5))
