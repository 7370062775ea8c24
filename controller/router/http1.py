"""HTTP/1.1 as clients speak it to us: requests out of bytes, answers into bytes. No sockets.

httptools (llhttp, strict) parses; this module bounds what it may collect and `head.py` refuses what
could be read in two ways.
"""

from __future__ import annotations

import math
from collections import deque
from http import HTTPStatus
from typing import TYPE_CHECKING, Final

import httptools

from controller.router.errors import ApiError, invalid, too_large
from controller.router.head import NOTED, SLASH, bad, flaw

if TYPE_CHECKING:
    from collections.abc import Iterable

    from controller.router.config import Limits

CONTINUE: Final = b"HTTP/1.1 100 Continue\r\n\r\n"
MOST_FRAMING: Final = 256 * 1024
"""Bytes of a request in a row that are nothing of its body. The parser joins each trailer anew
for every piece of it: 32 MiB in one would take 5 s of CPU."""
LAST_CHUNK: Final = b"0\r\n\r\n"
_STATUS_LINES: Final = {
    s.value: b"HTTP/1.1 %d %b" % (s.value, s.phrase.encode()) for s in HTTPStatus
}
_TOLD_FIRST: Final = frozenset(
    (b"x-request-id", b"origin")
)  # of an unfinished head, for its refusal
_USUAL_VERSION: Final = b" HTTP/1.1\r\n"
"""Ends most request lines: seen there, the parser need not make a text of the version, which takes
as long as all else that is asked of it."""
_UPGRADE_HEADERS: Final = frozenset((b"upgrade", b"http2-settings", b"connection"))

_NO_PARSER: Final = httptools.HttpRequestParser(object())  # of whom nothing is read any more

Headers = list[tuple[bytes, bytes]]  # names in lower case


class Request:
    """One request; `body` is there when `complete`.

    What a head does not say stays on the class: most requests say little, and setting twenty
    attributes for each costs more than parsing its head.
    """

    method = b""
    target = b""
    version = "1.1"
    authorization = b""
    authorized = False  # by an Authorization header
    origin = b""  # of a page in a browser
    hosts = 0  # Host headers
    flaw: ApiError | None = None  # seen in a header
    coding = b""
    request_id = b""
    explain = False
    fallback = b""
    priority = b""
    profile = b""  # of scoring
    wait_s = math.inf  # its client waits so long in all; not a number: it said nonsense
    length: int | None = None
    chunked = False
    expects = False
    keep_alive = True
    body = b""
    came = 0  # bytes of a body that is not here, or not any more
    complete = False

    def __init__(self) -> None:
        self.headers: Headers = []

    @property
    def path(self) -> bytes:
        return self.target.partition(b"?")[0]

    def let_go(self) -> None:
        """Nobody reads its body any more."""
        self.came, self.body = len(self.body), b""


