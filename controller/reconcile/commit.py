"""Writes a plan, and what its attempts found. Used by the tick, which owns the lease.

`commit_plan` is the fence; a late leader learns here that it leads no more. Nothing is sent twice:
after an unknown outcome the next tick reads what is there.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import fields
from hashlib import blake2b
from typing import TYPE_CHECKING, Any

import structlog

from controller.placement.model import Create, Move, Place
from sql import queries
from sql.errors import StaleTerm

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from controller.placement.model import Attempt, Refusal
    from controller.reconcile.lease import Lease
    from controller.reconcile.tick import TickStats
    from sql.pool import Pool

CHUNK = 2000
"""Items in one transaction, whose locks agents wait for."""
REFUSALS = 20_000
"""Refusals written in one call, which takes about half a second of the four that a statement may
take, and in one tick; an attempt that alone has more goes in parts, the rest in later ticks."""
KINDS = {Create: "create", Place: "place", Move: "move"}

log = structlog.get_logger()


class Writer:
    """What one ticker has written, so that it does not say the same again."""

    def __init__(self, pool: Pool, lease: Lease, stats: TickStats) -> None:
        self._pool = pool
        self._lease = lease
        self._stats = stats
        self._told: dict[str, tuple[bool, int | str]] = {}
        """Model -> its latest attempt as recorded; the one longest ago first."""
        self._refused: set[tuple[object, ...]] = set()
        """What the latest commit refused: the same again is no reason to look at once."""
        self._notes: tuple[str, ...] | None = None
        """As the database has them; None when another term's may stand there."""

    def forget(self) -> None:
        """Another leader may speak now: under the next term of ours everything is told anew."""
        self._told.clear()
        self._notes = None
        self._stats.rejections = {}

    async def items(self, term: int, items: Sequence[Create | Place | Move]) -> bool:
        """Commit the items; True when creates or new refusals ask for another look.

        Raises sql.errors; a stale term steps down and is no error.
        """
        again = False
        before, self._refused = self._refused, set()
        for start in range(0, len(items), CHUNK):
            documents = [_document(item) for item in items[start : start + CHUNK]]
            try:
                rows = await self._pool.fetch(queries("tick")["commit_plan"], term, documents)
            except StaleTerm as error:
                self._lease.step_down(str(error))
                return False
            outcomes = [row["outcome"] for row in rows]
            for document, outcome in zip(documents, outcomes, strict=True):
                again |= self._settle(document, outcome, term, before)
        return again

    def _settle(
        self, item: dict[str, Any], outcome: str, term: int, before: set[tuple[object, ...]]
    ) -> bool:
        """Count one outcome; True when it asks for another look."""
        if outcome == "ok":
            self._stats.items[item["kind"]] += 1
            return bool(item["kind"] == "create")
        self._stats.refused += 1
        log.info("refused at commit", item=item["kind"], model=item["model"],
                 replica=item.get("replica_id"), why=outcome, term=term)  # fmt: skip
        refused = (item["kind"], item["model"], item.get("replica_id"), outcome)
        self._refused.add(refused)
        return refused not in before

    async def attempts(self, term: int, attempts: Iterable[Attempt]) -> None:
        """Record the attempts that tell something new, up to REFUSALS. Raises sql.errors."""
        chosen: list[Attempt] = []
        size = 0
        for attempt in self._news(attempts):
            if chosen and size + len(attempt.refusals) > REFUSALS:
                break  # those told longest ago came first, so each gets its turn
            chosen.append(attempt)
            size += len(attempt.refusals)
        if not chosen:
            return
        try:
            if size <= REFUSALS:
                documents = [_found(a) | {"refusals": list(a.refusals)} for a in chosen]
                await self._pool.fetchval(queries("tick")["record_attempts"], term, documents)
            else:  # then it is alone
                await self._in_parts(term, chosen[0])
        except StaleTerm as error:
            self._lease.step_down(str(error))
            return
        for attempt in chosen:
            self._told.pop(attempt.model, None)
            self._told[attempt.model] = _summary(attempt)
            self._count(attempt)

    async def _in_parts(self, term: int, attempt: Attempt) -> None:
        """Only once all parts are there the attempt counts as the model's latest."""
        texts = queries("tick")
        found = _found(attempt) | {"total": len(attempt.refusals)}
        decision = await self._pool.fetchval(texts["attempt_begin"], term, found)
        if decision is None:
            return
        for start in range(0, len(attempt.refusals), REFUSALS):
            part = list(attempt.refusals[start : start + REFUSALS])
            await self._pool.fetchval(
                texts["attempt_part"], term, decision, attempt.model, start, part
            )
        await self._pool.fetchval(texts["attempt_end"], term, decision, found)

    def _news(self, attempts: Iterable[Attempt]) -> list[Attempt]:
        turn = {model: number for number, model in enumerate(self._told, 1)}
        news = [a for a in attempts if self._told.get(a.model) != _summary(a)]
        return sorted(news, key=lambda a: turn.get(a.model, 0))

    def _count(self, attempt: Attempt) -> None:
        kept = {key: n for key, n in self._stats.rejections.items() if key[0] != attempt.model}
        codes = Counter(refusal.code for refusal in attempt.refusals)
        self._stats.rejections = kept | {(attempt.model, code): n for code, n in codes.items()}

    async def notes(self, term: int, notes: tuple[str, ...]) -> None:
        """Keep what this tick leaves alone, where it is news. Raises sql.errors."""
        if notes == self._notes:
            return
        try:
            await self._pool.fetchval(queries("tick")["notes"], term, list(notes))
        except StaleTerm as error:
            self._lease.step_down(str(error))
            return
        self._notes = notes

    def keep_only(self, models: set[str]) -> None:
        """Models that left the catalog have no latest attempt any more."""
        for gone in self._told.keys() - models:
            del self._told[gone]
            rejections = self._stats.rejections
            self._stats.rejections = {key: n for key, n in rejections.items() if key[0] != gone}


def _document(item: Create | Place | Move) -> dict[str, Any]:
    """The item for commit_plan; what it holds (shards, score) is made JSON by the pool."""
    return {
        "kind": KINDS[type(item)],
        **{field.name: getattr(item, field.name) for field in fields(item)},
    }


def _summary(attempt: Attempt) -> tuple[bool, int | str]:
    """What tells two attempts apart without looking at every refusal."""
    found: int | str = getattr(attempt.refusals, "digest", len(attempt.refusals))
    return attempt.placed, found


def _found(attempt: Attempt) -> dict[str, Any]:
    """The attempt without its refusals."""
    digest = getattr(attempt.refusals, "digest", None) or _digest(attempt.refusals)
    return {"model": attempt.model, "placed": attempt.placed, "digest": digest}


def _digest(refusals: Sequence[Refusal]) -> str:
    """For refusals that bring none of their own."""
    state = blake2b(digest_size=16)
    for refusal in refusals:
        state.update(f"{refusal.profile}/{refusal.node}/{refusal.code};".encode())
    return state.hexdigest()
