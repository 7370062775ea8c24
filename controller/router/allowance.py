"""What this process may use of one budget or limit without asking anybody. Pure.

Postgres (`allowances_v1`) sets the amount; here it is used up and given back. Money and tokens are
reserved by a request's upper bound and settled with what it came to; money stays used until the
database has charged it, for then it leaves the amount too. Requests and tokens are of one minute,
slots are in use while a request runs. In an ask nothing is given up that may be used before the
answer: it names what is kept meanwhile, and only that is used until then.
"""

from __future__ import annotations

import math
from collections import deque
from enum import StrEnum
from typing import Final, NamedTuple

MOST_MARKS: Final = 32
"""Of a router whose rows wait for long; the oldest and newest matter."""
FRESH_S: Final = 0.1
"""So long a refusal needs no other question: a flood of requests is no flood of calls."""
CALM_S: Final = 1.0
"""After a refusal others are not waited for again so long: a flood waits for a part of the time."""
PACE_S, PACE_KEPT = 0.5, 0.9
"""How often the pace is reckoned, and what is left of it each time when less is taken."""


class Kind(StrEnum):
    """What a bound counts; the words are Postgres's."""

    MONEY = "money"  # micros
    REQUESTS = "requests"  # of a minute
    TOKENS = "tokens"  # of a minute
    SLOTS = "slots"  # requests at the same time


BY_MINUTE: Final = frozenset((Kind.REQUESTS, Kind.TOKENS))


GRACE_S: Final = {Kind.MONEY: 1.2, Kind.TOKENS: 0.3, Kind.SLOTS: 0.3, Kind.REQUESTS: 0.0}
"""So long others may take to tell of requests that just ended, before one is refused what these
held: what is more than they may keep is told within a tenth of a second, the rest of a budget each
second. A request that was sent stays counted."""


class Ask(NamedTuple):
    """What the database is told and asked of one bound, in the order of `allowances_v1`."""

    kind: str
    id: int
    minute: int
    hold: int
    keep: int
    need: int
    idle: int
    least: int


class Told(NamedTuple):
    """Its answer; amounts None: the call came late, another one counts."""

    amount: int | None
    spare: int | None  # held by other routers, unused
    busy: int | None  # held by other routers for requests that ran when they last told
    free: int | None  # held by nobody
    ahead: int | None  # so much may be kept unused
    whole: int
    minute: int
    good_s: float
    anew_s: float | None


