"""Whether one replica may have requests now. Pure: the time is an argument, and so is chance.

Three ways to answer badly are kept apart. A **failure** (no connection, no answer, 5xx, too slow)
opens the breaker once there are many; then one request at a time is let through as a probe, after
pauses that double. **Busy** (429, 503, 529) is backpressure: a short hold, never more (case C02).
Anything else below 500 is the client's own affair and proves that the engine works (case C01); a
401 is ours, and comes here as a failure.
A replica that refuses connections is held too, from its first failure on: others are better.

One client's requests can make an engine that works answer 5xx time and again (llama.cpp to a
picture for a model of text). So who tripped by answers, and answered well lately, is a **last
resort**: it is asked as before where no replica of the model is better. When it says that it is
busy it rests as others are held.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum

BUSY = frozenset((429, 503, 529))
UNJUDGED = frozenset((501, 505))  # the engine has no such endpoint: its answer, not its failure
LATELY_S = 60.0  # so old may its last good answer be: beyond, it fails whoever asks
WINDOW = (1 << 20) - 1  # outcomes remembered, one bit each, the newest lowest; 1 is a failure


class Phase(StrEnum):
    """The words of metrics; only `closed` is open to all requests."""

    CLOSED = "closed"
    HELD = "held"  # busy or unreachable a moment ago
    OPEN = "open"  # it fails: nothing until the pause is over, unless it is a last resort
    HALF_OPEN = "half_open"  # a probe is out


@dataclass(frozen=True, slots=True)
class BreakerRules:
    """When it opens and for how long; durations in seconds."""

    failures_in_row: int = 5
    failures_of_20: int = 10
    pause_s: float = 1.0  # after the first trip; doubles with each probe that fails
    longest_pause_s: float = 30.0
    hold_s: float = 0.1  # doubles while the replica stays busy
    longest_hold_s: float = 0.4  # so that service resumes within a second (case C02)


class Breaker:
    """The state of one replica. `closed` is all that the hot path looks at."""

    __slots__ = (
        "_busy", "_history", "_hold_s", "_in_row", "_probing", "_rested_at", "_rules",
        "_silences", "closed", "good_at", "pause_s", "phase", "trips", "until",
    )  # fmt: skip

    def __init__(self, rules: BreakerRules) -> None:
        self._rules = rules
        self._in_row = (1 << rules.failures_in_row) - 1
        self._history = 0
        self._hold_s = 0.0  # of the present hold, 0 when there is none
        self._busy = False  # it is held, or rests, because it was busy, not unreachable
        self._probing = False  # a request was let through since the last bad answer
        self._silences = 0  # which of the outcomes remembered were no answer
        self._rested_at = -math.inf  # monotonic: it is no last resort before, it was busy
        self.good_at = -math.inf  # monotonic, when an answer came to a good end; set from outside
        self.pause_s = 0.0  # of the last trip, 0 once it is forgotten
        self.closed = True
        self.phase = Phase.CLOSED
        self.until = -math.inf  # monotonic: unless closed, no request goes there before
        self.trips = 0

    @property
    def spotless(self) -> bool:
        """Closed and no failure remembered: a good answer changes nothing."""
        return self.closed and not self._history

    @property
    def tripped(self) -> bool:
        """Whether it failed so often that others come first."""
        return self.phase is Phase.OPEN or self.phase is Phase.HALF_OPEN

    @property
    def failing(self) -> bool:
        """Whether its latest outcomes are failures, as many as open it, and nothing else."""
        return self._history & self._in_row == self._in_row

    def shown(self, now: float) -> Phase:
        """For people: a hold that is over keeps nobody away, though nobody came since."""
        over = self.phase is Phase.HELD and now >= self.until
        return Phase.CLOSED if over else self.phase

    def is_last_resort(self, now: float) -> bool:
        """Whether it tripped, and yet answers some: better than nobody, unless it rests."""
        return self.answers_some(now) and now >= self._rested_at

    def answers_some(self, now: float) -> bool:
        """Whether it tripped by answers alone, and answered somebody well lately."""
        return self.tripped and not self._silences and now - self.good_at < LATELY_S

    def back_at(self, now: float, *, resort: bool = True) -> float:
        """The monotonic moment to look again; past while a probe is out, which may end any time,
        and where only room is lacking. `resort`: whether it will do as a last resort."""
        if self._probing:
            return -math.inf
        resort = resort and self.answers_some(now)
        return min(self._rested_at, self.until) if resort else self.until

    def hurry(self) -> None:
        """There is other evidence that it works again: the next request may probe at once."""
        if not self.closed:
            self.until = -math.inf

    def admits(self, now: float) -> bool:
        """Whether a request may go there: any when closed, else the one that is the next probe."""
        return self.closed or now >= self.until

    def sent(self, now: float) -> None:
        """A request is on its way there: the probe, unless nobody asked whether it may."""
        if self.admits(now):
            self.probe(now)
        elif self.tripped:
            self._spare(now)

    def _spare(self, now: float) -> None:
        """A request goes there as to a last resort. If it was busy, the next one goes when it
        could have refused this one."""
        if self._busy:
            self._busy = False
            self._rested_at = now + self._hold_s
        else:
            self._hold_s = 0.0

    def probe(self, now: float) -> None:
        """A request goes there although it is not closed; the next may after the same pause."""
        if self.phase is Phase.HELD:
            if self._busy and self._probing:
                self._close()  # the last one was not refused meanwhile, so it was taken
                return
            self.until = now + self._hold_s
        else:
            self.phase = Phase.HALF_OPEN
            self.until = now + self.pause_s
        self._probing = True

    def answered(self, now: float, status: int) -> None:
        """It answered with this HTTP status, which is not one of `BUSY`."""
        if status >= 500:
            if status not in UNJUDGED:
                self._fail(now)
            return
        self._history = self._history << 1 & WINDOW
        self._silences = self._silences << 1 & WINDOW
        if self.phase is Phase.HALF_OPEN:
            self._history = self._in_row >> 1  # on trial: one failure opens it again
            self._silences = 0
            self._close()
        elif self.phase is Phase.HELD and (self._probing or not self._busy):
            self._close()
        if not self._history and not self.tripped:
            self.pause_s = 0.0

    def failed(self, now: float, *, unreachable: bool = False, chance: float = 0.5) -> None:
        """It did not answer. `chance` in 0..1 spreads the holds of many routers."""
        tripped = not self._fail(now)
        self._silences |= 1
        if unreachable and not tripped:
            self._hold(now, 0.0, chance, busy=False)

    def _fail(self, now: float) -> bool:
        """Note a failure; False when it is tripped by it, or was open before."""
        self._history = (self._history << 1 | 1) & WINDOW
        self._silences = self._silences << 1 & WINDOW
        if self.phase is Phase.OPEN:
            return False  # a request from before the trip, or of a last resort
        if (
            self.phase is Phase.HALF_OPEN
            or self.failing
            or self._history.bit_count() >= self._rules.failures_of_20
        ):
            self._trip(now)
            return False
        return True

    def busy(self, now: float, retry_after_s: float = 0.0, chance: float = 0.5) -> None:
        """It has too much to do: hold back for a moment (less than the engine may ask for)."""
        if self.phase is Phase.OPEN:
            old_news = self._busy and now < self._rested_at
            if not old_news:
                self._busy = True
                self._rested_at = self._over_at(now, retry_after_s, chance)
            return
        old_news = self.phase is Phase.HELD and not self._probing and now < self.until
        if not old_news:
            self._hold(now, retry_after_s, chance, busy=True)

    def resume(self, until: float, pause_s: float) -> None:
        """Go on with a trip that this process did not see (case C11)."""
        self._open(until, min(pause_s, self._rules.longest_pause_s))

    def _trip(self, now: float) -> None:
        pause_s = max(2 * self.pause_s, self._rules.pause_s)
        pause_s = min(pause_s, self._rules.longest_pause_s)
        self.trips += 1
        self._open(now + pause_s, pause_s)

    def _open(self, until: float, pause_s: float) -> None:
        self.phase = Phase.OPEN
        self.closed = self._probing = self._busy = False
        self._hold_s = 0.0
        self.until = until
        self.pause_s = pause_s

    def _hold(self, now: float, asked_s: float, chance: float, *, busy: bool) -> None:
        self.until = self._over_at(now, asked_s, chance)
        self.phase = Phase.HELD
        self._busy = busy
        self.closed = self._probing = False

    def _over_at(self, now: float, asked_s: float, chance: float) -> float:
        """When a hold from now on is over: twice as long as the last one."""
        longest = self._rules.longest_hold_s
        self._hold_s = min(max(2 * self._hold_s, self._rules.hold_s, asked_s), longest)
        return now + self._hold_s * (0.75 + chance / 2)

    def _close(self) -> None:
        self.phase = Phase.CLOSED
        self.closed = True
        self._probing = False
        self._hold_s = 0.0
        self.until = -math.inf
