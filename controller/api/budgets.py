"""Budgets: what a scope or key, with all below it, may spend in a period."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Self

from pydantic import Field, model_validator

from controller.api.bodies import BIGGEST
from controller.api.errors import ApiError
from controller.api.paging import Page, PageQuery, page
from controller.api.scopes import Where  # noqa: TC001 - pydantic needs it
from controller.api.views import Answer
from controller.catalog.profile import Strict
from sql.errors import NotFound, Refused

if TYPE_CHECKING:
    from controller.api.call import Call

KeyId = Annotated[str, Field(min_length=1, max_length=100)]


class BoundView(Answer):
    """On what a budget or limit sits; scope: its path, or that of its key."""

    id: int
    level: str
    key: str | None = None
    key_name: str | None = None
    scope_id: int | None = None
    scope: str | None = None
    created_by: str
    created_at: str


class BudgetView(BoundView):
    """A budget, what is spent of it in the present period, and what routers have reserved."""

    micros: int
    period: str
    zone: str | None = None
    warn: list[float]
    spent: float
    reserved: float
    fraction: float
    frees_at: str | None = None


class BudgetEvent(Answer):
    """A budget passed a threshold, a fraction of its micros."""

    id: int
    at: str
    budget: int
    key: str | None = None
    scope_id: int | None = None
    period: str
    threshold: float
    spent: int
    micros: int


class BoundRemoved(Answer):
    """Which was removed."""

    removed: int


class BoundsQuery(PageQuery):
    """Whose."""

    scope: Where | None = Field(None, description="an id or a path: on it and all below it")
    key: KeyId | None = None


class EventsQuery(PageQuery):
    """Of which budget."""

    limit: int = Field(100, ge=1, le=5000, description="rows of a page")
    budget: int | None = Field(None, ge=1, le=BIGGEST)


class Placed(Strict):
    """A body that says on what it sits."""

    scope: Where | None = Field(None, description="an id or a path")
    key: KeyId | None = None

    @model_validator(mode="after")
    def _one(self) -> Self:
        if (self.scope is None) is (self.key is None):
            raise ValueError("it sits on a scope or on a key: name one of the two")
        return self


class BudgetBody(Placed):
    """A budget; what is there for the same period is changed, and keeps what is spent."""

    micros: int = Field(ge=1, le=10**15, strict=True, description="of the currency, in a period")
    period: str = Field(
        max_length=20, description="day, week, month: from midnight in zone; 24h, 7d, 30d: rolling"
    )
    zone: str | None = Field(None, max_length=100, description="as Europe/Berlin; absent: UTC")
    warn: list[float] | None = Field(
        None, max_length=10, description="fractions at which an event is written; absent: 0.8, 1"
    )


async def budgets(call: Call) -> Page:
    """A page of budgets, in the order in which they were made."""
    query = call.query
    return await page(call.pool, call.cursors, "budgets", query, query.scope, query.key)


async def put(call: Call) -> Any:
    """A new one or a changed one, as it is listed."""
    body = call.body
    values = body.scope, body.key, body.micros, body.period, body.zone, body.warn
    return await kept(call, "budget", *values)


async def remove(call: Call) -> Any:
    """It bounds nothing more."""
    return await removed(call, "budget")


async def events(call: Call) -> Page:
    """Thresholds that were passed, newest first."""
    return await page(call.pool, call.cursors, "budget_events", call.query, call.query.budget)


async def kept(call: Call, what: str, *values: object) -> Any:
    """Set a budget or limit; answers it as it is listed."""
    try:
        number = await call.value(f"{what}_put", call.actor, *values)
    except (Refused, NotFound) as error:  # a word, or a scope that is not there: the body's fault
        raise ApiError(400, str(error)) from error
    return await call.value(what, number)


async def removed(call: Call, what: str) -> Any:
    """Remove a budget or limit by the path's id."""
    given = call.path["id"]
    number = int(given) if given.isascii() and given.isdecimal() and len(given) < 19 else 0
    if not number:
        raise ApiError(404, f"there is no {what} {given}: an id is a number, see GET /{what}s")
    await call.value(f"{what}_remove", call.actor, number)
    return {"removed": number}
