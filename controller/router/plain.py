"""An answer that is not an event stream: bytes through, usage found as they pass. No sockets."""

from __future__ import annotations

from typing import TYPE_CHECKING

from controller.router.bill import plain_tokens
from controller.router.errors import ApiError, upstream_failed
from controller.router.relay import Head, Relay, StreamRelay, Wish
from controller.router.sse import restore_model
from controller.router.tokens import UNKNOWN, Tokens, UsageFinder

if TYPE_CHECKING:
    from controller.router.config import Limits


class PlainRelay(Relay):
    """An answer that is not an event stream: bytes through, usage found as they pass."""

    __slots__ = ("_bytes", "_finder", "_held", "_held_bytes", "_limit", "_raw_head")

    def __init__(self, head: Head, wish: Wish, limits: Limits) -> None:
        super().__init__(head, wish, head.length)
        self._finder = UsageFinder() if _is_json(head) and not head.coding else None
        self._limit = limits.rewrite_bytes
        self._raw_head = head
        self._bytes = 0
        self._held: list[bytes] | None = None
        self._held_bytes = 0
        if wish.restore is not None and self._finder:
            self._held = []  # its length changes with the name, so it is sent whole
        if head.status >= 400:
            self._give_up("error", f"upstream_{head.status}")

    def feed(self, data: bytes) -> bytes:
        self._bytes += len(data)
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
        """What the engine told of its tokens; a failure is not billed."""
        return self._finder.tokens() if self._finder and self.status < 400 else UNKNOWN

    def made(self) -> int | None:
        """Tokens that passed by, about; None before the first byte."""
        return plain_tokens(self._bytes) if self._bytes else None

    def answered(self) -> bool:
        """Whether the client has all it needs although the engine has not finished."""
        return False

    @property
    def ended(self) -> bool:
        """Whether nothing more will be sent although the engine may go on."""
        return False


def _is_json(head: Head) -> bool:
    return b"json" in head.kind or not head.kind


def open_relay(head: Head, wish: Wish, limits: Limits) -> PlainRelay | StreamRelay:
    """The relay for an answer with this head."""
    streamed = head.kind.lower().startswith(b"text/event-stream")
    if streamed and head.status == 200 and not head.coding:
        return StreamRelay(head, wish, limits)
    return PlainRelay(head, wish, limits)
