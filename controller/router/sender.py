"""One request as it is put to a replica: what is sent, what became of it, what more may cost.

Where it goes is decided above: to a replica of the model (`attempts.py`), to another model's
(`elsewhere.py`). Who gets it once more, after an engine had it, pays the retry budget.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from controller.router.bill import prompt_tokens
from controller.router.body import rewritten, too_deep
from controller.router.clock import monotonic
from controller.router.deadlines import Timed
from controller.router.errors import UPSTREAM_FAILED
from controller.router.forward import request_bytes
from controller.router.relay import ERROR_EVENT
from controller.router.stats import AT_ONCE
from controller.router.upstream import Cause, Failure, UpstreamConnection
from controller.router.verdict import BUSY, BY_STATUS, KEY_REFUSED, SHUTTING_DOWN, Verdict

if TYPE_CHECKING:
    from controller.router.auth import Key
    from controller.router.body import Asked
    from controller.router.breaker import Phase
    from controller.router.choose import Want
    from controller.router.core import Core
    from controller.router.exchange import Exchange
    from controller.router.http1 import Request
    from controller.router.pool import Target

SHORT_BYTES: Final = 16 * 1024
"""So long a body is kept until its answer ends: to let it go is not worth the look at it."""
NO_ANSWER: Final = "no_answer"  # a 200 with nothing in it, or with what nobody can read
ENDED_BADLY: Final = {ERROR_EVENT: "error_event", UPSTREAM_FAILED: NO_ANSWER}
"""Why an attempt failed whose answer the client saw in part, by the code of its row."""


class Sender(Timed):
    """A request, the replica that has it now, and how it fared so far."""

    admitted = AT_ONCE  # or where it waited last
    target: Target | None = None
    up: UpstreamConnection | None = None  # the attempt that runs now
    phase: Phase | None = None  # of its breaker when it was asked, unless closed
    count = 0
    failed: list[Any] | None = None  # [replica, model, why, ms] of those that failed
    _body = b""
    _resent = False
    _unheard = 0  # sends of which no engine heard: no connection, or one that had died
    _paid = 0  # engines that had had it, when it was paid for one more
    _again: str | None = None  # why the next attempt is made, as metrics say it

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
        core.budget.offer(self.started)

    @property
    def renamed(self) -> bool:
        """Whether the engine knows the model by another name than the client used."""
        return self.target is not None and self.target.upstream_model != self.asked.model

    def cancel(self) -> None:
        """Stop the attempt that runs, whose engine learns it at once."""
        self.forget()
        up, self.up = self.up, None
        if up is not None:
            up.cancel()

    def let_go(self) -> None:
        """It is not sent again: a stream may go on for an hour, and its prompt may be long."""
        if len(self._body) > SHORT_BYTES:
            self.asked.let_go(prompt_tokens(self.asked))
            self._request.let_go()
            self._body = b""

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
        if self._exchange.delivery.early and self.up is not None:
            self.up.watch(self._core.config.timeouts.comment_s)  # before a head, too: ours is out
        breaker = target.pool.breaker
        self.phase = None if breaker.closed else breaker.phase

    # -- what became of it -----------------------------------------------------------------------

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

    def _judged(self, status: int, verdict: Verdict, retry_after_s: int | None) -> None:
        """Let the replica's health know that it answered so."""
        assert self.target is not None
        if verdict is BUSY:
            self.target.pool.busy(retry_after_s)
        elif verdict is KEY_REFUSED or verdict is SHUTTING_DOWN:
            self.target.pool.useless(verdict.reason)
        elif status in BY_STATUS:
            self.target.pool.answered(status)

    def _note_failure(self, why: str, word: str = "") -> None:
        """Count what became of an attempt (as `word`), and keep it for the usage row."""
        assert self.target is not None
        self._core.stats.fail_upstream(self.target.pool.key, word or why)
        ms = round((monotonic() - self._exchange.started) * 1000, 1)
        self.failed = [*(self.failed or ()), [self.target.pool.key, self.serving, why, ms]]

    # -- what more may cost ----------------------------------------------------------------------

    @property
    def _had(self) -> int:
        """How many engines had it."""
        return self.count - self._unheard

    @property
    def _costs(self) -> bool:
        """Whether one more engine is to be paid for: not the first, nor one more after it was paid
        for one that it waited for in vain, or did not reach."""
        return self._had > self._paid

    def _affords(self, reason: str) -> bool:
        """Whether the budget allows an engine to get a request that another one had already."""
        if not self._costs or self._core.budget.affords(monotonic()):
            return True
        self._core.stats.unaffordable(reason)
        return False

    def _pay(self) -> None:
        """Once it goes there."""
        if self._costs:
            self._core.budget.spend(monotonic())
            self._paid = self._had
