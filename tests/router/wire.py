"""A raw HTTP client for tests: what exactly came over the wire, and how it ended."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

import trio

if TYPE_CHECKING:
    from collections.abc import Callable

PATIENCE_S = 20.0
"""Nothing that works takes as long, on the busiest machine."""


class ShortAnswer(Exception):
    """The connection ended before the answer did; `body` is what had come."""

    def __init__(self, body: bytes, error: BaseException | None = None) -> None:
        super().__init__(f"answer ended early after {len(body)} bytes: {error!r}")
        self.body = body


@dataclass
class Answer:
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def code(self) -> str:
        return self.json["error"]["code"]

    @property
    def events(self) -> list[str]:
        """Payloads of the event stream."""
        return [line[6:] for line in self.body.decode().split("\n") if line.startswith("data: ")]


class Wire:
    """One connection to the router."""

    def __init__(self, stream: trio.SocketStream) -> None:
        self.stream = stream
        self.raw = stream  # under TLS
        self.buffer = b""

    @classmethod
    async def open(cls, port: int) -> Self:
        return cls(await trio.open_tcp_stream("127.0.0.1", port))

    async def send(self, data: bytes) -> None:
        await self.stream.send_all(data)

    async def post(self, path: str, document: Any, **headers: str) -> None:
        await self.send(post_bytes(path, document, **headers))

    async def chat(self, **fields: Any) -> None:
        headers = fields.pop("headers", {})
        await self.post("/v1/chat/completions", chat_body(**fields), **headers)

    async def get(self, path: str, key: str | None = "sk-test") -> Answer:
        auth = f"authorization: Bearer {key}\r\n" if key else ""
        await self.send(f"GET {path} HTTP/1.1\r\nhost: t\r\n{auth}\r\n".encode())
        return await self.answer()

    async def more(self) -> bool:
        """Read a piece; False at the end of the connection."""
        data = await self.stream.receive_some(65536)
        self.buffer += data
        return bool(data)

    async def until(self, mark: bytes) -> bytes:
        """Everything up to and with `mark`, taken out of the buffer."""
        with trio.fail_after(PATIENCE_S):
            while mark not in self.buffer:
                if not await self.more():
                    raise ShortAnswer(self.buffer)
        end = self.buffer.index(mark) + len(mark)
        taken, self.buffer = self.buffer[:end], self.buffer[end:]
        return taken

    async def exactly(self, count: int) -> bytes:
        with trio.fail_after(PATIENCE_S):
            while len(self.buffer) < count:
                if not await self.more():
                    raise ShortAnswer(self.buffer)
        taken, self.buffer = self.buffer[:count], self.buffer[count:]
        return taken

    async def head(self) -> tuple[int, dict[str, str]]:
        lines = (await self.until(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        pairs = [line.split(": ", 1) for line in lines[1:] if line]
        return int(lines[0].split()[1]), {name.lower(): value for name, value in pairs}

    async def answer(self, *, head_only: bool = False) -> Answer:
        """A whole answer; ShortAnswer when its framing was not completed."""
        status, headers = await self.head()
        body = b""
        try:
            if head_only or status < 200 or status == 204:
                pass
            elif headers.get("transfer-encoding") == "chunked":
                while True:
                    size = int((await self.until(b"\r\n"))[:-2], 16)
                    piece = await self.exactly(size + 2)
                    if size == 0:
                        break
                    body += piece[:-2]
            elif "content-length" in headers:
                body = await self.exactly(int(headers["content-length"]))
            else:
                while await self.more():
                    pass
                body, self.buffer = self.buffer, b""
        except (trio.BrokenResourceError, ShortAnswer) as error:
            raise ShortAnswer(body + getattr(error, "body", b""), error) from error
        return Answer(status, headers, body)

    async def answer_from_chunks(self) -> bytes:
        """The last 64 KiB of a stream whose beginning was read already, chunk marks taken out."""
        while not self.buffer.endswith(b"\r\n0\r\n\r\n"):
            with trio.fail_after(PATIENCE_S):
                if not await self.more():
                    raise ShortAnswer(self.buffer)
            self.buffer = self.buffer[-65536:]
        return self.buffer[: -len(b"\r\n0\r\n\r\n")]

    async def closed(self) -> bool:
        """Whether the router closes the connection without another byte."""
        with trio.fail_after(PATIENCE_S):
            try:
                return not await self.more()
            except trio.BrokenResourceError:
                return True

    def reset(self) -> None:
        """Leave rudely."""
        sock = self.raw.socket
        sock.setsockopt(trio.socket.SOL_SOCKET, trio.socket.SO_LINGER, b"\x01\0\0\0\0\0\0\0")
        sock.close()

    def close(self) -> None:
        self.raw.socket.close()


def chat_body(**fields: Any) -> dict[str, Any]:
    return {"model": "m", "messages": [{"role": "user", "content": "hi"}], **fields}


def post_bytes(path: str, document: Any, *, key: str | None = "sk-test", **headers: str) -> bytes:
    body = document if isinstance(document, bytes) else json.dumps(document).encode()
    lines = [f"POST {path} HTTP/1.1", "host: t", "content-type: application/json"]
    if key is not None:
        lines.append(f"authorization: Bearer {key}")
    lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    lines.append(f"content-length: {len(body)}")
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


def chunk_of(data: bytes) -> bytes:
    """One chunk of a body."""
    return b"%x\r\n%b\r\n" % (len(data), data)


async def until(condition: Callable[[], Any], seconds: float = PATIENCE_S) -> Any:
    """Wait for `condition` to hold; returns its value."""
    with trio.move_on_after(seconds):
        while not (value := condition()):
            await trio.sleep(0.005)  # the condition lives in other threads and callbacks
        return value
    raise AssertionError(f"did not hold within {seconds} s: {condition}")
