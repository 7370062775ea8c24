"""One request's life: admit, read the body, find the model, attempt, relay, settle.

A state machine driven by callbacks of the client's and the engine's connection. `settle` happens
exactly once per request, on every way out, and writes its one usage row.
"""

from __future__ import annotations

import time
from enum import IntEnum
from typing import TYPE_CHECKING

import orjson
import trio

from controller.router import body as request_body
from controller.router import errors, local
from controller.router.attempts import Attempts
from controller.router.checking import admit, aim, read_body
from controller.router.early import EarlyRelay, open_late
from controller.router.errors import ApiError
from controller.router.plain import PlainRelay, open_relay
from controller.router.relay import Head, StreamRelay, Wish
from controller.router.routes import Kind, Route
from controller.router.tokens import UNKNOWN, Tokens
from controller.router.usage import UsageRow

if TYPE_CHECKING:
    from controller.router.auth import Key
    from controller.router.body import Asked
    from controller.router.client import ClientConnection
    from controller.router.core import Core
    from controller.router.http1 import Request
    from controller.router.stats import ModelStats
    from controller.router.table import Model
    from controller.router.upstream import Failure

CLIENT_CLOSED = 499  # nginx's number for "the client left before an answer"


class State(IntEnum):
    """Where a request is (integers: they are looked up on every move)."""

    CHECKING = 0  # route, key, model: all within one callback
    INFLATING = 1  # a compressed body is in a worker thread
    WAITING = 2  # an engine has the request, no head yet
    RELAYING = 3
    SETTLED = 4


MOVES = {
    State.CHECKING: frozenset((State.INFLATING, State.WAITING, State.SETTLED)),
    State.INFLATING: frozenset((State.WAITING, State.SETTLED)),
    State.WAITING: frozenset((State.RELAYING, State.SETTLED)),
    State.RELAYING: frozenset((State.SETTLED,)),
    State.SETTLED: frozenset[State](),
}


