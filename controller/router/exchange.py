"""One request's life: admit, read the body, find the model, attempt, relay, settle.

A state machine (`states.py`) driven by callbacks of the client's and the engine's connection.
`_settle` happens exactly once per request, on every way out, and writes its one usage row. What
was sent to the client is `delivery.py`, where the request was sent is `attempts.py`.
"""

from __future__ import annotations

import time
from functools import partial
from typing import TYPE_CHECKING

import orjson
import trio

from controller.router import bill, errors, explain, fallbacks, local
from controller.router import body as request_body
from controller.router.attempts import Attempts
from controller.router.checking import admit, aim, read_body
from controller.router.cors import answer_headers
from controller.router.delivery import Delivery
from controller.router.errors import ApiError
from controller.router.held import Held
from controller.router.record import Ending, record
from controller.router.relay import ERROR_EVENT, Head, StreamRelay, Wish
from controller.router.routes import Kind, Route
from controller.router.states import MOVES, State
from controller.router.stored import Missing, Owner, previous, response_id
from controller.router.tokens import UNKNOWN, Tokens
from controller.router.vectors import form_of
from controller.router.verdict import BY_STATUS
from controller.router.want import wanted

if TYPE_CHECKING:
    from controller.router.auth import Key
    from controller.router.body import Asked
    from controller.router.client import ClientConnection
    from controller.router.core import Core
    from controller.router.http1 import Request
    from controller.router.plain import PlainRelay
    from controller.router.stats import ModelStats
    from controller.router.upstream import Failure

CLIENT_CLOSED = 499  # nginx's number for "the client left before an answer"


