"""One row per client request, waiting in memory until `report.py` writes it to Postgres.

Bounded: when the database is away for long, the oldest rows go and are counted.
"""

from __future__ import annotations

import time
from collections import deque
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from controller.router.tokens import Tokens


class UsageRow(NamedTuple):
    """What is known of a finished request; None is unknown. Cheap to make, rendered later."""

    id: int  # a UUID as a number
    key_id: str | None  # None: refused before it was known; such a row is for the access log
    model_asked: str | None
    model: str | None
    replica_id: int | None
    endpoint: str
    status: str  # ok, error, client_closed, partial
    http_status: int
    stream: bool
    tokens: Tokens
    ttft_s: float | None
    total_s: float
    attempts: int
    error_code: str | None
    request_id: bytes
    ended: float  # monotonic
    queue_s: float | None
    at: float | None  # unix seconds of the database's clock; fixed, so a repeat is the same row

    def as_values(self) -> tuple[Any, ...]:
        """The row as `usage_flush` takes it, in the order of the table's columns.

        Values without names: a dictionary costs six times as much.
        """
        tokens = self.tokens
        return (
            f"{self.id:032x}", self.at, self.key_id, self.model_asked, self.model, self.replica_id,
            self.endpoint, self.status, self.http_status, self.error_code, self.stream,
            tokens.prompt, tokens.cached, tokens.completion,
            None if self.ttft_s is None else round(self.ttft_s * 1000, 3),
            round(self.total_s * 1000, 3), self.attempts, self.request_id.decode(),
            tokens.reasoning, tokens.estimated,
            None if self.queue_s is None else round(self.queue_s * 1000, 3),
        )  # fmt: skip


class UsageLog:
    """Rows of finished requests, oldest first."""

    def __init__(self, limit: int) -> None:
        self._rows: deque[UsageRow] = deque(maxlen=limit)
        self.dropped = 0

    def __len__(self) -> int:
        return len(self._rows)

    def add(self, row: UsageRow) -> None:
        if len(self._rows) == self._rows.maxlen:
            self.dropped += 1
        self._rows.append(row)

    def oldest_age_s(self) -> float | None:
        return time.monotonic() - self._rows[0].ended if self._rows else None

    def batch(self, limit: int) -> list[UsageRow]:
        """The oldest rows; they stay until `written` says that they are safe."""
        return list(islice(self._rows, limit))

    def date(self, clock_offset: float) -> None:
        """Give a time to rows that ended before the database's clock was known (in `ended`'s
        seconds plus `clock_offset`); one row without would fail every batch it is in."""
        for number, row in enumerate(self._rows):
            if row.at is not None:
                return  # so have all that came later
            self._rows[number] = row._replace(at=row.ended + clock_offset)

    def written(self, rows: list[UsageRow]) -> None:
        """Forget rows that are safe; ids make writing a row twice harmless, losing it not."""
        safe = {row.id for row in rows}
        while self._rows and self._rows[0].id in safe:
            self._rows.popleft()
