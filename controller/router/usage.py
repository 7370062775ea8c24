"""One row per client request, waiting in memory until `report.py` writes it to Postgres.

Bounded: when the database is away for long, the oldest rows go and are counted.
"""

from __future__ import annotations

import time
from collections import deque
from itertools import islice
from typing import Any


class UsageLog:
    """Rows with the moment they were finished (monotonic), oldest first."""

    def __init__(self, limit: int) -> None:
        self._rows: deque[tuple[float, dict[str, Any]]] = deque(maxlen=limit)
        self.dropped = 0

    def __len__(self) -> int:
        return len(self._rows)

    def add(self, row: dict[str, Any]) -> None:
        if len(self._rows) == self._rows.maxlen:
            self.dropped += 1
        self._rows.append((time.monotonic(), row))

    def oldest_age_s(self) -> float | None:
        return time.monotonic() - self._rows[0][0] if self._rows else None

    def batch(self, limit: int) -> list[dict[str, Any]]:
        """The oldest rows with their present age; they stay until `written` says so."""
        now = time.monotonic()
        return [
            {**row, "age_ms": int((now - ended) * 1000)} for ended, row in islice(self._rows, limit)
        ]

    def written(self, rows: list[dict[str, Any]]) -> None:
        """Forget rows that are safe; ids make writing a row twice harmless, losing it not."""
        safe = {row["id"] for row in rows}
        while self._rows and self._rows[0][1]["id"] in safe:
            self._rows.popleft()
