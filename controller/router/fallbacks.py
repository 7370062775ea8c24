"""Which models answer instead of one that cannot, and when. Pure.

The nearest word says when: the request's header, its key's, its user's, team's or org's (one of
them is in force, `llmgw_core.usable_key`), the settings'.

The same for plain and streamed calls: it is decided before a byte goes to the client. A key that
may use the asked name is served by its fallbacks too: whoever declares a fallback decides that.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from controller.router.errors import ApiError, invalid

if TYPE_CHECKING:
    from collections.abc import Mapping

    from controller.router.table import Model

REASONS = {
    400: "refusal", 413: "refusal", 422: "refusal",
    408: "timeout", 504: "timeout",
    429: "unavailable", 503: "unavailable", 529: "unavailable",
    500: "error", 502: "error", 401: "error",
}  # fmt: skip
"""By the status that the client would get otherwise; an engine's 401 would be a 502 for it.
`unavailable`: no ready replica, it does not start, or all are busy. `refusal`: the engine finds
fault with the request, for example a prompt that is too long for it."""
NONE: frozenset[str] = frozenset()
WORDS = frozenset(REASONS.values())


def chosen(header: bytes) -> frozenset[str] | ApiError:
    """What the client's `X-Llmgw-Fallback` asks for: `none`, or reasons between commas."""
    words = {word.strip() for word in header.decode("latin-1").lower().split(",")}
    if words == {"none"}:
        return NONE
    if words <= WORDS:
        return frozenset(words)
    return invalid(
        "invalid_fallback",
        f"The header X-Llmgw-Fallback must be 'none' or some of: {', '.join(sorted(WORDS))}.",
    )


def chain(model: str, names: Mapping[str, Model]) -> deque[str]:
    """The models to try after `model`, nearest first, each once however they refer in circles."""
    order: deque[str] = deque()
    seen = {model}
    open_ends = deque([model])
    while open_ends:
        known = names.get(open_ends.popleft())
        for name in () if known is None else known.fallbacks:
            found = names.get(name)
            if found is not None and found.name not in seen:
                seen.add(found.name)
                order.append(found.name)
                open_ends.append(found.name)
    return order
