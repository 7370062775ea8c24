"""The head of a request: the headers we read ourselves, and what makes a head unfit. Pure.

llhttp (strict) has refused most of what two readers could understand differently; what it lets
pass and RFC 9112 does not is refused here. Used by `http1.py` alone.
"""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING, Final

from controller.router.errors import ApiError, invalid

if TYPE_CHECKING:
    from collections.abc import Callable

    from controller.router.http1 import Request

SLASH: Final = ord("/")
_ABSOLUTE: Final = re.compile(rb"https?://[^/?#]+", re.IGNORECASE)


def flaw(request: Request) -> ApiError | None:
    """Why this complete head is not served, or None. Makes an absolute target a plain one.

    The reader asks only about heads that are not plain at the first look.
    """
    if request.version != "1.1":
        if request.version != "1.0":
            return invalid(
                "unsupported_version",
                f"HTTP/{request.version} is not spoken here; use HTTP/1.1.",
                status=505,
            )
        if request.chunked:
            return bad("HTTP/1.0 knows no Transfer-Encoding")
        request.expects = False  # RFC 9110 10.1.1: such a client does not know the 100
    elif request.hosts != 1:  # RFC 9112 3.2
        return bad("it must have one Host header")
    if request.target[0] != SLASH:
        request.target = _origin_form(request.target)
    return request.flaw


def bad(why: str) -> ApiError:
    """The request could be read in two ways, or in none."""
    return invalid("bad_request", f"This is not valid HTTP/1.1: {why}.")


def _origin_form(target: bytes) -> bytes:
    """The path of `http://host/path`, as a client behind a proxy sends it (RFC 9112 3.2.2)."""
    found = _ABSOLUTE.match(target)
    rest = target if found is None else target[found.end() :]
    return rest if found is None or rest.startswith(b"/") else b"/" + rest


def _note_length(request: Request, value: bytes) -> None:
    request.length = int(value)  # llhttp lets pass nothing but digits and blanks around them


def _note_coding(request: Request, value: bytes) -> None:
    coding = value.strip().lower()
    if coding != b"identity":  # twice: a list, which is no coding that we know
        request.coding = request.coding + b", " + coding if request.coding else coding


def _note_authorization(request: Request, value: bytes) -> None:
    if request.authorized and request.authorization != value:
        request.flaw = bad("it has two Authorization headers")
    request.authorized = True
    request.authorization = value


def _note_api_key(request: Request, value: bytes) -> None:
    """Anthropic's way to send a key; an Authorization header goes before it."""
    if not request.authorization:
        request.authorization = b"Bearer " + value


def _note_request_id(request: Request, value: bytes) -> None:
    request.request_id = value


def _note_explain(request: Request, value: bytes) -> None:
    request.explain = value == b"1"


def _note_priority(request: Request, value: bytes) -> None:
    request.priority = value.strip().lower()


def _note_wait(request: Request, value: bytes) -> None:
    try:
        request.wait_s = float(value)
    except ValueError:
        request.wait_s = math.nan


def _note_profile(request: Request, value: bytes) -> None:
    request.profile = value


def _note_fallback(request: Request, value: bytes) -> None:
    request.fallback = value


def _note_expect(request: Request, value: bytes) -> None:
    request.expects = value.lower() == b"100-continue"


def _note_transfer(request: Request, value: bytes) -> None:
    if request.chunked or value.strip().lower() != b"chunked":
        request.flaw = invalid(
            "unsupported_transfer_encoding",
            "The only Transfer-Encoding that is understood here is chunked, once.",
            status=501,
        )
    request.chunked = True


def _note_host(request: Request, _value: bytes) -> None:
    request.hosts += 1  # what it names does not matter: all hosts are one here


def _note_origin(request: Request, value: bytes) -> None:
    request.origin = value


NOTED: dict[bytes, Callable[[Request, bytes], None]] = {
    b"content-length": _note_length,
    b"content-encoding": _note_coding,
    b"authorization": _note_authorization,
    b"x-api-key": _note_api_key,
    b"x-request-id": _note_request_id,
    b"expect": _note_expect,
    b"x-llmgw-explain": _note_explain,
    b"x-llmgw-fallback": _note_fallback,
    b"x-llmgw-profile": _note_profile,
    b"x-llmgw-priority": _note_priority,
    b"x-llmgw-wait": _note_wait,
    b"transfer-encoding": _note_transfer,
    b"host": _note_host,
    b"origin": _note_origin,
}
