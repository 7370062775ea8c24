"""Errors as values: the same few kinds everywhere, never an exception.

The exchange returns them, a dialect makes the JSON body. Texts say what, which, and what to do;
they never repeat a key, a hash or anything the client sent as a credential (case B19).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

_TOO_MANY: Final = 429
_SOON_S: Final = 60
"""A time that a client may wait for within its call; windows of limits are as long."""


@dataclass(frozen=True, slots=True)
class ApiError:
    """One refusal or failure: HTTP status, machine words and a sentence for people."""

    status: int
    type: str
    code: str
    message: str
    param: str | None = None
    retry_after_s: int | None = None
    allow: str | None = None  # methods that would do, for 405


def as_object(error: ApiError) -> dict[str, str | int | None]:
    """The fields that OpenAI's clients read."""
    return {
        "message": error.message,
        "type": error.type,
        "param": error.param,
        "code": error.code,
    }


def is_lasting(error: ApiError) -> bool:
    """Whether who sends the request again by itself should not (case A34). SDKs do, after half a
    second where a refusal says no time; told of the next month, Anthropic's sleeps until then."""
    after_s = error.retry_after_s
    return error.status == _TOO_MANY if after_s is None else after_s > _SOON_S


def invalid(code: str, message: str, *, status: int = 400, param: str | None = None) -> ApiError:
    """The client's request cannot be served as it is."""
    return ApiError(status, "invalid_request_error", code, message, param)


def _unavailable(code: str, message: str, retry_after_s: int) -> ApiError:
    """Nothing is wrong with the request: it may be sent again after so long."""
    return ApiError(503, "server_error", code, message, retry_after_s=retry_after_s)


BUSY_S: Final = 1
"""Come back after so long, when a busy engine does not say it (queues move within a second)."""
_TOO_SLOW_S: Final = 5
ENGINE_REFUSED_KEY: Final = "engine_refused_key"
UPSTREAM_FAILED: Final = "upstream_failed"
"""The code of a request whose engine failed on it."""

# One body for unknown, malformed, revoked and expired keys, so that none can be told from another.
BAD_KEY: Final = ApiError(
    401,
    "invalid_request_error",
    "invalid_api_key",
    "Incorrect or missing API key. Send a valid key as 'Authorization: Bearer KEY' or in the "
    "header X-Api-Key.",
)


AUTH_UNAVAILABLE: Final = _unavailable(
    "auth_unavailable",
    "Whether this key is valid cannot be looked up now. Nothing is wrong with the request: try "
    "again in a few seconds.",
    retry_after_s=2,
)

KEY_REVOKED: Final = ApiError(
    401, "invalid_request_error", "key_revoked", "The API key was revoked while this was answered."
)


def ip_not_allowed(address: str) -> ApiError:
    """A good key from a place that it is not for."""
    return ApiError(
        403,
        "invalid_request_error",
        "ip_not_allowed",
        f"This API key may not be used from {address}. Use it from one of its networks, or ask "
        "its owner to add this one.",
    )


def model_not_found(name: str) -> ApiError:
    """Unknown, or not on the key's list: the same words, so that a key cannot probe for names."""
    shown = name if len(name) <= 200 else name[:200] + "..."
    return ApiError(
        404,
        "invalid_request_error",
        "model_not_found",
        f"The model '{shown}' does not exist or this key may not use it. See GET /v1/models.",
        "model",
    )


def no_previous(identity: str) -> ApiError:
    """Unknown, of another key, or gone with its replica: the same words for all three."""
    return invalid(
        "previous_response_not_found",
        f"Previous response '{identity[:200]}' is not found: its replica ended, or it never was. "
        "Send the whole conversation as 'input' again.",
        status=404,
        param="previous_response_id",
    )


def cannot_look_up() -> ApiError:
    return _unavailable(
        "previous_response_unknown",
        "Which replica holds the previous response cannot be looked up now. Try again.",
        retry_after_s=2,
    )


def no_replica(model: str) -> ApiError:
    return _unavailable(
        "no_ready_replica",
        f"No replica of model '{model}' is ready to serve now. Try again in a few seconds.",
        retry_after_s=5,
    )


def cooling_down(model: str, back_in_s: float) -> ApiError:
    """All its replicas failed or are busy; the first is asked again in `back_in_s`."""
    wait_s = max(1, math.ceil(back_in_s))
    return _unavailable(
        "replicas_cooling_down",
        f"Every replica of model '{model}' failed lately or is busy. The first is asked again in "
        f"{wait_s} s: try again then.",
        retry_after_s=wait_s,
    )


