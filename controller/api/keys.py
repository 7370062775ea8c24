"""Handlers of clients' keys: made here, shown once, kept as SHA-256 of the whole key."""

from __future__ import annotations

import hashlib
import secrets
import string
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field

from controller.api.errors import ApiError
from controller.api.paging import Page, PageQuery, page
from controller.api.scopes import Fallback, Tags, Where  # noqa: TC001 - pydantic needs them
from controller.catalog.profile import Strict
from controller.catalog.units import Seconds  # noqa: TC001 - pydantic needs them
from sql.errors import NotFound, Refused

if TYPE_CHECKING:
    from controller.api.call import Call

_ID_LETTERS = string.ascii_lowercase + string.digits
MOST_GRACE_S = 90 * 86400.0
MOST_LIFE_S = 100 * 366 * 86400.0


class KeysQuery(PageQuery):
    """Which keys."""

    scope: Where | None = Field(None, description="an id or a path: keys in it and below")
    state: Literal["active", "expired", "revoked"] | None = None


class KeyBody(Strict):
    """A key for clients."""

    name: str = Field(min_length=1, max_length=200, description="whose or what for")
    models: list[str] | None = Field(None, min_length=1, description="absent: every model")
    expires: Seconds | None = Field(
        None, gt=0, le=MOST_LIFE_S, description='from now, as "90d"; absent: never'
    )
    scope: Where | None = Field(None, description="an id or a path; absent: in none")
    ips: list[Annotated[str, Field(max_length=50)]] | None = Field(
        None, min_length=1, max_length=100, description="networks it may be used from; absent: any"
    )
    tags: Tags = Field(default_factory=dict, description="for its usage rows")
    fallback: Fallback | None = Field(
        None, description="why another model may answer; []: never; absent: as its scopes say"
    )


class RotateBody(Strict):
    """A new secret."""

    grace: Seconds = Field(
        3600.0, ge=0, le=MOST_GRACE_S, description="so long the one before is good too; 0: not"
    )


class MoveKeyBody(Strict):
    """Another scope."""

    scope: Where | None = Field(None, description="an id or a path; absent: in none")


class ChangeKeyBody(Strict):
    """What is to be otherwise; what is absent stays, null takes a bound away."""

    name: str | None = Field(None, min_length=1, max_length=200)
    models: list[str] | None = Field(None, min_length=1, description="null: every model")
    expires: Seconds | None = Field(
        None, gt=0, le=MOST_LIFE_S, description='from now, as "90d"; null: never'
    )
    ips: list[Annotated[str, Field(max_length=50)]] | None = Field(
        None, min_length=1, max_length=100, description="null: from anywhere"
    )
    tags: Tags | None = Field(None, description="all of them anew")
    fallback: Fallback | None = Field(None, description="[]: never; null: as its scopes say")


async def keys(call: Call) -> Page:
    """Keys, without anything secret."""
    query = call.query
    return await page(call.pool, call.cursors, "keys", query, query.scope, query.state)


async def create(call: Call) -> Any:
    """A new key ``sk-<id>-<secret>``."""
    number = "".join(secrets.choice(_ID_LETTERS) for _ in range(12))
    key, digest = _secret(number)
    body = call.body
    limits = body.models, body.expires, body.scope, body.ips, body.tags, body.fallback
    try:
        ends = await call.value("key_create", call.actor, number, digest, body.name, *limits)
    except (Refused, NotFound) as error:  # a model or scope that is not there: the body's fault
        raise ApiError(400, str(error)) from error
    more = {"models": body.models, "expires_at": ends, "scope": body.scope}
    return {"id": number, "name": body.name, "key": key} | {
        field: value for field, value in more.items() if value is not None
    }


async def rotate(call: Call) -> Any:
    """A new secret for the same key."""
    number = call.path["id"]
    key, digest = _secret(number)
    until = await call.value("key_rotate", call.actor, number, digest, call.body.grace)
    return {"id": number, "key": key, "old_until": until}


async def change(call: Call) -> Any:
    """Other bounds for a key, known to every router within two seconds; as it is listed then."""
    number = call.path["id"]
    changes = call.body.model_dump(exclude_unset=True)
    bare = [name for name in ("name", "tags") if name in changes and changes[name] is None]
    if bare or not changes:
        needs = {"name": "a name, so it cannot be null", "tags": "tags, {} for none"}
        raise ApiError(400, f"a key has {needs[bare[0]]}" if bare else "nothing is to be changed")
    try:
        await call.value("key_change", call.actor, number, changes)
    except Refused as error:
        raise ApiError(400, str(error)) from error
    return await call.value("key", number)


async def move(call: Call) -> Any:
    """Into another scope, or out of all."""
    number, scope = call.path["id"], call.body.scope
    await call.value("key_move", call.actor, number, scope)
    return {"id": number} | ({} if scope is None else {"scope": scope})


async def revoke(call: Call) -> Any:
    """Refused everywhere within two seconds."""
    await call.value("key_revoke", call.actor, call.path["id"])
    return {"revoked": call.path["id"]}


def _secret(number: str) -> tuple[str, bytes]:
    """What the client gets for the key of this id, and what is kept of it."""
    key = f"sk-{number}-{secrets.token_urlsafe(32)}"
    return key, hashlib.sha256(key.encode()).digest()
