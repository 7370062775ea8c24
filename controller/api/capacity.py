"""Measurements of how much one replica serves: their form, their list, and keeping one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pydantic import Field

from controller.api.errors import ApiError
from controller.api.paging import Page, PageQuery, page
from controller.api.views import Answer
from controller.catalog.profile import Strict
from sql.errors import Refused

if TYPE_CHECKING:
    from controller.api.call import Call

MOST = 1e9


class CapacityQuery(PageQuery):
    """Whose measurements."""

    model: str | None = None


class Spread(Strict):
    """Half of the requests were at most p50, nearly all at most p95 (milliseconds)."""

    p50: float | None = Field(None, ge=0, le=MOST)
    p95: float | None = Field(None, ge=0, le=MOST)


class Objectives(Strict):
    """What had to hold while it was measured (milliseconds at p95)."""

    ttft_ms: float | None = Field(None, gt=0, le=MOST)
    itl_ms: float | None = Field(None, gt=0, le=MOST)


class CapacityBody(Strict):
    """The last level that held; who measured and when is added here."""

    profile: str = Field(min_length=1, max_length=200, description="one model differs by profile")
    node_class: str | None = Field(None, min_length=1, max_length=200)
    engine: str | None = Field(None, max_length=200)
    concurrency: float = Field(gt=0, le=MOST, description="requests at once")
    requests_per_s: float | None = Field(None, ge=0, le=MOST)
    tokens_per_s: float | None = Field(None, ge=0, le=MOST)
    ttft_ms: Spread | None = None
    itl_ms: Spread | None = None
    slo: Objectives | None = None
    replica: int | None = Field(None, ge=1, le=2**63 - 1)


class CapacityView(Answer):
    """What one replica of a profile served within its objectives, as last measured."""

    model: str
    profile: str
    node_class: str | None = None
    engine: str | None = None
    concurrency: float
    requests_per_s: float | None = None
    tokens_per_s: float | None = None
    ttft_ms: Any = None
    itl_ms: Any = None
    slo: Any = None
    measured_at: str
    measured_by: str
    replica: int | None = None


async def capacity(call: Call) -> Page:
    """All measurements; a row of another shape is shown as it is and hides no other."""
    return await page(call.pool, call.cursors, "capacity", call.query, call.query.model)


async def put(call: Call) -> Any:
    """Keeps a measurement in place of the older one, and answers it."""
    name, body = call.path["name"], call.body.model_dump(exclude_none=True)
    try:
        return await call.value("capacity_put", call.actor, name, body)
    except Refused as error:
        raise ApiError(400, str(error)) from None
