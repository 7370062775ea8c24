"""Users: who may log in to the pages, and their sessions.

A session is a random token `ls-...`, sent as a bearer token; only its hash is kept. Logins are
counted as failed before the password is looked at, so that many at once gain nothing.
"""

from __future__ import annotations

import hashlib
import math
import secrets
from typing import TYPE_CHECKING, Any, Final

from pydantic import Field, SecretStr

from controller.api import passwords
from controller.api.errors import ApiError
from controller.api.paging import Page, page
from controller.api.scopes import Where  # noqa: TC001 - pydantic needs it
from controller.api.statements import statements
from controller.api.views import Answer
from controller.catalog.profile import Strict
from sql.errors import NotFound, Refused

if TYPE_CHECKING:
    from controller.api.call import Call
    from sql.pool import Pool

SESSION_PREFIX: Final = "ls-"


class UserView(Answer):
    """Who may log in; sessions that are open now."""

    id: int
    name: str
    admin: bool
    scope: str | None = None
    created_by: str
    created_at: str
    password_at: str
    sessions: int
    seen_at: str | None = None


class UserChanged(Answer):
    """Whose entry was made or changed."""

    name: str


class UserRemoved(Answer):
    """Who may log in no more."""

    removed: str


class LoggedIn(Answer):
    """A session. ``token`` is shown this once: send it as Authorization: Bearer TOKEN."""

    token: str
    name: str
    expires_at: str


class LoggedOut(Answer):
    """Whose session is over."""

    name: str


class UserBody(Strict):
    """A new user."""

    name: str = Field(min_length=1, max_length=100, description="small letters, digits, . _ @ + -")
    password: SecretStr = Field(description="12 to 1000 characters")
    admin: bool = Field(False, description="may change the fleet")
    scope: Where | None = Field(None, description="whose keys and usage they see: an id or a path")


class PasswordBody(Strict):
    """Another password."""

    password: SecretStr = Field(description="12 to 1000 characters")


class LoginBody(Strict):
    """Who one is."""

    name: str = Field(min_length=1, max_length=100)
    password: SecretStr


async def users(call: Call) -> Page:
    """A page of users by name."""
    return await page(call.pool, call.cursors, "users", call.query)


async def create(call: Call) -> Any:
    """A new one, who can log in at once."""
    body = call.body
    kept = await passwords.hashed(body.password)
    try:
        await call.value("user_create", call.actor, body.name, kept, body.admin, body.scope)
    except (Refused, NotFound) as error:
        raise ApiError(400, str(error)) from error
    return {"name": body.name}


async def change_password(call: Call) -> Any:
    """Another password; every session ends."""
    kept = await passwords.hashed(call.body.password)
    await call.value("user_password", call.actor, call.path["id"], kept)
    return {"name": call.path["id"]}


async def remove(call: Call) -> Any:
    """May log in no more."""
    await call.value("user_remove", call.actor, call.path["id"])
    return {"removed": call.path["id"]}


async def login(call: Call) -> Any:
    """A session, when the password is right and there were not too many wrong ones."""
    name, source = call.body.name, call.source or "unknown"
    row = await call.pool.fetchrow(statements()["login_begin"], name, source)
    assert row is not None
    if row["wait_s"] is not None:
        wait_s = math.ceil(row["wait_s"])
        raise ApiError(
            429,
            f"too many logins failed for this name or from this address: wait {wait_s} s",
            {"Retry-After": str(wait_s)},
        )
    if not await passwords.right(call.body.password, row["password_hash"]):
        raise ApiError(401, "the name or the password is wrong")
    token = SESSION_PREFIX + secrets.token_urlsafe(32)
    ends = await call.value("login_end", row["person_id"], source, session_hash(token))
    return {"token": token, "name": name, "expires_at": ends}


async def logout(call: Call) -> Any:
    """The session that is sent with this is over."""
    if call.session is None:
        raise ApiError(400, "no session came with this request, so none can end")
    await call.value("session_end", call.session)
    return {"name": call.actor}


def session_hash(token: str) -> bytes:
    """What is kept of a session's token."""
    return hashlib.sha256(token.encode()).digest()


def session_of(authorization: str | None) -> bytes | None:
    """The hash of the session in an Authorization header; None when it carries none."""
    scheme, _, token = (authorization or "").partition(" ")
    token = token.strip()
    if scheme.lower() != "bearer" or not token.startswith(SESSION_PREFIX):
        return None
    return session_hash(token)


async def admin_of(pool: Pool, session: bytes) -> str:
    """The name of the admin whose session this is; ApiError 401 or 403. Raises sql.errors."""
    row = await pool.fetchrow(statements()["session_find"], session)
    if row is None:
        raise ApiError(401, "this session is over: log in again", {"WWW-Authenticate": "Bearer"})
    if not row["admin"]:
        raise ApiError(403, f"user {row['name']} is no admin, and this is for admins")
    name: str = row["name"]
    return name
