"""The attempts of one request: choose a replica, send, and again where that is safe (case A14).

Everything here happens before the client has seen a byte. What may go elsewhere is the table of
`verdict.py`; how much of it, `retries.attempts` and the retry budget. When no replica of the
model can answer, its fallbacks are asked (`elsewhere.py`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from controller.router import errors, fallbacks
from controller.router.clock import monotonic
from controller.router.elsewhere import Elsewhere
from controller.router.sender import NO_ANSWER
from controller.router.turns import ANY
from controller.router.upstream import Cause, Failure
from controller.router.verdict import BY_CAUSE, KEY_REFUSED, Again, Verdict, judge
from controller.router.verdict import NEVER as NOT_AGAIN
from controller.router.waiters import patience

if TYPE_CHECKING:
    from controller.router.errors import ApiError
    from controller.router.pool import Pool, Target
    from controller.router.waiters import Waiters

LOOK_AGAIN_S: Final = 0.1  # while a replica's probe is out
MAX_UNHEARD: Final = 10


class Attempts(Elsewhere):
    """Where one request was sent so far. Methods that can fail return the error for the client."""

    queued_s = 0.0  # waited in all, until now
    waits: Waiters | None = None  # where it waits now
    waits_since = 0.0  # monotonic, as the next
    wait_until = 0.0
    _given: Target | None = None  # where it is sent, when its turn has come
    _pinned: tuple[str, str] | None = None  # replica, the stored answer that it holds

    def pin(self, replica: str, previous: str) -> None:
        """Only this replica can answer: it holds what the request goes on from."""
        self._pinned = replica, previous
        self.allow_fallback("previous", fallbacks.NONE)

    def begin(self) -> ApiError | None:
        """Send to the replica of choice, or wait for it."""
        core, target = self._core, self._given
        self._given = None
        if target is None:
            if self._pinned is not None or core.admission.count:
                target = core.admission.place(self.serving, self.lane, self.want)
            else:
                target = core.fleet.choose(self.serving, self.tried, self.want)
        if target is None:
            return self._unserved()
        if not self._prefers_fallback(target, "unavailable"):
            self._send(target)
        return None

    @property
    def lane(self) -> str | tuple[Pool, ...]:
        """Which replicas will do: any, one by its name, or all but those that have failed it."""
        return self.tried or (ANY if self._pinned is None else self._pinned[0])

    @property
    def where(self) -> str:
        """These, for people."""
        if self._pinned is not None:
            return f"the replica of model '{self.serving}' that holds '{self._pinned[1]}'"
        return f"any replica of model '{self.serving}'"

    def is_served(self) -> bool:
        """Whether a replica that can answer it is ready, with room or without."""
        if self._pinned is not None:
            return self._core.fleet.target(self.serving, self._pinned[0]) is not None
        return self._core.fleet.serves(self.serving)

    def _unserved(self) -> ApiError | None:
        """No replica may have it now: wait for one, or for the model to start, or fall back."""
        core = self._core
        if self._pinned is not None:
            if self.is_served():
                return core.admission.enter(self, self._request)
            return errors.no_previous(self._pinned[1])
        error: ApiError | None = errors.no_replica(self.model)
        if core.fleet.serves(self.serving):
            if self._flees("unavailable"):
                return None
            error = self._wait_for_place()
        elif core.fleet.wakes(self.model) and self.serving == self.model:
            error = core.waiting.enter(self, self._request)
        return None if error is None else self._instead(error)

    def _wait_for_place(self) -> ApiError | None:
        """All replicas are full, busy or tripped: queue, unless the first comes back too late."""
        back_in_s = self._core.fleet.back_at(self.serving, self.tried) - monotonic()
        if back_in_s > 0:
            wait_s = patience(self._request, self._core.config.timeouts.queue_s, self.queued_s)
            if back_in_s > wait_s:
                return errors.cooling_down(self.model, back_in_s)
        return self._core.admission.enter(self, self._request)

    def resume(self, target: Target | None = None) -> None:
        """A replica is there: the clocks of sending start now, not when the wait began."""
        self.started = monotonic()
        self._given = target
        self._exchange.try_again()

    def give_up(self) -> None:
        """It waits in vain: another model answers, or the client learns why."""
        if self.waits:
            self.turn_away(self.waits.error(self, monotonic() - self.waits_since))

    def flee(self) -> None:
        """All replicas of the model that it waits for fail by now: give up, where a fallback has
        room for it. Else its place is worth more than the error."""
        waits = self.waits
        if waits is None or "unavailable" not in self.may_fall_back:
            return
        if self._costs and not self._core.budget.affords(monotonic()):
            return
        fallback = self._fallback(better=self._core.fleet.has_last_resort(self.serving, self.tried))
        if fallback is not None:
            waits.leave(self)
            self._leave_to(*fallback, "unavailable")

    def turn_away(self, error: ApiError) -> None:
        """It waits no longer, because of `error`: a fallback answers, or the client is told."""
        if self._exchange.attempts is not self:
            return  # its client left meanwhile
        if self.waits:
            self.waits.leave(self)
        told = self._instead(error)
        if told is not None:
            self._exchange.refuse(told)

    def cancel(self) -> None:
        """Stop the attempt that runs, whose engine learns it at once, or the wait for one."""
        if self.waits:
            self.waits.leave(self)
        super().cancel()

    def after(self, failure: Failure, *, headed: bool) -> ApiError | None:
        """What follows an attempt that failed: another one (None), or an error.

        `headed`: the engine had begun to answer, so the model is not asked again.
        """
        target, cause = self.target, failure.cause
        assert target is not None
        if not headed and cause is Cause.CLOSED_UNANSWERED and failure.reused and not self._resent:
            self._resent = True  # it had died while idle: the engine never saw the request
            self._unheard += 1
            self._again = "stale_connection"
            self._send(target, again=True)
            return None
        verdict = NOT_AGAIN if headed else BY_CAUSE.get(cause, NOT_AGAIN)
        if verdict.reason == "connect_failed":
            if self._reconnect():
                return None
        elif self._another(verdict, "timeout" if cause.is_timeout else "error"):
            return None
        return self._instead(self.error_of(failure))

    def after_answer(
        self, status: int, told: bytes, retry_after_s: int | None, *, whole: bool = True
    ) -> bool:
        """Whether another attempt takes over from an engine's own error, which says `told`: never
        when there is more of it than may be held."""
        verdict = judge(status, told)
        if self.holds(status):  # else it is the request's fault, told in whatever way
            word = verdict.reason if verdict is KEY_REFUSED else str(status)  # says whose key
            self._note_failure(str(status), word)
        self._judged(status, verdict, retry_after_s)
        reason = fallbacks.REASONS.get(status)
        return whole and (self._another(verdict, reason) or self._fall_back(reason))

    def after_no_answer(self, error: ApiError, *, ended: bool) -> ApiError | None:
        """What came is no answer, as `error` says: a fallback's (None), or the error.

        Not `ended`: it is we who stopped reading, which says nothing of the replica's health.
        """
        assert self.target is not None
        self._note_failure(NO_ANSWER)
        if ended:
            self.target.pool.answered(500)
        return self._instead(error)

    def error_of(self, failure: Failure) -> ApiError:
        if self._pinned is not None and failure.cause is Cause.CONNECT_FAILED:
            return errors.no_previous(self._pinned[1])  # what it held is gone with it
        why = failure.cause.value.replace("_", " ")
        if failure.cause.is_timeout:
            return errors.upstream_timeout(self.model, why)
        return errors.upstream_failed(self.model, why)

    def expired(self, now: float) -> None:
        """The wait for a replica, or the pause before a lone one is tried again, is over."""
        waits = self.waits
        if waits is not None and now < self.wait_until:
            self._exchange.keep_alive(waits.comment(self.model))
            if self.waits is waits:  # unless the client was lost in telling it
                waits.rest(self, now)
        elif waits is not None:
            self.give_up()
        elif self.up is None:
            self._exchange.try_again()

    # -- again -----------------------------------------------------------------------------------

    def _another(self, verdict: Verdict, reason: str | None) -> bool:
        """Send to a replica not tried yet; False when the table, the bound or the budget forbid.

        `reason`: why a fallback may have it, when all of these fail.
        """
        if verdict.again is Again.NEVER or (verdict.again is Again.ONCE and self._resent):
            return False
        if self._had >= self._core.config.retries.attempts:
            return False
        if not self._may_queue() or not self._affords(verdict.reason):
            return False
        other = self._untried()
        if self._prefers_fallback(other, reason):
            return True
        if other is None and verdict.again is Again.ONCE and self._all_fail():
            return False
        self._pay()
        self._resent = self._resent or verdict.again is Again.ONCE
        self._again = verdict.reason
        if other is None:
            return self._queue()
        self._send(other)
        return True

    def _with_this(self) -> tuple[Pool, ...]:
        """Where it was tried, the replica of now included."""
        assert self.target is not None
        return (*self.tried, self.target.pool)

    def _untried(self) -> Target | None:
        if self._pinned is not None:
            return None
        self.tried = self._with_this()
        return self._core.fleet.choose(self.serving, self.tried, self.want)

    def _may_queue(self) -> bool:
        """Whether replicas that were not tried are ready, with room or without."""
        return self._pinned is None and self._core.fleet.serves(self.serving, self._with_this())

    def _queue(self) -> bool:
        """Wait for one of them; False when the queue does not take it."""
        self.cancel()
        return self._wait_for_place() is None

    def _reconnect(self) -> bool:
        """Nothing was sent, so any other replica may have it; a lone one is asked again soon."""
        self._unheard += 1
        if self._unheard > MAX_UNHEARD:
            return False
        self._again = "connect_failed"
        other = self._untried()
        if other is not None:
            if not self._prefers_fallback(other, "error"):
                self._send(other)
            return True
        if self._may_queue():
            return self._flees("error") or self._queue()
        self.tried = ()
        if not self._core.fleet.serves(self.serving):  # they left meanwhile: as if it came now
            self._exchange.try_again()
            return True
        back_at = max(self._core.fleet.back_at(self.serving), monotonic() + LOOK_AGAIN_S)
        if back_at - self.started > self._core.config.timeouts.connect_s:
            return False
        self._core.deadlines.set(self, back_at)
        return True