class Exchange:
    """One request of one client."""

    __slots__ = (
        "_asked", "_attempts", "_core", "_delivered", "_early", "_first_byte", "_key", "_model",
        "_relay", "_request", "_route", "_started", "_state", "_stats", "client", "request_id",
        "row_id",
    )  # fmt: skip

    def __init__(self, core: Core, client: ClientConnection, request: Request) -> None:
        self._core = core
        self.client = client
        self._request = request
        self._started = time.monotonic()
        self._state = State.CHECKING
        self.row_id = core.new_row_id()
        self.request_id = core.request_id(request.request_id, self.row_id)
        self._route: Route | None = None
        self._key: Key | None = None
        self._asked: Asked | None = None
        self._model: Model | None = None
        self._stats: ModelStats | None = None
        self._attempts: Attempts | None = None
        self._relay: PlainRelay | StreamRelay | None = None
        self._early: EarlyRelay | None = None  # the head of its stream is out already
        self._first_byte: float | None = None
        self._delivered = False
        core.exchanges += 1

    # -- before an engine ------------------------------------------------------------------------

    def start(self) -> None:
        """The request is complete: take it as far as one callback can."""
        admitted = admit(self._core, self._request)
        if isinstance(admitted, ApiError):
            self.refuse(admitted)
            return
        self._route, self._key = admitted
        if self._route.kind is not Kind.INFER:
            self._answer_locally(self._route)
        elif self._core.draining:
            self.refuse(errors.draining())
        elif self._request.coding:
            self._move(State.INFLATING)
            limit = self._core.config.limits.inflated_bytes
            self._core.in_background(
                trio.to_thread.run_sync,
                request_body.inflate, self._request.coding, self._request.body, limit,
                then=self._inflated,
            )  # fmt: skip
        else:
            self._find_model(self._request.body)

    def refuse_head(self, fault: ApiError) -> None:
        """The body is not here and will not be read; a bad key is told before anything else."""
        admitted = admit(self._core, self._request) if self._request.method else fault
        if not isinstance(admitted, ApiError):
            self._route, self._key = admitted
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
        result = local.answer_locally(self._core, route, self._key, self._request)
        if isinstance(result, ApiError):
            self.refuse(result)
            return
        status, document = result
        self._settle("ok", status, None, UNKNOWN)
        self.client.respond(status, self.request_id, local.encode(document), self._request)

    def _find_model(self, raw: bytes) -> None:
        assert self._key is not None
        assert self._route is not None
        asked = read_body(self._route, self._request, raw)
        if isinstance(asked, ApiError):
            self.refuse(asked)
            return
        aim(self._route, self._request)
        self._asked = asked
        model = self._core.fleet.names.get(asked.model)
        if model is None or not self._key.allows(asked.model, model.name):
            self.refuse(errors.model_not_found(asked.model))
            return
        self._model = model
        self._stats = self._core.stats.model(model.name)
        self._stats.in_flight += 1
        self._attempts = Attempts(self._core, self, self._request, asked, model.name)
        self._move(State.WAITING)
        self.try_again()

    # -- attempts --------------------------------------------------------------------------------

    def try_again(self) -> None:
        """Begin the first or, after a pause, a further attempt."""
        attempts = self._attempts
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
        attempts = self._attempts
        if attempts is None:
            return  # settled meanwhile
        assert attempts.target is not None
        attempts.up = None
        self._core.stats.fail_upstream(attempts.target.pool.key, failure.cause.value)
        try:
            if self._relay is not None:
                self._broken(attempts.error_of(failure))
                return
            error = attempts.after(failure)
            if error is not None:
                self.refuse(error)
        except Exception:
            self.abandon()
            raise

    def keep_alive(self, comment: str) -> None:
        """The client of a stream learns that it waits; from now on errors are events."""
        if self._attempts is None or self._state is not State.WAITING:
            return
        if self._early is None:
            self._early = EarlyRelay(self._wish(self._attempts), self._core.config.limits)
        self.client.send(self._early.comment(comment))
        if self.client.out is not None:
            self.client.bytes_wait()

    def _wish(self, attempts: Attempts) -> Wish:
        route, asked = self._route, attempts.asked
        assert route is not None
        return Wish(
            attempts.model,
            self.request_id,
            self._request.version == "1.1",
            self._closes,
            attempts.ask_usage,
            route.dialect,
            route.vectors and asked.document.get("encoding_format") == "base64",
            orjson.dumps(asked.model) if attempts.renamed else None,
        )

    # -- the answer ------------------------------------------------------------------------------

    def on_answer(self, head: Head | None, body: bytes, *, complete: bool) -> None:
        """More of the engine's answer: pass it on."""
        attempts = self._attempts
        if attempts is None:
            return  # settled meanwhile
        if complete:
            attempts.up = None
        try:
            if head is not None:
                self._move(State.RELAYING)
                opened = open_relay if self._early is None else open_late
                self._relay = opened(head, self._wish(attempts), self._core.config.limits)
            if self._relay is not None:
                self._pass_on(self._relay, body, complete=complete)
        except Exception:
            self.abandon()
            raise

    def _pass_on(self, relay: PlainRelay | StreamRelay, body: bytes, *, complete: bool) -> None:
        out = b""
        if body:
            out = relay.feed(body)
            if self._first_byte is None:
                self._first_byte = time.monotonic()
        if complete and relay.refusal is None:
            out += relay.finish()
        if relay.refusal is not None:
            self.refuse(relay.refusal)
            return
        if out:
            self.client.send(out)
        if complete or relay.ended:
            self._finish(relay)
        elif self.client.out is not None:
            self._slow_down()
        elif relay.answered():
            self._delivered = self.client.all_sent

    def _broken(self, error: ApiError) -> None:
        relay = self._relay
        assert relay is not None
        out = relay.broken(error)
        if relay.refusal is not None:
            self.refuse(relay.refusal)
        elif out is None:
            self.client.reset()  # only an abort tells that the body is short (case H14)
            self._settle(relay.outcome, relay.status, relay.code, UNKNOWN)
            self.client.finished(close=True)
        else:
            self.client.send(out)
            self._finish(relay)

    def _finish(self, relay: PlainRelay | StreamRelay) -> None:
        self._drop_upstream()
        self._settle(relay.outcome, relay.status, relay.code, relay.tokens())
        in_order = relay.outcome != "partial" or relay.code == "engine_aborted"
        framed = self._request.version == "1.1"
        self.client.finished(close=self._closes or not in_order or not framed)

    def _slow_down(self) -> None:
        up = None if self._attempts is None else self._attempts.up
        if up is not None and self.client.pending > self._core.config.limits.pause_above_bytes:
            up.pause()
        self.client.bytes_wait()

    def client_took_some(self) -> None:
        """The client read: go on reading the engine when little is left."""
        up = None if self._attempts is None else self._attempts.up
        if up is not None:
            if self.client.pending <= self._core.config.limits.resume_below_bytes:
                up.resume()
            if self._relay is not None and self._relay.answered():
                self._delivered = self.client.all_sent

    def client_lost(self, code: str = "client_closed") -> None:
        """The client is gone: the engine learns it now, whatever it was doing."""
        if self._state is State.SETTLED:
            return
        self._drop_upstream()
        relay = self._relay
        if relay is not None and self._delivered:
            self._settle(relay.outcome, relay.status, relay.code, relay.tokens())
        else:
            tokens = relay.tokens() if relay is not None else UNKNOWN
            self._settle("client_closed", CLIENT_CLOSED, code, tokens)

    def cut(self, error: ApiError) -> None:
        """End this request now because the process ends; the client is told as well as can be."""
        self._drop_upstream()
        if self._relay is None:
            self.refuse(error)
        else:
            self._broken(error)

    def refuse(self, error: ApiError) -> None:
        """Answer with an error of ours; the client has seen nothing yet."""
        self._drop_upstream()
        self._core.stats.refuse(error.code)
        self._settle("error", error.status, error.code, UNKNOWN)
        if self._early is None:
            self.client.respond_error(error, self.request_id, self._request)
        else:
            self.client.send(self._early.broken(error) or b"")
            self.client.finished(close=True)

    def abandon(self) -> None:
        """A bug of ours was hit: end this request and leave no engine working for it."""
        self._drop_upstream()
        if self._state is State.SETTLED:
            return
        if self._relay is None or self._relay.untouched:
            self.refuse(errors.internal())
            return
        self._settle("error", self._relay.status, "internal_error", UNKNOWN)
        self.client.reset()
        self.client.finished(close=True)

    @property
    def _closes(self) -> bool:
        request = self._request
        return not request.keep_alive or not request.complete or self._core.draining

    def _drop_upstream(self) -> None:
        if self._attempts is not None:
            self._attempts.cancel()

    # -- the end ---------------------------------------------------------------------------------

    def _move(self, state: State) -> None:
        if state not in MOVES[self._state]:
            raise RuntimeError(f"request {self.row_id} cannot go from {self._state!r} to {state!r}")
        self._state = state

    def _settle(self, outcome: str, http_status: int, code: str | None, tokens: Tokens) -> None:
        self._move(State.SETTLED)
        core, route, stats = self._core, self._route, self._stats
        core.exchanges -= 1
        seconds = time.monotonic() - self._started
        if stats is None:
            stats = core.stats.model("")
        else:
            stats.in_flight -= 1
            stats.count_tokens(tokens)
            if self._first_byte is not None and self._asked is not None and self._asked.stream:
                stats.ttft.observe(self._first_byte - self._started)
        name = "other" if route is None else route.name
        stats.settle(name, http_status, outcome, seconds)
        if self._key is not None and route is not None and route.kind is Kind.INFER:
            core.usage.add(self._row(outcome, http_status, code, tokens, seconds))
        self._attempts = None  # it points back here: without the cycle no collector is needed

    def _row(
        self, outcome: str, http_status: int, code: str | None, tokens: Tokens, seconds: float
    ) -> UsageRow:
        """The usage row; what is unknown is None."""
        assert self._key is not None
        assert self._route is not None
        asked, attempts = self._asked, self._attempts
        target = None if attempts is None else attempts.target
        now = time.monotonic()
        first = self._first_byte if asked is not None and asked.stream else None
        return UsageRow(
            self.row_id,
            self._key.id,
            None if asked is None else asked.model[:256],
            None if self._model is None else self._model.name,
            None if target is None else target.pool.id,
            self._route.name,
            outcome,
            http_status,
            asked is not None and asked.stream,
            tokens,
            None if first is None else first - self._started,
            seconds,
            0 if attempts is None else attempts.count,
            code,
            self.request_id,
            now,
            self._core.keys.database_time(now),
        )
