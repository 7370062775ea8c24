"""Scopes: organisations, teams and users, by id or path (acme/ml/alice)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field, model_validator

from controller.api.errors import ApiError
from controller.api.paging import Page, PageQuery, page
from controller.api.views import Answer
from controller.catalog.profile import Strict
from sql.errors import NotFound, Refused

if TYPE_CHECKING:
    from controller.api.call import Call

Tag = Annotated[str, Field(min_length=1, max_length=200)]
Tags = Annotated[dict[Tag, Annotated[str, Field(max_length=500)]], Field(max_length=50)]
Where = Annotated[str, Field(min_length=1, max_length=700)]
"""An id or a path."""
Fallback = Annotated[
    list[Literal["unavailable", "timeout", "error", "refusal"]], Field(max_length=4)
]
"""Why another model may answer."""


class ScopeView(Answer):
    """A scope; keys: active ones directly in it; weight: of those at the top."""

    id: int
    kind: str
    name: str
    path: str
    parent: int | None = None
    tags: dict[str, str]
    keys: int
    created_by: str
    created_at: str
    deleted_at: str | None = None
    fallback: list[str] | None = None
    weight: float | None = None


class ScopeDeleted(Answer):
    """What was deleted with a scope: itself and those below, and keys that were revoked."""

    deleted: str
    scopes: int
    keys: int


class ScopesQuery(PageQuery):
    """Which scopes."""

    kind: Literal["org", "team", "user"] | None = None
    below: Where | None = Field(None, description="an id or a path: it and all below it")
    deleted: bool = Field(False, description="deleted ones too")


class ScopeBody(Strict):
    """A new scope."""

    kind: Literal["org", "team", "user"]
    name: str = Field(min_length=1, max_length=200, description="without a slash, and no number")
    parent: Where | None = Field(None, description="id or path; absent: at the top")
    tags: Tags = Field(default_factory=dict)
    fallback: Fallback | None = Field(
        None, description="why another model may answer; []: never; absent: not said here"
    )


class ChangeScopeBody(Strict):
    """What is to be otherwise; what is absent stays."""

    fallback: Fallback | None = Field(
        None, description="why another model may answer; []: never; null: not said here"
    )
    weight: float | None = Field(
        None,
        ge=0.01,
        le=100,
        description="turns of all below it in a queue, for one of a scope of weight 1; null: 1",
    )

    @model_validator(mode="after")
    def _says_something(self) -> ChangeScopeBody:
        if not self.model_fields_set:
            raise ValueError("say what to change: fallback or weight")
        return self


class MoveBody(Strict):
    """Another parent."""

    parent: Where | None = Field(None, description="id or path; absent: to the top")


class RenameBody(Strict):
    """Another name."""

    name: str = Field(min_length=1, max_length=200)


async def scopes(call: Call) -> Page:
    """A page of scopes, in the order in which they were made."""
    query = call.query
    filters = query.kind, query.below, query.deleted
    return await page(call.pool, call.cursors, "scopes", query, *filters)


async def create(call: Call) -> Any:
    """A new one, as it is listed."""
    body = call.body
    try:
        number = await call.value(
            "scope_create", call.actor, body.kind, body.name, body.parent, body.tags, body.fallback
        )
    except (Refused, NotFound) as error:
        raise ApiError(400, str(error)) from error
    return await _one(call, str(number))


async def change(call: Call) -> Any:
    """Something else for all below, known to every router within two seconds."""
    changes = call.body.model_dump(exclude_unset=True)
    return await _one(
        call, await call.value("scope_change", call.actor, call.path["name"], changes)
    )


async def move(call: Call) -> Any:
    """The whole subtree elsewhere; requests that run are billed where they began."""
    return await _one(
        call, await call.value("scope_move", call.actor, call.path["name"], call.body.parent)
    )


async def rename(call: Call) -> Any:
    """Another name, in history too."""
    return await _one(
        call, await call.value("scope_rename", call.actor, call.path["name"], call.body.name)
    )


async def delete(call: Call) -> Any:
    """With all below it; their keys are revoked, history keeps the names."""
    return await call.value("scope_delete", call.actor, call.path["name"])


async def _one(call: Call, number: str) -> Any:
    return await call.value("scope", number)
