"""The request as an engine gets it: the client's headers less what is between others. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from controller.router.http1 import Request
    from controller.router.pool import Pool

# Hop-by-hop headers, what we set ourselves, and credentials: an engine sees no key (case A28).
NOT_FORWARDED: Final = frozenset((
    b"connection", b"keep-alive", b"proxy-authenticate", b"proxy-authorization",
    b"proxy-connection", b"te", b"trailer", b"transfer-encoding", b"upgrade", b"http2-settings",
    b"host", b"content-length", b"content-encoding", b"accept-encoding", b"expect",
    b"x-request-id", b"authorization", b"cookie", b"x-api-key", b"api-key",
    b"openai-organization", b"openai-project", b"origin",
))  # fmt: skip
_PLAIN_CONNECTION: Final = frozenset((b"", b"keep-alive", b"close"))


def request_bytes(request: Request, pool: Pool, request_id: bytes, body: bytes) -> bytes:
    """Head and body in one piece; `body` replaces the request's own."""
    lines = [b"POST %b%b HTTP/1.1\r\n%b" % (pool.base, request.target, pool.host_lines)]
    for pair in request.headers:
        name = pair[0]
        if name not in NOT_FORWARDED and not name.startswith(b"x-llmgw-"):
            lines.append(b": ".join(pair))
        elif name == b"connection" and pair[1].lower() not in _PLAIN_CONNECTION:
            return request_bytes(_without_named(request), pool, request_id, body)
    lines.append(
        b"accept-encoding: identity\r\nx-request-id: %b\r\ncontent-length: %d\r\n\r\n"
        % (request_id, len(body))
    )
    return b"\r\n".join(lines) + body


def _without_named(request: Request) -> Request:
    """The same request less the headers that its Connection header names as hop-by-hop."""
    named = set(NOT_FORWARDED)
    for name, value in request.headers:
        if name == b"connection":
            named.update(token.strip().lower() for token in value.split(b","))
    request.headers = [pair for pair in request.headers if pair[0] not in named]
    return request
