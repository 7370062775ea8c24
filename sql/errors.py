"""What can go wrong between us and Postgres, by what the caller should do about it."""

from __future__ import annotations

import asyncpg


class DatabaseError(Exception):
    """Postgres said no. ``hint`` is what to do next, where it knows."""

    def __init__(self, message: str, hint: str | None = None) -> None:
        super().__init__(message)
        self.hint = hint

    def __str__(self) -> str:
        """Message and hint in one sentence for people."""
        return f"{self.args[0]} ({self.hint})" if self.hint else str(self.args[0])


class DatabaseAway(DatabaseError):
    """No usable connection, or no answer in time: keep what you have and try again later."""


class Conflict(DatabaseError):
    """Another transaction was first (deadlock, serialization): read again, decide again."""


class BadValue(DatabaseError):
    """A value that no column or rule of ours takes: sending it again is in vain."""


class StaleTerm(DatabaseError):
    """LG001: another controller leads now; nothing was written."""


class IllegalMove(DatabaseError):
    """LG002: the state table has no such move; nothing was written."""


class Refused(DatabaseError):
    """LG003: what was asked does not fit what is there; the message is for people."""


class Unauthorized(DatabaseError):
    """LG004: the token names no node, or admits it no more."""


class NotFound(DatabaseError):
    """LG005: there is no object of that name."""


_OURS: dict[str, type[DatabaseError]] = {
    "LG001": StaleTerm,
    "LG002": IllegalMove,
    "LG003": Refused,
    "LG004": Unauthorized,
    "LG005": NotFound,
    "40001": Conflict,
    "40P01": Conflict,
    "55P03": Conflict,
}
# Connection trouble, shutdown, start-up, too many connections, a primary made a standby (F08).
_AWAY_PREFIXES = ("08", "57P", "53", "57014", "25006", "28", "3D")

_BAD_PREFIXES = ("22", "23")  # data exceptions, violated constraints


def translate(error: BaseException) -> DatabaseError | None:
    """Our error for what the driver raised, or None when it is not the database's (our bug)."""
    if isinstance(error, asyncpg.PostgresError):
        state = error.sqlstate or ""
        message, hint = str(error.args[0] if error.args else error), getattr(error, "hint", None)
        if state in _OURS:
            return _OURS[state](message, hint)
        if state.startswith(_AWAY_PREFIXES):
            return DatabaseAway(f"Postgres is not usable: {message}", hint)
        if state.startswith(_BAD_PREFIXES):
            return BadValue(f"{type(error).__name__}: {message}", hint)
        return DatabaseError(f"{type(error).__name__}: {message}", hint)
    if isinstance(error, TimeoutError):
        return DatabaseAway("Postgres did not answer in time")
    if isinstance(error, OSError):
        return DatabaseAway(f"Postgres cannot be reached: {error}")
    if isinstance(error, asyncpg.InterfaceError | asyncpg.InternalClientError):
        return DatabaseAway(f"the connection to Postgres broke: {error}")
    return None
