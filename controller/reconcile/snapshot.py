"""The database -> one value that decisions are made of. Called by the tick and by the admin API."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import trio

from controller.reconcile.look import look
from controller.reconcile.mirror import Mirror

if TYPE_CHECKING:
    from controller.placement.model import Snapshot
    from sql.pool import Pool

THREAD_ABOVE = 500
"""Nodes and replicas read again from which building leaves the loop for a thread."""


@dataclass(frozen=True, slots=True)
class Seen:
    """One look at the database."""

    snapshot: Snapshot
    now: float
    """The database's clock, unix seconds."""
    server_started_at: float
    change: int
    """Value of llmgw_core.change before anything was read."""
    guard_s: float
    """How long silence is not believed after a restart or a new leader."""
    notes: tuple[str, ...]


async def read(pool: Pool, mirror: Mirror | None = None) -> Seen:
    """The fleet at this moment; ``mirror`` is kept by who looks again. Raises sql.errors."""
    mirror = Mirror() if mirror is None else mirror
    found = await look(pool, mirror)
    if len(found.nodes) + len(found.replicas) < THREAD_ABOVE:
        snapshot, notes = mirror.take(found)
    else:  # 5,000 nodes of 8 cards take seconds, in which nothing else would be answered
        snapshot, notes = await trio.to_thread.run_sync(mirror.take, found)
    clock = found.clock
    return Seen(snapshot, clock.now, clock.started_at, clock.change, mirror.guard_s, tuple(notes))
