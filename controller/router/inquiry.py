"""A question to an engine off the hot path: one GET on a connection of its own, in plain Trio.

For metrics, health and model lists. Everything is bounded: time, bytes, and nothing is kept open.
"""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING, NamedTuple

import httptools
import trio

if TYPE_CHECKING:
    from controller.router.pool import Address
    from controller.router.table import Endpoint

LOOKUP_S = 2.0  # one name of an endpoint
MOST_LOOKUPS = 40
PIECE = 64 * 1024
_REQUEST = b"GET %b HTTP/1.1\r\n%b\r\naccept: */*\r\nconnection: close\r\n\r\n"


_LOOKUPS: trio.lowlevel.RunVar[trio.CapacityLimiter] = trio.lowlevel.RunVar("look-ups of names")


class Unanswered(Exception):
    """No usable answer came; the message says why."""


class Reply(NamedTuple):
    """Status and body."""

    status: int
    body: bytes


class _Answer:
    """What httptools calls while it parses."""

    def __init__(self) -> None:
        self.parts: list[bytes] = []
        self.size = 0
        self.complete = False
        self.ends_with_the_connection = False
        self._framed = False

    def on_header(self, name: bytes, _value: bytes) -> None:
        self._framed |= name.lower() in (b"content-length", b"transfer-encoding")

    def on_headers_complete(self) -> None:
        self.ends_with_the_connection = not self._framed

    def on_body(self, piece: bytes) -> None:
        self.parts.append(piece)
        self.size += len(piece)

    def on_message_complete(self) -> None:
        self.complete = True


async def look_up(endpoint: Endpoint) -> list[Address]:
    """The addresses of an endpoint's name, the first one preferred. Raises Unanswered when it has
    none."""
    host, port = endpoint.host, endpoint.port
    try:
        return _addresses(host, port, socket.AI_NUMERICHOST)
    except (OSError, UnicodeError):
        pass  # a name
    try:
        with trio.fail_after(LOOKUP_S):
            return await trio.to_thread.run_sync(
                _addresses, host, port, abandon_on_cancel=True, limiter=_limiter()
            )
    except (OSError, UnicodeError, trio.TooSlowError) as error:  # the second: no name can be so
        raise Unanswered(f"{host} has no address: {error}") from None


def _addresses(host: str, port: int, flags: int = 0) -> list[Address]:
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=flags)
    return [(family, where) for family, *_, where in found]


def _limiter() -> trio.CapacityLimiter:
    """Threads of their own: a name server that is silent holds each for long after we gave up, and
    bodies, rows and lines need theirs meanwhile."""
    try:
        return _LOOKUPS.get()
    except LookupError:
        made = trio.CapacityLimiter(MOST_LOOKUPS)
        _LOOKUPS.set(made)
        return made


async def get(
    address: Address, host_lines: bytes, path: bytes, *, within_s: float, most_bytes: int
) -> Reply:
    """The answer to GET `path`; `host_lines` as `engine_key.py` makes them.

    Raises Unanswered when none came in time or it is too large.
    """
    request = _REQUEST % (path, host_lines)
    try:
        with (
            trio.fail_after(within_s),
            trio.socket.socket(address[0], trio.socket.SOCK_STREAM) as sock,
        ):
            await sock.connect(address[1])
            stream = trio.SocketStream(sock)
            await stream.send_all(request)
            return await _read(stream, most_bytes)
    except trio.TooSlowError:
        raise Unanswered(f"no answer within {within_s:g} s") from None
    except (httptools.HttpParserError, httptools.HttpParserUpgrade):  # a 101 is the latter
        raise Unanswered("its answer is no HTTP") from None
    except (OSError, trio.BrokenResourceError) as error:
        raise Unanswered(str(error) or "the connection broke") from None


async def _read(stream: trio.SocketStream, most_bytes: int) -> Reply:
    answer = _Answer()
    parser = httptools.HttpResponseParser(answer)
    while not answer.complete:
        piece = await stream.receive_some(PIECE)
        if not piece:
            break
        parser.feed_data(piece)
        if answer.size > most_bytes:
            raise Unanswered(f"its answer is over {most_bytes} bytes")
    status = parser.get_status_code()
    if not (answer.complete or answer.ends_with_the_connection):
        raise Unanswered("its answer ended early")
    return Reply(status, b"".join(answer.parts))
