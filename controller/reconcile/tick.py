"""The leader's tick: lease -> snapshot -> decide -> commit -> record. Run by control.py.

Nothing here is safe by being the only leader: commit_plan checks the term, each node's generation
and every claim. An unknown outcome of a commit is not repeated: the next tick reads what is there.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

import structlog
import trio

from controller.placement.model import Create, Move, Place
from controller.reconcile import snapshot
from controller.reconcile.decide import decide
from sql import queries
from sql.errors import StaleTerm

if TYPE_CHECKING:
    from collections.abc import Sequence

    from controller.loops import Loop
    from controller.placement.model import Attempt, Plan
    from controller.reconcile.lease import Lease
    from controller.reconcile.snapshot import Seen
    from sql.pool import Pool

PEEK_S = 0.25
FULL_S = 1.0
"""A tick by the clock, whatever hints were missed."""
CHUNK = 2000
AGAIN = 5
"""A plan with news is followed by another at once, at most so many times in a row."""
GAP_S = 15.0
"""No tick for this long: what seems silent may only be us."""
THREAD_ABOVE = 500
"""Replicas and nodes from which deciding leaves the loop for a thread."""

log = structlog.get_logger()
KINDS = {Create: "create", Place: "place", Move: "move"}


@dataclass(slots=True)
class TickStats:
    """What metrics tell of ticks. Counts since the start of this process."""

    seconds: float | None = None
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
        self._change: int | None = None
        self._told: dict[str, tuple[bool, int | str]] = {}
        self._term: int | None = None
        self._last_at: float | None = None
        self._guard_until = -1.0
        self._guard = ""

    def wake(self) -> None:
        """Something may have to be decided: tick soon."""
        self.hint.set()

    async def run(self, loop: Loop) -> None:
        """Tick for ever; a follower only asks for the lease. Raises sql.errors."""
        while True:
            term = await self._lease.take()
            if term is not None:
                await self._lead(term)
            loop.succeeded()
            await self._wait(leading=term is not None)

    async def _lead(self, term: int) -> None:
        if term != self._term:
            await self._pool.fetchval(queries("control")["partitions"])
        for _ in range(AGAIN):
            if self._lease.held() != term or not await self.once(term):
                return

    async def once(self, term: int) -> bool:
        """One tick under ``term``; True when another should follow at once."""
        began = trio.current_time()
        seen = await snapshot.read(self._pool)
        plan = await self._decide(seen, term, began)
        self._change = seen.change
        news = await self._commit(term, plan)
        self.stats.seconds, self.stats.ticks = trio.current_time() - began, self.stats.ticks + 1
        self._last_at = trio.current_time()
        self._note((*seen.notes, *plan.notes))
        return news

    async def _decide(self, seen: Seen, term: int, began: float) -> Plan:
        self._watch_for_silence(seen, term, began)
        fleet = seen.snapshot
        if began < self._guard_until:
            fleet = replace(fleet, settings=replace(fleet.settings, guard=self._guard))
        if len(fleet.nodes) + len(fleet.replicas) < THREAD_ABOVE:
            return decide(fleet, seen.now, term)
        return await trio.to_thread.run_sync(decide, fleet, seen.now, term)

    def _watch_for_silence(self, seen: Seen, term: int, began: float) -> None:
        """Moments after which silence of nodes says little: start the guard."""
        why = None
        if term != self._term:
            why, self._told = "a new leader has just begun", {}
        elif self._last_at is not None and began - self._last_at > GAP_S:
            why = "there was no tick for a while"
        if seen.now - seen.server_started_at < seen.guard_s:
            why = "the database has just started"
        self._term = term
        if why is not None:
            self._guard, self._guard_until = why, began + seen.guard_s

    async def _commit(self, term: int, plan: Plan) -> bool:
        """Write the plan; True when creates or refusals ask for another look."""
        again = False
        for start in range(0, len(plan.items), CHUNK):
            chunk = plan.items[start : start + CHUNK]
            again = await self._commit_chunk(term, chunk) or again
        fresh = [attempt for attempt in plan.attempts if self._is_news(attempt)]
        if fresh:
            await self._record(term, fresh)
        return again

    async def _commit_chunk(self, term: int, items: Sequence[Create | Place | Move]) -> bool:
        documents = [{"kind": KINDS[type(item)], **asdict(item)} for item in items]
        try:
            rows = await self._pool.fetch(queries("tick")["commit_plan"], term, documents)
        except StaleTerm as error:
            self._lease.step_down(str(error))
            return False
        for item, row in zip(documents, rows, strict=True):
            ok = row["outcome"] == "ok"
            self.stats.items[item["kind"]] += ok
            self.stats.refused += not ok
            if not ok:
                log.info("refused at commit", item=item["kind"], model=item["model"],
                         replica=item.get("replica_id"), why=row["outcome"], term=term)  # fmt: skip
        return any(item["kind"] == "create" or row["outcome"] != "ok"
                   for item, row in zip(documents, rows, strict=True))  # fmt: skip

    def _is_news(self, attempt: Attempt) -> bool:
        return self._told.get(attempt.model) != (attempt.placed, _digest(attempt))

    async def _record(self, term: int, attempts: list[Attempt]) -> None:
        documents: list[dict[str, Any]] = [
            {"model": a.model, "placed": a.placed, "refusals": [asdict(r) for r in a.refusals]}
            for a in attempts
        ]
        try:
            await self._pool.fetchval(queries("tick")["record_attempts"], term, documents)
        except StaleTerm as error:
            self._lease.step_down(str(error))
            return
        for attempt, document in zip(attempts, documents, strict=True):
            self._told[attempt.model] = (attempt.placed, _digest(attempt))
            self._count(attempt.model, document["refusals"])

    def _count(self, model: str, refusals: list[dict[str, Any]]) -> None:
        kept = {key: n for key, n in self.stats.rejections.items() if key[0] != model}
        codes = Counter(str(refusal["code"]) for refusal in refusals)
        self.stats.rejections = kept | {(model, code): n for code, n in codes.items()}

    def _note(self, notes: tuple[str, ...]) -> None:
        for note in sorted(set(notes) - set(self.stats.notes)):
            log.warning("note of the tick", note=note)
        self.stats.notes = notes

    async def _wait(self, *, leading: bool) -> None:
        """Until the clock, a hint or a changed number says to tick again."""
        # A fleet whose tick takes long gets the same share of its controller as a small one.
        deadline = trio.current_time() + max(FULL_S, 2 * (self.stats.seconds or 0.0))
        while trio.current_time() < deadline and not self.hint.is_set():
            with trio.move_on_after(PEEK_S):
                await self.hint.wait()
            if not leading:
                break  # a follower asks for the lease four times a second
            if await self._pool.fetchval(queries("tick")["change"]) != self._change:
                break
        self.hint = trio.Event()


def _digest(attempt: Attempt) -> int | str:
    """What tells two attempts apart without looking at every refusal."""
    found: int | str = getattr(attempt.refusals, "digest", len(attempt.refusals))
    return found
