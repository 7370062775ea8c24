"""Whether a name is a model's, and what to say when it is not."""

from __future__ import annotations

import difflib
from typing import TYPE_CHECKING

from controller.api.errors import ApiError
from sql import queries

if TYPE_CHECKING:
    from controller.api.call import Call
    from controller.api.paging import Page


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


async def of_a_model(call: Call, found: Page) -> Page:
    """The page; an empty one of a model that there is not is a mistake and no answer."""
    query = call.query
    if not found and query.model is not None and query.cursor is None:
        refused = await unknown_model(call, query.model)
        if refused is not None:
            raise refused
    return found
