"""Loops that never end silently: each is restarted with backoff, and its last success has an age.

Called by loop. One error, one log line with the loop's name; the other loops do not notice.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import structlog
import trio

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

FIRST_S = 0.5
LAST_S = 30.0
log = structlog.get_logger()


class Backoff:
    """Waits that double up to LAST_S, each between half and all of it: no herd forms."""

    def __init__(self, seed: str) -> None:
        self._random = random.Random(seed)  # noqa: S311 - spreads load, guards nothing
        self._failures = 0

    def reset(self) -> None:
        """It worked."""
        self._failures = 0

    def next_s(self) -> float:
        """How long to wait after one more failure."""
        full = min(LAST_S, FIRST_S * (1 << self._failures))
        self._failures = min(self._failures + 1, 16)
        return full * self._random.uniform(0.5, 1.0)


class Loops:
    """The supervised loops of one agent."""

    def __init__(self, seed: str) -> None:
        self._seed = seed
        self._succeeded: dict[str, float] = {}

    def succeeded(self, name: str) -> None:
        """A loop did one round."""
        self._succeeded[name] = trio.current_time()

    def ages(self) -> dict[str, float]:
        """Seconds since each loop's last success; a loop that never had one is absent."""
        now = trio.current_time()
        return {name: now - at for name, at in self._succeeded.items()}

    async def supervise(self, name: str, run: Callable[[], Awaitable[None]]) -> None:
        """Run a loop for ever; it should not return, and an error starts it again after a pause."""
        backoff = Backoff(f"{self._seed} {name}")
        while True:
            begun = trio.current_time()
            try:
                await run()
                log.error("loop ended and is started again", loop=name)
            except Exception:
                log.exception("loop failed and is started again", loop=name)
            if trio.current_time() - begun > LAST_S:
                backoff.reset()
            await trio.sleep(backoff.next_s())
