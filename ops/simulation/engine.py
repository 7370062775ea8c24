"""A fake engine per shard: takes a while to start, then answers on its own address and port."""

from __future__ import annotations

import json
import random
from typing import TYPE_CHECKING

import trio

from sql.states import SHARD_FINAL

if TYPE_CHECKING:
    from agent.assignment import Assignment
    from agent.state import Record
    from agent.work import News
    from ops.simulation.fleet import Engines

MAX_REQUEST = 1 << 20
ANSWER_S = 30.0


class SimShard:
    """Stands where agent.supervise.Shard does: same life, no process."""

    def __init__(
        self, record: Record, assignment: Assignment, engines: Engines, news: News
    ) -> None:
        self.record = record
        self.assignment = assignment
        self.finished = trio.Event()
        self._engines = engines
        self._news = news
        self._work = trio.CancelScope()
        # Seeded by the shard, so that a run can be repeated.
        self._chance = random.Random(assignment.shard)

    @property
    def final(self) -> bool:
        """Whether it is over."""
        return self.record.state in SHARD_FINAL

    def stop(self) -> None:
        """Stop it for good."""
        self._work.cancel()

    def suspend(self) -> None:
        """The agent ends: nothing of a fake engine outlives it."""
        self._work.cancel()

    def crash(self) -> None:
        """End as by SIGKILL from outside."""
        self.record.exit_code, self.record.log_tail = -9, "simulated last words"
        self._set("failed", "the engine was ended by signal 9")
        self._work.cancel()

    async def run(self) -> None:
        """Start, serve, stop."""
        try:
            if not self.final:
                with self._work:
                    await self._serve()
                if not self.final:
                    self._set("stopped")
        finally:
            self.finished.set()

    async def _serve(self) -> None:
        self._set("starting")
        await trio.sleep(self._chance.uniform(*self._engines.start_s))
        if self._chance.random() < self._engines.fail_share:
            self.record.exit_code, self.record.log_tail = 1, "simulated failure"
            self._set("failed", "the engine exited with code 1")
            return
        try:
            listeners = await trio.open_tcp_listeners(
                self.assignment.port, host=self.assignment.host
            )
        except OSError as error:
            self._set("failed", f"port {self.assignment.port} of {self.assignment.host}: {error}")
            return
        self._set("ready")
        await trio.serve_listeners(self._answer, listeners)

    def _set(self, state: str, error: str | None = None) -> None:
        self.record.state, self.record.error = state, error
        self._news.tell()

    async def _answer(self, stream: trio.SocketStream) -> None:
        with trio.move_on_after(ANSWER_S):
            try:
                request = await _read(stream)
                if request:
                    await stream.send_all(self._response(request))
            except (trio.BrokenResourceError, ValueError):
                pass  # the client left or spoke no HTTP
        await stream.aclose()

    def _response(self, request: bytes) -> bytes:
        model = self.assignment.model
        if request.startswith(b"GET /v1/models"):
            document: dict[str, object] = {
                "object": "list",
                "data": [{"id": model, "object": "model"}],
            }
        elif request.startswith(b"GET"):
            document = {"status": "ok"}
        else:
            document = {
                "id": "sim",
                "object": "chat.completion",
                "model": model,
                "choices": [
                    {
                        "index": 0,
                        "finish_reason": "stop",
                        "message": {"role": "assistant", "content": "simulated"},
                    }
                ],
                "usage": {"prompt_tokens": 8, "completion_tokens": 1, "total_tokens": 9},
            }
        body = json.dumps(document).encode()
        head = ("HTTP/1.1 200 OK", "content-type: application/json", "connection: close")
        return "\r\n".join((*head, f"content-length: {len(body)}", "", "")).encode() + body


async def _read(stream: trio.SocketStream) -> bytes:
    """One whole request; empty when the client only connected."""
    data = b""
    while b"\r\n\r\n" not in data:
        part = await stream.receive_some(65536)
        if not part or len(data) > MAX_REQUEST:
            return b""
        data += part
    head, _, body = data.partition(b"\r\n\r\n")
    lengths = [
        int(line.split(b":")[1])
        for line in head.split(b"\r\n")
        if line.lower().startswith(b"content-length:")
    ]
    while len(body) < min(sum(lengths), MAX_REQUEST):
        part = await stream.receive_some(65536)
        if not part:
            break
        body += part
    return head + b"\r\n\r\n" + body