class Allowance:
    """One bound's part that this process may use. Times are the monotonic clock's."""

    __slots__ = (
        "ahead", "amount", "anew_at", "answered_at", "asked", "asked_at", "busy", "by_minute",
        "charged", "free", "gone", "id", "kind", "marks", "minute", "pace",
        "patient_until", "settled", "spare", "taken", "unit", "until", "used", "wanted", "whole",
    )  # fmt: skip

    def __init__(self, kind: Kind, number: int, whole: int) -> None:
        self.kind = kind
        self.by_minute = kind in BY_MINUTE
        self.id = number
        self.whole = whole
        self.amount = 0  # that it may use in all
        self.used = 0  # of it
        self.until = 0.0  # then the amount is worth nothing
        self.minute = 0
        self.wanted: dict[int, int] = {}  # by what waiting requests take, how many of them
        self.taken = 0  # since the pace was last reckoned
        self.pace = 0.0  # what is taken in a second or so
        self.unit = 0  # what a request took
        self.asked_at = 0.0
        self.ahead = self.spare = self.busy = self.free = 0  # as last told
        self.patient_until = 0.0  # until then nobody is refused what others use
        self.answered_at: float | None = None
        self.gone = False  # the database knows no such bound: it holds nobody up
        self.anew_at: float | None = None  # when there is more again
        self.settled = self.charged = 0  # money of requests that ended; of it what is charged
        self.marks: deque[tuple[int, int]] = deque()  # rows written, what was settled by then
        self.asked: int | None = None  # what was `charged` in the ask that is under way

    def left(self, now: float) -> int:
        """What another request may take."""
        return max(0, self.amount - self.used) if now < self.until else 0

    def take(self, n: int) -> None:
        """A request begins; `n` as it was compared with `left`."""
        self.used += n
        self.taken += n
        self.unit = n

    def settle(self, reserved: int, came_to: int, minute: int) -> None:
        """That request ended, or was not sent after all (then it came to nothing)."""
        if self.by_minute:
            if minute == self.minute:
                self.used = max(0, self.used + came_to - reserved)
            return
        self.used -= reserved
        if self.kind is Kind.MONEY:
            self.used += came_to
            self.settled += came_to

    # -- asking ----------------------------------------------------------------------------------

    def ask(self, now: float, rows: int, written: int, *, leaving: bool = False) -> Ask:
        """What to ask, `rows` of usage made and `written` of them charged until now.

        From here until the answer no more is used than is named here.
        """
        self._reckon(now)
        idle = 0 if leaving or not self.pace else max(math.ceil(2 * self.pace), self.unit)
        keep = min(self.left(now), self.ahead, idle)
        self.amount = self.used + keep
        self.asked = self._charged(rows, written)
        hold = max(0, self.used - (self.asked - self.charged))
        need = sum([n * count for n, count in self.wanted.items()])
        least = min(self.wanted, default=0)
        return Ask(self.kind, self.id, self.minute, hold, keep, need, idle, least)

    def want(self, n: int) -> None:
        """A request waits for `n`."""
        self.wanted[n] = self.wanted.get(n, 0) + 1

    def unwant(self, n: int) -> None:
        """It waits no longer."""
        self.wanted[n] -= 1
        if not self.wanted[n]:
            del self.wanted[n]

    def _reckon(self, now: float) -> None:
        """Who takes a request's worth now and then keeps one for half a minute."""
        self.pace = max(self.pace, float(self.taken))
        if now - self.asked_at < PACE_S:
            return
        self.pace = max(PACE_KEPT * self.pace, float(self.taken))
        self.asked_at, self.taken = now, 0
        if self.pace < self.unit / 20:
            self.pace = 0.0

    def _charged(self, rows: int, written: int) -> int:
        """What of `settled` is charged for certain: rows are written in the order they came."""
        if self.kind is not Kind.MONEY:
            return 0
        marks, charged = self.marks, self.charged if self.asked is None else self.asked
        if len(marks) == MOST_MARKS:
            marks.pop()
        marks.append((rows, self.settled))
        while marks and marks[0][0] <= written:
            charged = marks.popleft()[1]
        return charged

    def told(self, told: Told, sent_at: float, now: float) -> None:
        """The answer to what was asked at `sent_at`."""
        if told.amount is None or self.asked is None:
            return
        self.used -= self.asked - self.charged
        self.charged, self.asked = self.asked, None
        if self.by_minute and told.minute != self.minute:
            self.minute, self.used = told.minute, 0
        self.amount, self.whole = told.amount, told.whole
        self.spare, self.busy = told.spare or 0, told.busy or 0
        self.free, self.ahead = told.free or 0, told.ahead or 0
        self.until = sent_at + told.good_s
        self.answered_at = now
        self.anew_at = None if told.anew_s is None else now + told.anew_s

    def told_since(self, then: float) -> bool:
        """Whether an answer came since."""
        return self.answered_at is not None and self.answered_at >= then

    def lacks(self, n: int, now: float) -> bool:
        """Whether a request that takes `n` cannot begin without asking."""
        return self.left(now) < n and not self.gone

    def refuses(self, n: int, now: float, *, patient: bool = True) -> bool:
        """Whether the database said a moment ago that there is not so much, here or elsewhere.

        Not while it is asked: what was just given back to it may be had again. What requests
        elsewhere use may be free by now, and is waited for a little where one is `patient`.
        """
        if self.asked is not None or self.answered_at is None:
            return False
        if now - self.answered_at > FRESH_S:
            return False
        there = self.left(now) + max(0, self.spare) + max(0, self.free)
        if there >= n:
            return False
        if not patient or there + self.busy < n:
            return True
        return not self._waits(now)

    def _waits(self, now: float) -> bool:
        """For others: from the first time that is asked on, and anew after a calm."""
        if now > self.patient_until + CALM_S:
            self.patient_until = now + GRACE_S[self.kind]
        return now < self.patient_until

    @property
    def remaining(self) -> int:
        """What clients are told is left: with nobody, and here unused."""
        return max(0, self.free) + max(0, self.amount - self.used)

    def doubt(self) -> None:
        """The bound was changed: nothing more is used before the database was asked again."""
        self.gone = False
        self.until = 0.0
        self.answered_at = None

    @property
    def heavy(self) -> bool:
        """Whether it keeps more than it may while others lack it."""
        return self.amount - self.used > max(self.ahead, 0)

    @property
    def resting(self) -> bool:
        """Whether nothing is held and nothing was asked for lately."""
        return not (self.amount or self.used or self.wanted or self.pace or self.taken)
