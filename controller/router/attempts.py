"""The attempts of one request: choose a replica, send, and again where that is safe (case A14).

Safe is: nothing was sent (the connection failed), or one resend when a connection closed without
a single byte. After that an engine may have begun to work, so the client decides.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from controller.router import errors
from controller.router.body import rewritten
from controller.router.deadlines import Timed
from controller.router.forward import request_bytes
from controller.router.upstream import Cause, Failure, UpstreamConnection

if TYPE_CHECKING:
    from controller.router.body import Asked
    from controller.router.core import Core
    from controller.router.errors import ApiError
    from controller.router.exchange import Exchange
    from controller.router.fleet import Pool, Target
    from controller.router.http1 import Request

RECONNECT_S = 0.1  # a lone engine that restarts gets its port back within a moment
MAX_CONNECT_FAILURES = 10


class Attempts(Timed):
    """Where one request was sent so far. Methods that can fail return the error for the client."""

    __slots__ = (
        "_body", "_connect_failures", "_core", "_exchange", "_request", "_resent", "_tried",
        "ask_usage", "asked", "count", "model", "started", "target", "up", "wait_until",
        "waits",
    )  # fmt: skip

    def __init__(
        self, core: Core, exchange: Exchange, request: Request, asked: Asked, model: str
    ) -> None:
        super().__init__()
        self._core = core
        self._exchange = exchange
        self._request = request
        self.asked = asked
        self.model = model
        self.started = time.monotonic()
        self.ask_usage = asked.ask_usage
        self.target: Target | None = None
        self.up: UpstreamConnection | None = None  # the attempt that runs now
        self.count = 0
        self.waits = False  # in the waiting room
        self.wait_until = 0.0  # monotonic
        self._body = b""
        self._tried: tuple[Pool, ...] = ()
        self._resent = False
        self._connect_failures = 0

    @property
    def renamed(self) -> bool:
        """Whether the engine knows the model by another name than the client used."""
        return self.target is not None and self.target.upstream_model != self.asked.model

    def begin(self) -> ApiError | None:
        """Send to the replica of choice."""
        target = self._core.fleet.choose(self.model, self._tried)
        if target is None:
            if self._core.fleet.wakes(self.model):
                return self._core.waiting.enter(self, self._request)
            return errors.no_replica(self.model)
        self._send(target)
        return None

    def resume(self) -> None:
        """A replica is there: the clocks of sending start now, not when the wait began."""
        self.started = time.monotonic()
        self._tried = ()
        self._exchange.try_again()

    def give_up(self) -> None:
        """It waits in vain: the client learns why."""
        if self.waits:
            waited_s = time.monotonic() - self.started
            self._exchange.refuse(self._core.waiting.error(self.model, waited_s))

    def cancel(self) -> None:
        """Stop the attempt that runs, whose engine learns it at once, or the wait for one."""
        if self.waits:
            self._core.waiting.leave(self)
        up, self.up = self.up, None
        if up is not None:
            up.cancel()

    def after(self, failure: Failure) -> ApiError | None:
        """What follows an attempt that failed before a head: another one (None), or an error."""
        target = self.target
        assert target is not None
        if failure.cause is Cause.CLOSED_UNANSWERED and not self._resent:
            self._resent = True
            if failure.reused:  # it had died while idle: the engine never saw the request
                self._core.stats.retry("stale_connection")
                self._send(target, fresh=True)
                return None
            return None if self._another(target, "closed_unanswered") else self.error_of(failure)
        if failure.cause in (Cause.CONNECT_FAILED, Cause.CONNECT_TIMEOUT):
            return self._reconnect(target, failure)
        return self.error_of(failure)

    def error_of(self, failure: Failure) -> ApiError:
        why = failure.cause.value.replace("_", " ")
        if failure.cause.is_timeout:
            return errors.upstream_timeout(self.model, why)
        return errors.upstream_failed(self.model, why)

    def expired(self, now: float) -> None:
        """The wait for a replica, or the pause before a lone one is tried again, is over."""
        if self.waits and now < self.wait_until:
            self._exchange.keep_alive(self._core.waiting.comment(self.model))
            self._core.waiting.rest(self, now)
        elif self.waits:
            self.give_up()
        elif self.up is None:
            self._core.stats.retry("connect_failed")
            self._exchange.try_again()

    def _send(self, target: Target, *, fresh: bool = False) -> None:
        if target is not self.target:
            self.target = target
            self._body = rewritten(self.asked, target.upstream_model, ask_usage=self.ask_usage)
        self.count += 1
        request = request_bytes(self._request, target.pool, self._exchange.request_id, self._body)
        total_due = self.started + self._core.config.timeouts.total_s
        self.up = target.pool.take(self._exchange, request, total_due, fresh=fresh)

    def _reconnect(self, target: Target, failure: Failure) -> ApiError | None:
        """Nothing was sent, so any other replica may have it; a lone one is asked again."""
        self._core.fleet.avoid(target.pool)
        self._connect_failures += 1
        if self._connect_failures > MAX_CONNECT_FAILURES:
            return self.error_of(failure)
        if self._another(target, "connect_failed"):
            return None
        now = time.monotonic()
        if now - self.started >= self._core.config.timeouts.connect_s:
            return self.error_of(failure)
        self._tried = ()
        self._core.deadlines.set(self, now + RECONNECT_S)
        return None

    def _another(self, target: Target, reason: str) -> bool:
        """Send to a replica not tried yet; False when there is none."""
        self._tried = (*self._tried, target.pool)
        other = self._core.fleet.choose(self.model, self._tried)
        if other is None:
            return False
        self._core.stats.retry(reason)
        self._send(other)
        return True
