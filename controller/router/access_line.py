"""What the access log says of one request, as a line of JSON, until it is written.

A line is rendered when its answer was given to the socket, which takes less than keeping what it
is made of for later. What finds no room is dropped and counted.
"""

from __future__ import annotations

import time
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Final

import orjson

from controller.router.clock import monotonic

if TYPE_CHECKING:
    from random import Random

    from controller.router.stats import Stats
    from controller.router.usage import UsageRow

    Entry = tuple[UsageRow, str | None, str, int]  # row, replica, client's address, bytes in

LINES: Final = 20_000
MOST_WORDS: Final = 4096
MICROS: Final = 1_000_000
_TRUTH: Final = {True: "true", False: "false"}
_words: dict[str, str] = {}  # to what they are in JSON


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
    return time.clock_gettime(time.CLOCK_REALTIME) - monotonic()


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
    """Written out: where it is compiled a dictionary and its encoder take twice as long. TypeError
    or ValueError where something of it can be no JSON. The request's id is harmless
    (`Core.request_id`)."""
    tokens = row.tokens
    return (
        f'{{"time":"{ended}","request_id":"{row.request_id.decode()}",'
        f'"key":{_word(row.key_id)},"client":{_word(client)},"endpoint":{_word(row.endpoint)},'
        f'"model_asked":{_word(row.model_asked)},"model":{_word(row.model)},'
        f'"replica":{_word(replica)},"stream":{_TRUTH[row.stream]},"status":{row.http_status},'
        f'"outcome":{_word(row.status)},"error_code":{_word(row.error_code)},'
        f'"attempts":{row.attempts},"total_ms":{_ms(row.total_s)},"queue_ms":{_ms(row.queue_s)},'
        f'"ttft_ms":{_ms(row.ttft_s)},"prompt_tokens":{_count(tokens.prompt)},'
        f'"completion_tokens":{_count(tokens.completion)},"cached_tokens":{_count(tokens.cached)},'
        f'"estimated":{_TRUTH[tokens.estimated]},"bytes_in":{received},"bytes_out":{sent}}}\n'
    ).encode()


def _word(word: str | None) -> str:
    """As JSON: of what comes again and again, kept from the last time."""
    if word is None:
        return "null"
    found = _words.get(word)
    if found is None:
        if len(_words) == MOST_WORDS:
            _words.clear()
        _words[word] = found = orjson.dumps(word).decode()
    return found


def _count(number: int | None) -> str:
    return "null" if number is None else str(number)


def _ms(seconds: float | None) -> str:
    """In milliseconds, to the tenth."""
    if seconds is None:
        return "null"
    tenths = int(seconds * 1e4 + 0.5)
    return f"{tenths // 10}.{tenths % 10}"
