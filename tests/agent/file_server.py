"""What the tests of downloads share: a server of files and a hub, and ways to fetch from it."""

from __future__ import annotations

import hashlib
import json
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agent.config import engine_environment
from agent.weights import Weights

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).parents[2]
DATA = bytes(range(256)) * 4096  # 1 MiB
SHA = hashlib.sha256(DATA).hexdigest()


class Server:
    """Serves DATA with ranges; can hold back, cut, corrupt, and counts what it sent."""

    def __init__(self) -> None:
        self.data, self.tag = DATA, '"v1"'
        self.cut_after: int | None = None
        self.hold_after: int | None = None
        self.release = threading.Event()
        self.ranges: list[str | None] = []
        self.files: dict[str, bytes] = {}
        self.sha256: dict[str, str] = {}
        self.sized = True
        self.announced: int | None = None
        """What a file's length is said to be, when not its own."""
        self.tokens: set[str | None] = set()
        self.raw: list[bytes] = []
        """Answers to the next requests, byte for byte; the connection ends after each."""
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_HEAD(self) -> None:
                outer.answer(self, body=False)

            def do_GET(self) -> None:
                outer.answer(self, body=True)

            def log_message(self, *_: object) -> None:
                pass

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_port}"

    def answer(self, to: BaseHTTPRequestHandler, *, body: bool) -> None:
        self.tokens.add(to.headers.get("Authorization"))
        if to.path.startswith("/api/models/"):
            listed = [self.sibling(name) for name in self.files]
            tree = [
                {"type": "file", "path": n, "size": len(d), "oid": "0" * 40}
                for n, d in self.files.items()
            ]
            info = {"id": "org/tiny", "sha": "c" * 40, "siblings": listed}
            raw = json.dumps(tree if "/tree/" in to.path else info).encode()
            to.send_response(200)
            to.send_header("Content-Type", "application/json")
            to.send_header("Content-Length", str(len(raw)))
            to.end_headers()
            to.wfile.write(raw)
            return
        data = self.files.get(to.path.rpartition("/")[2], self.data)
        if to.path == "/gone":
            to.send_error(404)
            return
        wanted = to.headers.get("Range")
        if body:
            self.ranges.append(wanted)
        if self.raw:
            to.wfile.write(self.raw.pop(0))
            return
        start = 0
        if wanted and to.headers.get("If-Range", self.tag) == self.tag:
            start = int(wanted.removeprefix("bytes=").partition("-")[0])
            to.send_response(206)
            to.send_header("Content-Range", f"bytes {start}-{len(data) - 1}/{len(data)}")
        else:
            to.send_response(200)
        to.send_header("Content-Length", str((self.announced or len(data)) - start))
        to.send_header("ETag", self.tag)
        to.send_header("X-Repo-Commit", "c" * 40)
        to.send_header("Accept-Ranges", "bytes")
        to.end_headers()
        if body:
            self.send(to, data[start:])

    def sibling(self, name: str) -> dict[str, Any]:
        """A file as the hub lists it."""
        found: dict[str, Any] = {"rfilename": name}
        if self.sized:
            found["size"] = len(self.files[name])
        if name in self.sha256:
            size = len(self.files[name])
            found["lfs"] = {"size": size, "sha256": self.sha256[name], "pointerSize": 100}
        return found

    def send(self, to: BaseHTTPRequestHandler, data: bytes) -> None:
        if self.cut_after is not None:
            to.wfile.write(data[: self.cut_after])
            self.cut_after = None
            return
        if (
            self.hold_after is not None
            and self.hold_after < len(data)
            and not self.release.is_set()
        ):
            to.wfile.write(data[: self.hold_after])
            to.wfile.flush()
            self.release.wait(120)
            data = data[self.hold_after :]
        try:
            to.wfile.write(data)
        except OSError:
            pass  # the downloader was killed


def raw(status: int, body: bytes, *headers: str) -> bytes:
    """An answer as it comes over the wire."""
    head = [f"HTTP/1.1 {status} Odd", 'ETag: "v1"', *headers, "", ""]
    return "\r\n".join(head).encode() + body


@contextmanager
def running(http: ThreadingHTTPServer) -> Iterator[None]:
    thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield
    finally:
        http.shutdown()
        http.server_close()
        thread.join()


def weights(folder: Path, reserve: int = 0, **env: str) -> Weights:
    return Weights(folder / "weights", {**engine_environment(), **env}, reserve_bytes=reserve)


def nothing(_: dict[str, Any]) -> None:
    pass


def part_of(folder: Path) -> Path | None:
    return next(iter(folder.glob("weights/http/*/m.gguf.part")), None)
