"""Bounded logs of engines: cut while they are being written, read from the end or from a place.

An engine writes straight into its file with O_APPEND, so that it needs no agent to live on. The
agent bounds the file by copying its end to `.1` and truncating it: O_APPEND makes the writer go on
at the new end. A few lines written between copy and cut can be lost; the engine is never stopped.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

TAIL_BYTES = 4096
ANSWER_BYTES = 128 * 1024


@dataclass(frozen=True, slots=True)
class Part:
    """A piece of a log; `offset` is the byte where the next piece begins."""

    text: str
    offset: int


def _clean(raw: bytes) -> str:
    # Postgres stores no NUL; a cut multibyte character becomes a replacement mark.
    return raw.decode(errors="replace").replace("\0", "�")


def trim(path: Path, limit_bytes: int) -> bool:
    """Cut a log that outgrew its limit, keeping its second half in `.1`; True when cut."""
    try:
        size = path.stat().st_size
    except FileNotFoundError:
        return False
    if size <= limit_bytes:
        return False
    kept = path.with_name(path.name + ".1")
    with path.open("rb") as source, kept.open("wb") as copy:
        source.seek(max(0, size - limit_bytes // 2))
        while block := source.read(1 << 20):
            copy.write(block)
    os.truncate(path, 0)
    return True


def tail(path: Path, lines: int, limit_bytes: int = ANSWER_BYTES) -> Part:
    """The last lines of a log, within the byte limit; empty when there is none.

    Of one that was cut a moment ago the lines before the cut too: they may tell of a crash.
    """
    raw, size = _end(path, limit_bytes)
    if size < limit_bytes and raw.count(b"\n") < lines:
        raw = _end(path.with_name(path.name + ".1"), limit_bytes - size)[0] + raw
    return Part(_clean(b"".join(raw.splitlines(keepends=True)[-lines:])), size)


def _end(path: Path, limit_bytes: int) -> tuple[bytes, int]:
    """The whole lines at a file's end, and its size."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - limit_bytes))
            raw = file.read(limit_bytes)
    except FileNotFoundError:
        return b"", 0
    if size > limit_bytes:
        raw = raw.partition(b"\n")[2] or raw  # the first line was cut
    return raw, size


def read_from(path: Path, offset: int, limit_bytes: int = ANSWER_BYTES) -> Part:
    """What was written since `offset`; a log that was cut meanwhile is read from its beginning."""
    try:
        with path.open("rb") as file:
            start = offset if offset <= file.seek(0, os.SEEK_END) else 0
            file.seek(start)
            raw = file.read(limit_bytes)
    except FileNotFoundError:
        return Part("", 0)
    return Part(_clean(raw), start + len(raw))
