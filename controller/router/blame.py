"""An engine's error under a 200 as the HTTP status that it should have been. Pure.

Told first in a 200 stream, or as a plain answer, it is as good as a status: another replica may be
asked, and a client that has seen nothing gets an honest answer. Engines tell it as a number in
`code`, or in words.
"""

from __future__ import annotations

import re
from typing import Any, Final

import orjson

from controller.router.errors import BUSY_S, ApiError, engine_refused_key

_STATUS_OF = {
    "bad_request_error": 400, "badrequesterror": 400, "context_length_exceeded": 400,
    "exceed_context_size_error": 400, "invalid_request_error": 400,
    "authentication_error": 401, "invalid_api_key": 401,
    "not_found_error": 404, "notfounderror": 404,
    "request_too_large": 413,
    "template_error": 422, "tool_error": 422, "validation": 422,
    "rate_limit_error": 429, "rate_limit_exceeded": 429, "too_many_requests": 429,
    "api_error": 500, "internal_error": 500, "internal_server_error": 500,
    "internalservererror": 500, "server_error": 500,
    "not_supported_error": 501,
    "busy": 503, "engine_overloaded": 503, "overloaded": 503, "server_overloaded": 503,
    "service_unavailable": 503, "service_unavailable_error": 503, "unavailable_error": 503,
    "deadline_exceeded": 504, "gateway_timeout": 504, "request_timeout": 504, "timeout": 504,
    "timeout_error": 504,
    "overloaded_error": 529,
}  # fmt: skip
"""Words of `code` and `type`: Anthropic (docs.claude.com/en/api/errors), OpenAI
(platform.openai.com/docs/guides/error-codes), vLLM's and llama.cpp's types, TGI's `error_type`."""
_LONGEST = 64  # of a word; Python refuses to read numbers of some thousand digits
_UNKNOWN = 502
"""The engine failed, and does not say how."""
_BUSY = frozenset((429, 503, 529))
_ERROR_FIELD: Final = b'"error"'
_ERROR: Final = re.compile(rb'"error"\s*:\s*[^\sn]')  # the Responses API has a null in good answers


def tells_error(text: bytes) -> bool:
    """Whether a plain answer, or its beginning, may be an error: `error_in` says if it is."""
    # `rfind` takes less than half of the time that `find` does.
    return text.rfind(_ERROR_FIELD) >= 0 and _ERROR.search(text) is not None


def error_in(body: bytes) -> Any:
    """What a plain 200 says went wrong; None when it is an answer.

    A response that failed is an answer of the Responses API, which tells so in its `status`.
    """
    document = _document(body)
    if document is None or document.get("object") == "response":
        return None
    answered = document.get("choices") or document.get("data") or document.get("content")
    return None if answered else told_by(document) or None


def told_by(document: dict[str, Any]) -> Any:
    """The error that an answer or an event tells: TGI's is a text, and its kind lies beside it."""
    error, kind = document.get("error"), document.get("error_type")
    return {"message": error, "type": kind} if error and kind and type(error) is str else error


def is_failed_response(body: bytes) -> bool:
    """Whether a plain answer of the Responses API says that it is none."""
    document = _document(body)
    return document is not None and (document.get("object"), document.get("status")) == (
        "response",
        "failed",
    )


def _document(body: bytes) -> dict[str, Any] | None:
    try:
        document = orjson.loads(body)
    except orjson.JSONDecodeError:
        return None
    return document if isinstance(document, dict) else None


def refusal_in(body: bytes) -> Any:
    """What an answer with an error status says: SGLang's lies bare, FastAPI's is a `detail`. None
    when nobody can tell."""
    document = _document(body) or {}
    told = told_by(document) or document.get("detail")
    return told or (document if document.get("message") else None)


def error_of(error: Any, model: str, answered: int = 200) -> ApiError:
    """The error that an engine tells as `error`, with the status that it means there, else the one
    that it `answered` with."""
    told = error if isinstance(error, dict) else {"message": error}
    code, kind = told.get("code"), told.get("type")
    status = _status(code) or _status(kind) or _status(answered) or _UNKNOWN
    if status == 401:
        return engine_refused_key(model)
    message = _words(told.get("message"))
    message = message or f"The engine that serves '{model}' reported an error."
    serverside = status >= 500 or status in _BUSY
    other = "server_error" if serverside else "invalid_request_error"
    return ApiError(
        status,
        kind if isinstance(kind, str) else other,
        code if isinstance(code, str) else "upstream_error",
        message[:2000],
        retry_after_s=BUSY_S if status in _BUSY else None,
    )


def _words(told: Any) -> str:
    try:
        return str(told) if told else ""
    except RecursionError:  # it nests as deep as a parser lets pass, and says nothing to people
        return ""


def _status(told: Any) -> int | None:
    if isinstance(told, str) and len(told) <= _LONGEST:
        word = told.strip().lower().replace("-", "_").replace(" ", "_")
        told = int(word) if word.isascii() and word.isdigit() else _STATUS_OF.get(word)
    return told if type(told) is int and 400 <= told <= 599 else None
