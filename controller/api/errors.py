"""What the admin API says when it cannot do what was asked: status and one sentence."""

from __future__ import annotations

from typing import Final

from controller.catalog.faults import CatalogError
from sql import errors as database

RETRY_AFTER_S: Final = 2


class ApiError(Exception):
    """An answer that is not a success. ``message`` says what, which, why and what next."""

    def __init__(self, status: int, message: str, headers: dict[str, str] | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.headers = headers or {}


def no_store() -> ApiError:
    """For a controller without a database (static mode)."""
    return ApiError(
        501,
        "this controller runs without Postgres (static mode), so it has no catalog, nodes or keys, "
        "and nothing recorded would survive a restart: give it a database with LLMGW_DATABASE_URL",
    )


def translate(error: Exception) -> ApiError | None:
    """The answer to an error that we know; None for a fault of ours."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, CatalogError):
        return ApiError(400, str(error))
    if isinstance(error, database.NotFound):
        return ApiError(404, str(error))
    if isinstance(error, database.Refused | database.IllegalMove):
        return ApiError(409, str(error))
    if isinstance(error, database.Conflict):
        return later(f"another change was made at the same time: try again ({error})")
    if isinstance(error, database.DatabaseAway):
        return later(f"{error}: nothing was answered or changed, try again soon")
    return None


def later(message: str) -> ApiError:
    """For what may work soon."""
    return ApiError(503, message, {"Retry-After": str(RETRY_AFTER_S)})
