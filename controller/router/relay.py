"""One answer on its way from an engine to a client: what to send, and how it ended. No sockets.

Two kinds: `StreamRelay` for a 200 event stream, `PlainRelay` for everything else. Both hold the
head back until something of the body is there, so that a failure before it still gets an honest
HTTP status. `refusal` set means: nothing was sent, answer with this error instead.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from controller.router.errors import ApiError, render_event, upstream_failed
from controller.router.http1 import LAST_CHUNK, Headers, chunk, status_line
from controller.router.sse import Scanner, restore_model
from controller.router.tokens import UNKNOWN, Tokens, UsageFinder, read_usage

if TYPE_CHECKING:
    from controller.router.config import Limits

# Connection-level headers of the engine end at us; the length and framing are ours.
_NOT_RELAYED = frozenset((
    b"connection", b"keep-alive", b"proxy-authenticate", b"proxy-connection", b"te", b"trailer",
    b"transfer-encoding", b"upgrade", b"content-length", b"x-request-id", b"set-cookie",
))  # fmt: skip


class Head(NamedTuple):
    """The head of an engine's answer; `length` None when framed by chunks or by the close."""

    status: int
    headers: Headers
    length: int | None
    kind: bytes = b""  # the content type
    coding: bytes = b""  # the content encoding


class Wish(NamedTuple):
    """What the request at hand wants from the relay."""

    model: str  # for the words of errors
    request_id: bytes
    chunks: bool  # the client speaks HTTP/1.1
    close: bool  # the connection ends after this answer
    drop_usage: bool  # we asked for usage, the client did not
    restore: bytes | None  # JSON string of the name the client used, when the engine knows another


class Relay:
    """What both kinds share: the head not sent yet, and the verdict at the end."""

    __slots__ = ("_chunks", "_head", "_wish", "code", "outcome", "refusal", "status")

    def __init__(self, head: Head, wish: Wish, length: int | None) -> None:
        self._wish = wish
        self.status = head.status
        self.outcome = "ok"
        self.code: str | None = None
        self.refusal: ApiError | None = None
        self._chunks = length is None and wish.chunks
        lines = [status_line(head.status)]
        lines += [b"%b: %b\r\n" % pair for pair in head.headers if pair[0] not in _NOT_RELAYED]
        lines.append(b"x-request-id: %b\r\n" % wish.request_id)
        if length is not None:
            lines.append(b"content-length: %d\r\n" % length)
        elif wish.chunks:
            lines.append(b"transfer-encoding: chunked\r\n")
        close = wish.close or (length is None and not wish.chunks)
        lines.append(b"connection: close\r\n\r\n" if close else b"\r\n")
        self._head = b"".join(lines)

    @property
    def untouched(self) -> bool:
        """Whether the client has seen nothing of this answer."""
        return bool(self._head)

    def _frame(self, data: bytes) -> bytes:
        framed = chunk(data) if self._chunks and data else data
        if self._head:
            framed = self._head + framed
            self._head = b""
        return framed

    def _last(self) -> bytes:
        return LAST_CHUNK if self._chunks else b""

    def _give_up(self, outcome: str, code: str) -> None:
        self.outcome = outcome
        self.code = code


class PlainRelay(Relay):
    """An answer that is not an event stream: bytes through, usage found as they pass."""

    __slots__ = ("_finder", "_held", "_held_bytes", "_limit", "_raw_head")

    def __init__(self, head: Head, wish: Wish, limits: Limits) -> None:
        super().__init__(head, wish, head.length)
        self._finder = None if head.coding else UsageFinder()
        self._limit = limits.rewrite_bytes
        self._raw_head = head
        self._held: list[bytes] | None = None
        self._held_bytes = 0
        if wish.restore is not None and self._finder and b"json" in head.kind:
            self._held = []  # its length changes with the name, so it is sent whole
        if head.status >= 400:
            self._give_up("error", f"upstream_{head.status}")

    def feed(self, data: bytes) -> bytes:
        if self._finder is not None:
            self._finder.feed(data)
        if self._held is None:
            return self._frame(data)
        self._held.append(data)
        self._held_bytes += len(data)
        if self._held_bytes > self._limit:
            self.refusal = upstream_failed(self._wish.model, "its answer is larger than allowed")
        return b""

    def finish(self) -> bytes:
        if self._held is None:
            return self._frame(b"") + self._last() if self._head or self._chunks else b""
        assert self._wish.restore is not None
        body = restore_model(b"".join(self._held), self._wish.restore)
        Relay.__init__(self, self._raw_head, self._wish, len(body))
        if self._raw_head.status >= 400:
            self._give_up("error", f"upstream_{self._raw_head.status}")
        return self._frame(body)

    def broken(self, error: ApiError) -> bytes | None:
        """The engine is gone: None means that only an abort tells the client the truth."""
        if self.untouched:
            self.refusal = error
            return b""
        self._give_up("partial", error.code)
        return None

    def tokens(self) -> Tokens:
        return self._finder.tokens() if self._finder and self.status < 400 else UNKNOWN

    def answered(self) -> bool:
        """Whether the client has all it needs although the engine has not finished."""
        return False

    @property
    def ended(self) -> bool:
        """Whether nothing more will be sent although the engine may go on."""
        return False


