"""Budgets and limits on a request's way: reserve before it is sent, settle when it is over.

A request whose key has none passes by. What it needs of each bound is taken from what this process
holds (`allowance.py`); where that is too little it waits until Postgres was asked (`asking.py`),
not for long and not with too many others.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from controller.router import fallbacks, refusals
from controller.router.allowance import Kind
from controller.router.bounds import Bounds
from controller.router.clock import monotonic
from controller.router.deadlines import Timed
from controller.router.reservation import (
    FREE_ROUTES,
    UNPRICED,
    Need,
    Price,
    Reservation,
    cost_of,
    most_cost,
    most_tokens,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from controller.router.bounds import Bound
    from controller.router.core import Core
    from controller.router.errors import ApiError
    from controller.router.intake import Intake
    from controller.router.record import Ending

WAIT_S = 2.0
"""A request waits so long for what Postgres says of its bounds."""
MOST_WAITING, MOST_PATIENT = 1000, 500
"""The rest is for those whose bounds were not asked for yet: who floods leaves them room."""


class Parked(Timed):
    """A request that waits for an answer."""

    __slots__ = ("_late", "exchange")

    def __init__(self, exchange: Intake, late: Callable[[Intake], None]) -> None:
        super().__init__()
        self.exchange = exchange
        self._late = late

    def expired(self, now: float) -> None:
        self._late(self.exchange)


class Tenancy:
    """What all requests of one process share of it."""

    def __init__(self, core: Core) -> None:
        self._core = core
        self.bounds = Bounds()
        self.prices: Mapping[str, Price] = {}
        self.rows = 0  # usage rows made so far
        self.answered_at: float | None = None  # monotonic; when Postgres last answered an ask
        self.away = False  # it did not, the last time
        self.lacking: Callable[[], None] = lambda: None  # somebody waits: ask now
        self.heavy: Callable[[], None] = lambda: None  # others may need what is held here: ask soon
        self._parked: dict[Intake, Parked] = {}

    def __len__(self) -> int:
        """Requests that wait."""
        return len(self._parked)

    def enter(self, exchange: Intake, model: str) -> ApiError | bool:
        """Reserve for a request: True when it may go on; False: it waits, `reserved` follows."""
        key = exchange.key
        bounds = () if key is None else self.bounds.of(key)
        needs = self._needs(exchange, model, bounds) if bounds else []
        if not needs:
            return True
        exchange.reservation = reservation = Reservation(needs)
        return self._try(exchange, reservation)

    def _needs(self, exchange: Intake, model: str, bounds: tuple[Bound, ...]) -> list[Need]:
        route, asked = exchange.route, exchange.asked
        assert route is not None
        assert asked is not None
        bounds = tuple([b for b in bounds if b.model is None or b.model == model])
        if not bounds:
            return []
        prompt, completion = most_tokens(route, asked, self._core.config.limits.answer_tokens)
        cost = most_cost(self._prices_of(model), prompt, completion)
        needs = []
        for bound in bounds:
            amount = 1
            if bound.kind is Kind.MONEY:
                amount = cost
            elif bound.kind is Kind.TOKENS:
                amount = prompt + completion
            needs.append(Need(bound, self.bounds.allowance(bound), amount))
        return needs

    def _prices_of(self, model: str) -> list[Price]:
        """Of the model and of those that may answer in its stead."""
        prices = [self.prices.get(model, UNPRICED)]
        known = self._core.fleet.names.get(model)
        if known is not None and known.fallbacks:
            others = fallbacks.chain(model, self._core.fleet.names)
            prices += [self.prices.get(name, UNPRICED) for name in others]
        return prices

    def _try(self, exchange: Intake, reservation: Reservation) -> ApiError | bool:
        now = monotonic()
        lacking = reservation.lacking(now)
        if not lacking:
            reservation.take()
            return True
        patient = len(self._parked) < MOST_PATIENT
        for need in lacking:
            if need.allowance.refuses(need.amount, now, patient=patient):
                return refusals.lacking(need, now)
        if exchange not in self._parked:
            if len(self._parked) >= MOST_WAITING:
                return refusals.unavailable(503)
            self._parked[exchange] = parked = Parked(exchange, self._late)
            self._core.deadlines.set(parked, now + WAIT_S)
        reservation.want()
        self.lacking()
        return False

    def look_again(self) -> None:
        """Postgres answered: whoever waits goes on, is refused, or waits for another answer."""
        for exchange in list(self._parked):
            reservation = exchange.reservation
            if reservation is None or exchange not in self._parked:
                continue  # another one's end took it with it
            verdict = self._try(exchange, reservation)
            if verdict is not False:
                self._unpark(exchange, reservation)
                exchange.reserved(None if verdict is True else verdict)

    def _late(self, exchange: Intake) -> None:
        """It waited long enough. Only by what Postgres said lately nothing is left: it may be there
        and say nothing."""
        reservation = exchange.reservation
        if reservation is None or exchange not in self._parked:
            return
        now = monotonic()
        lacking = reservation.lacking(now)
        told = [n for n in lacking if n.allowance.told_since(now - WAIT_S / 2)]
        self._unpark(exchange, reservation)
        if not lacking:  # a request ended here meanwhile
            reservation.take()
            exchange.reserved(None)
        elif told and not self.away:
            exchange.reserved(refusals.lacking(told[0], now))
        else:
            exchange.reserved(refusals.unavailable(self._core.config.without_database))

    def _unpark(self, exchange: Intake, reservation: Reservation) -> None:
        reservation.unwant()
        parked = self._parked.pop(exchange, None)
        if parked is not None:
            parked.forget()

    # -- the end ---------------------------------------------------------------------------------

    def settle(self, exchange: Intake, ending: Ending) -> None:
        """The one end of a request that had bounds: what it did not use is free again."""
        reservation = exchange.reservation
        assert reservation is not None
        if not reservation.taken:
            self._unpark(exchange, reservation)
            return
        route, tokens, attempts = exchange.route, ending.tokens, exchange.attempts
        sent = attempts is not None and attempts.count > 0
        used = cost = 0
        if ending.outcome != "error" and route is not None and route.name not in FREE_ROUTES:
            used = (tokens.prompt or 0) + (tokens.completion or 0)
            if attempts is not None:
                cost = cost_of(self.prices.get(attempts.serving, UNPRICED), tokens)
        heavy = False
        for need in reservation.needs:
            came_to, kind = 0, need.bound.kind
            if kind is Kind.MONEY:
                came_to = cost
            elif kind is Kind.TOKENS:
                came_to = used
            elif kind is Kind.REQUESTS:
                came_to = int(sent)
            need.allowance.settle(need.amount, came_to, need.minute)
            heavy = heavy or need.allowance.heavy
        if heavy:
            self.heavy()

    def headers(self, exchange: Intake) -> tuple[refusals.Header, ...]:
        """What a client with limits is told of them; nothing to most."""
        if exchange.reservation is None:
            return ()
        return refusals.headers(exchange.reservation, monotonic())

    def answered(self) -> None:
        """Called off the reactor: what is to be done now is done in it."""
        self._core.reactor.call_soon(partial(self.look_again))

    def as_json(self) -> dict[str, float | int | None]:
        """For gauges: how old what we know is, and who waits."""
        age = None if self.answered_at is None else monotonic() - self.answered_at
        return {
            "bounds": len(self.bounds),
            "allowances": len(self.bounds.allowances),
            "allowances_age_s": age,
            "allowances_waiting": len(self._parked),
        }