def woken_too_late(model: str, waited_s: float, why: str | None) -> ApiError:
    """Its replica is still on its way; the start goes on without the client."""
    known = f": {why}" if why else ""
    return _unavailable(
        "model_is_starting",
        f"Model '{model}' runs on demand and was not ready after {waited_s:.0f} s{known}. It goes "
        "on starting: try again soon.",
        retry_after_s=10,
    )


def no_place(model: str, waited_s: float, why: str) -> ApiError:
    """Nothing can run it now; it keeps its place in the queue while clients ask for it."""
    return _unavailable(
        "model_has_no_place",
        f"Model '{model}' runs on demand and could not start within {waited_s:.0f} s: {why}. It "
        "starts when there is a place: try again later.",
        retry_after_s=30,
    )


def start_failed(model: str, why: str, failures: int, retry_s: float) -> ApiError:
    """Its engine does not come up; the next start is due when the client may come again."""
    return _unavailable(
        "model_start_failed",
        f"Model '{model}' runs on demand and does not come up (failed starts in a row: {failures})"
        f": {why}. It is tried again in {retry_s:.0f} s.",
        retry_after_s=max(1, math.ceil(retry_s)),
    )


def waiting_full(model: str) -> ApiError:
    return _unavailable(
        "waiting_room_full",
        f"Model '{model}' runs on demand and is being started, and too many requests wait already. "
        "Try again in a few seconds.",
        retry_after_s=5,
    )


def queue_full(where: str, retry_s: int) -> ApiError:
    """No place for it: others wait already, and it is no more its turn than theirs."""
    return _unavailable(
        "queue_full",
        f"No place is free at {where}, and too many requests wait already. Try again in "
        f"{retry_s} s.",
        retry_after_s=retry_s,
    )


def overloaded(where: str, due_s: float, wait_s: float, retry_s: int) -> ApiError:
    """It would wait in vain, so it does not begin to."""
    return _unavailable(
        "overloaded",
        f"No place is free at {where}: its turn would come in about {due_s:.0f} s, and it waits "
        f"for {wait_s:.0f} s at most. Try again in {retry_s} s.",
        retry_after_s=retry_s,
    )


def queue_timeout(where: str, waited_s: float, retry_s: int) -> ApiError:
    """It had a place and no turn before its deadline."""
    return _unavailable(
        "queue_timeout",
        f"No place was free at {where} for {waited_s:.0f} s. Try again in {retry_s} s or wait "
        "longer, see X-Llmgw-Wait.",
        retry_after_s=retry_s,
    )


def bad_priority() -> ApiError:
    return invalid(
        "invalid_priority",
        "The header X-Llmgw-Priority must be interactive, the default, or batch.",
    )


def bad_wait() -> ApiError:
    return invalid(
        "invalid_wait", "The header X-Llmgw-Wait must be a number of seconds, such as 30."
    )


def draining() -> ApiError:
    return _unavailable("shutting_down", "This router is shutting down.", retry_after_s=1)


def too_large(limit_bytes: int, what: str = "request body") -> ApiError:
    return invalid(
        "request_too_large",
        f"The {what} is larger than the limit of {limit_bytes} bytes.",
        status=413,
    )


def upstream_failed(model: str, why: str) -> ApiError:
    return ApiError(
        502,
        "server_error",
        UPSTREAM_FAILED,
        f"The engine that serves model '{model}' failed: {why}. The request may be sent again.",
        retry_after_s=1,
    )


def engine_refused_key(model: str) -> ApiError:
    """An engine's 401 in our words: its own would have the client doubt its key, and may repeat
    some of ours."""
    return ApiError(
        502,
        "server_error",
        ENGINE_REFUSED_KEY,
        f"The engine that serves model '{model}' refused the gateway's key for it. Nothing is "
        "wrong with your key or request: tell whoever runs the gateway (setting endpoint_keys).",
        retry_after_s=_TOO_SLOW_S,
    )


def upstream_timeout(model: str, why: str) -> ApiError:
    """The client may come again, later than after a failure: the engine has more than it can do."""
    return ApiError(
        504,
        "server_error",
        "upstream_timeout",
        f"The engine that serves model '{model}' was too slow: {why}. Try again in "
        f"{_TOO_SLOW_S} s, or with less to do.",
        retry_after_s=_TOO_SLOW_S,
    )


def internal() -> ApiError:
    return ApiError(
        500, "server_error", "internal_error", "The router failed on this request. It was logged."
    )
