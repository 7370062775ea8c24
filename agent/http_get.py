"""One HTTP GET to an engine, with a deadline and a bound: all that readiness needs.

Each call has a connection of its own: a cancelled call can poison no pool (case H01).
"""

from __future__ import annotations

from dataclasses import dataclass, field

import httptools
import trio

MAX_BYTES = 1 << 20


class NoAnswer(Exception):
    """No complete HTTP answer came; the message says why."""


@dataclass(slots=True)
class Answer:
    """Status and body; filled by the parser's callbacks."""

    status: int = 0
    body: bytearray = field(default_factory=bytearray)
    complete: bool = False

    def on_body(self, data: bytes) -> None:
        """Called by httptools."""
        self.body += data

    def on_message_complete(self) -> None:
        """Called by httptools."""
        self.complete = True


async def get(
    host: str, port: int, path: str, *, timeout_s: float, bearer: str | None = None
) -> Answer:
    """GET a path; raises NoAnswer when no complete answer of at most 1 MiB came in time."""
    name = f"[{host}]" if ":" in host else host
    lines = [f"GET {path} HTTP/1.1", f"Host: {name}:{port}", "Connection: close", "Accept: */*"]
    if bearer:
        lines.append(f"Authorization: Bearer {bearer}")
    request = "\r\n".join([*lines, "", ""]).encode()
    try:
        with trio.fail_after(timeout_s):
            stream = await trio.open_tcp_stream(host, port)
            try:
                await stream.send_all(request)
                return await _read(stream)
            finally:
                await trio.aclose_forcefully(stream)
    except trio.TooSlowError:
        raise NoAnswer(f"no answer from {name}:{port}{path} in {timeout_s:g} s") from None
    except (OSError, trio.BrokenResourceError) as error:
        raise NoAnswer(f"{name}:{port}{path} cannot be reached: {error}") from error
    except httptools.HttpParserError as error:
        raise NoAnswer(f"{name}:{port}{path} does not speak HTTP: {error}") from error


async def _read(stream: trio.SocketStream) -> Answer:
    answer = Answer()
    parser = httptools.HttpResponseParser(answer)
    while not answer.complete:
        data = await stream.receive_some(65536)
        if not data:
            break  # an answer without a length ends with the connection
        parser.feed_data(data)
        if len(answer.body) > MAX_BYTES:
            raise NoAnswer(f"the answer is over {MAX_BYTES} bytes")
    try:
        answer.status = parser.get_status_code()
    except httptools.HttpParserError:
        answer.status = 0
    if not answer.status:
        raise NoAnswer("the connection was closed without an answer")
    return answer
