"""Login roles of one installation, members of the llmgw group roles. Synchronous."""

from __future__ import annotations

import base64
import hashlib
import hmac
import secrets
from typing import TYPE_CHECKING, Any

from psycopg import sql

if TYPE_CHECKING:
    import psycopg

GROUPS = frozenset({"llmgw_owner", "llmgw_controller", "llmgw_agent", "llmgw_read"})
ITERATIONS = 4096


def verifier(password: str, salt: bytes) -> str:
    """What Postgres stores for a password, so that the password is never sent or logged.

    Format: RFC 5803 as in PostgreSQL's pg_authid, SCRAM-SHA-256.
    """
    salted = hashlib.pbkdf2_hmac("sha256", password.encode(), salt, ITERATIONS)
    stored = hashlib.sha256(hmac.digest(salted, b"Client Key", "sha256")).digest()
    server = hmac.digest(salted, b"Server Key", "sha256")
    text = [base64.b64encode(part).decode() for part in (salt, stored, server)]
    return f"SCRAM-SHA-256${ITERATIONS}:{text[0]}${text[1]}:{text[2]}"


def ensure(connection: psycopg.Connection[Any], name: str, group: str, password: str) -> None:
    """Makes (or re-keys) the login role ``name`` as a member of ``group``.

    Raises ValueError for a group that is not ours, InsufficientPrivilege without CREATEROLE.
    """
    if group not in GROUPS:
        raise ValueError(f"{group} is not one of our roles: {', '.join(sorted(GROUPS))}")
    secret = verifier(password, secrets.token_bytes(16))
    known = connection.execute("select 1 from pg_roles where rolname = %s", (name,)).fetchone()
    verb = "alter role {} login password {}" if known else "create role {} login password {}"
    connection.execute(sql.SQL(verb).format(sql.Identifier(name), sql.Literal(secret)))
    connection.execute(
        sql.SQL("grant {} to {}").format(sql.Identifier(group), sql.Identifier(name))
    )
