"""How a request comes to its attempts: admitted, its body read, its model and replica found.

The first part of an exchange (`exchange.py`), which is its only subclass. Whatever is wrong with a
request is found here and refused; nothing here knows engines' answers.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from functools import partial
from typing import TYPE_CHECKING, cast

import trio

from controller.router import body as request_body
from controller.router import errors, fallbacks, local
from controller.router.attempts import Attempts
from controller.router.checking import admit, aim, read_form
from controller.router.clock import monotonic
from controller.router.delivery import Delivery
from controller.router.errors import ApiError
from controller.router.routes import Kind, Route, find
from controller.router.states import MOVES, State
from controller.router.stored import Missing, Owner, previous
from controller.router.tokens import UNKNOWN, Tokens
from controller.router.want import wanted

if TYPE_CHECKING:
    from collections.abc import Callable

    from controller.router.auth import Key
    from controller.router.body import Asked
    from controller.router.client import ClientConnection
    from controller.router.core import Core
    from controller.router.exchange import Exchange
    from controller.router.http1 import Request
    from controller.router.reservation import Reservation
    from controller.router.stats import ModelStats


class Intake(ABC):
    """A request until its first attempt.

    What is not known yet stays on the class: setting it for each request is not free.
    """

    _state = State.CHECKING
    route: Route | None = None
    key: Key | None = None
    asked: Asked | None = None
    stats: ModelStats | None = None
    attempts: Attempts | None = None
    reservation: Reservation | None = None

    def __init__(self, core: Core, client: ClientConnection, request: Request) -> None:
        self._core = core
        self.client = client
        self.request = request
        self.started = monotonic()
        self.row_id = core.row_ids.take()
        self.request_id = core.request_id(request.request_id, self.row_id)
        self.delivery = Delivery(client, core.config.limits)
        client.given = 0
        core.exchanges += 1

    def start(self) -> None:
        """The request is complete: take it as far as one callback can."""
        admitted = admit(self._core.keys, self.request, self.client.address, self.client.shown)
        if isinstance(admitted, bytes):
            self._core.ask_key(admitted, partial(self._identified, self.start))
            return
        route, self.key, unfit = admitted
        self.route = route
        if unfit is not None:
            self.refuse(unfit)
            return
        assert route is not None
        if route.kind is not Kind.INFER:
            self._answer_locally(route)
        elif self._core.draining:
            self.refuse(errors.draining())
        elif self.request.coding:
            self._move(State.INFLATING)
            limit = self._core.config.limits.inflated_bytes
            self._core.in_background(
                trio.to_thread.run_sync,
                request_body.inflate, self.request.coding, self.request.body, limit,
                then=self._inflated,
            )  # fmt: skip
        else:
            self._find_model(self.request.body)

    def refuse_head(self, fault: ApiError) -> None:
        """The body is not here and will not be read; a bad key is told before anything else."""
        if not self.request.method:
            self.refuse(fault)  # its head is not here whole: whatever it says of a key
            return
        admitted = admit(self._core.keys, self.request, self.client.address, self.client.shown)
        if isinstance(admitted, bytes):
            again = partial(self.refuse_head, fault)
            self._core.ask_key(admitted, partial(self._identified, again))
            return
        self.route, self.key, unfit = admitted
        self.refuse(errors.BAD_KEY if unfit is errors.BAD_KEY else fault)

    def refuse_sender(self, error: ApiError) -> None:
        """Its key was looked up in vain."""
        route = find(self.request.method, self.request.target)
        self.route = route if isinstance(route, Route) else None
        self.refuse(error)

    def _identified(self, again: Callable[[], None], error: ApiError | None) -> None:
        """The key was looked up: go on as if it had always been here, or say what is wrong."""
        if self._state is not State.CHECKING:
            return  # the client left meanwhile
        try:
            if error is None:
                again()
            else:
                self.refuse_sender(error)
        except Exception:
            self.abandon()
            raise

    def _inflated(self, result: bytes | ApiError | None) -> None:
        if self._state is not State.INFLATING:
            return  # the client left meanwhile
        if not isinstance(result, bytes):
            self.refuse(result or errors.internal())
            return
        try:
            self._find_model(result)
        except Exception:
            self.abandon()
            raise

    def _answer_locally(self, route: Route) -> None:
        result = local.answer_locally(self._core, route, self.key, self.request)
        if isinstance(result, ApiError):
            self.refuse(result)
            return
        status, document = result
        if status < 400:
            self._settle("ok", status, None, UNKNOWN)
        else:  # not ready: why a load balancer looked past us
            self._settle("error", status, "not_ready", UNKNOWN)
        self.client.respond(status, self.request_id, local.encode(document), self.request)

    def _find_model(self, raw: bytes) -> None:
        assert self.key is not None
        assert self.route is not None
        core, route = self._core, self.route
        if route.form:
            asked = read_form(self.request, raw)
        else:
            asked = request_body.read(raw, asks_usage=route.asks_usage)
        if isinstance(asked, ApiError):
            self.refuse(asked)
            return
        if route.path:
            aim(route, self.request)
        if route.whole:
            asked.stream = False
        self.asked = asked
        model = core.fleet.names.get(asked.model)
        if model is None or not self.key.allows(model):
            self.refuse(errors.model_not_found(asked.model))
            return
        want = wanted(self.request, asked.document, core.fleet.usual)
        if isinstance(want, ApiError):
            self.refuse(want)
            return
        self.stats = core.stats.model(model.name)
        self.stats.in_flight += 1
        itself = cast("Exchange", self)  # there is no other kind
        attempts = Attempts(core, itself, self.request, asked, model.name, self.key, want)
        self.attempts = attempts
        attempts.allow_fallback(*(self.key.fallback or ("settings", core.config.fallback_on)))
        if self.request.fallback:
            chosen = fallbacks.chosen(self.request.fallback)
            if isinstance(chosen, ApiError):
                self.refuse(chosen)
                return
            attempts.allow_fallback("request", chosen)
        reserved = self._core.tenancy.enter(self, model.name)
        if reserved is False:
            self._move(State.RESERVING)
        else:
            self._reserved(None if reserved is True else reserved)

    def reserved(self, error: ApiError | None) -> None:
        """What its bounds need came after a wait, or the error for the client."""
        if self._state is not State.RESERVING:
            return  # the client left meanwhile
        try:
            self._reserved(error)
        except Exception:
            self.abandon()
            raise

    def _reserved(self, error: ApiError | None) -> None:
        assert self.asked is not None
        assert self.route is not None
        if error is not None:
            self.refuse(error)
            return
        goes_on_from = previous(self.asked.document) if self.route.stores else None
        if goes_on_from is None:
            assert self.attempts is not None
            self._move(State.WAITING)
            error = self.attempts.begin()
            if error is not None:
                self.refuse(error)
        else:
            self._find_owner(goes_on_from)

    def _find_owner(self, goes_on_from: str) -> None:
        """Which replica holds the answer before this one: another router may have begun it."""
        owner, log = self._core.stored.owner(goes_on_from), self._core.stored_log
        if owner is not None or log is None:
            self._found_owner(goes_on_from, owner or Missing())
            return
        self._move(State.LOOKING_UP)
        found = partial(self._looked_up, goes_on_from)
        self._core.in_background(log.find, goes_on_from, then=found)

    def _looked_up(self, goes_on_from: str, found: Owner | Missing | None) -> None:
        if self._state is not State.LOOKING_UP:
            return  # the client left meanwhile
        try:
            self._found_owner(goes_on_from, found)
        except Exception:
            self.abandon()
            raise

    def _found_owner(self, goes_on_from: str, owner: Owner | Missing | None) -> None:
        assert self.attempts is not None
        assert self.key is not None
        if owner is None:
            self.refuse(errors.cannot_look_up())
        elif isinstance(owner, Missing) or owner.key_id != self.key.id:
            self.refuse(errors.no_previous(goes_on_from))
        else:
            self.attempts.pin(owner.replica, goes_on_from)
            self._move(State.WAITING)
            self.try_again()

    def _move(self, state: State) -> None:
        if state not in MOVES[self._state]:
            raise RuntimeError(f"request {self.row_id} cannot go from {self._state!r} to {state!r}")
        self._state = state

    @abstractmethod
    def try_again(self) -> None:
        """Begin the first or, after a pause, a further attempt."""

    @abstractmethod
    def refuse(self, error: ApiError) -> None:
        """Answer with an error of ours; the client has seen nothing yet."""

    @abstractmethod
    def abandon(self) -> None:
        """A bug of ours was hit: end this request."""

    @abstractmethod
    def _settle(self, outcome: str, http_status: int, code: str | None, tokens: Tokens) -> None:
        """The one end of every request."""
