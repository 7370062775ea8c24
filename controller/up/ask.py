"""One streamed answer, as any client would get it: proof that the whole way works. Blocks."""

from __future__ import annotations

import http.client
import json
import time
from dataclasses import dataclass

QUESTION = "Write one sentence about the sea."
MOST_TOKENS = 40


class NotAnswered(Exception):
    """The router's or the engine's word instead of an answer. ``status`` is None without one."""

    def __init__(self, message: str, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status


@dataclass(frozen=True, slots=True)
class Answer:
    """What came, and when."""

    text: str
    first_token_s: float
    """From sending the request."""
    first_token_at: float
    """On the monotonic clock."""
    total_s: float
    pieces: int


def ask(host: str, port: int, key: str, model: str, timeout_s: float) -> Answer:
    """Stream one answer from ``model``; raises NotAnswered, also after ``timeout_s`` of silence."""
    body = {
        "model": model,
        "stream": True,
        "max_tokens": MOST_TOKENS,
        "messages": [{"role": "user", "content": QUESTION}],
    }
    headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
    connection = http.client.HTTPConnection(host, port, timeout=timeout_s)
    try:
        sent = time.monotonic()
        connection.request("POST", "/v1/chat/completions", json.dumps(body), headers)
        response = connection.getresponse()
        if response.status != 200:
            raise NotAnswered(_error(response.read(65536)), response.status)
        return _read(response, sent, timeout_s)
    except (OSError, http.client.HTTPException) as error:
        raise NotAnswered(f"the router at {host}:{port} gave no answer: {error!r}") from error
    finally:
        connection.close()


def not_ready_because(admin_port: int, timeout_s: float = 5.0) -> str | None:
    """Why the controller behind an admin port of this machine is not ready; None when it is."""
    connection = http.client.HTTPConnection("127.0.0.1", admin_port, timeout=timeout_s)
    try:
        connection.request("GET", "/readyz")
        response = connection.getresponse()
        said = response.read(65536).decode(errors="replace").strip()
    except (OSError, http.client.HTTPException) as error:
        return f"127.0.0.1:{admin_port} gives no answer: {error!r}"
    finally:
        connection.close()
    return None if response.status == 200 else said


def _error(body: bytes) -> str:
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return body.decode(errors="replace")[:500]


def _read(response: http.client.HTTPResponse, sent: float, timeout_s: float) -> Answer:
    first: float | None = None
    pieces: list[str] = []
    while line := response.readline():
        if first is None and time.monotonic() - sent > timeout_s:
            raise NotAnswered("the stream is open and brings no token")  # but signs of life
        data = line.removeprefix(b"data:").strip()
        if not line.startswith(b"data:") or data == b"[DONE]":
            continue
        event = json.loads(data)
        if "error" in event:
            raise NotAnswered(str(event["error"].get("message")))
        for choice in event.get("choices") or ():
            if content := choice.get("delta", {}).get("content"):
                first = first or time.monotonic()
                pieces.append(content)
    if first is None:
        raise NotAnswered("the stream ended without a token")
    return Answer("".join(pieces), first - sent, first, time.monotonic() - sent, len(pieces))
