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
    from controller.router.auth import Key, Keys, Shown
    from controller.router.body import Asked
    from controller.router.http1 import Request

    Admitted = tuple[Route | None, Key | None, ApiError | None]


def admit(keys: Keys, request: Request, address: str, shown: Shown) -> Admitted | bytes:
    """Everything that can be refused before the body is read, with what is known of the request
    all the same; bytes: this key is not known here."""
    route = find(request.method, request.target)
    if isinstance(route, ApiError):
        return None, None, route
    odd = request.coding or request.priority or not request.wait_s >= 0  # or not a number
    unfit = _unfit(request) if odd else None
    if not route.needs_key:
        return route, None, unfit
    key = keys.find(request.authorization, shown)
    if isinstance(key, bytes):
        return key
    if isinstance(key, ApiError):
        return route, None, key
    if key.networks is not None and not key.admits(address):
        return route, key, errors.ip_not_allowed(address)
    return route, key, unfit


def _unfit(request: Request) -> ApiError | None:
    if request.coding and request.coding not in request_body.CODINGS:
        return errors.invalid(
            "unsupported_encoding",
            "This Content-Encoding is not supported; use gzip, zstd, deflate or none.",
            status=415,
        )
    if request.priority not in KINDS:
        return errors.bad_priority()
    return None if request.wait_s >= 0 else errors.bad_wait()


def read_form(request: Request, raw: bytes) -> Asked | ApiError:
    """What the client wants of an endpoint that takes forms, from the decoded body `raw`."""
    kinds = [value for name, value in request.headers if name == b"content-type"]
    if len(kinds) == 1 and is_form(kinds[0]):
        return request_body.read_form(raw, kinds[0])
    if any(b"urlencoded" in kind.lower() for kind in kinds):  # an engine would read it as a form
        return errors.invalid("invalid_form", "Send this form as multipart/form-data.", status=415)
    return request_body.read(raw)


def aim(route: Route, request: Request) -> None:
    """Give the request the path under which engines have this endpoint, when it has its own."""
    query = request.target.partition(b"?")[1:]
    request.target = route.path + b"".join(query)
