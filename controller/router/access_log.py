"""One JSON line per request that is over: who, what, where, how it ended. Never bodies, never keys.

A worker thread writes what was rendered meanwhile (`access_line.py`).
"""

from __future__ import annotations

import os
import select
import stat
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import structlog
import trio

if TYPE_CHECKING:
    from controller.router.access_line import Lines

STDOUT = "stdout"
PACE_S = 0.2
LAST_S = 1.0

log = structlog.get_logger(__name__)


class AccessLog:
    """The log of one router process; `where` is a file's path or "stdout"."""

    def __init__(self, where: str, lines: Lines) -> None:
        self._sink = Sink(where)
        self._lines = lines

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
        lines = self._lines.take()
        if lines:
            lost = await trio.to_thread.run_sync(self._sink.write, lines, abandon_on_cancel=True)
            if lost:
                self._lines.lose(lost)


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
