"""Handlers of what was used: sums by scope, key or model, and single requests."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

from controller.api.errors import ApiError
from controller.api.paging import Page, PageQuery, page
from controller.api.statements import statements
from controller.api.views import Answer
from controller.catalog.moments import Moment, split
from controller.catalog.units import seconds
from sql.errors import NotFound, Refused

if TYPE_CHECKING:
    from controller.api.call import Call

DAY_S = seconds("24h")
REPORT_S = 15.0
"""For sums: a year of ten thousand keys takes longer than other statements may."""


class ScopeUsageView(Answer):
    """What one scope, key or model used; id "-": all that is in no such scope.

    Costs are of requests that have a price; unpriced, where there are any, have none. The budget
    is that of this very scope or key, in its present period, the one nearest to its end.
    """

    scope: str
    id: str
    name: str
    keys: int
    requests: int
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    reasoning_tokens: int
    cost_micros: int
    errors: int
    unpriced: int | None = None
    estimated: int | None = None
    degraded: int | None = None
    last_at: str | None = None
    budget_micros: int | None = None
    budget_period: str | None = None
    fraction: float | None = None


class UsageRowView(Answer):
    """One request; what nobody knows is absent. Cost is exact, to a millionth of a micro."""

    at: str
    id: str
    key: str | None = None
    org: str | None = None
    team: str | None = None
    user: str | None = None
    org_id: int | None = None
    team_id: int | None = None
    user_id: int | None = None
    model_asked: str | None = None
    model: str | None = None
    replica: int | None = None
    endpoint: str
    status: str
    http_status: int | None = None
    error_code: str | None = None
    stream: bool
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    completion_tokens: int | None = None
    reasoning_tokens: int | None = None
    cost_micros: float | None = None
    ttft_ms: float | None = None
    queue_ms: float | None = None
    total_ms: float | None = None
    attempts: int
    estimated: bool
    flags: list[str]
    request_id: str | None = None
    upstream_id: str | None = None
    tags: dict[str, Any] | None = None


class UsageQuery(PageQuery):
    """By what, and of which span."""

    by: Literal["org", "team", "user", "key", "model"] = "team"
    since: Moment = Field(DAY_S, description="a span counts whole minutes; older ones whole days")
    until: Moment | None = Field(None, description="absent: now")
    within: str | None = Field(None, min_length=1, description="of this scope (id or path) only")
    top: int | None = Field(None, ge=1, le=5000, description="the dearest so many, on one page")


class UsageRowsQuery(PageQuery):
    """Which requests."""

    since: Moment = DAY_S
    until: Moment | None = Field(None, description="absent: now")
    order: Literal["newest", "oldest"] = "newest"
    key: str | None = Field(None, description="of this key only")
    model: str | None = Field(None, description="served by this model only")
    within: str | None = Field(None, min_length=1, description="of this scope (id or path) only")


async def usage_by(call: Call) -> Page:
    """Sums of a span; pages are by id, the dearest come first with top."""
    query = call.query
    filters = query.by, *split(query.since), *split(query.until), query.within
    try:
        if query.top is None:
            asked = "usage_by", query, *filters
            return await page(call.pool, call.cursors, *asked, timeout_s=REPORT_S)
        text = statements()["usage_top"]
        rows = await call.pool.fetch(text, query.top, *filters, timeout_s=REPORT_S)
        return Page(row["row"] for row in rows)
    except (NotFound, Refused) as error:
        raise ApiError(400, str(error)) from error


async def usage_rows(call: Call) -> Page:
    """Single requests of a span; requests that ended at once are told apart by id (G04)."""
    query = call.query
    name = f"usage_{query.order}"
    filters = *split(query.since), *split(query.until), query.key, query.model, query.within
    try:
        return await page(call.pool, call.cursors, name, query, *filters)
    except NotFound as error:
        raise ApiError(400, str(error)) from error
