"""A small store that speaks as much of S3 as fetching needs: list-objects-v2, HEAD, ranged GET."""

from __future__ import annotations

import base64
import hashlib
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape


class Store:
    """Bucket `bkt`. Can hold back, cut, corrupt; remembers ranges, and who asked unsigned."""

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}
        self.etags: dict[str, str] = {}
        self.sha256: set[str] = set()
        """Objects that say their sha256 too."""
        self.page = 2
        self.cut_after: int | None = None
        self.hold_after: int | None = None
        self.corrupt: str | None = None
        self.shift = 0
        """So many bytes off the place that was asked for is what an answer begins with."""
        self.release = threading.Event()
        self.ranges: list[tuple[str, str | None]] = []
        self.signed: list[str] = []
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_HEAD(self) -> None:
                outer.answer(self, body=False)

            def do_GET(self) -> None:
                outer.answer(self, body=True)

            def log_message(self, *_: object) -> None:
                pass

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.http.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.http.server_port}"

    def etag(self, key: str) -> str:
        """As S3 gives it: the md5 of what was put in one part."""
        return self.etags.get(key) or f'"{hashlib.md5(self.objects[key]).hexdigest()}"'

    def answer(self, to: BaseHTTPRequestHandler, *, body: bool) -> None:
        url = urlsplit(to.path)
        self.signed.append(to.headers.get("Authorization", ""))
        _, bucket, *rest = unquote(url.path).split("/", 2)
        key = rest[0] if rest else ""
        if not key and bucket == "bkt":
            self.send(to, 200, self.listing(parse_qs(url.query)).encode(), {})
        elif bucket != "bkt" or key not in self.objects:
            missing = b"<Error><Code>NoSuchBucket</Code><Message>no</Message></Error>"
            self.send(to, 404, missing if body else b"", {})
        else:
            self.object(to, key, body=body)

    def listing(self, query: dict[str, list[str]]) -> str:
        prefix = query.get("prefix", [""])[0]
        keys = sorted(k for k in self.objects if k.startswith(prefix))
        start = int(query.get("continuation-token", ["0"])[0])
        shown, more = keys[start : start + self.page], start + self.page < len(keys)
        items = "".join(
            f"<Contents><Key>{escape(k)}</Key><ETag>{escape(self.etag(k))}</ETag>"
            f"<Size>{len(self.objects[k])}</Size></Contents>"
            for k in shown
        )
        token = f"<NextContinuationToken>{start + self.page}</NextContinuationToken>"
        return (
            f"<ListBucketResult><Name>bkt</Name><IsTruncated>{str(more).lower()}</IsTruncated>"
            f"{token if more else ''}{items}</ListBucketResult>"
        )

    def object(self, to: BaseHTTPRequestHandler, key: str, *, body: bool) -> None:
        data, etag = self.objects[key], self.etag(key)
        headers = {"ETag": etag}
        if key in self.sha256:
            digest = hashlib.sha256(data).digest()
            headers["x-amz-checksum-sha256"] = base64.b64encode(digest).decode()
        if to.headers.get("If-Match", etag) != etag:
            self.send(to, 412, b"<Error><Code>PreconditionFailed</Code></Error>", {})
            return
        wanted = to.headers.get("Range")
        if not body:
            self.send(to, 200, b"", headers, length=len(data))
            return
        self.ranges.append((key, wanted))
        if key == self.corrupt:
            data = bytes([data[0] ^ 1]) + data[1:]
        start = int(wanted.removeprefix("bytes=").partition("-")[0]) if wanted else 0
        if wanted:
            start += self.shift
            headers["Content-Range"] = f"bytes {start}-{len(data) - 1}/{len(data)}"
        self.send(to, 206 if wanted else 200, data[start:], headers)

    def send(
        self,
        to: BaseHTTPRequestHandler,
        status: int,
        data: bytes,
        headers: dict[str, str],
        length: int | None = None,
    ) -> None:
        to.send_response(status)
        for name, value in headers.items():
            to.send_header(name, value)
        to.send_header("Content-Length", str(len(data) if length is None else length))
        to.end_headers()
        big = "ETag" in headers
        if big and self.cut_after is not None and len(data) > self.cut_after:
            to.wfile.write(data[: self.cut_after])
            self.cut_after = None
            return
        if big and self.hold_after is not None and len(data) > self.hold_after:
            to.wfile.write(data[: self.hold_after])
            to.wfile.flush()
            self.release.wait(120)
            data = data[self.hold_after :]
        try:
            to.wfile.write(data)
        except OSError:
            pass  # the downloader was killed
