"""One answer on its way from an engine to a client: what to send, and how it ended. No sockets.

Two kinds: `StreamRelay` for a 200 event stream, `plain.PlainRelay` for all else. Both hold the
head back until something of the body is there, so that a failure before it still gets an honest
HTTP status. `refusal` set means: nothing was sent, answer with this error instead.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

from controller.router.blame import error_of
from controller.router.errors import upstream_failed
from controller.router.http1 import LAST_CHUNK, Headers, chunk, status_line
from controller.router.sse import Scanner
from controller.router.tokens import UNKNOWN, Tokens

if TYPE_CHECKING:
    from controller.router.config import Limits
    from controller.router.dialect import Dialect
    from controller.router.errors import ApiError

# Connection-level headers of the engine end at us; the length and framing are ours.
_NOT_RELAYED: Final = frozenset((
    b"connection", b"keep-alive", b"proxy-authenticate", b"proxy-connection", b"te", b"trailer",
    b"transfer-encoding", b"upgrade", b"content-length", b"x-request-id", b"request-id",
    b"set-cookie", b"access-control-allow-origin", b"access-control-allow-credentials",
    b"access-control-allow-methods", b"access-control-allow-headers",
    b"access-control-expose-headers", b"access-control-max-age",
))  # fmt: skip


_BODILESS: Final = (204, 304)  # RFC 9110 8.6: no length either
_CHUNKED: Final = b"transfer-encoding: chunked"
ERROR_EVENT: Final = "upstream_error_event"
"""The code of a stream in which the engine itself reported an error."""
OPENING_BYTES: Final = 16_384
"""So much of the beginning of an answer is kept for the ids in it, however small its pieces are."""
HELD_BYTES: Final = 16_384
"""So much of comments before the first event is held back with the head."""


Pairs = tuple[tuple[bytes, bytes], ...]


class Head:
    """The head of an engine's answer; `length` None when framed by chunks or by the close."""

    __slots__ = ("coding", "headers", "kind", "length", "status")

    def __init__(
        self,
        status: int,
        headers: Headers,
        length: int | None,
        kind: bytes = b"",
        coding: bytes = b"",
    ) -> None:
        self.status = status
        self.headers = headers
        self.length = length
        self.kind = kind  # the content type, in small letters
        self.coding = coding  # the content encoding


class Wish(NamedTuple):
    """What the request at hand wants from the relay."""

    model: str  # for the words of errors
    request_id: bytes
    chunks: bool  # the client speaks HTTP/1.1
    close: bool  # the connection ends after this answer
    drop_usage: bool  # we asked for usage, the client did not
    dialect: Dialect
    vectors: str | None  # the form that the client wants embeddings in
    restore: bytes | None  # JSON string of the name the client used, when the engine knows another
    extra: Pairs = ()  # header lines of ours
    choices: int = 1  # answers in one, each with an end of its own: what `n` asks for


def head_bytes(
    head: Head, request_id: bytes, framing: bytes, *, close: bool, extra: Pairs = ()
) -> bytes:
    """The head for the client, with `extra` lines of ours; `framing`: the line that says how long
    the body is, or none."""
    lines, told = [status_line(head.status)], head.headers
    if extra:  # what we say of a client's limits is not what an engine says of ours there
        ours = {pair[0] for pair in extra if pair[0] != b"vary"}
        told = [pair for pair in told if pair[0] not in ours]
    lines += [b": ".join(pair) for pair in told if pair[0] not in _NOT_RELAYED]
    if extra:
        lines += [b": ".join(pair) for pair in extra]
    lines.append(b"x-request-id: " + request_id)
    if framing:
        lines.append(framing)
    if close:
        lines.append(b"connection: close")
    lines.append(b"\r\n")
    return b"\r\n".join(lines)


