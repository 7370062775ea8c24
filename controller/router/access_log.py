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
        self._unsure = True  # whether the file ends with a whole line

    def write(self, lines: list[bytes]) -> int:
        """Writes and returns how many lines were lost; failures are logged, not raised."""
        written = 0
        try:
            self._open()
            whole = stat.S_ISREG(os.fstat(self._fd).st_mode)
            if whole and self._unsure:
                self._end_line()
            for part in parts(lines, 2**20 if whole else select.PIPE_BUF):
                data = b"".join(part)
                sent, error = _write_all(self._fd, data)
                written += len(part) if error is None else data.count(b"\n", 0, sent)
                if error is not None:
                    raise error
        except OSError as error:
            self._unsure = True
            self._failures += 1
            if self._failures & (self._failures - 1) == 0:  # the 1st, 2nd, 4th, 8th, ...
                log.warning("access log lines are lost", path=self._path, error=repr(error))
        return len(lines) - written

    def _end_line(self) -> None:
        """A disk that was full cut the last line: the next one must not be lost with it."""
        if _last_byte(self._fd) != b"\n":
            os.write(self._fd, b"\n")
        self._unsure = False

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
        self._unsure = True


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


def _last_byte(fd: int) -> bytes:
    """Of a file that is open for writing only; that of a line's end when nobody may know."""
    try:
        with Path(f"/proc/self/fd/{fd}").open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - 1))
            return file.read(1) or b"\n"
    except OSError:
        return b"\n"


def _write_all(fd: int, data: bytes) -> tuple[int, OSError | None]:
    """How many bytes were written, and what kept the rest from it."""
    sent = 0
    try:
        while sent < len(data):
            sent += os.write(fd, memoryview(data)[sent:])
    except OSError as error:
        return sent, error
    return sent, None
