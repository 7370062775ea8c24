"""Another model answers one request, when its own cannot: which one, and whether it may now.

The chain and the reasons are `fallbacks.py`; here is what of the chain is left for a request, and
who of it is ready, has room and does not fail itself.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from controller.router import fallbacks
from controller.router.clock import monotonic
from controller.router.sender import Sender
from controller.router.turns import ANY
from controller.router.verdict import BY_STATUS

if TYPE_CHECKING:
    from collections import deque

    from controller.router.errors import ApiError
    from controller.router.pool import Pool, Target

_FREE: Final = ("refusal",)  # the engine did nothing for it, and its breaker never opens


class Elsewhere(Sender):
    """A request that other models may answer, for reasons that its nearest word gives."""

    fallback: str | None = None  # why it is not the model
    fallback_by = ""  # who said when another model may answer
    may_fall_back = fallbacks.NONE  # and when it may
    tried: tuple[Pool, ...] = ()  # of the model asked now; a wait for a place changes nothing
    _chain: deque[str] | None = None  # fallbacks that did not get it; None: not looked up

    def allow_fallback(self, by: str, reasons: frozenset[str]) -> None:
        """Another model may answer for these reasons, says `by`: the nearest says it last."""
        self.fallback_by, self.may_fall_back = by, reasons

    def holds(self, status: int) -> bool:
        """Whether an answer with this status is decided on before the client sees it."""
        reason = fallbacks.REASONS.get(status)
        return status in BY_STATUS or (reason == "refusal" and reason in self.may_fall_back)

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

    def _all_fail(self) -> bool:
        """Whether all that were not tried fail: waiting for a probe of one would let nobody by
        whom another would answer, and the error at hand is as good as what the probe may tell."""
        return self._core.fleet.fails(self.serving, self.tried)

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
        """The next model of the chain that has a ready replica with room for which nobody waits,
        and this one; one that failed lately only if no other works.

        `better`: than a last resort, which the model itself has, too.
        """
        doubtful = None
        for name in self._others():
            target = self._core.admission.place(name, ANY, self.want)
            if target is not None and not target.pool.breaker.tripped:
                return name, target
            if doubtful is None and target is not None:
                doubtful = name, target
        return None if better else doubtful

    def _leave_to(self, name: str, target: Target, reason: str) -> None:
        """Send to this fallback, whose time begins now. Others of the chain, which had no room, may
        have some later."""
        self._others().remove(name)
        self.started = monotonic()
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
