"""The epoll set behind the client port, hosted in one Trio task; callbacks instead of tasks.

A Trio task per connection costs five times more CPU per request (measured, see the README of this
package). The rules that make callbacks safe: they never block, never raise past `_turn`, and
a socket closed in a turn keeps its number until the turn ends, so no event reaches a successor.
"""

from __future__ import annotations

import os
import select
import time
from abc import abstractmethod
from collections import deque
from typing import TYPE_CHECKING, Final

import structlog
import trio

from controller.router.deadlines import Timed

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable

    from controller.router.connection import Connection

IN: Final = select.EPOLLIN
OUT: Final = select.EPOLLOUT
RDHUP: Final = select.EPOLLRDHUP
GONE: Final = select.EPOLLHUP | select.EPOLLERR
EVENTS_BETWEEN_TASKS: Final = 256  # then other Trio tasks get a turn
EVENTS_IN_TURN: Final = (
    128  # more, and what the first of them sends would wait too long for the last
)

PIECES_TO_GATHER: Final = 4
PAUSE_S: Final = 0.000_3
EVENTS_IN_PAUSE: Final = 32
"""With so many pieces of streams in a turn more are on their way, and cost less when they come
together: it waits for so long, which is as much as so many events take. With those in one turn
they come together as it is (decision 0016)."""
sleep: Final = time.sleep

log = structlog.get_logger(__name__)


class Handler(Timed):
    """What a registered file descriptor belongs to."""

    __slots__ = ()

    @abstractmethod
    def on_event(self, events: int) -> None:
        """The descriptor is ready for `events` (epoll bits)."""

    @abstractmethod
    def crashed(self) -> None:
        """`on_event` raised, which is a bug of ours: give up this connection, and only this."""


class Reactor:
    """One epoll set, its handlers, and callbacks asked for by Trio tasks."""

    def __init__(self) -> None:
        self._epoll = select.epoll()
        self._handlers: dict[int, Handler] = {}
        self._soon: deque[Callable[[], None]] = deque()
        self._closing: list[socket.socket] = []
        self._senders: list[Connection] = []
        self._in_turn = False
        self.pieces = 0  # of streams, passed on in this turn
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._epoll.register(self._wake, IN)
        self.crashes = 0

    def register(self, fd: int, handler: Handler, mask: int) -> None:
        self._handlers[fd] = handler
        self._epoll.register(fd, mask)

    def modify(self, fd: int, mask: int) -> None:
        self._epoll.modify(fd, mask)

    def unregister(self, fd: int) -> None:
        if self._handlers.pop(fd, None) is not None:
            self._epoll.unregister(fd)

    def close_socket(self, sock: socket.socket) -> None:
        """Close now, or at the end of the turn when events of its number may still be waiting."""
        if self._in_turn:
            self._closing.append(sock)
        else:
            sock.close()

    def call_soon(self, callback: Callable[[], None]) -> None:
        """Run `callback` in the next turn; the way back for Trio tasks."""
        self._soon.append(callback)
        if not self._in_turn:
            os.eventfd_write(self._wake, 1)

    def send_soon(self, sender: Connection) -> None:
        """Have its `send_held` called when this turn ends, or at once outside of turns."""
        self._senders.append(sender)
        if not self._in_turn:
            self._send()

    async def run(self) -> None:
        """Serve until cancelled."""
        while True:
            await trio.lowlevel.wait_readable(self._epoll.fileno())
            while self._turns():
                await trio.lowlevel.checkpoint()

    async def catch_up(self) -> None:
        """Each descriptor that is ready now has its turn: what waits in the kernel came in time,
        however long this process had no CPU."""
        left = len(self._handlers)
        while left > 0 and self._turns():
            left -= EVENTS_BETWEEN_TASKS
            await trio.lowlevel.checkpoint()

    def close(self) -> None:
        """Close every connection still open, and the set itself."""
        for handler in list(self._handlers.values()):
            handler.crashed()
        self._epoll.close()
        os.close(self._wake)

    def _turns(self) -> bool:
        """Turns until nothing is ready (False), or until other Trio tasks should have theirs.

        Looking again costs a microsecond, coming back through Trio fifty to a hundred.
        """
        handled = 0
        while handled < EVENTS_BETWEEN_TASKS:
            events = self._epoll.poll(0, EVENTS_IN_TURN)
            if not events and not self._soon:
                return False
            self._turn(events)
            handled += max(1, len(events))
            if self.pieces >= PIECES_TO_GATHER and len(events) < EVENTS_IN_PAUSE:
                sleep(PAUSE_S)
                handled += EVENTS_IN_PAUSE
            self.pieces = 0
        return True

    def _turn(self, events: list[tuple[int, int]]) -> None:
        self._in_turn = True
        for fd, bits in events:
            handler = self._handlers.get(fd)
            if handler is not None:
                try:
                    handler.on_event(bits)
                except Exception:
                    self._report()
                    self._call(handler.crashed)
            elif fd == self._wake:
                os.eventfd_read(self._wake)
        for _ in range(len(self._soon)):
            self._call(self._soon.popleft())
        self._send()
        self._in_turn = False
        for sock in self._closing:
            sock.close()
        self._closing.clear()

    def _send(self) -> None:
        senders, self._senders = self._senders, []
        for sender in senders:
            try:
                sender.send_held()
            except Exception:
                self._report()
                self._call(sender.crashed)

    def _call(self, callback: Callable[[], None]) -> None:
        try:
            callback()
        except Exception:
            self._report()

    def _report(self) -> None:
        # A bug hit by every request must not turn into a log storm: 1, 2, 4, 8, ... are logged.
        self.crashes += 1
        if self.crashes & (self.crashes - 1) == 0:
            log.exception("a connection's callback failed", crashes=self.crashes)
