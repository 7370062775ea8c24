"""Points of nodes that could take one more replica of a model at this moment."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import trio

from controller.placement.candidates import candidates
from controller.reconcile import snapshot

if TYPE_CHECKING:
    from controller.placement.model import Snapshot
    from sql.pool import Pool


async def now(pool: Pool, model: str) -> list[dict[str, Any]]:
    """The best candidates of the live snapshot, best first; [] when none fits."""
    seen = await snapshot.read(pool)
    return await trio.to_thread.run_sync(_rows, seen.snapshot, model)


def _rows(fleet: Snapshot, name: str) -> list[dict[str, Any]]:
    found = (m for m in fleet.models if m.name == name)
    return [
        {"node": c.node, "profile": c.profile, "total": round(c.total, 3),
         "parts": {part: round(points, 3) for part, points in c.parts.items()}}
        for model in found for c in candidates(fleet, model)
    ]  # fmt: skip
