"""The leader's tick: lease -> snapshot -> decide -> commit -> record. Run by control.py.

Nothing here is safe by being the only leader: commit_plan checks the term, each node's generation
and every claim. An unknown outcome of a commit is not repeated: the next tick reads what is there.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import structlog
import trio

from controller.reconcile import snapshot
from controller.reconcile.commit import Writer
from controller.reconcile.decide import decide
from controller.reconcile.guard import Guard
from controller.reconcile.mirror import Mirror
from sql import queries

if TYPE_CHECKING:
    from controller.loops import Loop
    from controller.placement.model import Plan
    from controller.reconcile.lease import Lease
    from controller.reconcile.snapshot import Seen
    from sql.pool import Pool

PEEK_S = 0.25
FULL_S = 1.0
"""A tick by the clock, whatever hints were missed."""
AGAIN = 5
"""A plan with news is followed by another at once, at most so many times in a row."""
THREAD_ABOVE = 500
"""Replicas and nodes from which deciding leaves the loop for a thread."""

log = structlog.get_logger()


@dataclass(slots=True)
class TickStats:
    """What metrics tell of ticks. Counts since the start of this process."""

    seconds: float | None = None
    stages: dict[str, float] = field(default_factory=dict)
    """read, decide, commit -> seconds of the last tick."""
    ticks: int = 0
    items: Counter[str] = field(default_factory=Counter)
    refused: int = 0
    rejections: dict[tuple[str, str], int] = field(default_factory=dict)
    """(model, code) -> candidates refused in the model's latest attempt."""
    notes: tuple[str, ...] = ()


class Ticker:
    """Decides and commits while the lease is held."""

    def __init__(self, pool: Pool, lease: Lease) -> None:
        self.stats = TickStats()
        self.hint = trio.Event()
        self._pool = pool
        self._lease = lease
        self._writer = Writer(pool, lease, self.stats)
        self._guard = Guard()
        self._mirror = Mirror()
        self._change: int | None = None

    def wake(self) -> None:
        """Something may have to be decided: tick soon."""
        self.hint.set()

    async def run(self, loop: Loop) -> None:
        """Tick for ever; a follower only asks for the lease. Raises sql.errors."""
        while True:
            term = await self._lease.take()
            if term is not None:
                await self._lead(term)
            else:
                self._writer.forget()
            loop.succeeded()
            await self._wait(term)

    async def _lead(self, term: int) -> None:
        if self._guard.is_new(term):
            await self._pool.fetchval(queries("control")["partitions"])
            self._writer.forget()
        for _ in range(AGAIN):
            # Renews when it is time: five large ticks outlast a lease.
            if await self._lease.take() != term or not await self.once(term):
                return

    async def once(self, term: int) -> bool:
        """One tick under ``term``; True when another should follow at once."""
        began = trio.current_time()
        seen = await snapshot.read(self._pool, self._mirror)
        read = trio.current_time()
        plan = await self._decide(seen, term, began)
        decided = trio.current_time()
        self._change = seen.change
        again = await self._commit(term, plan)
        self._writer.keep_only({model.name for model in seen.snapshot.models})
        await self._note(term, (*seen.notes, *plan.notes))
        ended = trio.current_time()
        self._guard.looked(ended)
        self.stats.stages = {
            "read": read - began, "decide": decided - read, "commit": ended - decided
        }  # fmt: skip
        self.stats.seconds, self.stats.ticks = ended - began, self.stats.ticks + 1
        return again

    async def _decide(self, seen: Seen, term: int, began: float) -> Plan:
        fleet = seen.snapshot
        guard = self._guard.why(seen, term, began)
        if guard is not None:
            fleet = replace(fleet, settings=replace(fleet.settings, guard=guard))
        if len(fleet.nodes) + len(fleet.replicas) < THREAD_ABOVE:
            return decide(fleet, seen.now, term)
        return await trio.to_thread.run_sync(decide, fleet, seen.now, term)

    async def _commit(self, term: int, plan: Plan) -> bool:
        """Write the plan and what was refused; True when another look is due at once."""
        again = await self._writer.items(term, plan.items)
        if self._lease.held() == term:
            await self._writer.attempts(term, plan.attempts)
        return again

    async def _note(self, term: int, notes: tuple[str, ...]) -> None:
        for note in sorted(set(notes) - set(self.stats.notes)):
            log.warning("note of the tick", note=note)
        self.stats.notes = notes
        if self._lease.held() == term:
            await self._writer.notes(term, notes)

    async def _wait(self, term: int | None) -> None:
        """Until the clock, a hint or a changed number says to tick again."""
        # A fleet whose tick takes long gets the same share of its controller as a small one.
        deadline = trio.current_time() + max(FULL_S, 2 * (self.stats.seconds or 0.0))
        while trio.current_time() < deadline and not self.hint.is_set():
            with trio.move_on_after(PEEK_S):
                await self.hint.wait()
            if term is None:
                break  # a follower asks for the lease four times a second
            if await self._lease.take() != term:
                break
            if await self._pool.fetchval(queries("tick")["change"]) != self._change:
                break
        self.hint = trio.Event()
