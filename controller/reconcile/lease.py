"""Whether this process does a duty now, and under which term.

Leadership saves work, it is no safety device: what is written is fenced by the term in SQL. Still a
holder stops early: it trusts its lease by its own monotonic clock until a second before the end,
and not at all once its presence connection is gone (F04).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import structlog
import trio

from sql import queries
from sql.errors import DatabaseError

if TYPE_CHECKING:
    from uuid import UUID

    from sql.listen import ListenState
    from sql.pool import Pool

MARGIN_S = 1.0
RENEW_SHARE = 1 / 3
"""A lease of 15 s is renewed every 5 s."""
RESIGN_S = 2.0

log = structlog.get_logger()


class Lease:
    """One duty of one process."""

    def __init__(self, pool: Pool, holder: UUID, duty: str, presence: ListenState) -> None:
        self.duty = duty
        self.term: int | None = None
        """The term while we hold the duty, else None. Use `held()` before acting on it."""
        self.since: float | None = None
        self._pool = pool
        self._holder = holder
        self._presence = presence
        self._renew_at = self._trusted_until = 0.0
        self._resigned = False

    def held(self) -> int | None:
        """The term that may still be acted under, or None."""
        if self.term is None:
            return None
        if not self._presence.connected or trio.current_time() >= self._trusted_until:
            self.step_down("the lease cannot be trusted any more")
        return self.term

    def step_down(self, why: str) -> None:
        """Stop doing the duty at once; the row is left to expire or to be taken."""
        if self.term is not None:
            log.warning("stepped down", duty=self.duty, term=self.term, why=why)
        self.term = self.since = None

    async def take(self) -> int | None:
        """Take the duty or renew it when it is time; the term, or None when another leads.

        Raises sql.errors; the duty then ends by `held` unless a later renewal succeeds in time.
        """
        if self._resigned:
            return None
        if not self._presence.connected:
            self.step_down("the presence connection is gone")
            return None
        if self.held() is not None and trio.current_time() < self._renew_at:
            return self.term
        asked_at = trio.current_time()
        row = await self._pool.fetchrow(queries("control")["lease_take"], self.duty, self._holder)
        if row is None:
            self.step_down("another controller leads")
            return None
        if row["term"] != self.term:
            log.info("leads", duty=self.duty, term=row["term"])
            self.term, self.since = row["term"], asked_at
        self._renew_at = asked_at + row["ttl_s"] * RENEW_SHARE
        self._trusted_until = asked_at + row["ttl_s"] - min(MARGIN_S, row["ttl_s"] * RENEW_SHARE)
        return self.held()

    async def resign(self) -> None:
        """Give the duty to whoever asks next, at an orderly end; we do not take it again."""
        self._resigned = True
        if self.term is None:
            return
        self.step_down("this process ends")
        with trio.move_on_after(RESIGN_S) as scope:
            scope.shield = True
            try:
                await self._pool.execute(
                    queries("control")["lease_resign"], self.duty, self._holder
                )
            except DatabaseError as error:
                log.info("the duty is left to expire", duty=self.duty, error=str(error))
