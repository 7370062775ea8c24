"""An answer that is not an event stream: bytes through, usage found as they pass. No sockets."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Final

import orjson

from controller.router import vectors
from controller.router.bill import plain_tokens
from controller.router.blame import error_in, error_of, is_failed_response, tells_error
from controller.router.errors import ApiError, upstream_failed
from controller.router.names import restore
from controller.router.relay import (
    ERROR_EVENT,
    OPENING_BYTES,
    Head,
    Pairs,
    Relay,
    StreamRelay,
    Wish,
    head_bytes,
)
from controller.router.sse import ABORTED
from controller.router.tokens import UNKNOWN, Tokens, UsageFinder
from controller.router.unzip import CODINGS, Unzip

if TYPE_CHECKING:
    from controller.router.config import Limits


class PlainRelay(Relay):
    """An answer that is not an event stream. It is held and sent whole only where its text must
    change, a model's name to restore, embeddings in another form; or where only the close ends
    a document: an engine that dies closes too, so that it must be read to be known as whole.
    Of others the beginning is held, for a 200 may be an error (case A08)."""

    __slots__ = (
        "_bytes", "_endless", "_finder", "_first", "_held", "_held_bytes", "_limit", "_raw_head",
        "_tail", "_unzip",
    )  # fmt: skip

    def __init__(self, head: Head, wish: Wish, limits: Limits) -> None:
        super().__init__(head, wish, head.length)
        readable = _is_json(head) and (not head.coding or head.coding in CODINGS)
        self._finder = UsageFinder() if readable else None
        self._unzip = Unzip(head.coding) if readable and head.coding else None
        self._limit = limits.rewrite_bytes if wish.restore is not None else vectors.MOST_BYTES
        self._raw_head = head
        self._bytes = 0
        self._tail = b""
        self._held: list[bytes] | None = None
        self._held_bytes = 0
        self._endless = _is_endless(head)
        plain = not head.coding and (wish.vectors or self._endless)
        if readable and (wish.restore is not None or plain):
            self._held = []
        self._first: list[bytes] | None = [] if _JSON in head.kind and readable else None
        self._judge()

    def _judge(self) -> None:
        if self._raw_head.status >= 300:  # a redirect is no answer either
            self._give_up("error", f"upstream_{self._raw_head.status}")

    @property
    def _redirects(self) -> bool:
        """Whether it sends the client to where that has no business, and could take its key."""
        return 300 <= self.status < 400 and self.status != NOT_MODIFIED

    def feed(self, data: bytes) -> bytes:
        if self._redirects:
            return b""
        text = data if self._unzip is None else self._unzip.feed(data)
        self._bytes += len(text)
        if len(self.opening) < OPENING_BYTES:
            self.opening += text
        if self._finder is not None:
            self._finder.feed(text)
            self._tail = (self._tail + text)[-TAIL:]
        if self._held is not None:
            return self._hold(self._held, text)
        return self._frame(data) if self._first is None else self._judge_first(self._first, data)

    def _judge_first(self, first: list[bytes], data: bytes) -> bytes:
        """The head goes once it is known that this 200 is no error, or not a short one; or that
        nobody can know, for its coding cannot be read, or says nothing in many bytes. Blanks go at
        once: engines send them so that nobody cuts a silent answer."""
        first.append(data)
        self._held_bytes += len(data)
        size = len(self.opening)
        unreadable = self._unzip is not None and self._unzip.failed
        if (
            max(size, self._held_bytes) < OPENING_BYTES
            and not (unreadable or self.opening.isspace())
            and (size < SHORT_BYTES or tells_error(self.opening))
        ):
            return b""
        self._first = None
        return self._frame(b"".join(first))

    def _hold(self, held: list[bytes], text: bytes) -> bytes:
        held.append(text)
        self._held_bytes += len(text)
        if self._unzip is not None and self._unzip.failed:
            why = "its compressed answer cannot be read"
            self.refusal = upstream_failed(self._wish.model, why)
        elif self._held_bytes > self._limit and self._wish.restore is None:
            self._held = None
            return self._frame(b"".join(held))
        elif self._held_bytes > self._limit:
            self.refusal = upstream_failed(self._wish.model, "its answer is larger than allowed")
        return b""

    def finish(self) -> bytes:
        if self._redirects:
            why = f"it redirects (status {self.status})"
            self.refusal = upstream_failed(self._wish.model, why)
            return b""
        if self._finder is not None and not self._bytes and self.status == 200 and self.untouched:
            self.refusal = upstream_failed(self._wish.model, "its answer is empty")
            return b""
        if self.outcome == "ok" and ABORTED.search(self._tail):
            self._give_up("partial", "engine_aborted")
        if self._held is None:
            return self._finish_passing()
        if self._held and self._unzip is not None and not self._unzip.whole:
            self.refusal = upstream_failed(self._wish.model, "its compressed answer is cut")
            return b""
        body = b"".join(self._held)
        if self._is_error(body):
            return b""
        if self._endless and not _is_document(body):
            self.refusal = upstream_failed(self._wish.model, "its answer is cut")
            return b""
        if self._wish.restore is not None:
            body = restore(body, self._wish.restore)
        if self._wish.vectors:
            body = vectors.in_form(body, self._wish.vectors)
        self._head_again(_decoded(self._raw_head), len(body))
        return self._frame(body)

    def _finish_passing(self) -> bytes:
        rest = b"".join(self._first or ())
        whole = self._finder is not None and len(self.opening) == self._bytes
        if (rest or whole) and self._is_error(self.opening) and self.untouched:
            return b""
        return self._frame(rest) + self._last() if rest or self._head or self._chunks else b""

    def _is_error(self, body: bytes) -> bool:
        if self.status != 200 or not tells_error(body):
            return False
        error = error_in(body)
        if error is not None:
            told = error_of(error, self._wish.model)
            self._give_up("error", ERROR_EVENT)
            if self.untouched:
                self.refusal = told
            elif told.status < 500:  # the request's fault: nothing for its replica's health
                self.code = f"upstream_{told.status}"
        elif is_failed_response(body):  # its client can read it; whose fault it is, nobody knows
            self._give_up("error", RESPONSE_FAILED)
        return error is not None

    def broken(self, error: ApiError) -> bytes | None:
        """The engine is gone: None means that only an abort tells the client the truth."""
        if self.untouched:
            self.refusal = error
            return b""
        self._give_up("partial", error.code)
        return None

    def tokens(self) -> Tokens:
        """What the engine told of its tokens; a failure is not billed."""
        return self._finder.tokens() if self._finder and self.outcome != "error" else UNKNOWN

    def made(self) -> int | None:
        """Tokens that passed by, about; None before the first byte."""
        return plain_tokens(self._bytes) if self._bytes else None

    @property
    def begun(self) -> bool:
        """Whether something of the answer is there, once a byte came."""
        return True

    def answered(self) -> bool:
        """Whether the client has all it needs although the engine has not finished."""
        return False

    @property
    def ended(self) -> bool:
        """Whether nothing more will be sent although the engine may go on."""
        return False


class UnzippedStream(StreamRelay):
    """A compressed event stream: its events are read, so the client gets them plain."""

    __slots__ = ("_unzip",)

    def __init__(self, head: Head, wish: Wish, limits: Limits) -> None:
        super().__init__(_decoded(head), wish, limits)
        self._unzip = Unzip(head.coding)

    def flow(self, data: bytes) -> bytes | None:
        """Never: its bytes are no text yet."""
        return None

    def feed(self, data: bytes) -> bytes:
        text = self._unzip.feed(data)
        out = super().feed(text) if text else b""
        if self._unzip.failed and not self.ended:
            why = upstream_failed(self._wish.model, "its compressed stream cannot be read")
            out += self.broken(why) or b""
        return out


_JSON: Final = b"application/json"
SHORT_BYTES: Final = 512
"""An answer is not looked at for an error beyond, unless one may have begun there."""
NOT_MODIFIED: Final = 304
RESPONSE_FAILED: Final = "response_failed"
"""The code of an answer of the Responses API that says of itself that it failed."""
_CODED: Final = b"transfer-encoding"
_ABORT: Final = b'"abort"'
TAIL: Final = 1024
"""How an answer ended is told behind it, with its usage: so many bytes are looked at."""


def whole(
    head: Head, body: bytes, request_id: bytes, *, close: bool, extra: Pairs = ()
) -> bytes | None:
    """What the client gets for a good answer that came in one piece with its head.

    None when a relay has to look at it. Most plain answers come so, and a relay costs three times
    as much.
    """
    if head.status != 200 or not head.length or head.coding:
        return None
    if head.kind != _JSON and b"json" not in head.kind:
        return None
    if body.rfind(_ABORT, -TAIL) >= 0 or tells_error(body):
        return None
    framing = b"content-length: %d" % head.length
    return head_bytes(head, request_id, framing, close=close, extra=extra) + body


def _is_json(head: Head) -> bool:
    return b"json" in head.kind or not head.kind


def _is_endless(head: Head) -> bool:
    """Whether only its close ends a document."""
    framed = head.length is not None or any(pair[0] == _CODED for pair in head.headers)
    return not framed and b"json" in head.kind and head.status == 200


def _is_document(body: bytes) -> bool:
    try:
        orjson.loads(body)
    except orjson.JSONDecodeError:
        return _is_lax_document(body)
    return True


def _is_lax_document(body: bytes) -> bool:
    """Engines tell a probability of zero as -Infinity, and line ends as they are."""
    try:
        json.loads(body, strict=False)
    except (ValueError, RecursionError):
        return False
    return True


def _decoded(head: Head) -> Head:
    kept = [pair for pair in head.headers if pair[0] != b"content-encoding"]
    return Head(head.status, kept, head.length, head.kind)


def open_relay(head: Head, wish: Wish, limits: Limits) -> PlainRelay | StreamRelay:
    """The relay for an answer with this head."""
    streamed = head.kind.startswith(b"text/event-stream")
    if streamed and head.status == 200 and not head.coding:
        return StreamRelay(head, wish, limits)
    if streamed and head.status == 200 and head.coding in CODINGS:
        return UnzippedStream(head, wish, limits)
    return PlainRelay(head, wish, limits)
