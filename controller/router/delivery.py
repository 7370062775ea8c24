"""An answer on its way to one client: the relay of the moment, and what the client has of it.

Owned by an exchange, which decides; nothing here knows attempts or states. The relay is None
until an engine's head came, and again when another attempt takes over.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from controller.router.clock import monotonic
from controller.router.early import HEAD, EarlyRelay, open_late
from controller.router.plain import open_relay
from controller.router.relay import ERROR_EVENT, StreamRelay

if TYPE_CHECKING:
    from controller.router.client import ClientConnection
    from controller.router.config import Limits
    from controller.router.errors import ApiError
    from controller.router.held import Held
    from controller.router.plain import PlainRelay
    from controller.router.relay import Head, Wish
    from controller.router.upstream import UpstreamConnection

ALIVE: Final = "keep-alive"


class Delivery:
    """What one exchange sends."""

    _early: EarlyRelay | None = None  # the head of its stream went out before an engine's
    held: Held | None = None  # an engine's error that may not be for the client
    first_byte: float | None = None  # monotonic
    beginning = b""  # of the answer: what came until then
    noted = False  # which replica keeps this answer
    delivered = False  # the client has all it needs

    def __init__(self, client: ClientConnection, limits: Limits) -> None:
        self._client = client
        self._limits = limits
        self.relay: PlainRelay | StreamRelay | None = None

    @property
    def headed(self) -> bool:
        """Whether an engine has begun to answer."""
        return self.relay is not None or self.held is not None

    @property
    def early(self) -> bool:
        """Whether our own head is out, so that the client may be told that it waits."""
        return self._early is not None

    @property
    def failed_first(self) -> bool:
        """Whether the engine's stream began with an error, which the client has not seen."""
        relay = self.relay
        return relay is not None and relay.refusal is not None and relay.code == ERROR_EVENT

    def open(self, head: Head, wish: Wish) -> PlainRelay | StreamRelay:
        """An engine's head came."""
        opened = open_relay if self._early is None else open_late
        self.relay = opened(head, wish, self._limits)
        return self.relay

    def forget(self) -> None:
        """Another attempt takes over: nothing of this answer was sent."""
        self.relay = None
        self.held = None
        self.first_byte = None
        self.beginning = b""
        self.noted = False

    def pass_on(self, body: bytes, *, complete: bool) -> bytes:
        """Feed the relay; what is to be sent to the client now.

        Its `refusal` set means: nothing is to be sent, and this is what went wrong.
        """
        relay = self.relay
        assert relay is not None
        out = b""
        if body:
            out = relay.feed(body)
            self.beginning = relay.opening
            if self.first_byte is None and relay.begun:
                self.first_byte = monotonic()
        if complete and relay.refusal is None:
            out += relay.finish()
        return out if relay.refusal is None else b""

    def flowed(self, body: bytes) -> bool:
        """Whether this was one more piece of a stream, to a client that keeps up: it is on its way.

        The short way of `pass_on`, for all but a few pieces of a stream.
        """
        relay = self.relay
        if self._client.out is not None or not isinstance(relay, StreamRelay):
            return False
        out = relay.flow(body)
        if out is None:
            return False
        self._client.reactor.pieces += 1
        self._client.send_soon(out)
        return True

    # -- silence ---------------------------------------------------------------------------------

    def announce(self, comment: str, wish: Wish) -> None:
        """Our own head and a comment, while no engine has the request: errors are events now."""
        if self._early is None:
            self._early = EarlyRelay(wish, self._limits)
        self._say(self._early.comment(comment))

    def keep_alive(self) -> bool:
        """A comment in a stream whose engine is silent; whether it was due and sent, and makes the
        engine's answer one that the client has seen."""
        relay = self.relay
        if relay is None and self._early is not None and self._client.out is None:
            self._say(self._early.comment(ALIVE))  # no engine has said a word yet
        if not isinstance(relay, StreamRelay) or relay.answered() or self._client.out is not None:
            return False
        self._say(relay.comment(ALIVE))
        return True

    def _say(self, data: bytes) -> None:
        self._client.send(data)
        if self._client.out is not None:
            self._client.bytes_wait()

    def status_seen(self, status: int) -> int:
        """What the client saw of an answer with this status: the head of ours, where it had one."""
        return status if self._early is None else HEAD.status

    def refused(self, error: ApiError) -> bytes | None:
        """The error as the end of a stream whose head is ours; None when there is no such head."""
        return None if self._early is None else self._early.broken(error) or b""

    # -- slow readers ----------------------------------------------------------------------------

    def slow_down(self, up: UpstreamConnection | None) -> None:
        """The client did not take all of it: above a bound its engine is not read any more."""
        if up is not None and self._client.pending > self._limits.pause_above_bytes:
            up.pause()
        self._client.bytes_wait()

    def took_some(self, up: UpstreamConnection | None) -> None:
        """The client read: go on reading the engine when little is left."""
        if up is not None and self._client.pending <= self._limits.resume_below_bytes:
            up.resume()
            self.check_delivered()

    def check_delivered(self) -> None:
        """Note when the client has all it needs, though the engine has not finished."""
        if self.relay is not None and self.relay.answered():
            self.delivered = self._client.all_sent
