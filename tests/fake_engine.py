"""A scriptable engine on loopback: speaks the OpenAI API, misbehaves on command, keeps a record.

Each request says how it wants to be treated: a JSON object in the header `X-Fake`, or in the
body's field `fake`, or the engine's `default`. One thread per connection, raw sockets, so that
every byte and every close is ours to decide. Also a program:
`python tests/fake_engine.py --port 0` prints `{"port": N}`; GET /_records tells what it saw, and
SIGUSR1 lets all that is held go on.

Keys of a behaviour (all optional):
  delay         seconds before the head          gap        seconds between stream events
  first_delay   seconds between head and body    tokens     number of stream events
  status        HTTP status of the answer        body       answer document, instead of a chat
  text          content of each token            line_end   "\\n", "\\r\\n" or "\\r"
  prefix        "data: " or "data:"              byte_gap   seconds between single bytes
  usage         false: never tell usage          usage_always: tell it unasked
  extra         raw text put before the usage    raw        the whole answer, as text or bytes
  kind          content type of a plain answer   plain      true: never a stream
  done          false: no [DONE]                 framing    "chunked", "length" or "close"
  error_first   event {"error": ...} first       error_at   the same after so many tokens
  die_at        stop after so many tokens/bytes, by `die`: "rst", "fin", "kill" (the process)
  close         "always": no byte, just close; "reused": only on a connection used before
  close_after   true: close the connection after this answer without saying so
  stateful      true: /v1/responses are kept, and chains go on from kept ones only
  hold          true: wait before the head until `FakeEngine.release` lets one go on
  hold_after    a stream waits so after this many tokens, or at each number of a list
  gzip          true: compress a plain answer or the stream `raw`, and say so
  retry_after   value of that header in a plain answer
  headers       raw header lines in the head of an answer
  end_delay     seconds between the last byte of an answer and the end of its framing
  metrics       page of /metrics, a status instead, or null: hang     health     status of /health
  api_key       all below /v1 is answered 401 without it, as vLLM does
  models        names in /v1/models, a status instead                 (GET obeys engines' defaults)
"""

from __future__ import annotations

import argparse
import contextlib
import gzip
import json
import os
import select
import signal
import socket
import struct
import threading
import time
import weakref
from dataclasses import dataclass, field
from typing import Any, Self


@dataclass
class Record:
    """One request as the engine saw it."""

    method: str
    path: str
    headers: dict[str, str]
    body: bytes
    connection: int
    nth: int  # on its connection, from 1
    started: float = field(default_factory=time.monotonic)
    closed: float | None = None  # when the peer's close was seen while we worked
    answered: bool = False

    @property
    def document(self) -> Any:
        return json.loads(self.body)


class _Gone(Exception):
    """The peer closed, or we decided to: stop working on this connection."""


class FakeEngine:
    """Runs in threads of this process between `start` and `stop`."""

    def __init__(
        self, default: dict[str, Any] | None = None, port: int = 0, host: str = "127.0.0.1"
    ) -> None:
        self.default = default or {}
        self.host = host
        self.records: list[Record] = []
        self.stored: set[str] = set()
        self.connections = 0
        self._want_port = port
        self._lock = threading.Lock()
        self._open: set[socket.socket] = set()
        self._threads: list[threading.Thread] = []
        self._stopping = False
        self._held = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_SEMAPHORE | os.EFD_CLOEXEC)
        weakref.finalize(self, os.close, self._held)  # when no thread of ours waits for it any more
        self.port = 0

    @property
    def url(self) -> str:
        return f"http://{self.host}:{self.port}"

    def start(self) -> FakeEngine:
        self._stopping = False
        listener = socket.socket()
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((self.host, self.port or self._want_port))
        listener.listen(512)
        self.port = listener.getsockname()[1]
        self._listener = listener
        thread = threading.Thread(target=self._accept, args=(listener,), daemon=True)
        self._threads = [thread]
        thread.start()
        return self

    def stop(self) -> None:
        """Close everything at once, as a killed engine would."""
        self._stopping = True
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._threads[0].join(5)  # a connection accepted just now is known by then
        self.drop_connections()
        for thread in self._threads:
            thread.join(5)
        self._listener.close()

    def drop_connections(self) -> None:
        """Close every open connection."""
        with self._lock:
            for sock in self._open:
                with contextlib.suppress(OSError):
                    sock.shutdown(socket.SHUT_RDWR)

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()

    def release(self, number: int = 1) -> None:
        """Let so many held requests go on; those to come, when fewer are held."""
        os.eventfd_write(self._held, number)

    def held(self) -> int:
        """Requests that are being worked on."""
        return sum(1 for r in self.chats() if r.closed is None and not r.answered)

    def chats(self) -> list[Record]:
        """Requests for inference only."""
        return [record for record in self.records if record.method == "POST"]

    def _accept(self, listener: socket.socket) -> None:
        while not self._stopping:
            try:
                sock = listener.accept()[0]
            except OSError:
                return
            with self._lock:
                self._open.add(sock)
                self.connections += 1
                number = self.connections
            thread = threading.Thread(target=self._serve, args=(sock, number), daemon=True)
            self._threads.append(thread)
            thread.start()

    def _serve(self, sock: socket.socket, number: int) -> None:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        nth = 0
        try:
            while True:
                nth += 1
                record = _read_request(sock, number, nth)
                if record is None:
                    return
                self.records.append(record)
                _Answer(self, sock, record).run()
                record.answered = True
        except (_Gone, OSError):
            pass
        finally:
            with self._lock:
                self._open.discard(sock)
            sock.close()


