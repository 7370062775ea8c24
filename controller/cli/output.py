"""What a command prints: tables and sentences, or exactly one JSON document; all else on stderr.

Text is made whole before it is written, so that a failure half way leaves no half answer (G01).
"""

from __future__ import annotations

import errno
import io
import os
import sys
import unicodedata
from typing import TYPE_CHECKING, Any, TextIO

import orjson

from controller.cli.failures import Failure

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from rich.text import Text

_STYLES = {
    "ready": "green",
    "active": "green",
    "pass": "green",
    "ok": "green",
    "joined": "green",
    "warn": "yellow",
    "applied": "green",
    "differs": "yellow",
    "refused": "red",
    "fail": "red",
    "added": "green",
    "cordoned": "yellow",
    "draining": "yellow",
    "changed": "yellow",
    "pending": "yellow",
    "unreachable": "red",
    "lost": "red",
    "failed": "red",
    "removed": "red",
}
_WIDTH = 100_000
"""Lines are never folded or cut: whoever reads a pipe needs whole ids, and terminals fold."""


class Made(str):
    """Text whose control characters are ours: the colours of a table."""

    __slots__ = ()


class Output:
    """Where one command's answer goes."""

    def __init__(self, *, json_mode: bool, stdout: TextIO | None = None) -> None:
        self.json_mode = json_mode
        self.emitted = False
        self._stdout = sys.stdout if stdout is None else stdout

    def show(self, document: Any, text: Callable[[], str]) -> None:
        """The answer: the document in JSON mode, else the text (made only then)."""
        if self.json_mode:
            self.emitted = True
            self.write(orjson.dumps(document, option=orjson.OPT_INDENT_2).decode() + "\n")
        else:
            said = lines(text())
            self.write(said if said.endswith("\n") else said + "\n")

    def write(self, text: str) -> None:
        """Writes to stdout now; BrokenPipeError, or Failure when stdout is full or closed."""
        try:
            self._stdout.write(text)
            self._stdout.flush()
        except BrokenPipeError:
            raise
        except (OSError, ValueError, AttributeError) as error:
            full = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
            why = "no space is left where it goes" if full else str(error)
            raise Failure(f"the answer could not be written to stdout: {why}") from error

    @property
    def colour(self) -> bool:
        """Colours are for terminals only, and not where NO_COLOR is set."""
        terminal = self._stdout.isatty() and os.environ.get("TERM", "") not in ("", "dumb")
        return terminal and not os.environ.get("NO_COLOR")

    def table(self, headings: Sequence[str], rows: Iterable[Sequence[object]]) -> Made:
        """Aligned columns; None is ``-``, states are coloured on a terminal."""
        from rich.console import Console
        from rich.table import Table

        made = Table(box=None, show_edge=False, padding=(0, 2, 0, 0), header_style="bold")
        for heading in headings:
            made.add_column(heading, no_wrap=True)
        for row in rows:
            made.add_row(*(_cell(value) for value in row))
        console = Console(
            file=io.StringIO(), width=_WIDTH, force_terminal=self.colour,
            color_system="standard" if self.colour else None, no_color=not self.colour,
            highlight=False, legacy_windows=False,
        )  # fmt: skip
        with console.capture() as captured:
            console.print(made)
        return Made("\n".join(line.rstrip() for line in captured.get().splitlines()))


def note(text: str) -> None:
    """A sentence on stderr. A stderr that is gone is no reason to fail."""
    try:
        sys.stderr.write(plain(text) + "\n")
        sys.stderr.flush()
    except (OSError, ValueError, AttributeError):
        pass


def plain(text: str) -> str:
    """Without control characters: engines' last words must not steer the terminal."""
    return "".join(c if c in "\n\t" or unicodedata.category(c) != "Cc" else "�" for c in text)


def lines(*parts: str) -> Made:
    """Paragraphs joined, without foreign control characters; empty ones left out."""
    return Made("\n".join(p if isinstance(p, Made) else plain(p) for p in parts if p))


def _cell(value: object) -> Text:
    from rich.text import Text

    text = "-" if value is None or value == "" else plain(str(value)).replace("\n", " ")
    return Text(text, style=_STYLES.get(text, ""))


def leave_stdout() -> None:
    """After a broken pipe or a full disk: the interpreter must not try to flush again at exit."""
    try:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (OSError, ValueError, AttributeError):
        pass
