"""Keyset pages: a cursor is the sort key of the last row seen, signed and tied to list and filters.

Keys travel as the database's own text, so that a time keeps its microseconds (G05).
"""

from __future__ import annotations

import base64
import binascii
import hmac
from typing import TYPE_CHECKING, Any, Final

import orjson
from pydantic import Field

from controller.api.errors import ApiError
from controller.api.statements import statements
from controller.catalog.profile import Strict

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sql.pool import Pool

DEFAULT: Final = 1000
MOST: Final = 5000
NEXT_HEADER: Final = "X-Llmgw-Next-Cursor"
_SIGNATURE_BYTES: Final = 16


class PageQuery(Strict):
    """Query parameters of every list."""

    limit: int = Field(default=DEFAULT, ge=1, le=MOST, description="rows of a page")
    cursor: str | None = Field(
        default=None, max_length=2000, description=f"{NEXT_HEADER} of the page before; same filters"
    )


class Cursors:
    """Seals and opens cursors with the secret that all controllers share."""

    def __init__(self, secret: bytes) -> None:
        self._secret = secret

    def _sign(self, name: str, filters: Sequence[object], key: bytes) -> bytes:
        text = orjson.dumps([name, list(filters)]) + b"\0" + key
        return hmac.digest(self._secret, text, "sha256")[:_SIGNATURE_BYTES]

    def seal(self, name: str, filters: Sequence[object], key: list[Any]) -> str:
        """The cursor after the row with this key."""
        text = orjson.dumps(key)
        return base64.urlsafe_b64encode(self._sign(name, filters, text) + text).decode()

    def open(self, name: str, filters: Sequence[object], cursor: str) -> list[Any]:
        """The key in a cursor; ApiError 400 when it is not ours or of another list or filter."""
        try:
            raw = base64.b64decode(cursor.encode(), altchars=b"-_", validate=True)
        except (binascii.Error, ValueError):
            raw = b""
        signature, text = raw[:_SIGNATURE_BYTES], raw[_SIGNATURE_BYTES:]
        if not text or not hmac.compare_digest(signature, self._sign(name, filters, text)):
            raise ApiError(
                400,
                f"this cursor was not made for this list of {name} with these filters: use the "
                f"{NEXT_HEADER} of the page before unchanged, or start without a cursor",
            )
        key: list[Any] = orjson.loads(text)
        return key


class Page(list[Any]):
    """Rows of a list and the cursor of the next page, None at the end."""

    next: str | None = None


async def page(
    pool: Pool,
    cursors: Cursors,
    name: str,
    query: PageQuery,
    *filters: object,
    timeout_s: float | None = None,
) -> Page:
    """One page of the list that the statement of this name makes; None: the pool's own limit."""
    after = cursors.open(name, filters, query.cursor) if query.cursor else None
    args = after, query.limit + 1, *filters
    rows = await pool.fetch(statements()[name], *args, timeout_s=timeout_s)
    found = Page(row["row"] for row in rows[: query.limit])
    if len(rows) > query.limit:
        found.next = cursors.seal(name, filters, rows[query.limit - 1]["key"])
    return found
