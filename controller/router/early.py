"""A stream whose model is being started: its head and comments go out before an engine has it.

Proxies and clients give up on a connection that is silent for a minute (D17). Once the head is
sent, what goes wrong is told as an event. No sockets; used by the exchange.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from controller.router.blame import error_in, error_of, refusal_in
from controller.router.errors import upstream_failed
from controller.router.relay import ERROR_EVENT, Head, StreamRelay, Wish

if TYPE_CHECKING:
    from controller.router.config import Limits

HEAD = Head(
    200,
    [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")],
    None,
    b"text/event-stream",
)
HELD_BYTES = 65_536
"""So much of an answer that is no event stream is read for the error in it."""


class EarlyRelay(StreamRelay):
    """Our own head and what is said until an engine answers."""

    __slots__ = ()

    def __init__(self, wish: Wish, limits: Limits) -> None:
        super().__init__(HEAD, wish, limits)


class LateStream(StreamRelay):
    """An engine's event stream after a head of ours.

    Of this engine's answer the client has seen nothing before its first event, so that until then
    another may answer.
    """

    __slots__ = ("_fresh",)

    def __init__(self, head: Head, wish: Wish, limits: Limits) -> None:
        super().__init__(head, wish, limits)
        self._head = b""
        self._fresh = True

    @property
    def untouched(self) -> bool:
        return self._fresh

    def _hold_back(self, comments: bytes) -> bytes:
        """The client is told by us that it waits."""
        return b""

    def _frame(self, data: bytes) -> bytes:
        if data:
            self._fresh = False
        return super()._frame(data)


class LatePlain(LateStream):
    """An answer that is no event stream, for a client that was promised one: told as an error."""

    __slots__ = ("_held",)

    def __init__(self, head: Head, wish: Wish, limits: Limits) -> None:
        super().__init__(head, wish, limits)
        self._held = b""
        self._fresh = head.status < 400  # else it was judged by its status: it is for the client

    def flow(self, data: bytes) -> bytes | None:
        """Never: nothing of it goes out."""
        return None

    def feed(self, data: bytes) -> bytes:
        self._held += data[: HELD_BYTES - len(self._held)]
        return b""

    def finish(self) -> bytes:
        model, status = self._wish.model, self.status
        why = f"answered with status {status} and no event stream"
        told = refusal_in(self._held) if status >= 400 else None
        if status == 200:
            told = error_in(self._held)
        elif told is None and 400 <= status < 500:  # it would be in vain to send it again
            told = f"The engine that serves model '{model}' {why}."
        error = upstream_failed(model, f"it {why}")
        if told is not None:
            error = error_of(told, model, status)
        if self._fresh:
            self.refusal = error
            if told is not None:
                self._give_up("error", ERROR_EVENT)
            return b""
        out = self.broken(error) or b""
        self._give_up("error", f"upstream_{status}")  # judged by its status, and not again
        return out


def open_late(head: Head, wish: Wish, limits: Limits) -> StreamRelay:
    """The relay for an engine's answer to a client that has its head already."""
    streamed = head.kind.startswith(b"text/event-stream")
    if streamed and head.status == 200 and not head.coding:
        return LateStream(head, wish, limits)
    return LatePlain(head, wish, limits)