class Relay:
    """What both kinds share: the head not sent yet, and the verdict at the end."""

    __slots__ = ("_chunks", "_head", "_wish", "code", "opening", "outcome", "refusal", "status")

    def __init__(self, head: Head, wish: Wish, length: int | None) -> None:
        self._wish = wish
        self.status = head.status
        self.opening = b""  # the beginning of the answer's text
        self.outcome = "ok"
        self.code: str | None = None
        self.refusal: ApiError | None = None
        self._chunks = length is None and wish.chunks
        framing = _CHUNKED if self._chunks else b""
        if length is not None:
            framing = b"content-length: %d" % length
        close = wish.close or not framing
        if head.status in _BODILESS:
            framing, close = b"", wish.close
        self._head = head_bytes(head, wish.request_id, framing, close=close, extra=wish.extra)

    @property
    def untouched(self) -> bool:
        """Whether the client has seen nothing of this answer."""
        return bool(self._head)

    def _head_again(self, head: Head, length: int) -> None:
        """The body is another than the head told, and so long. No second `__init__`: compiled, it
        would not let go of what the first one set."""
        wish = self._wish
        self._chunks = False
        framing = b"content-length: %d" % length
        self._head = head_bytes(head, wish.request_id, framing, close=wish.close, extra=wish.extra)

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


class StreamRelay(Relay):
    """An event stream: whole events through, errors told, never a silent short answer."""

    __slots__ = ("_ended", "scanner")

    def __init__(self, head: Head, wish: Wish, limits: Limits) -> None:
        super().__init__(head, wish, None)
        self.scanner = Scanner(
            limits.event_bytes, wish.dialect, drop_usage=wish.drop_usage, model=wish.restore,
            choices=wish.choices,
        )  # fmt: skip
        self._ended = False

    def feed(self, data: bytes) -> bytes:
        scanner = self.scanner
        if not scanner.begun and len(self.opening) < OPENING_BYTES:
            self.opening += data
        out = scanner.feed(data)
        if scanner.error is not None and self.outcome == "ok":
            self._told_error()
        if scanner.done:
            self._judge_end()
        if scanner.overflow and not self._ended:
            return self._whole(out) + (self.broken(self._too_long()) or b"")
        if not out or self.refusal is not None or self._ended:
            return b""
        if not scanner.begun and self.untouched:
            return self._hold_back(out)
        return self._frame(out)

    def flow(self, data: bytes) -> bytes | None:
        """What to send for more of a stream that is under way, when nothing is special about it.

        None: nothing has happened, `feed` takes it. Most of what a router does is this.
        """
        if self._head or self._ended or self.outcome != "ok" or not self.scanner.passes(data):
            return None
        return chunk(data) if self._chunks else data

    def _hold_back(self, comments: bytes) -> bytes:
        """An engine may say that it lives and then fail: until its first event the client has
        seen nothing, so that another engine may answer."""
        self._head += chunk(comments) if self._chunks else comments
        return self._frame(b"") if len(self._head) > HELD_BYTES else b""

    def _whole(self, last: bytes) -> bytes:
        """What came before a failure; comments alone do not make it one that is only told."""
        return self._frame(last) if last and self.scanner.begun else b""

    def comment(self, text: str) -> bytes:
        """A line that clients of event streams pass over; the head goes before the first."""
        told = " ".join(text.split())
        if not self.scanner.begun:
            self.scanner.look_closer()  # at its first event, which now must not pass by `flow`
        return self._frame(f": {told}\n\n".encode())

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
            # Without its tail: what no blank line ended would become one line with our event.
            why = upstream_failed(self._wish.model, "its stream ended before the answer did")
            return self.broken(why) or b""
        self._judge_end()
        self._ended = True
        return (self._frame(tail) if tail or self._head else b"") + self._last()

    def _judge_end(self) -> None:
        """The last word is here: who leaves or dies after it changes nothing of what it was."""
        if self.outcome == "ok" and self.scanner.aborted():
            self._give_up("partial", "engine_aborted")

    def broken(self, error: ApiError) -> bytes | None:
        """The engine is gone: end the stream so that no client takes it for complete."""
        if self._ended:
            return b""
        self._ended = True
        if self.answered():
            return self._last()
        if self.untouched:
            self.refusal = error
            return b""
        self._give_up("partial", error.code)
        return self._frame(self.scanner.failure(error)) + self._last()

    @property
    def begun(self) -> bool:
        """Whether a token of the answer came, about; comments are none."""
        return self.scanner.begun and self.scanner.spoke

    def tokens(self) -> Tokens:
        """What the engine told of its tokens; a failure that it told of is not billed."""
        return UNKNOWN if self.scanner.error is not None else self.scanner.tokens()

    def made(self) -> int:
        """Tokens that passed by, about."""
        return self.scanner.made()

    def answered(self) -> bool:
        """Its end went out: a client that closes now has everything (case A05)."""
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
        self._give_up("error" if self.scanner.error_first else "partial", ERROR_EVENT)
