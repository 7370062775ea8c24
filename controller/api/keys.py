"""Handlers of clients' keys: made here, shown once, kept as SHA-256 of the whole key."""

from __future__ import annotations

import hashlib
import secrets
import string
from typing import TYPE_CHECKING, Any

from controller.api.errors import ApiError
from controller.api.paging import Page, page
from sql.errors import Refused

if TYPE_CHECKING:
    from controller.api.call import Call

_ID_LETTERS = string.ascii_lowercase + string.digits


async def keys(call: Call) -> Page:
    """Every key, without anything secret."""
    return await page(call.pool, call.cursors, "keys", call.query)


async def create(call: Call) -> Any:
    """A new key ``sk-<id>-<secret>``."""
    number = "".join(secrets.choice(_ID_LETTERS) for _ in range(12))
    key = f"sk-{number}-{secrets.token_urlsafe(32)}"
    digest = hashlib.sha256(key.encode()).digest()
    body = call.body
    try:
        ends = await call.value(
            "key_create", call.actor, number, digest, body.name, body.models, body.expires
        )
    except Refused as error:  # a model that is not there: the body's fault
        raise ApiError(400, str(error)) from error
    more = {"models": body.models, "expires_at": ends}
    return {"id": number, "name": body.name, "key": key} | {
        field: value for field, value in more.items() if value is not None
    }


async def revoke(call: Call) -> Any:
    """Refused everywhere within two seconds."""
    await call.value("key_revoke", call.actor, call.path["id"])
    return {"revoked": call.path["id"]}
