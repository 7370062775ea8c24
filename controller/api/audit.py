"""The audit: who changed what, when, and from which address."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pydantic import Field

from controller.api.paging import Page, PageQuery, page
from controller.api.views import Answer
from controller.catalog.units import Seconds  # noqa: TC001 - pydantic needs them

if TYPE_CHECKING:
    from controller.api.call import Call


class AuditView(Answer):
    """One change. source: the address it was made from, absent when it is not known."""

    id: int
    at: str
    actor: str
    action: str
    object: str
    detail: Any = None
    source: str | None = None


class AuditQuery(PageQuery):
    """Which changes, newest first."""

    limit: int = Field(100, ge=1, le=5000, description="rows of a page")
    object: str | None = Field(
        None, max_length=300, description='"key" for all keys, "key k3x9..." for one'
    )
    actor: str | None = Field(None, max_length=200)
    since: Seconds | None = Field(None, description='how far back, as "24h"')


async def audit(call: Call) -> Page:
    """A page of changes, newest first."""
    query = call.query
    filters = query.object, query.actor, query.since
    return await page(call.pool, call.cursors, "audit", query, *filters)
