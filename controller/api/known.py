"""Whether a name is a model's, and what to say when it is not."""

from __future__ import annotations

import difflib
from typing import TYPE_CHECKING

from controller.api.errors import ApiError
from sql import queries

if TYPE_CHECKING:
    from controller.api.call import Call


async def unknown_model(call: Call, name: str) -> ApiError | None:
    """Refusal of a name that no model in the catalog has, with the nearest; None for a model's."""
    rows = await call.pool.fetch(queries("placement")["names"])
    owners = {row["name"]: row["model"] for row in rows}
    if owners.get(name) == name:
        return None
    close = difflib.get_close_matches(name, owners, 1, 0.6)
    next_ = "llmgwctl models lists them"
    if name in owners:
        next_ = f"it is an alias of model {owners[name]}"
    elif close:
        next_ = f"did you mean {close[0]!r}?"
    return ApiError(404, f"there is no model {name} in the catalog: {next_}")
