"""What `up` tells people while it works: a line per step on stderr, a spinner on a terminal."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING, Self

from rich.console import Console

if TYPE_CHECKING:
    from types import TracebackType

    from rich.status import Status


def since_start_s() -> float:
    """Seconds since this process began; ops/up becomes it by exec, so its install counts too."""
    with open("/proc/self/stat", encoding="ascii", errors="replace") as file:  # noqa: PTH123
        fields = file.read().rpartition(")")[2].split()
    began = int(fields[19]) / os.sysconf("SC_CLK_TCK")
    return time.clock_gettime(time.CLOCK_BOOTTIME) - began


class Report:
    """Steps as they finish, and on a terminal what is being waited for."""

    def __init__(self) -> None:
        self._console = Console(stderr=True, highlight=False)
        self._status: Status | None = None
        self._said: str | None = None

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            self._status = self._console.status("starting")
            self._status.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._status is not None:
            self._status.stop()

    def done(self, what: str) -> None:
        """A step is finished."""
        self._console.print(f"{since_start_s():6.1f} s  {what}", markup=False, soft_wrap=True)

    def waiting(self, what: str) -> None:
        """What is being waited for: a spinner on a terminal, else a line per change of words."""
        if self._status is not None:
            self._status.update(what)
            self._status.start()
        elif what != self._said:
            self.done(what)
        self._said = what

    def pause(self) -> None:
        """No spinner from here on: stdout speaks, or nothing is being waited for."""
        if self._status is not None:
            self._status.stop()
