"""TLS on the client port: the same client connection, its bytes through `ssl.MemoryBIO`.

Only loaded when a certificate is configured. Handshakes run on the reactor (about 1 ms of CPU
each), a few in a turn; connections that stand pay for their bytes alone.
"""

from __future__ import annotations

import ssl
from contextlib import suppress
from typing import TYPE_CHECKING, Final

from controller.router.client import ClientConnection
from controller.router.clock import monotonic
from controller.router.connection import RECEIVE_BYTES
from controller.router.dialect import CHAT
from controller.router.errors import invalid
from controller.router.http1 import answer

if TYPE_CHECKING:
    import socket
    from os import PathLike

    from controller.router.core import Core
    from controller.router.reactor import Reactor

HANDSHAKES_IN_TURN: Final = 4
"""Hundreds of clients come back at once when a load balancer or another router restarts: all of
their handshakes in one turn held up every stream for 100 ms and more."""

_NO_TLS = answer(
    400,
    [(b"content-type", b"application/json")],
    CHAT.error(invalid("tls_required", "This port speaks TLS: use https:// in the URL.")),
    close=True,
)


def server_context(cert: PathLike[str], key: PathLike[str]) -> ssl.SSLContext:
    """TLS 1.2 or later for HTTP/1.1. Raises OSError or ValueError when the files are no pair."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.options |= ssl.OP_NO_RENEGOTIATION
    context.set_alpn_protocols(["http/1.1"])
    context.load_cert_chain(cert, key, password=str)  # else an encrypted key asks on the terminal
    return context


class Certificate:
    """The certificate of the client port, as it was read last."""

    def __init__(self, cert: PathLike[str], key: PathLike[str]) -> None:
        self._files = cert, key
        self._context = server_context(cert, key)
        self._left = HANDSHAKES_IN_TURN

    def read_again(self) -> None:
        """For connections from now on. Raises as `server_context`; the old one then stays."""
        self._context = server_context(*self._files)

    def open(self, core: Core, sock: socket.socket, address: str) -> ClientConnection:
        return TlsClientConnection(core, sock, address, self._context, self)

    def has_turn(self, reactor: Reactor) -> bool:
        """Whether one more handshake may go on in this turn."""
        if self._left == 0:
            return False
        if self._left == HANDSHAKES_IN_TURN:
            reactor.call_soon(self._next_turn)
        self._left -= 1
        return True

    def _next_turn(self) -> None:
        self._left = HANDSHAKES_IN_TURN


class TlsClientConnection(ClientConnection):
    """A client whose bytes are encrypted. An end without close_notify counts as any other end."""

    __slots__ = ("_certificate", "_incoming", "_outgoing", "_shaken", "_tls")

    def __init__(
        self,
        core: Core,
        sock: socket.socket,
        address: str,
        context: ssl.SSLContext,
        certificate: Certificate,
    ) -> None:
        self._certificate = certificate
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._incoming, self._outgoing, server_side=True)
        self._shaken = False
        super().__init__(core, sock, address)
        core.deadlines.set(self, monotonic() + core.config.timeouts.handshake_s)

    def received(self, data: bytes) -> None:
        if self._lingering:
            super().received(data)
            return
        self._incoming.write(data)
        try:
            if not self._shaken:
                self._shake()
            ended = self._read()
        except ssl.SSLWantReadError:
            self._send_encrypted()
        except ssl.SSLError as error:
            self._broken(error)
        else:
            if ended:
                self._end(None)

    def _receive(self) -> None:
        """What waits for its turn stays in the kernel, and is told again in the next one."""
        if self._shaken or self._lingering or self._certificate.has_turn(self.reactor):
            super()._receive()

    def _read(self) -> bool:
        """Whether the client's close_notify came. Nothing is read after ours: what comes then
        would be an error, and that a reset, which destroys our answer."""
        while self.fd >= 0 and not self._lingering:
            plain = self._tls.read(RECEIVE_BYTES)
            if not plain:
                return True
            super().received(plain)
        return False

    def _put(self, data: bytes) -> None:
        if data and self.fd >= 0:
            self._tls.write(data)
            self._send_encrypted()

    def half_close(self) -> None:
        self._say_goodbye()
        super().half_close()

    def close(self) -> None:
        if self.fd >= 0 and self.out is None:
            self._say_goodbye()
        super().close()

    def reset(self) -> None:
        self._shaken = False  # no close_notify: it would make a short answer look whole
        super().reset()

    def _shake(self) -> None:
        self._tls.do_handshake()
        self._shaken = True
        self._send_encrypted()
        self._set_deadline()

    def _set_deadline(self) -> None:
        if self._shaken:  # till then the whole handshake has one
            super()._set_deadline()

    def _broken(self, error: ssl.SSLError) -> None:
        self._core.stats.add("tls_failures" if self._shaken else "tls_handshake_failures")
        self._send_encrypted()  # the alert
        self._shaken = False
        if error.reason == "HTTP_REQUEST":
            super()._put(_NO_TLS)
            self._lingering = True  # its body may still be coming
            self._shut()
        else:
            self._end(error)

    def _send_encrypted(self) -> None:
        if self._outgoing.pending:
            super()._put(self._outgoing.read())

    def _say_goodbye(self) -> None:
        """close_notify, as far as the kernel takes it: who has left needs none."""
        if self._shaken:
            self._shaken = False
            with suppress(ssl.SSLError):
                self._tls.unwrap()
            with suppress(OSError):
                self.sock.send(self._outgoing.read())
