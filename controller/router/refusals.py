"""What clients are told of budgets and limits: refusals, and the headers of those who have some.

Words and headers are OpenAI's: SDKs know them. Nothing is told of other keys' numbers.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from controller.router.allowance import Kind
from controller.router.errors import ApiError

if TYPE_CHECKING:
    from controller.router.reservation import Need, Reservation

Header = tuple[bytes, bytes]
AGAIN_S = 1
"""When to come back for a free slot: requests end all the time."""
LONGEST_S = 60 * 60 * 24 * 31
_HEADERS = ((Kind.REQUESTS, b"requests"), (Kind.TOKENS, b"tokens"))
_WHAT = {
    Kind.REQUESTS: ("requests", "requests per minute"),
    Kind.TOKENS: ("tokens", "tokens per minute"),
    Kind.SLOTS: ("requests", "parallel requests"),
}


def lacking(need: Need, now: float) -> ApiError:
    """There is not enough of this for the request."""
    return _spent(need, now) if need.bound.kind is Kind.MONEY else _limited(need, now)


def _spent(need: Need, now: float) -> ApiError:
    bound, allowance = need.bound, need.allowance
    left = allowance.remaining
    rest = "is used up" if not left else "leaves less than this request may cost"
    told = (
        f"The budget of this key's {bound.level} for {_period(bound.period)} {rest}. "
        if bound.level != "key"
        else f"The budget of this key for {_period(bound.period)} {rest}. "
    )
    hint = (
        "Allow a shorter answer (max_tokens), or ask whoever gave you the key for more."
        if left
        else "Wait for the next period, or ask whoever gave you the key for more."
    )
    again_s = _again_s(allowance.anew_at, now)
    code = "insufficient_quota"
    return ApiError(429, code, code, told + hint, retry_after_s=again_s)


def _limited(need: Need, now: float) -> ApiError:
    bound, allowance = need.bound, need.allowance
    kind, words = _WHAT[bound.kind]
    of = f" of model '{bound.model}'" if bound.model is not None else ""
    message = f"Rate limit reached for this key's {bound.level}{of}: {allowance.whole} {words}."
    if bound.level == "key":
        message = f"Rate limit reached for this key{of}: {allowance.whole} {words}."
    if need.amount > allowance.whole:
        text = f"{message} This request alone may take {need.amount}: allow a shorter answer."
        return ApiError(429, kind, "rate_limit_exceeded", text)
    again_s = AGAIN_S if bound.kind is Kind.SLOTS else _again_s(allowance.anew_at, now) or AGAIN_S
    text = f"{message} Try again in {again_s} s."
    return ApiError(429, kind, "rate_limit_exceeded", text, retry_after_s=again_s)


def unavailable(status: int) -> ApiError:
    """Nobody can say now whether anything is left."""
    return ApiError(
        status,
        "server_error",
        "allowance_unavailable",
        "Budgets and limits of this key cannot be looked up now. Try again in a few seconds.",
        retry_after_s=2,
    )


def headers(reservation: Reservation, now: float) -> tuple[Header, ...]:
    """`x-ratelimit-{limit,remaining,reset}-*` of whichever bound is nearest to its end."""
    if all(need.bound.kind is Kind.MONEY for need in reservation.needs):
        return ()
    told: list[Header] = []
    for kind, name in _HEADERS:
        found = [n.allowance for n in reservation.needs if n.bound.kind is kind]
        if found:
            least = min(found, key=lambda a: a.remaining / a.whole)
            anew_s = _again_s(least.anew_at, now)
            told.append((b"x-ratelimit-limit-" + name, b"%d" % least.whole))
            told.append((b"x-ratelimit-remaining-" + name, b"%d" % least.remaining))
            if anew_s is not None:
                told.append((b"x-ratelimit-reset-" + name, b"%ds" % anew_s))
    return tuple(told)


def _period(word: str) -> str:
    return f"this {word}" if word in {"day", "week", "month"} else f"the last {word}"


def _again_s(anew_at: float | None, now: float) -> int | None:
    return None if anew_at is None else min(LONGEST_S, max(1, math.ceil(anew_at - now)))
