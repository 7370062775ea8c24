"""Which web pages may call us from a browser: the setting `cors`, off by default. Pure.

Keys come in headers and never in cookies, so no answer allows credentials. An engine's own CORS
headers are not passed on: whether pages may call is decided here.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from controller.router.http1 import Headers, Request

ANY: Final = "*"
_KEPT_S: Final = b"600"  # how long a browser may remember a preflight; some cap it at that
_NAMES: Final = re.compile(rb"[A-Za-z0-9!#$%&'*+.^_`|~, -]{1,2048}")
_USUAL: Final = b"authorization, content-type, x-api-key"


def answer_headers(origins: frozenset[str], origin: bytes) -> tuple[tuple[bytes, bytes], ...]:
    """What every answer to a page of `origin` carries, errors too; empty when it may not read."""
    if ANY in origins:
        return _FOR_ANY
    if origin.decode("latin-1") not in origins:
        return ()
    return (
        (b"access-control-allow-origin", origin),
        (b"access-control-expose-headers", b"*"),
        (b"vary", b"Origin"),
    )


_FOR_ANY: Final = ((b"access-control-allow-origin", b"*"), (b"access-control-expose-headers", b"*"))


def preflight_headers(request: Request, methods: str) -> Headers:
    """What an OPTIONS request is told about a path that answers `methods`, besides the above.

    `*` would not do: it does not cover Authorization. So the names asked for come back.
    """
    wanted = _value(request, b"access-control-request-headers")
    allowed = wanted if _NAMES.fullmatch(wanted) else _USUAL
    if not _value(request, b"access-control-request-method"):
        return []
    return [
        (b"access-control-allow-methods", methods.encode()),
        (b"access-control-allow-headers", allowed),
        (b"access-control-max-age", _KEPT_S),
    ]


def _value(request: Request, name: bytes) -> bytes:
    return next((value for known, value in request.headers if known == name), b"")