class Exchange:
    """One request of one client."""

    __slots__ = (
        "_core", "_state", "asked", "attempts", "client", "delivery", "key", "request",
        "request_id", "route", "row_id", "started", "stats",
    )  # fmt: skip

    def __init__(self, core: Core, client: ClientConnection, request: Request) -> None:
        self._core = core
        self.client = client
        self.request = request
        self.started = time.monotonic()
        self._state = State.CHECKING
        self.row_id = core.new_row_id()
        self.request_id = core.request_id(request.request_id, self.row_id)
        self.route: Route | None = None
        self.key: Key | None = None
        self.asked: Asked | None = None
        self.stats: ModelStats | None = None
        self.attempts: Attempts | None = None
        self.delivery = Delivery(client, core.config.limits)
        client.given = 0
        core.exchanges += 1

    # -- before an engine ------------------------------------------------------------------------

    def start(self) -> None:
        """The request is complete: take it as far as one callback can."""
        admitted = admit(self._core.keys, self.request)
        if isinstance(admitted, ApiError):
            self.refuse(admitted)
            return
        self.route, self.key = admitted
        if self.route.kind is not Kind.INFER:
            self._answer_locally(self.route)
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
        admitted = admit(self._core.keys, self.request) if self.request.method else fault
        if not isinstance(admitted, ApiError):
            self.route, self.key = admitted
        known = isinstance(admitted, ApiError) and admitted.status == errors.BAD_KEY.status
        self.refuse(errors.BAD_KEY if known else fault)

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
        self._settle("ok", status, None, UNKNOWN)
        self.client.respond(status, self.request_id, local.encode(document), self.request)

    def _find_model(self, raw: bytes) -> None:
        assert self.key is not None
        assert self.route is not None
        asked = read_body(self.route, self.request, raw)
        if isinstance(asked, ApiError):
            self.refuse(asked)
            return
        aim(self.route, self.request)
        self.asked = asked
        model = self._core.fleet.names.get(asked.model)
        if model is None or not self.key.allows(asked.model, model.name):
            self.refuse(errors.model_not_found(asked.model))
            return
        want = wanted(self.request, asked.document, self._core.fleet.profile)
        if isinstance(want, ApiError):
            self.refuse(want)
            return
        self.stats = self._core.stats.model(model.name)
        self.stats.in_flight += 1
        self.attempts = attempts = Attempts(
            self._core, self, self.request, asked, model.name, self.key, want
        )
        if self.request.fallback:
            chosen = fallbacks.chosen(self.request.fallback)
            if isinstance(chosen, ApiError):
                self.refuse(chosen)
                return
            attempts.allow_fallback(chosen)
        goes_on_from = previous(asked.document) if self.route.stores else None
        if goes_on_from is None:
            self._move(State.WAITING)
            self.try_again()
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

    # -- attempts --------------------------------------------------------------------------------

    def try_again(self) -> None:
        """Begin the first or, after a pause, a further attempt."""
        attempts = self.attempts
        if attempts is None or self._state is not State.WAITING:
            return
        try:
            error = attempts.begin()
            if error is not None:
                self.refuse(error)
        except Exception:
            self.abandon()
            raise

    def on_failed(self, failure: Failure) -> None:
        """The attempt failed: another one where that is safe, else tell the client."""
        attempts, delivery = self.attempts, self.delivery
        if attempts is None:
            return  # settled meanwhile
        assert attempts.target is not None
        attempts.up = None
        self._core.stats.fail_upstream(attempts.target.pool.key, failure.cause.value)
        attempts.blame(failure)
        try:
            if self._state is State.RELAYING:
                self._broken(attempts.error_of(failure))
                return
            headed = delivery.headed
            delivery.forget()
            error = attempts.after(failure, headed=headed)
            if error is not None:
                self.refuse(error)
        except Exception:
            self.abandon()
            raise

    def keep_alive(self, comment: str) -> None:
        """The client of a stream learns that it waits; from now on errors are events."""
        if self.attempts is not None and self._state is State.WAITING:
            self.delivery.announce(comment, self._wish(self.attempts))

    def on_silence(self) -> None:
        """The engine's stream says nothing: its status is known, so the client gets a comment."""
        if self.delivery.keep_alive():
            self._relaying()

    def _wish(self, attempts: Attempts) -> Wish:
        route, asked = self.route, attempts.asked
        assert route is not None
        origin = self.request.origin
        cors = answer_headers(self._core.config.cors, origin) if origin else ()
        return Wish(
            attempts.model,
            self.request_id,
            self.request.version == "1.1",
            self._closes,
            attempts.ask_usage,
            route.dialect,
            form_of(asked.document) if route.vectors else None,
            orjson.dumps(asked.model) if attempts.renamed else None,
            explain.headers(attempts) + cors if self.request.explain else cors,
        )

    # -- the answer ------------------------------------------------------------------------------

    def on_answer(self, head: Head | None, body: bytes, *, complete: bool) -> None:
        """More of the engine's answer: pass it on, or hold back what may not be for the client."""
        attempts, delivery = self.attempts, self.delivery
        if attempts is None:
            return  # settled meanwhile
        if complete:
            attempts.up = None
        try:
            if head is not None:
                if head.status >= 400 and attempts.holds(head.status):
                    delivery.held = Held(head)
                else:
                    self._open(head)
            if delivery.held is not None:
                self._hold(attempts, delivery.held, body, complete=complete)
            elif delivery.relay is not None:
                self._pass_on(delivery.relay, body, complete=complete)
        except Exception:
            self.abandon()
            raise

    def _open(self, head: Head) -> PlainRelay | StreamRelay:
        assert self.attempts is not None
        relay = self.delivery.open(head, self._wish(self.attempts))
        if isinstance(relay, StreamRelay) and self.attempts.up is not None:
            self.attempts.up.watch(self._core.config.timeouts.comment_s)
        return relay

    def _hold(self, attempts: Attempts, held: Held, body: bytes, *, complete: bool) -> None:
        """An error of the engine's own: another attempt when it is whole, else pass it on."""
        if held.feed(body) and not complete:
            return
        self.delivery.forget()
        if complete and attempts.after_answer(held.status, held.body, held.retry_after_s):
            return
        self._pass_on(self._open(held.head), held.body, complete=complete)

    def _pass_on(self, relay: PlainRelay | StreamRelay, body: bytes, *, complete: bool) -> None:
        delivery = self.delivery
        if delivery.first_byte is None and self.route is not None and self.route.stores:
            self._note_stored(relay.status, body)
        if delivery.pass_on(body, complete=complete) and self._state is State.WAITING:
            self._relaying()
        if relay.refusal is not None:
            self._refused(relay.refusal)
        elif complete or relay.ended:
            self._finish(relay)
        elif self.client.out is not None:
            delivery.slow_down(None if self.attempts is None else self.attempts.up)
        else:
            delivery.check_delivered()

    def _note_stored(self, status: int, beginning: bytes) -> None:
        """Remember which replica keeps this answer, before the client can go on from it."""
        identity = response_id(beginning) if status == 200 else None
        if identity is not None and self.attempts and self.attempts.target and self.key:
            owner = Owner(self.attempts.target.pool.key, self.key.id)
            self._core.stored.note(identity, owner)

    def _relaying(self) -> None:
        """The first bytes of an engine's answer went out: nothing is made again from here."""
        relay, attempts = self.delivery.relay, self.attempts
        if self._state is not State.WAITING or relay is None or attempts is None:
            return
        self._move(State.RELAYING)
        if relay.status not in BY_STATUS and attempts.target is not None:
            attempts.target.pool.answered(relay.status)

    def _refused(self, error: ApiError) -> None:
        """Nothing was sent. An engine's stream that began with an error is as good as a status."""
        attempts = self.attempts
        if attempts is not None and self.delivery.failed_first:
            told, back_s = error.message.encode(), error.retry_after_s
            if attempts.after_answer(error.status, told, back_s):
                self.delivery.forget()
                return
        self.refuse(error)

    def _broken(self, error: ApiError) -> None:
        relay = self.delivery.relay
        assert relay is not None
        out = relay.broken(error)
        if relay.refusal is not None:
            self.refuse(relay.refusal)
        elif out is None:
            self.client.reset()  # only an abort tells that the body is short (case H14)
            self._settle(relay.outcome, relay.status, relay.code, self._used(relay))
            self.client.finished(close=True)
        else:
            self.client.send(out)
            self._finish(relay)

    def _finish(self, relay: PlainRelay | StreamRelay) -> None:
        self._drop_upstream()
        attempts = self.attempts
        if relay.code == ERROR_EVENT and attempts is not None and attempts.target is not None:
            attempts.target.pool.answered(500)
        self._settle(relay.outcome, relay.status, relay.code, self._used(relay))
        in_order = relay.outcome != "partial" or relay.code == "engine_aborted"
        framed = self.request.version == "1.1"
        self.client.finished(close=self._closes or not in_order or not framed)

    def client_took_some(self) -> None:
        """The client read: go on reading the engine when little is left."""
        if self.attempts is not None:
            self.delivery.took_some(self.attempts.up)

    def client_lost(self, code: str = "client_closed") -> None:
        """The client is gone: the engine learns it now, whatever it was doing."""
        if self._state is State.SETTLED:
            return
        reached = self.attempts is not None and self.attempts.up is not None
        self._drop_upstream()
        relay = self.delivery.relay
        if relay is not None and self.delivery.delivered:
            self._settle(relay.outcome, relay.status, relay.code, self._used(relay))
        else:
            tokens = UNKNOWN
            if relay is not None:
                tokens = self._used(relay)
            elif self.route is not None:
                tokens = bill.unanswered(self.route, self.asked, reached=reached)
            self._settle("client_closed", CLIENT_CLOSED, code, tokens)

    def _used(self, relay: PlainRelay | StreamRelay) -> Tokens:
        assert self.route is not None
        assert self.asked is not None
        return bill.used(self.route, self.asked, relay)

    def cut(self, error: ApiError) -> None:
        """End this request now because the process ends; the client is told as well as can be."""
        self._drop_upstream()
        if self.delivery.relay is None:
            self.refuse(error)
        else:
            self._broken(error)

    def refuse(self, error: ApiError) -> None:
        """Answer with an error of ours; the client has seen nothing yet."""
        if error.allow is not None and self.request.method == b"OPTIONS":
            self._settle("ok", 204, None, UNKNOWN)
            self.client.respond_options(error.allow, self.request_id, self.request)
            return
        self._drop_upstream()
        self._core.stats.refuse(error.code)
        attempts = self.attempts
        told = explain.headers(attempts) if attempts is not None and self.request.explain else ()
        self._settle("error", error.status, error.code, UNKNOWN)
        event = self.delivery.refused(error)
        if event is None:
            self.client.respond_error(error, self.request_id, self.request, told)
        else:
            self.client.send(event)
            self.client.finished(close=True)

    def abandon(self) -> None:
        """A bug of ours was hit: end this request and leave no engine working for it."""
        self._drop_upstream()
        if self._state is State.SETTLED:
            return
        relay = self.delivery.relay
        if relay is None or relay.untouched:
            self.refuse(errors.internal())
            return
        self._settle("error", relay.status, "internal_error", UNKNOWN)
        self.client.reset()
        self.client.finished(close=True)

    @property
    def _closes(self) -> bool:
        request = self.request
        return not request.keep_alive or not request.complete or self._core.draining

    def _drop_upstream(self) -> None:
        if self.attempts is not None:
            self.attempts.cancel()

    # -- the end ---------------------------------------------------------------------------------

    def _move(self, state: State) -> None:
        if state not in MOVES[self._state]:
            raise RuntimeError(f"request {self.row_id} cannot go from {self._state!r} to {state!r}")
        self._state = state

    def _settle(self, outcome: str, http_status: int, code: str | None, tokens: Tokens) -> None:
        self._move(State.SETTLED)
        self._core.exchanges -= 1
        record(self._core, self, Ending(outcome, http_status, code, tokens))
        self.attempts = None  # it points back here: without the cycle no collector is needed
