"""The agent's own log: JSON lines to stderr and to a bounded file that survives the terminal."""

from __future__ import annotations

import logging
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING, TextIO

import structlog

from sql.plain_logs import write_line

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

FILE_BYTES = 8 << 20
LEVELS = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING}


class BoundedFile:
    """Lines to a file that becomes `.1` when it is full: at most twice its limit on disk."""

    def __init__(self, path: Path, limit_bytes: int = FILE_BYTES) -> None:
        self._path = path
        self._limit = limit_bytes
        self._file = self._open()

    def _open(self) -> TextIO:
        return self._path.open("a", encoding="utf-8")

    def write(self, line: str) -> None:
        """Append; a full disk loses the line and not the agent."""
        try:
            self._file.write(line)
            self._file.flush()
            if self._file.tell() > self._limit:
                self._file.close()
                self._path.replace(self._path.with_name(self._path.name + ".1"))
                self._file = self._open()
        except (OSError, ValueError):
            self._file = self._reopened()

    def _reopened(self) -> TextIO:
        try:
            return self._open()
        except OSError:
            return sys.stderr

    def close(self) -> None:
        """Close the file."""
        if self._file is not sys.stderr:
            self._file.close()


class Tee:
    """Writes each event to stderr and to the file."""

    def __init__(self, file: BoundedFile) -> None:
        self._file = file

    def msg(self, message: str) -> None:
        """One event, one line."""
        write_line(sys.stderr, message)
        self._file.write(message + "\n")

    debug = info = warning = error = critical = msg


def configure(path: Path, node: str, level: str = "info") -> BoundedFile:
    """Set structlog up for this process; every event carries the node."""
    file = BoundedFile(path)
    tee = Tee(file)
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True, key="at"),
            structlog.processors.format_exc_info,
            structlog.processors.JSONRenderer(),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(LEVELS[level]),
        logger_factory=lambda *_: tee,
        cache_logger_on_first_use=False,
    )
    structlog.contextvars.bind_contextvars(node=node)
    return file


@contextmanager
def quiet() -> Iterator[None]:
    """No log lines within: for commands whose output is their answer, JSON among others.

    What the log would say of a machine is in the answer itself.
    """
    before = structlog.get_config()
    structlog.configure(processors=[_drop], cache_logger_on_first_use=False)
    try:
        yield
    finally:
        structlog.configure(**before)


def _drop(*_: object) -> str:
    raise structlog.DropEvent
