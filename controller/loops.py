"""Loops that must never end: run again after any error, and tell when they last succeeded.

Every background task of the control process is one of these; metrics and readiness read `Loops`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import structlog
import trio

from sql.errors import DatabaseError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator

FIRST_PAUSE_S = 0.1
LONGEST_PAUSE_S = 5.0

log = structlog.get_logger()


@dataclass(slots=True)
class Loop:
    """One loop's state. Times are trio.current_time()."""

    name: str
    overdue_s: float
    """Without a success for this long it counts as dead: readiness turns red."""
    started_at: float
    succeeded_at: float | None = None
    error: str | None = None
    errors: int = 0

    def succeeded(self) -> None:
        """One round is done."""
        self.succeeded_at, self.error = trio.current_time(), None

    def age_s(self) -> float | None:
        """Seconds since the last success; None before the first."""
        return None if self.succeeded_at is None else trio.current_time() - self.succeeded_at

    def trouble(self) -> str | None:
        """Why it counts as dead, or None."""
        since = self.started_at if self.succeeded_at is None else self.succeeded_at
        silent = trio.current_time() - since
        if silent <= self.overdue_s:
            return None
        return f"loop {self.name} has not succeeded for {silent:.0f} s: {self.error or 'it hangs'}"


@dataclass(slots=True)
class Loops:
    """All loops of the process by name."""

    by_name: dict[str, Loop] = field(default_factory=dict)

    def add(self, name: str, overdue_s: float) -> Loop:
        """A new loop, which counts from now."""
        loop = Loop(name, overdue_s, trio.current_time())
        self.by_name[name] = loop
        return loop

    def troubles(self) -> Iterator[str]:
        """A sentence for each dead loop."""
        return (said for loop in self.by_name.values() if (said := loop.trouble()))

    async def run(self, loop: Loop, body: Callable[[Loop], Awaitable[None]]) -> None:
        """Run ``body`` for ever; it calls ``loop.succeeded()`` after each round."""
        pause = FIRST_PAUSE_S
        while True:
            before = loop.succeeded_at
            try:
                await body(loop)
                loop.error = "it ended by itself"
            except Exception as error:
                loop.error = "; ".join(leaves(error))
                _tell(loop, error)
            loop.errors += 1
            pause = (
                FIRST_PAUSE_S if loop.succeeded_at != before else min(2 * pause, LONGEST_PAUSE_S)
            )
            await trio.sleep(pause)


def leaves(error: BaseException) -> list[str]:
    """The errors inside a group, each once (H08); the error itself when it is none."""
    if isinstance(error, BaseExceptionGroup):
        return [said for inner in error.exceptions for said in leaves(inner)]
    return [f"{type(error).__name__}: {error}"]


def _tell(loop: Loop, error: Exception) -> None:
    expected = isinstance(error, DatabaseError)
    log.warning(
        "loop failed", loop=loop.name, error=loop.error, exc_info=None if expected else error
    )
