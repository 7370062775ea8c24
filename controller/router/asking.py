"""Asks Postgres for allowances, once a second for all in use and at once when one is lacking.

One call at a time, so that the database sees them in their order; a call whose answer was lost is
made good by the next, for each says the whole of what is used and kept. Bounds and prices are read
here too. When the database is away what is held is used until it ends.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import structlog
import trio

from controller.router.allowance import Told
from controller.router.bounds import Bounds
from controller.router.clock import monotonic
from controller.router.reservation import Price
from sql.errors import DatabaseError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from controller.router.allowance import Allowance
    from controller.router.core import Core
    from controller.router.refresh import Pool

EVERY_S = 1.0
READ_S = 2.0
"""Bounds are read so often, notifications or not."""
PAUSE_S = 0.01
SOON_S = 0.05
"""Before what others may need is brought back: requests that end together make one call."""
AGAIN_S = 0.1
"""Between asks for what others hold still."""
AWAY_S = 0.5
PAGE = 5000
"""Bounds that are read in one go: some ten milliseconds of this process."""
MOST_ASKS = 200
"""In one call, which locks what it asks for."""

log = structlog.get_logger(__name__)


Seen = tuple[int, int]
"""The transaction that changed a bound last, and its id: in this order they are read."""


def _last(rows: list[dict[str, Any]]) -> Seen:
    """Of a page's rows; beyond all when it has none."""
    return (rows[-1]["changed"], rows[-1]["id"]) if rows else (2**62, 0)


class Asking:
    """One per process."""

    def __init__(self, core: Core, pool: Pool, queries: Mapping[str, str]) -> None:
        self._core = core
        self._tenancy = core.tenancy
        self._pool = pool
        self._queries = queries
        self._call = 0
        self._mark = 0  # transactions before this one were read
        self._read_at = self._asked_at = -1e9
        self._wake = trio.Event()
        self._urgent = False
        self._one_at_a_time = trio.Lock()
        self._left = False
        core.tenancy.lacking = self._lacking
        core.tenancy.heavy = self._heavy

    def _lacking(self) -> None:
        self._urgent = True
        self._wake.set()

    def _heavy(self) -> None:
        self._wake.set()

    async def run(self) -> None:
        """Ask for ever; the database being away ends nothing."""
        while True:
            self._wake, self._urgent = trio.Event(), False
            try:
                await self._round(monotonic())
                self._tenancy.away = False
            except DatabaseError as error:
                if not self._tenancy.away:
                    log.warning("allowances cannot be asked for", error=str(error))
                self._tenancy.away = True
                await trio.sleep(AWAY_S)
            self._tenancy.answered()
            await self._pause()

    async def _pause(self) -> None:
        """Until somebody lacks something, others may need what is here, or it is time."""
        await trio.sleep(PAUSE_S)  # also lets the reactor look at the answers
        with trio.move_on_after(AGAIN_S if len(self._tenancy) else EVERY_S):
            await self._wake.wait()
            if not self._urgent:
                await trio.sleep(SOON_S)

    async def _round(self, now: float) -> None:
        if now - self._read_at >= READ_S:
            await self.read()
        every = list(self._tenancy.bounds.allowances.values())
        if now - self._asked_at >= EVERY_S:
            self._asked_at = now
        else:
            every = [one for one in every if one.wanted or one.heavy]
        for start in range(0, len(every), MOST_ASKS):
            if start and self._urgent:  # who lacks something does not wait for all others
                self._urgent = False
                await self._ask([one for one in every if one.wanted][:MOST_ASKS])
                self._tenancy.answered()
            await self._ask(every[start : start + MOST_ASKS])
        for one in every:
            if one.gone or one.resting:
                self._tenancy.bounds.allowances.pop((one.kind, one.id), None)

    async def read(self) -> None:
        """Bounds that changed since the last time, and prices. Errors of the database end it."""
        async with self._one_at_a_time:
            self._read_at = monotonic()
            row = await self._page(self._mark, (self._mark, 0), (self._mark, 0))
            if row["mark"] < self._mark:  # after a restore transactions count from anew
                self._tenancy.bounds, self._mark = Bounds(), 0
                row = await self._page(0, (0, 0), (0, 0))
            mark = row["mark"]
            while after := self._learn(row):
                row = await self._page(self._mark, *after)
            self._mark = mark

    async def _page(self, mark: int, budgets: Seen, limits: Seen) -> Any:
        """What changed from a mark on, after those seen already."""
        query = self._queries["route_bounds"]
        [row] = await self._pool.fetch(query, mark, *budgets, *limits, PAGE)
        return row

    def _learn(self, row: Mapping[str, Any]) -> tuple[Seen, Seen] | None:
        """Take a page over; the last ones of it when there may be more."""
        budgets, limits = row["budgets"], row["limits"]
        self._tenancy.bounds.learn(budgets, limits)
        prices = row["prices"].items()
        self._tenancy.prices = {model: Price(*parts) for model, parts in prices}
        if max(len(budgets), len(limits)) < PAGE:
            return None
        return _last(budgets), _last(limits)

    async def leave(self) -> None:
        """Give everything back that no request uses: the process ends."""
        async with self._one_at_a_time:
            self._left = True
            every = list(self._tenancy.bounds.allowances.values())
            for start in range(0, len(every), MOST_ASKS):
                await self._send(every[start : start + MOST_ASKS], leaving=True)

    async def _ask(self, some: list[Allowance]) -> None:
        async with self._one_at_a_time:
            if not self._left:  # while this waited; what was given back is not taken again
                await self._send(some, leaving=False)

    async def _send(self, some: list[Allowance], *, leaving: bool) -> None:
        now, rows = monotonic(), self._tenancy.rows
        written = rows - len(self._core.usage)
        self._call += 1
        asks = [list(one.ask(now, rows, written, leaving=leaving)) for one in some]
        answers: list[list[Any]] = await self._pool.fetchval(
            self._queries["router_allowances"],
            self._core.router_id,
            self._call,
            asks,
        )
        got = monotonic()
        for one, (_, _, *told) in zip(some, answers, strict=True):
            if told:
                one.told(Told(*told), now, got)
            else:
                one.gone = True
        self._tenancy.answered_at = got
