"""Limits: what a scope or key, with all below it, may ask for on all routers together."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pydantic import Field

from controller.api.budgets import BoundView, Placed, kept, removed
from controller.api.paging import Page, page

if TYPE_CHECKING:
    from controller.api.call import Call


class LimitView(BoundView):
    """A limit; requests and tokens: given out in this minute, in_parallel: running now."""

    model: str | None = None
    requests_per_min: int | None = None
    tokens_per_min: int | None = None
    parallel: int | None = None
    requests: int | None = None
    tokens: int | None = None
    in_parallel: int | None = None


class LimitBody(Placed):
    """A limit; what is there for the same model, or for all, is replaced."""

    model: str | None = Field(
        None, min_length=1, max_length=200, description="name or alias; absent: all together"
    )
    requests_per_min: int | None = Field(None, ge=1, le=10**9, strict=True)
    tokens_per_min: int | None = Field(None, ge=1, le=10**12, strict=True)
    parallel: int | None = Field(None, ge=1, le=10**6, strict=True)


async def limits(call: Call) -> Page:
    """A page of limits, in the order in which they were made."""
    query = call.query
    return await page(call.pool, call.cursors, "limits", query, query.scope, query.key)


async def put(call: Call) -> Any:
    """A new one or a changed one, as it is listed."""
    body = call.body
    bounds = body.requests_per_min, body.tokens_per_min, body.parallel
    return await kept(call, "limit", body.scope, body.key, body.model, *bounds)


async def remove(call: Call) -> Any:
    """It holds no more."""
    return await removed(call, "limit")
