"""Whether another replica may have a request that one has failed or refused. Pure, one table.

Only asked while the client has seen nothing of an answer. The question is what the engine did:
nothing (another may have it), gave up what it had begun (once, so no more than two engines ever
begin the work of a request, case A14), or it may be working still (never).
"""

from __future__ import annotations

from enum import IntEnum
from typing import Final, NamedTuple

from controller.router.errors import ENGINE_REFUSED_KEY
from controller.router.upstream import Cause


class Again(IntEnum):
    """How often the request may go elsewhere for this reason."""

    NEVER = 0
    ONCE = 1
    FREE = 2  # as often as `retries.attempts` allows


class Verdict(NamedTuple):
    """`reason` is its word in metrics; None when nothing is made again."""

    reason: str
    again: Again


BUSY: Final = Verdict("busy", Again.FREE)
KEY_REFUSED: Final = Verdict(ENGINE_REFUSED_KEY, Again.FREE)
SHUTTING_DOWN: Final = Verdict("shutting_down", Again.FREE)
NEVER: Final = Verdict("", Again.NEVER)

BY_STATUS: Final = {
    401: KEY_REFUSED,  # ours for it: a client's never gets there. It began nothing
    408: Verdict("engine_timeout", Again.ONCE),  # it gave up on the request, it does not go on
    429: BUSY,
    500: Verdict("engine_error", Again.ONCE),  # also how a dead vLLM core answers
    502: Verdict("bad_gateway", Again.ONCE),
    503: BUSY,
    504: Verdict("engine_timeout", Again.ONCE),
    529: BUSY,  # Anthropic's overloaded_error
}
"""An engine's own answer, or the first event of its stream. Others pass through untouched: they
are the request's fault (4xx) or cannot get better elsewhere (501)."""

BY_CAUSE: Final = {
    Cause.CONNECT_FAILED: Verdict("connect_failed", Again.FREE),
    Cause.CONNECT_TIMEOUT: Verdict("connect_failed", Again.FREE),
    Cause.CLOSED_UNANSWERED: Verdict("closed_unanswered", Again.ONCE),
}
"""Failures without an answer. After a head or a timeout the engine may be working on it."""

# vLLM that stops with --shutdown-timeout: its health stays 200 and new chats get this 500.
_STOPPING: Final = b"cannot schedule new futures"


def judge(status: int, told: bytes) -> Verdict:
    """The verdict on an engine's answer; `told` is its body or its error's message."""
    if status == 500 and _STOPPING in told:
        return SHUTTING_DOWN
    return BY_STATUS.get(status, NEVER)