class StreamRelay(Relay):
    """An event stream: whole events through, errors told, never a silent short answer."""

    __slots__ = ("_ended", "scanner")

    def __init__(self, head: Head, wish: Wish, limits: Limits) -> None:
        super().__init__(head, wish, None)
        self.scanner = Scanner(limits.event_bytes, drop_usage=wish.drop_usage, model=wish.restore)
        self._ended = False

    def feed(self, data: bytes) -> bytes:
        scanner = self.scanner
        out = scanner.feed(data)
        if scanner.error is not None and self.outcome == "ok":
            self._told_error()
        if scanner.overflow and not self._ended:
            return (self._frame(out) if out else b"") + (self.broken(self._too_long()) or b"")
        if not out or self.refusal is not None or self._ended:
            return b""
        return self._frame(out)

    def finish(self) -> bytes:
        """The engine ended the answer in good order; whether it is complete is another matter."""
        if self._ended:
            return b""
        tail = self.scanner.finish()
        if self.scanner.error is not None and self.outcome == "ok":
            self._told_error()
        if self.refusal is not None:
            return b""
        if not self.scanner.ended_well() and self.scanner.error is None:
            why = upstream_failed(self._wish.model, "its stream ended before the answer did")
            return (self._frame(tail) if tail else b"") + (self.broken(why) or b"")
        if self.scanner.aborted() and self.outcome == "ok":
            self._give_up("partial", "engine_aborted")
        self._ended = True
        return (self._frame(tail) if tail or self._head else b"") + self._last()

    def broken(self, error: ApiError) -> bytes | None:
        """The engine is gone: end the stream so that no client takes it for complete."""
        if self._ended:
            return b""
        self._ended = True
        if self.scanner.done:
            return self._last()
        if self.untouched:
            self.refusal = error
            return b""
        self._give_up("partial", error.code)
        return self._frame(render_event(error)) + self._last()

    def tokens(self) -> Tokens:
        if self.scanner.error is not None:
            return UNKNOWN  # a failure is not billed
        return read_usage(self.scanner.usage)

    def answered(self) -> bool:
        """`[DONE]` went out: a client that closes now has everything (case A05)."""
        return self.scanner.done

    @property
    def ended(self) -> bool:
        return self._ended

    def _too_long(self) -> ApiError:
        return upstream_failed(self._wish.model, "one event of its stream is larger than allowed")

    def _told_error(self) -> None:
        error = self.scanner.error
        if self.untouched and self.scanner.error_first:
            self.refusal = error_of(error, self._wish.model)
        self._give_up("error" if self.scanner.error_first else "partial", "upstream_error_event")


def error_of(error: Any, model: str) -> ApiError:
    """An engine's first event is an error: the HTTP status that it should have been."""
    told = error if isinstance(error, dict) else {"message": str(error)}
    code = told.get("code")
    status = code if type(code) is int and 400 <= code <= 599 else 502
    message = str(told.get("message") or f"The engine that serves '{model}' reported an error.")
    kind = told.get("type")
    return ApiError(
        status,
        kind if isinstance(kind, str) else "server_error",
        code if isinstance(code, str) else "upstream_error",
        message[:2000],
        retry_after_s=1 if status in (429, 503) else None,
    )


def open_relay(head: Head, wish: Wish, limits: Limits) -> PlainRelay | StreamRelay:
    """The relay for an answer with this head."""
    streamed = head.kind.lower().startswith(b"text/event-stream")
    if streamed and head.status == 200 and not head.coding:
        return StreamRelay(head, wish, limits)
    return PlainRelay(head, wish, limits)
