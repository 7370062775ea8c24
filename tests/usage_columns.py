"""The order in which routers hand request rows to Postgres."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

COLUMNS = (
    "id", "at", "key_id", "model_asked", "model", "replica_id", "endpoint", "status",
    "http_status", "error_code", "stream", "prompt_tokens", "cached_tokens", "completion_tokens",
    "ttft_ms", "total_ms", "attempts", "request_id", "reasoning_tokens", "estimated", "queue_ms",
    "degraded", "org_id", "team_id", "user_id", "upstream_id", "tried",
)  # fmt: skip


def named(values: Sequence[Any]) -> dict[str, Any]:
    """A row by its columns' names, without what is unknown or not estimated."""
    row = dict(zip(COLUMNS, values, strict=True))
    row |= {flag: row[flag] or None for flag in ("estimated", "degraded")}
    return {name: value for name, value in row.items() if value is not None}


def listed(row: Mapping[str, Any]) -> list[Any]:
    """The other way round. KeyError for a name that is no column."""
    unknown = row.keys() - set(COLUMNS)
    if unknown:
        raise KeyError(unknown)
    return [row.get(name) for name in COLUMNS]
