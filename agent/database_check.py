"""The doctor's look at the way to the database: whether it answers, how fast, and its clock."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final

import trio

from agent.doctor import Check
from sql import queries
from sql.pool import open_pool

if TYPE_CHECKING:
    from sql.settings import DatabaseSettings

TIMEOUT_S: Final = 15.0
SLOW_MS: Final = 100.0
"""An agent syncs in one round trip; beyond this the fleet reacts late."""
SKEW_WARN_S: Final = 1.0
SKEW_FAIL_S: Final = 5.0


async def checks(settings: DatabaseSettings | None) -> tuple[Check, ...]:
    """Checks "database" and "clock"; the second only when the first got an answer."""
    if settings is None:
        remedy = "Set LLMGW_DATABASE_URL, or [database] url in /etc/llmgw/agent.toml."
        return (Check("database", "warn", "no database is configured for the agent", remedy),)
    said = f"no answer within {TIMEOUT_S:g} s"
    asked: tuple[Check, Check] | None = None
    try:
        with trio.move_on_after(TIMEOUT_S):
            asked = await _ask(settings)
    except* Exception as errors:  # of whatever kind: why it cannot be asked is the answer
        said = _first(errors)
    if asked is None:
        remedy = "Check the URL, the network and the server: llmgwctl db status where it runs."
        return (Check("database", "fail", said[:500], remedy),)
    return asked


async def _ask(settings: DatabaseSettings) -> tuple[Check, Check]:
    """What one answer comes to, and the time in it."""
    async with open_pool(settings, "llmgw-agent doctor") as pool:
        await pool.fetchrow(queries("agent")["ping"])  # connects: not part of the figure
        sent, begun = time.clock_gettime(time.CLOCK_REALTIME), trio.current_time()
        row = await pool.fetchrow(queries("agent")["ping"])
        took_s = trio.current_time() - begun
        assert row is not None
        # It was answered about half way. What comes after, as closing, takes seconds on busy cores.
        skew_s = sent + took_s / 2 - row["now"]
        return answer(1000 * took_s, may=row["may"]), clock(skew_s)


def _first(errors: BaseException) -> str:
    while isinstance(errors, BaseExceptionGroup):
        errors = errors.exceptions[0]
    return str(errors) or type(errors).__name__


def answer(took_ms: float, *, may: bool) -> Check:
    """What an answer in so many milliseconds comes to. Pure."""
    if not may:
        remedy = "Give the login membership in role llmgw_agent: llmgwctl db upgrade prints how."
        return Check("database", "fail", "the login may not use the agent's functions", remedy)
    evidence = f"answers in {took_ms:.1f} ms"
    if took_ms > SLOW_MS:
        return Check("database", "warn", evidence, "Look at the network between here and Postgres.")
    return Check("database", "pass", evidence, None)


def clock(skew_s: float) -> Check:
    """What a difference to the database's clock comes to. Pure."""
    evidence = f"{skew_s:+.2f} s off the database's clock"
    if abs(skew_s) <= SKEW_WARN_S:
        return Check("clock", "pass", evidence, None)
    remedy = "Start a time service: chronyd or systemd-timesyncd."
    return Check("clock", "fail" if abs(skew_s) > SKEW_FAIL_S else "warn", evidence, remedy)
