"""How each family of endpoints speaks: its errors, and what its streams look like. Pure.

Three families: OpenAI's chat completions with all that resembles them, OpenAI's responses,
Anthropic's messages. A route names its dialect; relays and errors are told by it.
Sources: platform.openai.com/docs/api-reference (streaming), docs.claude.com/en/api/errors and
/en/docs/build-with-claude/streaming.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace

import orjson

from controller.router.errors import ApiError, as_object

REQUEST_ID = b"request-id"
"""Where Anthropic's clients look for the id, which everybody finds in X-Request-Id."""
_SEQUENCE = re.compile(rb'"sequence_number"\s*:\s*(\d{1,9})')
_ANTHROPIC_TYPES = {
    400: "invalid_request_error", 401: "authentication_error", 402: "billing_error",
    403: "permission_error", 404: "not_found_error", 413: "request_too_large",
    429: "rate_limit_error", 503: "overloaded_error", 504: "timeout_error",
    529: "overloaded_error",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Dialect:
    """One family. `error` makes the JSON body of a refusal; `event` the last words of a stream
    that fails (given the bytes of its last event)."""

    error: Callable[[ApiError], bytes]
    event: Callable[[ApiError, bytes], bytes]
    ends: re.Pattern[bytes]  # one of the last two events of a whole stream has it
    stop: bytes | None  # in the last event, and not in those before; None: that is [DONE]
    part: bytes  # once in every event that carries a token, and in few others
    opening: int = 0  # events with `part` that come before the first token
    done: bool = False  # `ends` is the last word; else [DONE] is, where an engine has it


def _openai(error: ApiError) -> bytes:
    return orjson.dumps({"error": as_object(error)})


def _openai_event(error: ApiError, _last: bytes) -> bytes:
    return b"data: " + _openai(error) + b"\n\ndata: [DONE]\n\n"


def _responses_event(error: ApiError, last: bytes) -> bytes:
    """Both as documented (flat) and as seen (nested): clients look for either."""
    found = _SEQUENCE.findall(last)
    number = int(found[-1]) + 1 if found else 0
    told = as_object(error)
    document = {"sequence_number": number, **told, "error": told, "type": "error"}
    return b"event: error\ndata: " + orjson.dumps(document) + b"\n\n"


def _anthropic(error: ApiError) -> bytes:
    other = "invalid_request_error" if error.status < 500 else "api_error"
    kind = _ANTHROPIC_TYPES.get(error.status, other)
    return orjson.dumps({"type": "error", "error": {"type": kind, "message": error.message}})


def _anthropic_event(error: ApiError, _last: bytes) -> bytes:
    return b"event: error\ndata: " + _anthropic(error) + b"\n\n"


CHAT = Dialect(
    _openai,
    _openai_event,
    re.compile(
        rb'(?m:^data: ?\[DONE\])|"finish_reason"\s*:\s*"[^"]|"type"\s*:\s*"'
        rb'(?:transcript\.text\.done|speech\.audio\.done|image_generation\.completed)"'
    ),
    None,
    b'"delta"',
    opening=1,  # the role comes alone
)
TEXT = replace(CHAT, part=b'"text"', opening=0)
RESPONSES = Dialect(
    _openai,
    _responses_event,
    re.compile(rb'"type"\s*:\s*"response\.(?:completed|incomplete|failed)"'),
    b'"response.completed"',
    b'.delta"',
    done=True,
)
MESSAGES = Dialect(
    _anthropic,
    _anthropic_event,
    re.compile(rb'"type"\s*:\s*"message_stop"'),
    b'"message_stop"',
    b'"content_block_delta"',
    done=True,
)