def _bytes(text: str | bytes) -> bytes:
    return text.encode() if isinstance(text, str) else text


def _read_request(sock: socket.socket, number: int, nth: int) -> Record | None:
    data = b""
    while b"\r\n\r\n" not in data:
        more = sock.recv(65536)
        if not more:
            return None
        data += more
    head, _, body = data.partition(b"\r\n\r\n")
    lines = head.decode("latin-1").split("\r\n")
    method, path, _ = lines[0].split(" ")
    pairs = [line.split(":", 1) for line in lines[1:]]
    headers: dict[str, str] = {}
    for name, value in pairs:  # one that comes twice is seen to
        before = headers.get(name.lower())
        headers[name.lower()] = value.strip() if before is None else f"{before}, {value.strip()}"
    length = int(headers.get("content-length", "0"))
    parts = [body]
    have = len(body)
    while have < length:
        more = sock.recv(1 << 20)
        if not more:
            return None
        parts.append(more)
        have += len(more)
    return Record(method, path, headers, b"".join(parts), number, nth)


class _Answer:
    """Treats one request as its behaviour says."""

    def __init__(self, engine: FakeEngine, sock: socket.socket, record: Record) -> None:
        self.engine = engine
        self.sock = sock
        self.record = record
        self.asked: dict[str, Any] = {}
        if record.body:
            with contextlib.suppress(ValueError):
                document = json.loads(record.body)
                self.asked = document if isinstance(document, dict) else {}
        told = record.headers.get("x-fake")
        self.how = {**engine.default, **self.asked.get("fake", {}), **json.loads(told or "{}")}

    def run(self) -> None:
        how, path = self.how, self.record.path
        close = how.get("close")
        if close == "always" or (close == "reused" and self.record.nth > 1):
            raise _Gone
        wanted, given = how.get("api_key"), self.record.headers.get("authorization")
        if wanted and path.startswith("/v1/") and given != f"Bearer {wanted}":
            told = f"Incorrect API key provided: {given}" + how.get("long", "")
            self._plain({"error": {"message": told, "code": "invalid_api_key"}}, 401)
            return
        if self.record.method == "GET":
            self._get(path)
            return
        while how.get("hold") and not self._may_go_on():
            pass
        self._wait(how.get("delay", 0))
        if how.get("status", 200) != 200:
            error = {"message": "told to fail", "type": "server_error", "code": how["status"]}
            self._plain(how.get("body", {"error": error}), how["status"])
        elif how.get("stateful") and path == "/v1/responses":
            self._respond()
        elif self.asked.get("stream") and not how.get("plain"):
            self._stream()
        else:
            self._plain(how.get("body", self._document()), 200)
        if how.get("close_after"):
            raise _Gone

    def _get(self, path: str) -> None:
        if path == "/health":
            self._plain({"status": "ok"}, self.how.get("health", 200))
        elif path == "/v1/models":
            names = self.how.get("models", ["m"])
            status = names if isinstance(names, int) else 200
            data = [] if status != 200 else [{"id": name, "object": "model"} for name in names]
            self._plain({"object": "list", "data": data}, status)
        elif path == "/metrics":
            page = self.how.get("metrics", "vllm:num_requests_running 0\n")
            if page is None:
                self._wait(60)
            elif isinstance(page, int):
                self._plain({"error": "told to fail"}, page)
            else:
                self._send_all(200, "text/plain", page.encode())
        elif path == "/_records":
            self._plain([_as_json(record) for record in self.engine.records], 200)
        else:
            self._plain({"error": {"message": "not found"}}, 404)

    def _usage(self) -> dict[str, Any]:
        tokens = self.how.get("tokens", 3)
        return {"prompt_tokens": 7, "completion_tokens": tokens, "total_tokens": 7 + tokens,
                "prompt_tokens_details": {"cached_tokens": 2}}  # fmt: skip

    def _document(self) -> dict[str, Any]:
        model = self.asked.get("model", "m")
        usage = {} if self.how.get("usage") is False else {"usage": self._usage()}
        if self.record.path.endswith("/embeddings"):
            vector = {"object": "embedding", "index": 0, "embedding": [0.5, -0.25]}
            return {"object": "list", "data": [vector], "model": model, **usage}
        text = self.how.get("text", "tok") * self.how.get("tokens", 3)
        message = {"role": "assistant", "content": text}
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        return {"id": "c-1", "object": "chat.completion", "created": 1, "model": model,
                "choices": [choice], **usage}  # fmt: skip

    def _plain(self, document: Any, status: int) -> None:
        body = json.dumps(document, ensure_ascii=False).encode()
        if status == 200 and "raw" in self.how:
            body = _bytes(self.how["raw"])
        self._send_all(status, self.how.get("kind", "application/json"), body)

    def _send_all(self, status: int, kind: str, body: bytes) -> None:
        extra = ""
        if self.how.get("gzip"):
            body = gzip.compress(body)
            extra = "content-encoding: gzip\r\n"
        if self.how.get("retry_after"):
            extra += f"retry-after: {self.how['retry_after']}\r\n"
        framing = self.how.get("framing", "length")
        self._head(status, kind, framing, extra, len(body))
        self._wait(self.how.get("first_delay", 0))
        die_at = self.how.get("die_at")
        sent = body if die_at is None else body[:die_at]
        self._body(sent, framing)
        if die_at is not None:
            self._die()
        self._end(framing)

    def _head(self, status: int, kind: str, framing: str, extra: str = "", length: int = 0) -> None:
        lines = {"length": f"content-length: {length}\r\n", "close": "connection: close\r\n",
                 "chunked": "transfer-encoding: chunked\r\n"}  # fmt: skip
        extra += self.how.get("headers", "")
        head = f"HTTP/1.1 {status} Fake\r\ncontent-type: {kind}\r\n{extra}{lines[framing]}\r\n"
        self._send(head.encode())

    def _body(self, data: bytes, framing: str) -> None:
        if framing == "chunked" and data:
            data = b"%x\r\n%b\r\n" % (len(data), data)
        gap = self.how.get("byte_gap")
        if gap is None:
            self._send(data)
            return
        for byte in data:
            self._send(bytes([byte]))
            self._wait(gap)

    def _end(self, framing: str) -> None:
        self._wait(self.how.get("end_delay", 0))
        if framing == "chunked":
            self._send(b"0\r\n\r\n")
        elif framing == "close":
            raise _Gone

    def _respond(self) -> None:
        previous, stored = self.asked.get("previous_response_id"), self.engine.stored
        if previous is not None and previous not in stored:
            self._plain({"error": {"message": "no such response", "code": 404}}, 404)
            return
        identity = f"resp_{self.engine.port}.{len(stored)}"
        stored.add(identity)
        document = {"id": identity, "object": "response", "model": self.asked.get("model"),
                    "status": "completed", "output": [], "previous_response_id": previous,
                    "usage": {"input_tokens": 7, "output_tokens": 3}}  # fmt: skip
        if not self.asked.get("stream"):
            self._plain(document, 200)
            return
        self._head(200, "text/event-stream; charset=utf-8", "chunked")
        for kind in ("response.created", "response.completed"):
            self._event({"type": kind, "response": document}, "chunked")
        self._end("chunked")

    def _stream(self) -> None:
        how = self.how
        framing = how.get("framing", "chunked")
        extra = "content-encoding: gzip\r\n" if how.get("gzip") else ""
        self._head(200, "text/event-stream; charset=utf-8", framing, extra)
        self._wait(how.get("first_delay", 0))
        if "raw" in how:
            raw = _bytes(how["raw"])
            self._body(gzip.compress(raw) if how.get("gzip") else raw, framing)
            self._end(framing)
            return
        if how.get("error_first"):
            self._event(how["error_first"], framing)
        else:
            self._tokens(framing)
        if how.get("done", True):
            self._event("[DONE]", framing)
        self._end(framing)

    def _tokens(self, framing: str) -> None:
        how = self.how
        total, stops = how.get("tokens", 3), how.get("hold_after")
        for number in range(total):
            while number in (stops if isinstance(stops, list) else [stops]):
                if self._may_go_on():
                    break
            if how.get("die_at") == number:
                self._die()
            if how.get("error_at") == number:
                self._event({"error": {"message": "engine broke", "code": 500}}, framing)
                return
            self._event(self._chunk(number, total), framing)
            self._wait(how.get("gap", 0))
        if how.get("extra"):
            self._body(how["extra"].encode(), framing)
        options = self.asked.get("stream_options") or {}
        wanted = options.get("include_usage") or how.get("usage_always")
        if wanted and how.get("usage") is not False:
            self._event({**self._chunk(0, 0), "choices": [], "usage": self._usage()}, framing)

    def _chunk(self, number: int, total: int) -> dict[str, Any]:
        finish = "stop" if number == total - 1 else None
        choice = {"index": 0, "delta": {"content": self.how.get("text", f"tok{number} ")},
                  "finish_reason": finish}  # fmt: skip
        return {"id": "c-1", "object": "chat.completion.chunk", "created": 1,
                "model": self.asked.get("model", "m"), "choices": [choice]}  # fmt: skip

    def _event(self, document: Any, framing: str) -> None:
        text = document if isinstance(document, str) else json.dumps(document, ensure_ascii=False)
        end = self.how.get("line_end", "\n")
        prefix = self.how.get("prefix", "data: ")
        self._body(f"{prefix}{text}{end}{end}".encode(), framing)

    def _die(self) -> None:
        how = self.how.get("die", "fin")
        if how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "rst":
            self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        raise _Gone

    def _send(self, data: bytes) -> None:
        try:
            self.sock.sendall(data)
        except OSError:
            self.record.closed = time.monotonic()
            raise

    def _may_go_on(self) -> bool:
        """Whether `release` let this one go on; raises _Gone when the peer closes first."""
        ready = select.select([self.sock, self.engine._held], [], [])[0]
        if self.sock in ready:
            self.record.closed = time.monotonic()
            raise _Gone
        try:
            os.eventfd_read(self.engine._held)
        except BlockingIOError:
            return False  # another was faster
        return True

    def _wait(self, seconds: float) -> None:
        """Pass time, but notice at once when the peer closes."""
        until = time.monotonic() + seconds
        while seconds > 0 and (left := until - time.monotonic()) > 0:
            readable = select.select([self.sock], [], [], left)[0]
            if readable:
                try:
                    more = self.sock.recv(1, socket.MSG_PEEK)
                except OSError:
                    more = b""
                if not more:
                    self.record.closed = time.monotonic()
                    raise _Gone
                time.sleep(left)  # pipelined bytes: they are for later
                return


def _as_json(record: Record) -> dict[str, Any]:
    return {
        "method": record.method, "path": record.path, "headers": record.headers,
        "body": record.body.decode("utf-8", "replace"), "connection": record.connection,
        "nth": record.nth, "closed": record.closed is not None, "answered": record.answered,
        "started": record.started,  # CLOCK_MONOTONIC: the same clock in every process
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--default", default="{}", help="behaviour of every request, JSON")
    options = parser.parse_args()
    told = {signal.SIGTERM, signal.SIGINT, signal.SIGUSR1}
    signal.pthread_sigmask(signal.SIG_BLOCK, told)  # first: its threads must not take them either
    engine = FakeEngine(json.loads(options.default), options.port, options.host).start()
    print(json.dumps({"port": engine.port}), flush=True)
    while signal.sigwait(told) == signal.SIGUSR1:
        engine.release(1 << 16)
    engine.stop()


if __name__ == "__main__":
    main()
