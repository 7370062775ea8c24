"""The paths of the client port, and who may call them. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from urllib.parse import unquote

from controller.router.errors import ApiError, invalid


class Kind(Enum):
    """What answers a path."""

    INFER = "infer"  # an engine
    MODELS = "models"
    MODEL = "model"
    HEALTH = "health"
    READY = "ready"


@dataclass(frozen=True, slots=True)
class Route:
    """One path: `name` is its word in metrics and usage rows."""

    name: str
    kind: Kind
    methods: frozenset[bytes]
    argument: str = ""  # the last part of /v1/models/{id}
    needs_key: bool = True


_READ = frozenset((b"GET", b"HEAD"))
_POST = frozenset((b"POST",))
_ROUTES = {
    b"/v1/chat/completions": Route("chat.completions", Kind.INFER, _POST),
    b"/v1/completions": Route("completions", Kind.INFER, _POST),
    b"/v1/embeddings": Route("embeddings", Kind.INFER, _POST),
    b"/v1/models": Route("models", Kind.MODELS, _READ),
    b"/healthz": Route("healthz", Kind.HEALTH, _READ, needs_key=False),
    b"/readyz": Route("readyz", Kind.READY, _READ, needs_key=False),
}
_MODEL_PREFIX = b"/v1/models/"


def find(method: bytes, path: bytes) -> Route | ApiError:
    """The route of a request: 404 for unknown paths, 405 for wrong methods."""
    route = _ROUTES.get(path)
    if route is None and path.startswith(_MODEL_PREFIX) and len(path) > len(_MODEL_PREFIX):
        name = unquote(path[len(_MODEL_PREFIX) :].decode("latin-1"))
        route = Route("models", Kind.MODEL, _READ, name)
    if route is None:
        return invalid(
            "unknown_url",
            "There is nothing at this URL. The OpenAI-compatible paths begin with /v1/.",
            status=404,
        )
    if method not in route.methods:
        allowed = ", ".join(sorted(word.decode() for word in route.methods))
        return ApiError(
            405,
            "invalid_request_error",
            "method_not_allowed",
            f"This URL answers {allowed} only.",
            allow=allowed,
        )
    return route
