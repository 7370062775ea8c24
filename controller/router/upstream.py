"""One connection to an engine: a request goes out, its answer comes back in pieces.

An exchange owns the connection from `start` until the answer is complete or failed; between
exchanges it lies in its pool. Nothing here decides about retries: failures are values.
"""

from __future__ import annotations

import errno
import math
import socket
from enum import Enum
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol

import httptools

from controller.router.clock import monotonic
from controller.router.connection import Connection
from controller.router.reactor import IN, OUT
from controller.router.relay import Head

if TYPE_CHECKING:
    from controller.router.config import Timeouts
    from controller.router.deadlines import Deadlines
    from controller.router.pool import Pool
    from controller.router.reactor import Reactor


_NOT_HTTP: Final = httptools.HttpParserError, httptools.HttpParserUpgrade  # a 101 is the latter
_NO_CODING: Final = frozenset((b"identity", b"none"))
"""Said of answers as they are, mostly of event streams, so that no proxy compresses them."""
DEAD_S: Final = 30
"""A machine that lost its power closes nothing: what it was to answer would be waited for until
`headers_s` is over. So the kernel asks whether it is there, and waits so long for its word."""
_ASKING: Final = (
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 10),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 4),
    (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, DEAD_S * 1000),
)
SURE_BYTES: Final = 32 * 1024
"""So much of a request a machine takes at once, whether or not its engine reads. Of a longer one
the rest may wait for an engine that has no time, for as long as `headers_s` allows."""
MOST_FRAMING: Final = 256 * 1024
"""Bytes of an answer in a row that are nothing of its body: heads, trailers, names of chunks. An
engine that sends them for ever would fill the memory before any timeout."""


class Cause(Enum):
    """How an attempt failed; the values are words of the metrics."""

    CONNECT_FAILED = "connect_failed"
    CONNECT_TIMEOUT = "connect_timeout"
    CLOSED_UNANSWERED = "closed_unanswered"  # not one byte came back
    CLOSED_EARLY = "closed_early"  # in the middle of the answer
    HEADERS_TIMEOUT = "headers_timeout"
    FIRST_TOKEN_TIMEOUT = "first_token_timeout"  # noqa: S105 - a word, no secret
    IDLE_TIMEOUT = "idle_timeout"
    TOTAL_TIMEOUT = "total_timeout"
    NOT_HTTP = "not_http"

    @property
    def is_timeout(self) -> bool:
        return self in _TIMEOUTS


_TIMEOUTS: Final = frozenset((
    Cause.HEADERS_TIMEOUT, Cause.FIRST_TOKEN_TIMEOUT, Cause.IDLE_TIMEOUT, Cause.TOTAL_TIMEOUT,
))  # fmt: skip


class Failure(NamedTuple):
    """Why an attempt ended, and whether its connection had served others before."""

    cause: Cause
    reused: bool


class Owner(Protocol):
    """The exchange that waits for the answer."""

    def on_answer(self, head: Head | None, body: bytes, *, complete: bool) -> None:
        """The head (once) and more of the body."""

    def on_silence(self) -> None:
        """Nothing came for as long as `watch` was told to wait."""

    def on_failed(self, failure: Failure) -> None:
        """The attempt is over; the connection is closed and no longer counted."""


