"""A non-blocking socket in the reactor: sends at once what it can, keeps the rest, reports ends.

Base of the client's and the engine's side. A failed send is not reported by itself: the kernel
raises a read event for it, and what the peer had sent before is then still read first.
"""

from __future__ import annotations

import socket
from abc import abstractmethod
from typing import TYPE_CHECKING, Final

from controller.router.reactor import GONE, IN, OUT, RDHUP, Handler

if TYPE_CHECKING:
    from controller.router.reactor import Reactor

RECEIVE_BYTES: Final = 65536
FIRST_BYTES: Final = 8192
"""Until more than that came at once, so much is asked for: making room for 64 KiB takes longer
than receiving what is usual."""


class Connection(Handler):
    """One socket. Subclasses say what bytes, the end, and an emptied buffer mean."""

    __slots__ = ("_held", "_mask", "_most", "_unsendable", "fd", "given", "out", "reactor", "sock")

    def __init__(self, reactor: Reactor, sock: socket.socket, mask: int) -> None:
        super().__init__()
        sock.setblocking(False)
        if sock.family != socket.AF_UNIX:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.reactor = reactor
        self.sock = sock
        self.fd = sock.fileno()
        self.out: bytearray | None = None  # waiting to be sent
        self.given = 0  # bytes sent so far, or to be sent; its owner may set it back
        self._held = b""  # goes out at the end of this turn
        self._mask = mask
        self._most = FIRST_BYTES
        self._unsendable = False
        reactor.register(self.fd, self, mask)

    @abstractmethod
    def received(self, data: bytes) -> None:
        """Bytes arrived."""

    @abstractmethod
    def lost(self, error: OSError | None) -> None:
        """The peer closed (None) or the connection broke; it is closed on our side already."""

    def sent_some(self) -> None:
        """Waiting bytes went out; `pending` says how many are left."""

    def crashed(self) -> None:
        """A callback failed: end this connection as if the peer had left."""
        if self.fd >= 0:
            self.close()
            self.lost(ConnectionAbortedError("a callback of this connection failed"))

    @property
    def pending(self) -> int:
        """Bytes accepted by `send` that the kernel has not taken yet."""
        return 0 if self.out is None else len(self.out)

    @property
    def all_sent(self) -> bool:
        """Whether the kernel has taken everything that was ever given to `send`."""
        return self.out is None and not self._held and not self._unsendable and self.fd >= 0

    def send_soon(self, data: bytes) -> None:
        """Send with what others send in this turn: who sleeps at the other end is woken once for
        all of it, and waking costs more than sending."""
        self.given += len(data)
        if self._held:
            self._held += data
        else:
            self._held = data
            self.reactor.send_soon(self)

    def send_held(self) -> None:
        """Called by the reactor before the turn ends."""
        data, self._held = self._held, b""
        if data:  # else it went out with what was sent since, or the connection ended
            self._put(data)
        if self.out is not None:
            self.bytes_wait()

    def bytes_wait(self) -> None:
        """Not all of what was to be sent soon went out."""

    def send(self, data: bytes) -> None:
        """Send now or keep for later; silently nothing when the connection is gone."""
        self.given += len(data)
        if self._held:
            data, self._held = self._held + data, b""
        self._put(data)

    def _put(self, data: bytes) -> None:
        """The bytes for the kernel, as they are."""
        if self.fd < 0 or self._unsendable:
            return
        if self.out is not None:
            self.out += data
            return
        try:
            sent = self.sock.send(data)
        except BlockingIOError:
            sent = 0
        except OSError:
            self._unsendable = True
            return
        if sent < len(data):
            self.out = bytearray(memoryview(data)[sent:])
            self.set_mask(self._mask | OUT)

    def set_mask(self, mask: int) -> None:
        """Change the events of interest; 0 takes the socket out of the set (no HUP storm)."""
        if mask == self._mask or self.fd < 0:
            return
        if self._mask == 0:
            self.reactor.register(self.fd, self, mask)
        elif mask == 0:
            self.reactor.unregister(self.fd)
        else:
            self.reactor.modify(self.fd, mask)
        self._mask = mask

    def want(self, bits: int, *, on: bool) -> None:
        """Switch single event bits on or off."""
        self.set_mask(self._mask | bits if on else self._mask & ~bits)

    def on_event(self, events: int) -> None:
        if events == IN:
            self._receive()  # all there is to most events
        else:
            self.on_events(events)

    def on_events(self, events: int) -> None:
        """More than that there is something to read."""
        if events & OUT and self.out is not None:
            self._flush()
        if self.fd < 0:
            return
        if events & (IN | GONE) and self._mask & IN:
            self._receive()
        elif events & (GONE | RDHUP):
            self._end(None)

    def close(self) -> None:
        """Close; what is pending is dropped. The peer sees FIN, or RST if it was still sending."""
        if self.fd < 0:
            return
        if self._mask:
            self.reactor.unregister(self.fd)
        self.fd = -1
        self.forget()  # else its slot would keep it for as long as an engine may take
        self.given = max(0, self.given - self.pending - len(self._held))  # nobody gets these
        self.out = None
        self._held = b""
        self.reactor.close_socket(self.sock)

    def half_close(self) -> None:
        """Send no more; the peer sees FIN. Raises OSError when it is gone."""
        self.sock.shutdown(socket.SHUT_WR)

    def reset(self) -> None:
        """Close so that the peer cannot mistake it for a normal end."""
        self.send_held()  # what came before it is still the peer's
        if self.fd >= 0:
            self._reset_on_close()
            self.close()

    def _reset_on_close(self) -> None:
        self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\0\0\0\0\0\0\0")

    def _receive(self) -> None:
        try:
            data = self.sock.recv(self._most)
        except BlockingIOError:
            return
        except OSError as error:
            self._end(error)
            return
        if data:
            if len(data) == self._most:
                self._most = RECEIVE_BYTES
            self.received(data)
        else:
            self._end(None)

    def _flush(self) -> None:
        assert self.out is not None
        try:
            sent = self.sock.send(self.out)
        except BlockingIOError:
            return
        except OSError:
            self._unsendable = True
            sent = len(self.out)
        del self.out[:sent]
        if not self.out:
            self.out = None
            self.want(OUT, on=False)
        self.sent_some()

    def _end(self, error: OSError | None) -> None:
        self.close()
        self.lost(error)