class RequestReader:
    """Bytes of one client connection in, requests out, in order.

    `ready`: complete requests; `current`: one whose head is complete and whose body is not;
    `fault`: the connection cannot be understood any further (answer it last, then close).
    """

    def __init__(self, limits: Limits) -> None:
        self.ready: deque[Request] = deque()
        self.current: Request | None = None
        self.fault: ApiError | None = None
        self.begun = False  # a request has begun and is not complete
        self._limits = limits
        self._parser = httptools.HttpRequestParser(self)
        self._request = Request()
        self._pieces: list[bytes] = []
        self._body_bytes = 0
        self._wanted = True  # the body of this request
        self._raw_bytes = 0  # of this request, head and body
        self._body_at = self._body_then = 0  # of these, where the body went on, and how far it was
        self._upgrade = False
        self._first = b""  # what is being parsed, if a request begins it

    @property
    def busy(self) -> bool:
        """Whether bytes of a request are here that nobody has taken yet."""
        return self.begun or bool(self.ready) or self.fault is not None

    def unfinished(self) -> Request:
        """What is known of a request that is refused as far as it is here. Its body is let go."""
        request = self.current
        if request is None:
            request = self._request
            for name, value in request.headers:
                if name in _TOLD_FIRST:
                    NOTED[name](request, value)
        request.came = self._body_bytes
        self._pieces = []
        return request

    def close(self) -> None:
        """Nothing is read any more. A parser knows its reader: that would keep both, and what of
        a body had come, until the next collection, which may be hours away."""
        self._parser = _NO_PARSER

    def pass_over(self) -> None:
        """What comes of the body of `current` is not kept: its path wants none."""
        self._wanted = False
        self._pieces = []

    def feed(self, data: bytes) -> None:
        rest: bytes | None = data
        while rest is not None:
            rest = self._feed(rest)

    def _feed(self, data: bytes) -> bytes | None:
        """Parse; what is to be fed again, as each of many requests in one piece may ask for."""
        if self.fault is not None:
            return None
        again = None
        self._raw_bytes += len(data)
        self._first = b"" if self.begun else data
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            again = self._without_upgrade(data[upgrade.args[0] :])
        except httptools.HttpParserError as error:
            self._fail(error)
        self._first = b""
        if self.begun and again is None:
            self._check_overhead()
        return again

    # -- called by the parser ------------------------------------------------------------------

    def on_message_begin(self) -> None:
        self.begun = True

    def on_url(self, url: bytes) -> None:
        self._request.target += url

    def on_header(self, name: bytes, value: bytes) -> None:
        if self.current is None:  # else a trailer: nobody asked for it
            self._request.headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        request = self._request
        for name, value in request.headers:
            note = NOTED.get(name)
            if note is not None:
                note(request, value)
        request.method = self._parser.get_method()
        start = len(request.method) + 1 + len(request.target)
        end = start + len(_USUAL_VERSION)
        if self._first[start:end] != _USUAL_VERSION:
            request.version = self._parser.get_http_version()
        self._upgrade = self._parser.should_upgrade()
        self.current = request
        if request.hosts != 1 or request.version != "1.1" or request.target[0] != SLASH:
            self._look_closer(request)
        elif request.flaw is not None:
            self._refuse(request.flaw)
        limits = self._limits
        if len(request.headers) > limits.header_count:
            self._refuse(_headers_too_large())
        if self._raw_bytes > limits.header_bytes and self._head_bytes() > limits.header_bytes:
            self._refuse(_headers_too_large())  # it came at once, else `_check_overhead` saw it
        if request.length is not None and request.length > limits.body_bytes:
            self._refuse(too_large(limits.body_bytes))

    def on_body(self, piece: bytes) -> None:
        self._body_bytes += len(piece)
        if self._body_bytes > self._limits.body_bytes:
            self._refuse(too_large(self._limits.body_bytes))
        if self._wanted:
            self._pieces.append(piece)

    def on_message_complete(self) -> None:
        if self._upgrade:
            return  # the body follows after all, see _without_upgrade
        request = self._request
        request.body = self._pieces[0] if len(self._pieces) == 1 else b"".join(self._pieces)
        if not self._wanted:
            self._wanted = True
            request.came = self._body_bytes
        request.keep_alive = self._parser.should_keep_alive()
        request.complete = True
        self.ready.append(request)
        self._request = Request()
        self._first = b""
        self._pieces = []
        self.current = None
        self._body_bytes = self._raw_bytes = self._body_at = self._body_then = 0
        self.begun = False

    # -- faults ----------------------------------------------------------------------------------

    def _look_closer(self, request: Request) -> None:
        fault = flaw(request)
        if fault is not None:
            self._refuse(fault)

    def _head_bytes(self) -> int:
        """How long a whole head is, however it was cut on its way: less the blanks in it."""
        request = self._request
        return len(request.target) + sum(len(name) + len(value) for name, value in request.headers)

    def _refuse(self, fault: ApiError) -> None:
        self.fault = fault
        raise _StopReadingError

    def _fail(self, error: httptools.HttpParserError) -> None:
        if self.fault is not None or (self.ready and not self.ready[-1].keep_alive):
            return  # our own limit, or bytes after a request that said it was the last
        self.fault = bad(str(error).rstrip("."))

    def _check_overhead(self) -> None:
        """Bound what the parser collects by itself: unfinished headers, chunk extensions."""
        if self.fault is not None:
            return
        if self.current is None:
            if self._raw_bytes > self._limits.header_bytes:
                self.fault = _headers_too_large()
        elif self._raw_bytes - self._body_bytes > self._limits.body_bytes:
            self.fault = too_large(self._limits.body_bytes, "framing of the request body")
        elif self._body_bytes > self._body_then:
            self._body_at, self._body_then = self._raw_bytes, self._body_bytes
        elif self._raw_bytes - self._body_at > MOST_FRAMING:
            self.fault = too_large(MOST_FRAMING, "trailer or chunk extension")

    def _without_upgrade(self, rest: bytes) -> bytes | None:
        """Java's HTTP client offers `Upgrade: h2c` on every request: answer in HTTP/1.1.

        llhttp stops at the head of such a request, so the same head goes in again without it.
        """
        request = self._request
        if request.method == b"CONNECT":
            self.fault = invalid("bad_request", "CONNECT is not served here.", status=501)
            return None
        kept = [header for header in request.headers if header[0] not in _UPGRADE_HEADERS]
        if not self._parser.should_keep_alive():
            kept.append((b"connection", b"close"))
        lines = b"".join([b"%b: %b\r\n" % header for header in kept])
        start = b"%b %b HTTP/%b" % (request.method, request.target, request.version.encode())
        head = b"%b\r\n%b\r\n" % (start, lines)
        self._request = Request()
        self.current = None
        self._upgrade = False
        self._parser = httptools.HttpRequestParser(self)
        return head + rest


class _StopReadingError(Exception):
    """Raised inside a parser callback: httptools then stops."""


def _headers_too_large() -> ApiError:
    return invalid("headers_too_large", "The request has too many or too long headers.", status=431)


def status_line(status: int) -> bytes:
    return _STATUS_LINES.get(status) or b"HTTP/1.1 %d Unknown" % status


def answer(
    status: int, headers: Iterable[tuple[bytes, bytes]], body: bytes, *, close: bool
) -> bytes:
    """A whole answer of known length."""
    lines = [status_line(status)]
    lines += [b": ".join(header) for header in headers]
    if status != HTTPStatus.NO_CONTENT:  # RFC 9110 8.6: that one has no length
        lines.append(b"content-length: %d" % len(body))
    if close:
        lines.append(b"connection: close")
    lines += (b"", body)
    return b"\r\n".join(lines)


def chunk(data: bytes) -> bytes:
    """One chunk of a chunked answer; `data` must not be empty (that would be the last one)."""
    return b"%x\r\n%b\r\n" % (len(data), data)
