"""What is checked of a request before an engine is chosen: route, key, coding, body. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from controller.router import body as request_body
from controller.router import errors
from controller.router.admission import KINDS
from controller.router.errors import ApiError
from controller.router.multipart import is_form
from controller.router.routes import Route, find

if TYPE_CHECKING:
    from controller.router.auth import Key, Keys
    from controller.router.body import Asked
    from controller.router.http1 import Request


def admit(
    keys: Keys, request: Request, address: str
) -> tuple[Route, Key | None] | ApiError | bytes:
    """Everything that can be refused before the body is read; bytes: this key is not known here."""
    route = find(request.method, request.target)
    if isinstance(route, ApiError):
        return route
    key = keys.find(request.authorization, address) if route.needs_key else None
    if isinstance(key, (ApiError, bytes)):
        return key
    if request.coding and request.coding not in request_body.CODINGS:
        return errors.invalid(
            "unsupported_encoding",
            "This Content-Encoding is not supported; use gzip, zstd, deflate or none.",
            status=415,
        )
    if request.priority not in KINDS:
        return errors.bad_priority()
    if not request.wait_s >= 0:  # not a number is not either
        return errors.bad_wait()
    return route, key


def read_form(request: Request, raw: bytes) -> Asked | ApiError:
    """What the client wants of an endpoint that takes forms, from the decoded body `raw`."""
    kinds = [value for name, value in request.headers if name == b"content-type"]
    if len(kinds) == 1 and is_form(kinds[0]):
        return request_body.read_form(raw, kinds[0])
    return request_body.read(raw)


def aim(route: Route, request: Request) -> None:
    """Give the request the path under which engines have this endpoint, when it has its own."""
    query = request.target.partition(b"?")[1:]
    request.target = route.path + b"".join(query)
