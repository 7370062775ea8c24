"""One JSON line per request that is over: who, what, where, how it ended. Never bodies, never keys.

A line is rendered when its answer was given to the socket, which takes less than keeping what it
is made of for later; a worker thread writes. What finds no room is dropped and counted.
"""

from __future__ import annotations

import os
import select
import stat
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import structlog
import trio

from controller.router.access_line import line

if TYPE_CHECKING:
    from random import Random

    from controller.router.access_line import Entry
    from controller.router.stats import Stats

STDOUT = "stdout"
PACE_S = 0.2
LINES = 20_000
LAST_S = 1.0

log = structlog.get_logger(__name__)


class AccessLog:
    """The log of one router process; `where` is a file's path or "stdout"."""

    def __init__(self, where: str, sample: float, random: Random, stats: Stats) -> None:
        self._sink = Sink(where)
        self._sample = sample
        self._stats = stats
        self._random = random.random
        self._lines: list[bytes] = []

    def wants(self, outcome: str) -> bool:
        """Whether a request that ended so is told: all that failed, a share of the rest."""
        return self._sample >= 1 or outcome != "ok" or self._random() < self._sample

    def add(self, entry: Entry, sent: int) -> None:
        """`sent`: bytes of its answer, heads included."""
        if len(self._lines) >= LINES:
            self._lose(1)
        else:
            row = entry[0]
            at = row.ended + _offset() if row.at is None else row.at
            self._lines.append(line(entry, sent, at))

    async def run(self) -> None:
        """Write until cancelled, then what is left, within LAST_S."""
        try:
            while True:
                await trio.sleep(PACE_S)
                await self._write()
        finally:
            with trio.CancelScope(shield=True), trio.move_on_after(LAST_S):
                await self._write()

    async def _write(self) -> None:
        lines, self._lines = self._lines, []
        if lines:
            lost = await trio.to_thread.run_sync(self._sink.write, lines, abandon_on_cancel=True)
            self._lose(lost)

    def _lose(self, number: int) -> None:
        if number:
            self._stats.add("access_log_lines_lost", number)


class Sink:
    """Where the lines go; used by one worker thread at a time.

    Router processes share it: a file takes each write whole (O_APPEND), a pipe takes so much as
    PIPE_BUF whole.
    """

    def __init__(self, where: str) -> None:
        self._path = None if where == STDOUT else where
        self._fd = sys.stdout.fileno() if where == STDOUT else -1
        self._failures = 0

    def write(self, lines: list[bytes]) -> int:
        """Writes and returns how many lines were lost; failures are logged, not raised."""
        written = 0
        try:
            self._open()
            whole = stat.S_ISREG(os.fstat(self._fd).st_mode)
            for part in parts(lines, 2**20 if whole else select.PIPE_BUF):
                _write_all(self._fd, b"".join(part))
                written += len(part)
        except OSError as error:
            self._failures += 1
            if self._failures & (self._failures - 1) == 0:  # the 1st, 2nd, 4th, 8th, ...
                log.warning("access log lines are lost", path=self._path, error=repr(error))
        return len(lines) - written

    def _open(self) -> None:
        """Open the file, anew when it was moved away (rotated)."""
        if self._path is None:
            return
        if self._fd >= 0:
            try:
                if os.path.samestat(Path(self._path).stat(), os.fstat(self._fd)):
                    return
            except FileNotFoundError:
                pass
            os.close(self._fd)
            self._fd = -1
        self._fd = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o640)


def _offset() -> float:
    """Makes unix seconds of this machine of monotonic ones: the time of rows that ended before the
    database's clock was known, and of static mode, which has no database."""
    return time.clock_gettime(time.CLOCK_REALTIME) - time.monotonic()


def parts(lines: list[bytes], most: int) -> list[list[bytes]]:
    """`lines` in order, in lists of at most `most` bytes; a longer line has a list of its own."""
    found: list[list[bytes]] = []
    size = most
    for text in lines:
        if size + len(text) > most:
            found.append([])
            size = 0
        found[-1].append(text)
        size += len(text)
    return found


def _write_all(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        written = os.write(fd, view)
        view = view[written:]
