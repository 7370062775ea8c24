"""What the access log says of one request, as a line of JSON, until it is written.

A line is rendered when its answer was given to the socket, which takes less than keeping what it
is made of for later. What finds no room is dropped and counted.
"""

from __future__ import annotations

import time
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Final

import orjson

if TYPE_CHECKING:
    from random import Random

    from controller.router.stats import Stats
    from controller.router.usage import UsageRow

    Entry = tuple[UsageRow, str | None, str, int]  # row, replica, client's address, bytes in

LINES: Final = 20_000
MICROS: Final = 1_000_000


class Lines:
    """Lines that wait for the log's file (`access_log.py`)."""

    def __init__(self, sample: float, random: Random, stats: Stats) -> None:
        self._sample = sample
        self._random = random
        self._stats = stats
        self._waiting: list[bytes] = []
        self._second = -1  # of the last line's time, in unix time
        self._date = ""  # the same for people

    def wants(self, outcome: str) -> bool:
        """Whether a request that ended so is told: all that failed, a share of the rest."""
        return self._sample >= 1 or outcome != "ok" or self._random.random() < self._sample

    def add(self, entry: Entry, sent: int) -> None:
        """`sent`: bytes of its answer, heads included."""
        if len(self._waiting) >= LINES:
            self.lose(1)
        else:
            row = entry[0]
            at = row.ended + _offset() if row.at is None else row.at
            self._waiting.append(line(entry, sent, self._time(at)))

    def _time(self, at: float) -> str:
        """Of unix seconds, in UTC: the date is worked out once a second."""
        micros = int(at * MICROS + 0.5)
        second = micros // MICROS
        if second != self._second:
            self._second, self._date = second, datetime.fromtimestamp(second, UTC).isoformat()[:19]
        return f"{self._date}.{str(MICROS + micros % MICROS)[1:]}Z"

    def take(self) -> list[bytes]:
        """All that wait, oldest first."""
        lines, self._waiting = self._waiting, []
        return lines

    def lose(self, number: int) -> None:
        """Count lines that nobody will read."""
        self._stats.add("access_log_lines_lost", number)


def _offset() -> float:
    """Makes unix seconds of this machine of monotonic ones: the time of rows that ended before the
    database's clock was known, and of static mode, which has no database."""
    return time.clock_gettime(time.CLOCK_REALTIME) - time.monotonic()


def line(entry: Entry, sent: int, ended: str) -> bytes:
    """One line. `ended`: when; `sent`: bytes of the answer."""
    row, replica, client, received = entry
    try:
        return _line(row, replica, client, received, sent, ended)
    except (TypeError, ValueError):  # something of it can be no JSON (case B20)
        return _line(row.cleaned(), replica, client, received, sent, ended)


def _line(
    row: UsageRow, replica: str | None, client: str, received: int, sent: int, ended: str
) -> bytes:
    tokens, ttft_s, queue_s = row.tokens, row.ttft_s, row.queue_s
    document = {
        "time": ended,
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
        "total_ms": _ms(row.total_s),
        "queue_ms": None if queue_s is None else _ms(queue_s),
        "ttft_ms": None if ttft_s is None else _ms(ttft_s),
        "prompt_tokens": tokens.prompt,
        "completion_tokens": tokens.completion,
        "cached_tokens": tokens.cached,
        "estimated": tokens.estimated,
        "bytes_in": received,
        "bytes_out": sent,
    }
    return orjson.dumps(document, option=orjson.OPT_APPEND_NEWLINE)


def _ms(seconds: float) -> float:
    """In milliseconds, to the tenth; `round` takes five times as long."""
    return int(seconds * 1e4 + 0.5) / 10
