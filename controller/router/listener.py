"""The listening socket of the client port, shared by all router processes (SO_REUSEPORT)."""

from __future__ import annotations

import errno
import socket
from typing import TYPE_CHECKING, Final

from controller.router.client import ClientConnection
from controller.router.clock import monotonic
from controller.router.reactor import IN, Handler

if TYPE_CHECKING:
    from collections.abc import Callable

    from controller.router.core import Core

    Opener = Callable[[Core, socket.socket, str], ClientConnection]

ACCEPTS_PER_EVENT = 64  # then others get a turn
PAUSE_S = 0.2
_NO_ROOM = frozenset((errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM))
_ASKING: Final = (
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 30),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 15),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 6),
    (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 120_000),  # it asks nothing while bytes wait
)
"""A client whose machine or network is gone closes nothing, and an engine would work for it until
`total_s`: the kernel asks for two minutes, so that one that only slept still gets its answer.
Connections have these from the socket that accepts them."""


def bind(host: str, port: int, backlog: int) -> socket.socket:
    """A listening socket. Raises OSError naming the address when it cannot be had."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        for option in _ASKING:
            sock.setsockopt(*option)
        sock.bind((host, port))
        sock.listen(backlog)
        sock.setblocking(False)
    except OSError as error:
        sock.close()
        raise OSError(
            error.errno, f"cannot listen on {host}:{port}: {error.strerror}; is it taken?"
        ) from error
    return sock


class Listener(Handler):
    """Accepts clients; pauses while descriptors or room run out instead of spinning."""

    def __init__(self, core: Core, sock: socket.socket, opens: Opener = ClientConnection) -> None:
        super().__init__()
        self._core = core
        self._opens = opens
        self._sock = sock
        self._open = True
        core.reactor.register(sock.fileno(), self, IN)

    @property
    def port(self) -> int:
        """The port in fact (when 0 was asked for)."""
        return int(self._sock.getsockname()[1])

    def on_event(self, events: int) -> None:
        for _ in range(ACCEPTS_PER_EVENT):
            if not self._accept():
                return

    def _accept(self) -> bool:
        if len(self._core.clients) >= self._core.config.limits.connections:
            self._pause()
            return False
        try:
            sock, address = self._sock.accept()
        except BlockingIOError:
            return False
        except ConnectionError:
            return True  # it left before we looked
        except OSError as error:
            if error.errno not in _NO_ROOM:
                raise
            self._pause()
            return False
        self._core.stats.add("accepted")
        self._opens(self._core, sock, address[0])
        return True

    def _pause(self) -> None:
        self._core.stats.add("accept_pauses")
        self._core.reactor.modify(self._sock.fileno(), 0)
        self._core.deadlines.set(self, monotonic() + PAUSE_S)

    def expired(self, now: float) -> None:
        if self._open:
            self._core.reactor.modify(self._sock.fileno(), IN)

    def crashed(self) -> None:
        """A bug in accepting one connection must not close the port."""
        if self._open:
            self._pause()

    def close(self) -> None:
        """Stop accepting; who already waits in the queue is served first, not reset."""
        if not self._open:
            return
        while self._accept():
            pass
        self._open = False
        self._core.reactor.unregister(self._sock.fileno())
        self._sock.close()
