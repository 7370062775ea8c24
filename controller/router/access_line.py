"""What the access log says of one request, as a line of JSON. Pure."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING

import orjson

if TYPE_CHECKING:
    from controller.router.usage import UsageRow

    Entry = tuple[UsageRow, str | None, str, int]  # row, replica, client's address, bytes in

_FORMAT = orjson.OPT_APPEND_NEWLINE | orjson.OPT_UTC_Z


def line(entry: Entry, sent: int, wall: float) -> bytes:
    """One line. `wall` makes unix seconds of this machine of monotonic ones: the time of rows that
    ended before the database's clock was known, and of static mode, which has no database."""
    row, replica, client, received = entry
    at = row.ended + wall if row.at is None else row.at
    document = {
        "time": datetime.fromtimestamp(at, UTC),
        "request_id": row.request_id.decode("latin-1"),
        "key": row.key_id,
        "client": client,
        "endpoint": row.endpoint,
        "model_asked": row.model_asked,
        "model": row.model,
        "replica": replica,
        "stream": row.stream,
        "status": row.http_status,
        "outcome": row.status,
        "error_code": row.error_code,
        "attempts": row.attempts,
        "total_ms": round(row.total_s * 1000, 1),
        "ttft_ms": None if row.ttft_s is None else round(row.ttft_s * 1000, 1),
        "prompt_tokens": row.tokens.prompt,
        "completion_tokens": row.tokens.completion,
        "cached_tokens": row.tokens.cached,
        "bytes_in": received,
        "bytes_out": sent,
    }
    return orjson.dumps(document, option=_FORMAT)
