"""Imported first by long-running processes: structlog without rich, and lines that cannot hurt.

structlog loads rich when it finds it, for tracebacks that show local variables. Those may hold
keys, and loading costs each process a tenth of a second of its start. Programs for people
(llmgwctl) use rich and do not import this.
"""

from __future__ import annotations

import os
import sys
from typing import TextIO

if "rich" not in sys.modules:
    sys.modules["rich"] = None  # type: ignore[assignment] # makes "import rich" an ImportError
    import structlog.dev

    del sys.modules["rich"]
    assert structlog.dev is not None


def write_line(file: TextIO, line: str) -> None:
    """Write to stderr at once. A disk that is full, or a reader that left, loses the line and not
    the process; nothing stays in a buffer, whose flush would fail at the end."""
    try:
        number = file.fileno()
    except OSError:  # what a test puts in its place
        file.write(line + "\n")
        return
    rest = memoryview(line.encode("utf-8", "replace") + b"\n")
    try:
        while rest:
            rest = rest[os.write(number, rest) :]
    except OSError:
        return
