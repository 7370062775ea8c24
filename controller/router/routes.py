"""The paths of the client port, and who may call them. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Final
from urllib.parse import unquote_to_bytes

from controller.router.dialect import CHAT, MESSAGES, RESPONSES, TEXT, Dialect
from controller.router.errors import ApiError, invalid

if TYPE_CHECKING:
    from controller.router.http1 import Request


class Kind(Enum):
    """What answers a path."""

    INFER = "infer"  # an engine
    MODELS = "models"
    MODEL = "model"
    HEALTH = "health"
    READY = "ready"
    OPENAPI = "openapi"


_READ: Final = frozenset((b"GET", b"HEAD"))
_POST: Final = frozenset((b"POST",))


@dataclass(frozen=True, slots=True)
class Route:
    """One path: `name` is its word in metrics and usage rows."""

    name: str
    kind: Kind = Kind.INFER
    methods: frozenset[bytes] = _POST
    argument: str = ""  # the last part of /v1/models/{id}
    needs_key: bool = True
    dialect: Dialect = CHAT
    asks_usage: bool = False  # engines know stream_options.include_usage here
    form: bool = False  # the body is multipart/form-data
    vectors: bool = False  # answers are embeddings, as numbers or base64
    reads: bool = False  # its prompt is text, so that its tokens can be estimated
    writes: bool = False  # its answer is text
    whole: bool = False  # what comes is no event stream, though a request says `stream`
    stores: bool = False  # engines keep its answers, and later requests go on from them
    path: bytes = b""  # what engines call it, when that is not what the client called


_RERANK: Final = Route("rerank", reads=True, whole=True)
_SCORE: Final = Route("score", reads=True, whole=True)
_TOKENIZE: Final = Route("tokenize", whole=True, path=b"/tokenize")  # no engine has it under /v1
_DETOKENIZE: Final = Route("detokenize", whole=True, path=b"/detokenize")
_ROUTES: Final = {
    b"/v1/chat/completions": Route("chat.completions", asks_usage=True, reads=True, writes=True),
    b"/v1/completions": Route(
        "completions", dialect=TEXT, asks_usage=True, reads=True, writes=True
    ),
    b"/v1/embeddings": Route("embeddings", vectors=True, reads=True, whole=True),
    b"/v1/responses": Route("responses", dialect=RESPONSES, reads=True, writes=True, stores=True),
    b"/v1/messages": Route("messages", dialect=MESSAGES, reads=True, writes=True),
    b"/v1/messages/count_tokens": Route("messages.count_tokens", dialect=MESSAGES, whole=True),
    b"/v1/rerank": _RERANK,
    b"/v2/rerank": _RERANK,
    b"/rerank": _RERANK,
    b"/v1/score": _SCORE,
    b"/score": _SCORE,
    b"/v1/audio/transcriptions": Route("audio.transcriptions", form=True),
    b"/v1/audio/translations": Route("audio.translations", form=True),
    b"/v1/audio/speech": Route("audio.speech", whole=True),
    b"/v1/images/generations": Route("images.generations"),
    b"/tokenize": _TOKENIZE,
    b"/v1/tokenize": _TOKENIZE,
    b"/detokenize": _DETOKENIZE,
    b"/v1/detokenize": _DETOKENIZE,
    b"/v1/models": Route("models", Kind.MODELS, _READ),
    b"/healthz": Route("healthz", Kind.HEALTH, _READ, needs_key=False),
    b"/readyz": Route("readyz", Kind.READY, _READ, needs_key=False),
    b"/openapi.json": Route("openapi", Kind.OPENAPI, _READ, needs_key=False),
}
_MODEL_PREFIX: Final = b"/v1/models/"
_MODELS_PREFIX: Final = b"/v1/models"
_MESSAGES_PREFIX: Final = b"/v1/messages"


def paths() -> list[tuple[str, Route]]:
    """Every path with its route; `{model}` stands for a model's name."""
    model = Route("models", Kind.MODEL, _READ)
    return [
        *((path.decode(), route) for path, route in _ROUTES.items()),
        ("/v1/models/{model}", model),
    ]


def find(method: bytes, target: bytes) -> Route | ApiError:
    """The route of a request, whatever its query: 404 for unknown paths, 405 for wrong methods."""
    path, route = target, _ROUTES.get(target)
    if route is None and b"?" in target:
        path = target.partition(b"?")[0]
        route = _ROUTES.get(path)
    if route is None and path.startswith(_MODEL_PREFIX) and len(path) > len(_MODEL_PREFIX):
        name = unquote_to_bytes(path[len(_MODEL_PREFIX) :]).decode("utf-8", "replace")
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


def dialect_of(request: Request) -> Dialect:
    """In which shape we answer a request ourselves, whether or not there is anything at its path.

    Anthropic's clients ask for models too, and say who they are.
    """
    path = request.path
    if path.startswith(_MODELS_PREFIX):
        return MESSAGES if is_anthropics(request) else CHAT
    return MESSAGES if path.startswith(_MESSAGES_PREFIX) else CHAT


def is_anthropics(request: Request) -> bool:
    """Whether a client of Anthropic's API sent it."""
    return any(name == b"anthropic-version" for name, _ in request.headers)
