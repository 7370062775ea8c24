"""Clients that send requests all the time and count what they get. Plain ones, without retries."""

from __future__ import annotations

import http.client
import json
import threading
import time
import uuid
from dataclasses import dataclass, field
from typing import Any, Self

PATIENCE_S = 60.0


@dataclass(frozen=True, slots=True)
class Sent:
    """One request and what became of it. Times are monotonic."""

    id: str
    port: int
    at: float
    took_s: float
    status: int | None
    """None: no answer at all."""
    error: str | None
    retry_after: str | None = None

    @property
    def failed(self) -> bool:
        return self.status != 200 or self.error is not None


def send(
    port: int, key: str, model: str, *, stream: bool, wait: str | None = None, **more: Any
) -> Sent:
    """One chat request on a connection of its own, read to its end; `wait`: seconds for a wake."""
    name, at = uuid.uuid4().hex, time.monotonic()
    body = {"model": model, "stream": stream, "max_tokens": 4, **more}
    body["messages"] = [{"role": "user", "content": "hello"}]
    headers = {"Authorization": f"Bearer {key}", "X-Request-Id": name}
    headers |= {} if wait is None else {"X-Llmgw-Wait": wait}
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE_S)
    status = retry_after = None
    try:
        connection.request("POST", "/v1/chat/completions", json.dumps(body), headers)
        answer = connection.getresponse()
        status, retry_after = answer.status, answer.getheader("Retry-After")
        error = _fault(status, answer.read(), stream=stream)
    except (OSError, http.client.HTTPException) as problem:
        error = repr(problem)
    finally:
        connection.close()
    return Sent(name, port, at, time.monotonic() - at, status, error, retry_after)


def _fault(status: int, body: bytes, *, stream: bool) -> str | None:
    """What is wrong with a whole answer; a stream must say its end and no error."""
    if status == 200 and stream:
        whole = body.endswith(b"data: [DONE]\n\n") and b'"error"' not in body
        return None if whole else f"broken stream: {body[-300:]!r}"
    document = json.loads(body)
    return None if status == 200 and document["choices"] else str(document["error"]["message"])


@dataclass
class Traffic:
    """Requests to every port, plain and streamed in turn, for the length of a `with` block."""

    ports: list[int]
    key: str
    model: str
    pace_s: float = 0.06
    sent: list[Sent] = field(default_factory=list)

    def __enter__(self) -> Self:
        self._over = threading.Event()
        self._threads = [threading.Thread(target=self._go_on, args=(port,)) for port in self.ports]
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join(PATIENCE_S)

    def _go_on(self, port: int) -> None:
        stream = False
        while not self._over.wait(self.pace_s):
            stream = not stream
            self.sent.append(send(port, self.key, self.model, stream=stream))

    @property
    def failures(self) -> list[Sent]:
        return [sent for sent in self.sent if sent.failed]

    def later(self) -> Sent:
        """A request that begins after this call, when it is over."""
        now = time.monotonic()
        while time.monotonic() < now + PATIENCE_S:
            for sent in self.sent:
                if sent.at > now:
                    return sent
            time.sleep(self.pace_s)
        raise AssertionError("no more requests are sent")

    def all_answered(self, at_least: int = 10) -> None:
        """No request failed, and there were enough to mean something."""
        assert not self.failures, f"{len(self.failures)} of {len(self.sent)}: {self.failures[:5]}"
        assert len(self.sent) >= at_least, f"only {len(self.sent)} requests were sent"


class Stream:
    """One long answer that is being read in the background."""

    def __init__(self, port: int, key: str, model: str, **more: Any) -> None:
        self.sent: Sent | None = None
        self._call = lambda: send(port, key, model, stream=True, **more)
        self._thread = threading.Thread(target=self._read)
        self._thread.start()

    def _read(self) -> None:
        self.sent = self._call()

    @property
    def running(self) -> bool:
        return self.sent is None

    def finished(self) -> Sent:
        """Its outcome, when it has ended."""
        self._thread.join(PATIENCE_S)
        assert self.sent is not None, "the stream goes on and on"
        return self.sent
