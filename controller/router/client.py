"""One client connection: reads requests, runs one exchange at a time, writes answers in order."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Final

from controller.router.auth import Shown
from controller.router.checking import admit
from controller.router.clock import monotonic
from controller.router.connection import Connection
from controller.router.cors import answer_headers, preflight_headers
from controller.router.dialect import MESSAGES, REQUEST_ID
from controller.router.errors import ApiError, invalid, is_lasting
from controller.router.exchange import Exchange
from controller.router.http1 import CONTINUE, RequestReader, answer
from controller.router.reactor import IN, RDHUP
from controller.router.routes import Kind, dialect_of

if TYPE_CHECKING:
    import socket

    from controller.router.access_line import Entry
    from controller.router.core import Core
    from controller.router.http1 import Request

MOST_IN_TURN: Final = 16
"""A client may send thousands of small requests in one piece: so many are begun in one turn, else
they held up everybody for 30 ms, with a key or without one."""
_JSON: Final = (b"content-type", b"application/json")
_NOT_AGAIN: Final = (b"x-should-retry", b"false")
"""What the official SDKs look at before they send a request again by themselves."""


class ClientConnection(Connection):
    """A socket on the client port. Its descriptor stays in the epoll set while an engine works,
    so a client that leaves is noticed at once (cases A01, A02)."""

    __slots__ = (
        "_advancing", "_closing", "_core", "_drops_until", "_endless", "_examined", "_exchange",
        "_hushed", "_lingering", "_pause_above", "_reader", "_stalled", "address", "noted", "shown",
    )  # fmt: skip

    def __init__(self, core: Core, sock: socket.socket, address: str) -> None:
        super().__init__(core.reactor, sock, IN | RDHUP)
        self.address = address
        self.shown = Shown()
        self.noted: Entry | None = None  # a line for the access log, less the bytes of the answer
        self._core = core
        self._reader = RequestReader(core.config.limits)
        self._exchange: Exchange | None = None
        self._examined = False  # the head of the incomplete request was looked at
        self._advancing = False
        self._hushed = False
        self._stalled = False  # answer bytes wait for the client
        self._pause_above = core.config.limits.pause_above_bytes
        self._closing = False
        self._endless = False  # only the close ends the answer that is pending
        self._lingering = False
        self._drops_until = 0.0  # monotonic
        core.clients.add(self)
        self._set_deadline()

    # -- events ----------------------------------------------------------------------------------

    def received(self, data: bytes) -> None:
        if self._lingering or self._closing:
            self._drop()
            return
        self._reader.feed(data)
        if self._exchange is None:
            self._advance()
        elif self._reader.busy:
            self._hush()

    def lost(self, error: OSError | None) -> None:
        self._core.clients.discard(self)
        exchange, self._exchange = self._exchange, None
        if exchange is not None:
            exchange.client_lost()
            self._tell()

    def sent_some(self) -> None:
        if self._closing:
            if self.out is None:
                self._shut()
            else:
                self._set_deadline()
            return
        self._set_deadline()
        self._stalled = self.out is not None
        if self._exchange is not None:
            self._exchange.client_took_some()
        else:
            self._advance()

    def crashed(self) -> None:
        exchange, self._exchange = self._exchange, None
        if exchange is not None:
            exchange.abandon()
        self.close()
        self._core.clients.discard(self)

    def close(self) -> None:
        """As always; but where only the close ends an answer of which something is still pending,
        it is a reset: an orderly end would make the short answer whole (case H14)."""
        exchange = self._exchange
        if self.out and (self._endless or (exchange is not None and _may_end_by_close(exchange))):
            self._reset_on_close()
        super().close()
        self._reader.close()

    def bytes_wait(self) -> None:
        """The client is slower than its answer: from now on it has a deadline too."""
        if not self._stalled:
            self._stalled = True
            self._set_deadline()

    def expired(self, now: float) -> None:
        if self._exchange is not None and self.out is None:
            return  # left over from before this request: an engine has its own deadlines
        unfinished = self._exchange is None and self._reader.begun and not self._closing
        if unfinished and self.out is None:  # else it does not read its answers
            self._refuse_fault(
                invalid("request_timeout", "The request was not complete in time.", status=408)
            )
            return
        self.close()
        self.lost(TimeoutError())

    # -- requests --------------------------------------------------------------------------------

    def _advance(self) -> None:
        """Start what can be started; one exchange at a time, answers stay in order."""
        self._advancing = True
        reader, begun, later = self._reader, 0, False
        while self._exchange is None and not self._closing and self.fd >= 0:
            if self.out is not None and len(self.out) > self._pause_above:
                break
            if reader.ready:
                if begun == MOST_IN_TURN:
                    later = True
                    break
                begun += 1
                self._examined = False
                self._exchange = Exchange(self._core, self, reader.ready.popleft())
                self._exchange.start()
            elif reader.fault is not None:
                self._refuse_fault(reader.fault)
            elif reader.current is None or self._examined:
                break
            else:
                self._examine(reader.current)
        self._advancing = False
        if later:
            self._hush()
            self._core.reactor.call_soon(self._go_on)
        elif self._exchange is None:
            self._rest()
        elif reader.busy:
            self._hush()

    def _go_on(self) -> None:
        """In the next turn, when others had theirs."""
        if self._exchange is None and self.fd >= 0:
            self._advance()

    def _rest(self) -> None:
        """Nothing is being answered: read on, but not for ever, and not from who sends request
        after request and reads no answer."""
        if (self._reader.ready or self._reader.fault is not None) and not self._closing:
            self._hush()
        elif self._hushed:
            self._hushed = False
            self.want(IN, on=True)
        if not self._closing:
            self._set_deadline()

    def _hush(self) -> None:
        """Bytes of a next request are here while one is answered: the rest waits in the kernel."""
        if not self._hushed and not self._closing:
            self._hushed = True
            self.want(IN, on=False)

    def _examine(self, request: Request) -> None:
        """A head without its body: refuse what can be refused, or invite the body (case A38)."""
        self._examined = True
        admitted = admit(self._core.keys, request, self.address, self.shown)
        if isinstance(admitted, bytes):
            self._core.ask_key(admitted, partial(self._identified, request))
            return
        route, _, unfit = admitted
        if unfit is not None:
            self._refuse_fault(unfit)
            return
        if route is not None and route.kind is not Kind.INFER:
            self._reader.pass_over()
        if request.expects:
            self.send(CONTINUE)

    def _identified(self, request: Request, error: ApiError | None) -> None:
        """The key of a head was looked up while its body may have gone on coming."""
        if self.fd < 0 or self._closing or self._reader.current is not request:
            return
        if self._exchange is not None:
            return  # it was refused meanwhile, and asks for its key itself
        if error is not None:
            self._exchange = Exchange(self._core, self, self._reader.unfinished())
            self._exchange.refuse_sender(error)
        else:
            self._examine(request)

    def _refuse_fault(self, fault: ApiError) -> None:
        """Answer a request that is not here whole; its connection ends, and what comes of it while
        its key is looked up makes it no request."""
        self._reader.fault = fault
        self._exchange = Exchange(self._core, self, self._reader.unfinished())
        self._exchange.refuse_head(fault)

    # -- answers ---------------------------------------------------------------------------------

    def respond(
        self,
        status: int,
        request_id: bytes,
        body: bytes,
        request: Request,
        extra: tuple[tuple[bytes, bytes], ...] = (),
    ) -> None:
        """A whole answer of ours, which ends the exchange."""
        lasts = request.keep_alive and request.complete and request.version == "1.1"
        close = not lasts or self._core.draining
        if dialect_of(request) is MESSAGES:
            extra += ((REQUEST_ID, request_id),)
        if request.origin and self._core.config.cors:
            extra += answer_headers(self._core.config.cors, request.origin)
        data = answer(status, (_JSON, (b"x-request-id", request_id), *extra), body, close=close)
        self.send(data[: len(data) - len(body)] if request.method == b"HEAD" else data)
        self.finished(close=close)

    def respond_error(
        self,
        error: ApiError,
        request_id: bytes,
        request: Request,
        told: tuple[tuple[bytes, bytes], ...] = (),
    ) -> None:
        """An error in the shape of its endpoint, which ends the exchange; `told`: more headers."""
        extra = list(told)
        if error.retry_after_s is not None:
            extra.append((b"retry-after", b"%d" % error.retry_after_s))
        if is_lasting(error):
            extra.append(_NOT_AGAIN)
        if error.allow is not None:
            extra.append((b"allow", error.allow.encode()))
        if error.status == 401:
            extra.append((b"www-authenticate", b"Bearer"))
        body = dialect_of(request).error(error)
        self.respond(error.status, request_id, body, request, tuple(extra))

    def respond_options(self, allow: str, request_id: bytes, request: Request) -> None:
        """What a path answers, also to a browser that asks before it sends (case A37)."""
        methods = f"{allow}, OPTIONS"
        extra = [(b"allow", methods.encode())]
        if request.origin and answer_headers(self._core.config.cors, request.origin):
            extra += preflight_headers(request, methods)
        self.respond(204, request_id, b"", request, tuple(extra))

    def finished(self, *, close: bool) -> None:
        """The exchange is settled and its answer given to `send` or `send_soon`."""
        exchange, self._exchange = self._exchange, None
        if self.noted is not None:
            self._tell()
        if self.fd < 0:
            self._core.clients.discard(self)
        elif close:
            self._closing = True
            self.send_held()
            if self.out is None:
                self._shut()
            else:
                self._endless = exchange is not None and _may_end_by_close(exchange)
                self._set_deadline()
        elif self._advancing:
            pass  # the loop above us goes on
        elif self._hushed or self.out is not None or self._reader.busy:
            self._advance()
        else:  # the usual end: nothing of a next request is here
            due = monotonic() + self._core.config.timeouts.client_idle_s
            self._core.deadlines.set(self, due)

    def _tell(self) -> None:
        entry, self.noted = self.noted, None
        if entry is not None and self._core.access_lines is not None:
            self._core.access_lines.add(entry, self.given)

    @property
    def key_id(self) -> str | None:
        """Whose request is being answered; None: nobody's."""
        key = None if self._exchange is None else self._exchange.key
        return None if key is None else key.id

    def drain(self) -> None:
        """The process is stopping: an idle connection closes now, a busy one after its answer."""
        if self._exchange is None and not self._reader.busy and self.out is None:
            self.close()
            self._core.clients.discard(self)

    def cut(self, error: ApiError) -> None:
        """The process ends or a key was revoked: tell the client what can be told, then close."""
        self._closing = True  # else its next request would begin, of which nobody would know
        if self._exchange is not None:
            self._exchange.cut(error)
        self.close()
        self._core.clients.discard(self)

    def _shut(self) -> None:
        """Everything is sent. With request bytes still coming, a plain close would be a reset
        that destroys the answer at the client: half-close, read and drop for a moment."""
        if not self._reader.busy and not self._lingering:
            self.close()
            self._core.clients.discard(self)
            return
        self._lingering = True
        try:
            self.half_close()
        except OSError:
            self.close()
            self._core.clients.discard(self)
            return
        self.set_mask(IN)
        now, times = monotonic(), self._core.config.timeouts
        self._drops_until = now + times.client_read_s
        self._core.deadlines.set(self, now + times.linger_s)

    def _drop(self) -> None:
        """What is read now is nobody's, but our answer is not lost to a reset. Many clients read it
        when their whole body is sent, however long that takes."""
        if self._lingering and not self._core.draining:
            due = monotonic() + self._core.config.timeouts.linger_s
            self._core.deadlines.set(self, min(due, self._drops_until))

    def _set_deadline(self) -> None:
        if self.fd < 0 or self._lingering:
            return
        times = self._core.config.timeouts
        if self.out is not None:
            patience = times.client_write_s
        elif self._exchange is not None:
            return
        else:
            patience = times.client_read_s if self._reader.begun else times.client_idle_s
        self._core.deadlines.set(self, monotonic() + patience)


def _may_end_by_close(exchange: Exchange) -> bool:
    """Whether its answer may have no length and no chunks."""
    return exchange.request.version != "1.1"
