"""HTTP to the admin API with the standard library: JSON in and out, one deadline per request."""

from __future__ import annotations

import http.client
import ssl
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import quote, urlencode, urlsplit

import orjson

from controller.cli.failures import Failure, TimedOut

if TYPE_CHECKING:
    from collections.abc import Iterator

ADMIN_PORT: Final = 9090
NEXT_HEADER: Final = "X-Llmgw-Next-Cursor"
MOST_BYTES: Final = 256 * 1024 * 1024
QUIET_S: Final = 60.0
"""A followed log sends at least a comment more often than this."""


@dataclass(frozen=True, slots=True)
class Client:
    """One admin API. ``timeout_s`` bounds each request as a whole."""

    server: str
    token: str | None
    actor: str
    timeout_s: float

    def get(self, path: str, timeout_s: float | None = None, **query: object) -> Any:
        """The document at a path; None in the query is left out."""
        return self._document("GET", path, query, None, timeout_s)[0]

    def post(
        self, path: str, body: dict[str, Any], timeout_s: float | None = None, **query: object
    ) -> Any:
        """The answer to a write."""
        return self._document("POST", path, query, body, timeout_s)[0]

    def delete(self, path: str) -> Any:
        """The answer to a removal."""
        return self._document("DELETE", path, {}, None)[0]

    def pages(self, path: str, **query: object) -> list[Any]:
        """Every row of a list, page after page."""
        return [row for page in self.each_page(path, **query) for row in page]

    def each_page(self, path: str, **query: object) -> Iterator[list[Any]]:
        """The pages of a list, each asked for when it is wanted."""
        cursor: str | None = None
        while True:
            page, headers = self._document("GET", path, query | {"cursor": cursor}, None)
            yield page
            cursor = headers.get(NEXT_HEADER)
            if cursor is None:
                return

    def text(self, path: str, timeout_s: float, **query: object) -> str:
        """A text answer."""
        raw, _ = self._request("GET", path, query, None, timeout_s)
        return raw.decode(errors="replace")

    def events(self, path: str, **query: object) -> Iterator[tuple[str, dict[str, Any]]]:
        """Server-sent events as (name, document), until the server ends them."""
        with _Guard(self.server, QUIET_S):
            connection, answer = self._open("GET", path, query, None, QUIET_S)
            try:
                self._good(answer.status, b"" if answer.status == 200 else answer.read())
                name = "message"
                while line := answer.readline(1 << 20):
                    if line.startswith(b"event: "):
                        name = line[7:].strip().decode()
                    elif line.startswith(b"data: "):
                        yield name, orjson.loads(line[6:])
                        name = "message"
            finally:
                connection.close()

    def _document(
        self,
        verb: str,
        path: str,
        query: dict[str, object],
        body: Any,
        timeout_s: float | None = None,
    ) -> tuple[Any, http.client.HTTPMessage]:
        raw, headers = self._request(verb, path, query, body, timeout_s)
        try:
            return orjson.loads(raw), headers
        except orjson.JSONDecodeError:
            raise Failure(self._not_ours(200)) from None

    def _request(
        self, verb: str, path: str, query: dict[str, object], body: Any, timeout_s: float | None
    ) -> tuple[bytes, http.client.HTTPMessage]:
        limit = timeout_s or self.timeout_s
        deadline = time.monotonic() + limit
        with _Guard(self.server, limit):
            connection, answer = self._open(verb, path, query, body, limit)
            try:
                raw = b""
                while part := answer.read(1 << 18):
                    raw += part
                    if time.monotonic() > deadline:
                        raise TimeoutError
                    if len(raw) > MOST_BYTES:
                        raise Failure(f"{self.server} answered over {MOST_BYTES >> 20} MiB")
                if answer.length:  # read(n) takes a cut answer for a whole one
                    raise http.client.IncompleteRead(raw[:0], answer.length)
            finally:
                connection.close()
        self._good(answer.status, raw)
        return raw, answer.headers

    def _open(
        self, verb: str, path: str, query: dict[str, object], body: Any, timeout_s: float
    ) -> tuple[http.client.HTTPConnection, http.client.HTTPResponse]:
        url = urlsplit(self.server)
        host, port = url.hostname or "", url.port
        if url.scheme == "https":
            trusted = ssl.create_default_context()
            connection: http.client.HTTPConnection = http.client.HTTPSConnection(
                host, port, timeout=timeout_s, context=trusted
            )
        else:
            connection = http.client.HTTPConnection(host, port, timeout=timeout_s)
        given = {name: _word(value) for name, value in query.items() if value is not None}
        target = f"/api/v1{path}" + (f"?{urlencode(given)}" if given else "")
        headers = {"X-Llmgw-Actor": quote(self.actor, safe="@ "), "Accept": "application/json"}
        if self.token:
            headers["Authorization"] = f"Bearer {self.token}"
        if body is not None:
            headers["Content-Type"] = "application/json"
        try:
            connection.request(verb, target, None if body is None else orjson.dumps(body), headers)
            return connection, connection.getresponse()
        except BaseException:
            connection.close()
            raise

    def _good(self, status: int, raw: bytes) -> None:
        if status < 300:
            return
        try:
            document = orjson.loads(raw)
        except orjson.JSONDecodeError:
            document = None
        said = document.get("error") if isinstance(document, dict) else None
        if not isinstance(said, str):
            raise Failure(self._not_ours(status))
        raise (TimedOut if status == 504 else Failure)(said)

    def _not_ours(self, status: int) -> str:
        return (
            f"{self.server} answered {status}, but not as an admin API does: does --server point "
            f"at the admin port (admin_listen, default {ADMIN_PORT}) and not at the clients' port?"
        )


def server_url(text: str) -> str:
    """``http://host:port`` from what people write; ValueError when it names no server."""
    url = urlsplit(text if "://" in text else f"http://{text}")
    port = url.port
    if url.scheme not in ("http", "https") or not url.hostname or url.path.strip("/"):
        raise ValueError(f"{text!r} is no server: write host:port or https://host:port")
    if port is None and "://" not in text:
        port = ADMIN_PORT
    host = f"[{url.hostname}]" if ":" in url.hostname else url.hostname
    return f"{url.scheme}://{host}" + (f":{port}" if port else "")


def part(name: str) -> str:
    """A name as one piece of a path."""
    return quote(name, safe="")


def _word(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


class _Guard:
    """Turns what sockets raise into sentences."""

    def __init__(self, server: str, timeout_s: float) -> None:
        self._server = server
        self._timeout_s = timeout_s

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, TimeoutError):
            raise TimedOut(
                f"no answer from {self._server} within {self._timeout_s:g} s: is the controller "
                "overloaded, or a firewall in between?"
            ) from error
        if isinstance(error, ssl.SSLCertVerificationError):
            raise Failure(
                f"the certificate of {self._server} is not trusted: {error.verify_message}; name "
                "its authority in SSL_CERT_FILE"
            ) from error
        if isinstance(error, OSError | http.client.HTTPException):
            why = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
            raise Failure(
                f"cannot reach the server at {self._server}: {why or type(error).__name__}. Is a "
                f"controller running there, and does --server point at its admin port "
                f"(admin_listen, default {ADMIN_PORT}) and not at the clients' port?"
            ) from error
