"""Scopes, keys and people by the functions that a controller calls."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import psycopg
import pytest
from psycopg.types.json import Jsonb

from tests.sql.fleet import digest

if TYPE_CHECKING:
    from tests.sql.fleet import Fleet

KEY = "select llmgw.key_create_v2('me', %s, %s, %s, null, %s, %s, %s, %s)"


def call(fleet: Fleet, function: str, *args: object) -> Any:
    """The one value of a function, or the first of its columns."""
    marks = ", ".join("%s" for _ in args)
    row = fleet.controller.execute(f"select * from {function}({marks})", args).fetchone()
    return next(iter(row.values())) if row else None


def refused(fleet: Fleet, function: str, *args: object, code: str = "LG003") -> str:
    """What a function says to people when it refuses, with this SQLSTATE."""
    with pytest.raises(psycopg.Error) as caught:
        call(fleet, function, *args)
    assert caught.value.sqlstate == code, caught.value
    return str(caught.value.diag.message_primary)


def scope(fleet: Fleet, kind: str, name: str, parent: str | None = None, tags: Any = None) -> int:
    """A new scope; its id."""
    made = None if tags is None else Jsonb(tags)
    number: int = call(fleet, "llmgw.scope_create_v1", "me", kind, name, parent, made)
    return number


def key(
    fleet: Fleet,
    identity: str = "abcdef",
    *,
    name: str = "k",
    scope: str | None = None,
    ttl: float | None = None,
    ips: list[str] | None = None,
    tags: Any = None,
) -> Any:
    """A new key whose secret is its id."""
    made = None if tags is None else Jsonb(tags)
    args = (identity, digest(identity), name, None, ttl, scope, ips, made)
    return call(fleet, "llmgw.key_create_v2", "me", *args)


def family(fleet: Fleet, keys: dict[str, str | None]) -> None:
    """acme/ml/alice, other beside, and keys by their ids in some of these scopes, or in none."""
    scope(fleet, "org", "acme")
    scope(fleet, "team", "ml", "acme")
    scope(fleet, "user", "alice", "acme/ml")
    scope(fleet, "org", "other")
    for identity, path in keys.items():
        key(fleet, identity, scope=path)


def fill(fleet: Fleet) -> None:
    """Something in every table that a view of tenants reads."""
    scope(fleet, "org", "acme")
    key(fleet, "ofacme", scope="acme")
    call(fleet, "llmgw.user_create_v1", "me", "ada", "$argon2id$x", True, "acme")
