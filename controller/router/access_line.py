"""What the access log says of one request, as a line of JSON. Pure."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING

import orjson

if TYPE_CHECKING:
    from controller.router.usage import UsageRow

    Entry = tuple[UsageRow, str | None, str, int]  # row, replica, client's address, bytes in

_FORMAT = orjson.OPT_APPEND_NEWLINE | orjson.OPT_UTC_Z


def line(entry: Entry, sent: int, at: float) -> bytes:
    """One line. `at`: when it ended, in unix seconds; `sent`: bytes of the answer."""
    row, replica, client, received = entry
    try:
        return _line(row, replica, client, received, sent, at)
    except (TypeError, ValueError):  # something of it can be no JSON (case B20)
        return _line(row.cleaned(), replica, client, received, sent, at)


def _line(
    row: UsageRow, replica: str | None, client: str, received: int, sent: int, at: float
) -> bytes:
    (  # by name, one by one, it would take half as long again
        _, key, asked, model, _, endpoint, outcome, status, stream, tokens, ttft_s, total_s,
        attempts, code, request_id, _, queue_s, _, _, _, _, _,
    ) = row  # fmt: skip
    document = {
        "time": datetime.fromtimestamp(at, UTC),
        "request_id": request_id.decode("latin-1"),
        "key": key,
        "client": client,
        "endpoint": endpoint,
        "model_asked": asked,
        "model": model,
        "replica": replica,
        "stream": stream,
        "status": status,
        "outcome": outcome,
        "error_code": code,
        "attempts": attempts,
        "total_ms": _ms(total_s),
        "queue_ms": None if queue_s is None else _ms(queue_s),
        "ttft_ms": None if ttft_s is None else _ms(ttft_s),
        "prompt_tokens": tokens.prompt,
        "completion_tokens": tokens.completion,
        "cached_tokens": tokens.cached,
        "estimated": tokens.estimated,
        "bytes_in": received,
        "bytes_out": sent,
    }
    return orjson.dumps(document, option=_FORMAT)


def _ms(seconds: float) -> float:
    """In milliseconds, to the tenth; `round` takes five times as long."""
    return int(seconds * 1e4 + 0.5) / 10
