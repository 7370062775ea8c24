"""The key that an engine wants of us, as one started with `--api-key` does, in a file of its own.

A file, because arguments of a process and printed settings can be read by others. Nothing shows the
key but the heads of requests to that engine.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

MOST_BYTES = 4096
"""Engines refuse heads over 8 to 64 KiB."""
_KEY = re.compile(rb"[!-~]+")


def read_key(path: Path) -> bytes:
    """The key in `path`, less the blanks around it (an editor's last line break).

    Raises OSError when the file cannot be read, ValueError when it holds no key; neither says what
    is in it.
    """
    with path.open("rb") as file:
        key = file.read(MOST_BYTES + 1).strip()
    if not key:
        raise ValueError(f"{path} is empty: it must hold the engine's key and nothing else")
    if len(key) > MOST_BYTES:
        raise ValueError(f"{path} is over {MOST_BYTES} bytes: it must hold the engine's key alone")
    if not _KEY.fullmatch(key):
        raise ValueError(
            f"{path} must hold the engine's key alone: one line of printable ASCII without blanks, "
            "and without the word Bearer"
        )
    return key


def host_lines(authority: bytes, key: bytes) -> bytes:
    """The lines of a request's head that say whom it is for, with the key where that wants one."""
    line = b"host: " + authority
    return line + b"\r\nauthorization: Bearer " + key if key else line
