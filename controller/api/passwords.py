"""Passwords: argon2id, in a thread, two at a time so that logins cannot take the whole machine."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

import trio
from argon2 import PasswordHasher
from argon2.exceptions import InvalidHashError, VerificationError

from controller.api.errors import ApiError

if TYPE_CHECKING:
    from pydantic import SecretStr

SHORTEST, LONGEST = 12, 1000
AT_ONCE = 2
_HASHER = PasswordHasher()  # the library's own parameters: RFC 9106's second choice, 64 MiB


@cache
def _room() -> trio.CapacityLimiter:
    return trio.CapacityLimiter(AT_ONCE)


@cache
def _nobodys() -> str:
    """A hash to compare with when there is no such user: that must take as long."""
    return _HASHER.hash("nobody's password")


async def hashed(password: SecretStr) -> str:
    """The hash to keep of a new password; ApiError 400 when it is too short or too long."""
    text = password.get_secret_value()
    if not SHORTEST <= len(text) <= LONGEST:
        raise ApiError(400, f"a password has {SHORTEST} to {LONGEST} characters")
    return await trio.to_thread.run_sync(_HASHER.hash, text, limiter=_room())


async def right(password: SecretStr, kept: str | None) -> bool:
    """Whether this is the password of the hash; no hash (None) takes as long and is wrong."""
    text = password.get_secret_value()[: LONGEST + 1]
    return await trio.to_thread.run_sync(_verify, text, kept, limiter=_room())


def _verify(text: str, kept: str | None) -> bool:
    nobodys = _nobodys()  # made by the first login of all, whoever that is
    try:
        return _HASHER.verify(kept or nobodys, text) and kept is not None
    except (VerificationError, InvalidHashError):
        return False
