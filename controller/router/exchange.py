"""One request's life from its first attempt on: attempt, relay, settle (before: `intake.py`).

A state machine (`states.py`) driven by callbacks of the client's and the engine's connection.
`_settle` happens exactly once per request, on every way out, and writes its one usage row. What
was sent to the client is `delivery.py`, where the request was sent is `attempts.py`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import orjson

from controller.router import bill, errors, explain
from controller.router.body import choices
from controller.router.cors import answer_headers
from controller.router.dialect import MESSAGES, REQUEST_ID
from controller.router.held import Held
from controller.router.intake import Intake
from controller.router.plain import whole
from controller.router.record import Ending, record
from controller.router.relay import Head, StreamRelay, Wish
from controller.router.states import State
from controller.router.stored import Owner, response_id
from controller.router.tokens import UNKNOWN, Tokens
from controller.router.vectors import form_of
from controller.router.verdict import BY_STATUS

if TYPE_CHECKING:
    from controller.router.attempts import Attempts
    from controller.router.errors import ApiError
    from controller.router.plain import PlainRelay
    from controller.router.relay import Pairs
    from controller.router.routes import Route
    from controller.router.upstream import Failure

CLIENT_CLOSED: Final = 499  # nginx's number for "the client left before an answer"


class Exchange(Intake):
    """One request of one client."""

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
        """The engine's stream says nothing: its status is known, so the client gets a comment; or
        its end, when the engine has said its last word and leaves the stream open."""
        relay = self.delivery.relay
        if relay is not None and relay.answered():
            self._finish(relay, relay.finish())
        elif self.delivery.keep_alive():
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
            (explain.headers(attempts) + cors if self.request.explain else cors)
            + self._told(route),
            choices(asked.document) if route.asks_usage else 1,
        )

    def _told(self, route: Route) -> Pairs:
        """Header lines of ours that some answers carry."""
        told: Pairs = self._core.tenancy.headers(self)
        return told if route.dialect is not MESSAGES else (*told, (REQUEST_ID, self.request_id))

    # -- the answer ------------------------------------------------------------------------------

    def on_answer(self, head: Head | None, body: bytes, *, complete: bool) -> None:
        """More of the engine's answer: pass it on, or hold back what may not be for the client."""
        attempts, delivery = self.attempts, self.delivery
        if attempts is None:
            return  # settled meanwhile
        if self._state is State.RELAYING and body and not complete and delivery.flowed(body):
            return
        if complete:
            attempts.up = None
        try:
            if complete and head is not None and self._passed_whole(attempts, head, body):
                return
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

    def _passed_whole(self, attempts: Attempts, head: Head, body: bytes) -> bool:
        """Whether this was a plain answer in one piece that nothing is special about.

        The short way of `_open`, `_pass_on` and `_finish`, for most requests that do not stream.
        """
        route, asked, target = self.route, attempts.asked, attempts.target
        assert route is not None
        assert target is not None
        if asked.stream or route.stores or route.vectors or target.upstream_model != asked.model:
            return False
        request = self.request
        if request.explain or request.origin or request.version != "1.1":
            return False
        close = self._closes
        out = whole(head, body, self.request_id, close=close, extra=self._told(route))
        if out is None:
            return False
        target.pool.answered(200)
        self.delivery.beginning = body
        self._settle("ok", 200, None, bill.used_whole(route, asked, body))
        self.client.send_soon(out)
        self.client.finished(close=close)
        return True

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
        key_refused = held.status == 401  # however long the engine's words on it are
        told, back_s, whole = held.body, held.retry_after_s, complete or key_refused
        if attempts.after_answer(held.status, told, back_s, whole=whole):
            return
        if key_refused:
            self.refuse(errors.engine_refused_key(attempts.model))
            return
        self._pass_on(self._open(held.head), held.body, complete=complete)

    def _pass_on(self, relay: PlainRelay | StreamRelay, body: bytes, *, complete: bool) -> None:
        delivery = self.delivery
        out = delivery.pass_on(body, complete=complete)
        if out and self._state is State.WAITING:
            self._relaying()
        if relay.refusal is not None:
            self._refused(relay.refusal, complete=complete)
            return
        if self.route is not None and self.route.stores and not delivery.noted:
            self._note_stored(relay)
        if complete or relay.ended:
            self._finish(relay, out)
            return
        if not relay.begun and self.attempts is not None and self.attempts.up is not None:
            self.attempts.up.no_token_yet()
        if out:
            self.client.send(out)
        if self.client.out is not None:
            delivery.slow_down(None if self.attempts is None else self.attempts.up)
        else:
            delivery.check_delivered()

    def _note_stored(self, relay: PlainRelay | StreamRelay) -> None:
        """Remember which replica keeps this answer, before the client can go on from it."""
        identity = response_id(relay.opening) if relay.status == 200 else None
        if identity is not None and self.attempts and self.attempts.target and self.key:
            self.delivery.noted = True
            owner = Owner(self.attempts.target.pool.key, self.key.id)
            self._core.stored.note(identity, owner)

    def _relaying(self) -> None:
        """The first bytes of an engine's answer went out: nothing is made again from here."""
        relay, attempts = self.delivery.relay, self.attempts
        if self._state is not State.WAITING or relay is None or attempts is None:
            return
        self._move(State.RELAYING)
        attempts.let_go()
        if relay.status not in BY_STATUS and attempts.target is not None:
            attempts.target.pool.answered(relay.status)

    def _refused(self, error: ApiError, *, complete: bool) -> None:
        """Nothing was sent. An engine's stream that began with an error is as good as a status."""
        attempts, delivery = self.attempts, self.delivery
        if attempts is None:
            return
        if delivery.failed_first:
            told, back_s = error.message.encode(), error.retry_after_s
            refuses_key = error.code == errors.ENGINE_REFUSED_KEY
            if error.status not in BY_STATUS and attempts.target is not None:
                attempts.target.pool.answered(error.status)  # the others are told of next
            if attempts.after_answer(401 if refuses_key else error.status, told, back_s):
                delivery.forget()
            elif refuses_key:
                self.refuse(error)
            else:
                self._tell(error, f"upstream_{error.status}")  # as if it had been the status
            return
        told_error = attempts.after_no_answer(error, ended=complete)
        if told_error is None:
            delivery.forget()
        else:
            self.refuse(told_error)

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
            self._end(relay, out)

    def _finish(self, relay: PlainRelay | StreamRelay, last: bytes) -> None:
        """The engine has ended its answer."""
        if relay.code is not None and self.attempts is not None:
            self.attempts.ended(relay.code)
        self._end(relay, last)

    def _end(self, relay: PlainRelay | StreamRelay, last: bytes) -> None:
        """The row is kept before the client can have the last byte: no kill comes in between."""
        self._drop_upstream()
        seen = self.delivery.status_seen(relay.status)
        self._settle(relay.outcome, seen, relay.code, self._used(relay))
        in_order = relay.outcome != "partial" or relay.code == "engine_aborted"
        framed = self.request.version == "1.1"
        if last:
            self.client.send(last)
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
        self._core.stats.refuse(error.code)
        self._tell(error, error.code)

    def _tell(self, error: ApiError, code: str) -> None:
        """Answer with this error, ours or an engine's; `code` is the row's."""
        self._drop_upstream()
        attempts = self.attempts
        told = explain.headers(attempts) if attempts is not None and self.request.explain else ()
        told += self._core.tenancy.headers(self)
        seen = self.delivery.status_seen(error.status)
        self._settle("error", seen, code, UNKNOWN)
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

    def _settle(self, outcome: str, http_status: int, code: str | None, tokens: Tokens) -> None:
        self._move(State.SETTLED)
        self._core.exchanges -= 1
        ending = Ending(outcome, http_status, code, tokens)
        record(self._core, self, ending)
        if self.reservation is not None:
            self._core.tenancy.settle(self, ending)
        if outcome == "ok" and self.attempts is not None and self.attempts.target is not None:
            self.attempts.target.pool.served()
        self.attempts = None  # it points back here: without the cycle no collector is needed
