"""The attempts of one request: choose a replica, send, and again where that is safe (case A14).

Everything here happens before the client has seen a byte. What may go elsewhere is the table of
`verdict.py`; how much of it, `retries.attempts` and the retry budget. When no replica of the
model can answer, its fallbacks are asked (`fallbacks.py`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from controller.router import errors, fallbacks
from controller.router.body import rewritten, too_deep
from controller.router.clock import monotonic
from controller.router.deadlines import NEVER, Timed
from controller.router.errors import UPSTREAM_FAILED
from controller.router.forward import request_bytes
from controller.router.relay import ERROR_EVENT
from controller.router.stats import AT_ONCE
from controller.router.upstream import Cause, Failure, UpstreamConnection
from controller.router.verdict import (
    BUSY,
    BY_CAUSE,
    BY_STATUS,
    KEY_REFUSED,
    SHUTTING_DOWN,
    Again,
    Verdict,
    judge,
)
from controller.router.verdict import NEVER as NOT_AGAIN
from controller.router.waiters import patience

if TYPE_CHECKING:
    from collections import deque

    from controller.router.auth import Key
    from controller.router.body import Asked
    from controller.router.breaker import Phase
    from controller.router.choose import Want
    from controller.router.core import Core
    from controller.router.errors import ApiError
    from controller.router.exchange import Exchange
    from controller.router.http1 import Request
    from controller.router.pool import Pool, Target
    from controller.router.waiters import Waiters

LOOK_AGAIN_S: Final = 0.1  # while a replica's probe is out
MAX_CONNECT_FAILURES: Final = 10
_FREE: Final = ("refusal",)  # the engine did nothing for it, and its breaker never opens
NO_ANSWER: Final = "no_answer"  # a 200 with nothing in it, or with what nobody can read
ENDED_BADLY: Final = {ERROR_EVENT: "error_event", UPSTREAM_FAILED: NO_ANSWER}
"""Why an attempt failed whose answer the client saw in part, by the code of its row."""


class Attempts(Timed):
    """Where one request was sent so far. Methods that can fail return the error for the client."""

    fallback: str | None = None  # why it is not the model
    fallback_by = "settings"  # who said when another model may answer
    queued_s = 0.0  # waited in all, until now
    admitted = AT_ONCE  # or where it waited last
    target: Target | None = None
    up: UpstreamConnection | None = None  # the attempt that runs now
    phase: Phase | None = None  # of its breaker when it was asked, unless closed
    count = 0
    failed: list[Any] | None = None  # [replica, model, why, ms] of those that failed
    waits: Waiters | None = None  # where it waits now
    waits_since = 0.0  # monotonic, as the next
    wait_until = 0.0
    _given: Target | None = None  # where it is sent, when its turn has come
    _body = b""
    tried: tuple[Pool, ...] = ()  # of the model asked now; a wait for a place changes nothing
    _resent = False
    _connect_failures = 0
    _again: str | None = None  # why the next attempt is made, as metrics say it
    _chain: deque[str] | None = None  # fallbacks that did not get it; None: not looked up
    _pinned: tuple[str, str] | None = None  # replica, the stored answer that it holds

    def __init__(
        self,
        core: Core,
        exchange: Exchange,
        request: Request,
        asked: Asked,
        model: str,
        key: Key,
        want: Want,
    ) -> None:
        super().__init__()
        self._core = core
        self._exchange = exchange
        self._request = request
        self.asked = asked
        self.key = key
        self.model = model  # what the client's name means
        self.serving = model  # what is asked now: the model, or one of its fallbacks
        self.want = want
        self.started = monotonic()
        self.ask_usage = asked.ask_usage
        self.may_fall_back = core.config.fallback_on
        if key.fallback is not None:
            self.fallback_by, self.may_fall_back = key.fallback
        core.budget.offer(self.started)

    @property
    def renamed(self) -> bool:
        """Whether the engine knows the model by another name than the client used."""
        return self.target is not None and self.target.upstream_model != self.asked.model

    def allow_fallback(self, reasons: frozenset[str]) -> None:
        """The request says itself when another model may answer: nobody is nearer."""
        self.fallback_by, self.may_fall_back = "request", reasons

    def pin(self, replica: str, previous: str) -> None:
        """Only this replica can answer: it holds what the request goes on from."""
        self._pinned = replica, previous
        self.fallback_by, self.may_fall_back = "previous", fallbacks.NONE

    def begin(self) -> ApiError | None:
        """Send to the replica of choice."""
        if self._pinned is not None:
            return self._go_on(*self._pinned)
        core, target = self._core, self._given
        if target is not None:
            self._given = None
        elif not (core.admission.count and core.admission.queues(self.serving)):
            target = core.fleet.choose(self.serving, self.tried, self.want)
        if target is None:
            return self._unserved()
        if not self._prefers_fallback(target, "unavailable"):
            self._send(target)
        return None

    def _unserved(self) -> ApiError | None:
        """No replica may have it now: wait for one, or for the model to start, or fall back."""
        core = self._core
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

    def _go_on(self, replica: str, previous: str) -> ApiError | None:
        target = self._core.fleet.target(self.model, replica)
        if target is None:
            return errors.no_previous(previous)
        self._send(target)
        return None

    def resume(self, target: Target | None = None) -> None:
        """A replica is there: the clocks of sending start now, not when the wait began."""
        self.started = monotonic()
        self._given = target
        self._exchange.try_again()

    def give_up(self) -> None:
        """It waits in vain: another model answers, or the client learns why."""
        if self.waits:
            self.turn_away(self.waits.error(self.serving, monotonic() - self.waits_since))

    def flee(self) -> None:
        """All replicas of the model that it waits for fail by now: give up, where a fallback has
        room for it. Else its place is worth more than the error."""
        waits = self.waits
        if waits is None or "unavailable" not in self.may_fall_back:
            return
        if self._was_sent and not self._core.budget.affords(monotonic()):
            return
        fallback = self._fallback(better=self._core.fleet.has_last_resort(self.serving, self.tried))
        if fallback is not None:
            waits.leave(self)
            self.started = monotonic()
            self._leave_to(*fallback, "unavailable")

    def turn_away(self, error: ApiError) -> None:
        """It waits no longer, because of `error`: a fallback answers, or the client is told."""
        if self._exchange.attempts is not self:
            return  # its client left meanwhile
        if self.waits:
            self.waits.leave(self)
        self.started = monotonic()
        told = self._instead(error)
        if told is not None:
            self._exchange.refuse(told)

    def cancel(self) -> None:
        """Stop the attempt that runs, whose engine learns it at once, or the wait for one."""
        if self.waits:
            self.waits.leave(self)
        self.due = NEVER
        up, self.up = self.up, None
        if up is not None:
            up.cancel()

    def after(self, failure: Failure, *, headed: bool) -> ApiError | None:
        """What follows an attempt that failed: another one (None), or an error.

        `headed`: the engine had begun to answer, so the model is not asked again.
        """
        target, cause = self.target, failure.cause
        assert target is not None
        if not headed and cause is Cause.CLOSED_UNANSWERED and failure.reused and not self._resent:
            self._resent = True  # it had died while idle: the engine never saw the request
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
        assert self.target is not None
        verdict = judge(status, told)
        if self.holds(status):  # else it is the request's fault, told in whatever way
            word = verdict.reason if verdict is KEY_REFUSED else str(status)  # says whose key
            self._note_failure(str(status), word)
        if verdict is BUSY:
            self.target.pool.busy(retry_after_s)
        elif verdict is KEY_REFUSED or verdict is SHUTTING_DOWN:
            self.target.pool.useless(verdict.reason)
        elif status in BY_STATUS:
            self.target.pool.answered(status)
        reason = fallbacks.REASONS.get(status)
        return whole and (self._another(verdict, reason) or self._fall_back(reason))

    def holds(self, status: int) -> bool:
        """Whether an answer with this status is decided on before the client sees it."""
        reason = fallbacks.REASONS.get(status)
        return status in BY_STATUS or (reason == "refusal" and reason in self.may_fall_back)

    def blame(self, failure: Failure) -> None:
        """Let the replica's health know; that an idle connection had died says nothing of it."""
        self._note_failure(failure.cause.value)
        stale = failure.cause is Cause.CLOSED_UNANSWERED and failure.reused
        if self.target is not None and not stale:
            self.target.pool.failed(failure.cause)

    def ended(self, code: str) -> None:
        """The engine's answer came to its end, and is none for this reason: nobody had told yet."""
        assert self.target is not None
        why = ENDED_BADLY.get(code)
        if why is not None:
            self._note_failure(why)
            self.target.pool.answered(500)

    def after_no_answer(self, error: ApiError, *, ended: bool) -> ApiError | None:
        """What came is no answer, as `error` says: a fallback's (None), or the error.

        Not `ended`: it is we who stopped reading, which says nothing of the replica's health.
        """
        assert self.target is not None
        self._note_failure(NO_ANSWER)
        if ended:
            self.target.pool.answered(500)
        return self._instead(error)

    def _note_failure(self, why: str, word: str = "") -> None:
        """Count what became of an attempt (as `word`), and keep it for the usage row."""
        assert self.target is not None
        self._core.stats.fail_upstream(self.target.pool.key, word or why)
        ms = round((monotonic() - self._exchange.started) * 1000, 1)
        self.failed = [*(self.failed or ()), [self.target.pool.key, self.serving, why, ms]]

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

    def _send(self, target: Target, *, again: bool = False) -> None:
        if self.up is not None:  # a stream whose first event was an error may have more to say
            self.cancel()
        if target is not self.target:
            body = rewritten(self.asked, target.upstream_model, ask_usage=self.ask_usage)
            if body is None:
                self._exchange.refuse(too_deep())
                return
            self.target, self._body = target, body
        if not self.count:
            self._core.stats.model(self.serving).admit(self.admitted)
        elif self._again is not None:
            self._core.stats.retry(self._again)
            self._again = None
        self.count += 1
        request = request_bytes(self._request, target.pool, self._exchange.request_id, self._body)
        total_due = self.started + self._core.config.timeouts.total_s
        fresh = self._resent  # an idle connection that had died would be the end of this request
        self.up = target.pool.take(self._exchange, request, total_due, fresh=fresh, again=again)
        breaker = target.pool.breaker
        self.phase = None if breaker.closed else breaker.phase

    # -- again -----------------------------------------------------------------------------------

    def _another(self, verdict: Verdict, reason: str | None) -> bool:
        """Send to a replica not tried yet; False when the table, the bound or the budget forbid.

        `reason`: why a fallback may have it, when all of these fail.
        """
        if verdict.again is Again.NEVER or (verdict.again is Again.ONCE and self._resent):
            return False
        if self.count - self._connect_failures >= self._core.config.retries.attempts:
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

    def _all_fail(self) -> bool:
        """Whether all that were not tried fail: waiting for a probe of one would let nobody by
        whom another would answer, and the error at hand is as good as what the probe may tell."""
        return self._core.fleet.fails(self.serving, self.tried)

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

    @property
    def _was_sent(self) -> bool:
        """Whether an engine had it."""
        return self.count != self._connect_failures

    def _affords(self, reason: str) -> bool:
        """Whether the budget allows an engine to get a request that another one had already."""
        if not self._was_sent or self._core.budget.affords(monotonic()):
            return True
        self._core.stats.unaffordable(reason)
        return False

    def _pay(self) -> None:
        """Once it goes there; nothing, where no engine had it."""
        if self._was_sent:
            self._core.budget.spend(monotonic())

    def _reconnect(self) -> bool:
        """Nothing was sent, so any other replica may have it; a lone one is asked again soon."""
        self._connect_failures += 1
        if self._connect_failures > MAX_CONNECT_FAILURES:
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
        back_at = max(self._core.fleet.back_at(self.serving), monotonic() + LOOK_AGAIN_S)
        if back_at - self.started > self._core.config.timeouts.connect_s:
            return False
        self._core.deadlines.set(self, back_at)
        return True

    # -- elsewhere -------------------------------------------------------------------------------

    def _instead(self, error: ApiError) -> ApiError | None:
        """None when a fallback answers instead of this error of ours; a 4xx is the client's."""
        elsewhere = error.status >= 500 and self._fall_back(fallbacks.REASONS.get(error.status))
        return None if elsewhere else error

    def _prefers_fallback(self, target: Target | None, reason: str | None) -> bool:
        """Send to a fallback at once, where the model has nobody better than a last resort."""
        if target is not None and (
            target.pool.breaker.closed or target.pool.breaker.admits(monotonic())
        ):
            return False
        return self._flees(reason)

    def _flees(self, reason: str | None) -> bool:
        """Send to a fallback at once, where all replicas that are left fail: waiting for the next
        probe of one would take its whole pause, and may be in vain."""
        if not self._all_fail():
            return False
        better = self._core.fleet.has_last_resort(self.serving, self.tried)
        return self._fall_back(reason, better=better)

    def _fall_back(self, reason: str | None, *, better: bool = False) -> bool:
        """Send to the next model of the chain that has a replica for it."""
        if reason not in self.may_fall_back:
            return False
        if not any(self._core.fleet.serves(name) for name in self._others()):
            return False
        if reason not in _FREE and not self._affords("fallback"):
            return False
        fallback = self._fallback(better=better)
        if fallback is None:
            return False
        self._leave_to(*fallback, reason)
        return True

    def _fallback(self, *, better: bool) -> tuple[str, Target] | None:
        """The next model of the chain that has a ready replica with room, and this one; one that
        failed lately only if no other works.

        `better`: than a last resort, which the model itself has, too.
        """
        doubtful = None
        for name in self._others():
            target = self._core.fleet.choose(name, (), self.want)
            if target is not None and not target.pool.breaker.tripped:
                return name, target
            if doubtful is None and target is not None:
                doubtful = name, target
        return None if better else doubtful

    def _leave_to(self, name: str, target: Target, reason: str) -> None:
        """Send to this fallback. Others of the chain, which had no room, may have some later."""
        self._others().remove(name)
        if reason not in _FREE:
            self._pay()
        self._core.stats.fall_back(self.model, name, reason)
        self._core.stats.move_in_flight(self.serving, name)
        self.serving, self.fallback, self.tried, self._again = name, reason, (), None
        self._send(target)

    def _others(self) -> deque[str]:
        """The fallbacks that did not get it yet, nearest first."""
        if self._chain is None:
            self._chain = fallbacks.chain(self.model, self._core.fleet.names)
        return self._chain