class UpstreamConnection(Connection):
    """A socket to one engine."""

    __slots__ = (
        "_beat_s", "_begun", "_body", "_complete", "_connecting", "_deadlines", "_extra",
        "_framing", "_got", "_head", "_headers", "_heard", "_keep", "_length", "_long", "_parser",
        "_paused", "_sent_at", "_step_s", "_timeouts", "_total_due", "_until_close", "_waiting",
        "_watched", "owner", "pool", "reused",
    )  # fmt: skip

    def __init__(
        self,
        reactor: Reactor,
        sock: socket.socket,
        pool: Pool,
        deadlines: Deadlines,
        timeouts: Timeouts,
    ) -> None:
        super().__init__(reactor, sock, IN | OUT)
        self.out = bytearray()  # nothing can be sent before the connection stands
        self.pool = pool
        self.owner: Owner | None = None
        self.reused = False
        self._connecting = True
        self._long = False  # the request that it was given last
        self._deadlines = deadlines
        self._timeouts = timeouts
        self._parser = httptools.HttpResponseParser(self)
        self._headers: list[tuple[bytes, bytes]] = []
        self._body: list[bytes] = []
        self._forget_answer()

    def _forget_answer(self) -> None:
        self._head: Head | None = None
        self._length: int | None = None
        self._waiting = True  # for the head
        self._got = False
        self._framing = 0
        self._complete = False
        self._keep = False
        self._until_close = False
        self._extra = False
        self._paused = False
        self._sent_at = 0.0  # 0: no first byte is waited for any more
        self._total_due = 0.0
        self._begun = False  # something of the body came
        self._heard = 0.0  # monotonic moment of the last progress
        self._watched = False
        self._beat_s = math.inf
        self._step_s = self._timeouts.idle_s

    def start(self, owner: Owner, request: bytes, total_due: float) -> None:
        """Send a request for `owner`; `total_due` is the monotonic moment its patience ends."""
        self._forget_answer()
        self.owner = owner
        self._total_due = total_due
        self._heard = self._sent_at = now = monotonic()
        times = self._timeouts
        patience_s = times.connect_s if self._connecting else times.headers_s
        self._deadlines.set(self, min(now + patience_s, total_due))
        if (len(request) > SURE_BYTES) is not self._long:
            self._long = not self._long
            word_s = 0 if self._long else DEAD_S
            self.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, word_s * 1000)
        self.send_soon(request)

    def watch(self, beat_s: float) -> None:
        """Its answer is a stream: tell the owner each time that it was silent for `beat_s`."""
        if self.owner is not None:
            self._watched = True
            self._beat_s = beat_s
            self._step_s = min(beat_s, self._timeouts.idle_s)
            self._expect()

    def no_token_yet(self) -> None:
        """What came of its stream says only that an answer was begun."""
        if self._begun:
            self._begun = False
            self._deadlines.set(self, self._next_due(monotonic()))

    def _patience_s(self) -> float:
        """How long the engine may be silent now."""
        times = self._timeouts
        if self._connecting:
            return times.connect_s
        if self._waiting:
            return times.headers_s
        return times.first_token_s if self._awaits_token() else times.idle_s

    def _awaits_token(self) -> bool:
        return self._watched and not self._begun

    def _expect(self) -> None:
        """It goes on from here: what the engine is given starts now."""
        self._heard = now = monotonic()
        self._deadlines.set(self, self._next_due(now))

    def _next_due(self, now: float) -> float:
        return min(now + self._beat_s, self._heard + self._patience_s(), self._total_due)

    def cancel(self) -> None:
        """The owner lost interest: closing tells the engine to stop working."""
        if self.owner is not None:
            self.owner = None
            self.pool.give_up(self)
        self.close()

    def pause(self) -> None:
        """Read no more until `resume`: the client is slower than the engine."""
        if not self._paused and self.owner is not None:
            self._paused = True
            self.set_mask(0)
            self._deadlines.set(self, self._total_due)

    def resume(self) -> None:
        if self._paused:
            self._paused = False
            self._expect()
            self.set_mask(IN if self.out is None else IN | OUT)

    # -- events ----------------------------------------------------------------------------------

    def on_events(self, events: int) -> None:
        if self._connecting:  # it asks for OUT then, so the way of IN alone is not taken
            code = self.sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            if code:
                self.close()
                self.lost(OSError(code, errno.errorcode.get(code, "")))
                return
            if not events & OUT:
                return
            self._connecting = False
            self._expect()
        super().on_events(events)

    def received(self, data: bytes) -> None:
        owner = self.owner
        if owner is None:
            self.pool.forget(self)  # an idle engine must not talk
            self.close()
            return
        if self._held:  # it talked while it was idle: what it said is no answer to this request
            self._fail(Cause.CLOSED_UNANSWERED)
            return
        self._got = True
        try:
            self._parser.feed_data(data)
        except _NOT_HTTP:
            self._extra = True
            if not self._complete:
                self._fail(Cause.NOT_HTTP)
                return
        head, self._head = self._head, None
        body = self._body[0] if len(self._body) == 1 else b"".join(self._body)
        self._body.clear()
        if self._complete:
            if body and self._sent_at:
                self._time_first()
            self._release()
        else:
            self._framing = 0 if body else self._framing + len(data)
            if self._framing > MOST_FRAMING:
                self._fail(Cause.NOT_HTTP)
                return
            self._progress(head, body)
        owner.on_answer(head, body, complete=self._complete)
        if self._sent_at and self._begun and self.owner is owner:
            self._time_first()

    def _time_first(self) -> None:
        """The first of its answer is here: no comment, nor an event that says only that it was
        begun."""
        self.pool.timed(monotonic() - self._sent_at)
        self._sent_at = 0.0

    def _progress(self, head: Head | None, body: bytes) -> None:
        """What an engine says in comments of its stream is no progress: one whose model hangs
        can go on with those for ever."""
        if body[:1] == b":" and b"\ndata:" not in body and (self._watched or head is not None):
            body = b""
        if not self._begun and (body or head is not None):
            self._begun = bool(body)
            self._expect()
        elif body:
            self._heard = now = monotonic()
            due = now + self._step_s
            self.due = min(self._total_due, due)

    def lost(self, error: OSError | None) -> None:
        if self._until_close and error is None and self.owner is not None:
            owner, self.owner = self.owner, None
            self.pool.give_up(self)
            owner.on_answer(None, b"", complete=True)
        elif self._connecting:
            self._fail(Cause.CONNECT_FAILED)
        else:
            self._fail(Cause.CLOSED_EARLY if self._got else Cause.CLOSED_UNANSWERED)

    def expired(self, now: float) -> None:
        owner = self.owner
        if owner is None:
            self._fail(Cause.IDLE_TIMEOUT)  # it lay in its pool
        elif now >= self._total_due:
            self._fail(Cause.TOTAL_TIMEOUT)
        elif now >= self._heard + self._patience_s():
            self._fail(self._which_timeout())
        else:
            owner.on_silence()
            if self.owner is not None:  # it may have given up on us
                self._deadlines.set(self, self._next_due(now))

    def _which_timeout(self) -> Cause:
        if self._connecting:
            return Cause.CONNECT_TIMEOUT
        if self._waiting:
            return Cause.HEADERS_TIMEOUT
        return Cause.FIRST_TOKEN_TIMEOUT if self._awaits_token() else Cause.IDLE_TIMEOUT

    def _fail(self, cause: Cause) -> None:
        self.close()
        owner, self.owner = self.owner, None
        if owner is None:
            self.pool.forget(self)
            return
        self.pool.give_up(self)
        owner.on_failed(Failure(cause, self.reused))

    def _release(self) -> None:
        self.owner = None
        reusable = self._keep and self.all_sent and not self._extra
        self.reused = True
        if self.pool.take_back(self, reusable=reusable):
            self._deadlines.set(self, monotonic() + self._timeouts.upstream_idle_s)
        else:
            self.close()

    # -- called by the parser --------------------------------------------------------------------

    def on_message_begin(self) -> None:
        if self._complete:
            self._extra = True
        self._headers = []
        self._length = None
        self._until_close = False

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._waiting:  # trailers come later and are not passed on
            self._headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        status = self._parser.get_status_code()
        if status < 200 or self._complete:
            return
        framed = False
        kind = coding = b""
        for name, value in self._headers:
            if name == b"content-length":
                self._length, framed = int(value), True
            elif name == b"transfer-encoding":  # identity, of old servers, ends with the close
                framed = value.strip().lower() != b"identity"
            elif name == b"content-type":
                kind = value.lower()  # RFC 9110, 8.3.1
            elif name == b"content-encoding":
                coding = value.strip().lower()
        if coding in _NO_CODING:
            coding = b""
        if status in (204, 304):
            self._length, framed = 0, True
        if status >= 400:
            self._sent_at = 0.0  # how soon it refuses says nothing of how fast it serves
        self._until_close = not framed
        self._waiting = False
        self._head = Head(status, self._headers, self._length, kind, coding)

    def on_body(self, piece: bytes) -> None:
        if not self._complete:
            self._body.append(piece)

    def on_message_complete(self) -> None:
        if self._parser.get_status_code() >= 200:
            self._complete = True
            self._keep = self._parser.should_keep_alive()  # known here only


def begin_connecting(address: tuple[object, ...], family: int) -> socket.socket:
    """A socket on its way to `address`. Raises OSError when it fails at once."""
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setblocking(False)
        for level, option, value in _ASKING:
            sock.setsockopt(level, option, value)
        sock.connect(address)
    except BlockingIOError:
        pass
    except OSError:
        sock.close()
        raise
    return sock
