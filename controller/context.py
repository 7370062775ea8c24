"""What the parts of the control process share. Made by control.py, read by API, health, metrics."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from controller.metrics import router

if TYPE_CHECKING:
    from pathlib import Path
    from uuid import UUID

    from controller.config import Settings
    from controller.loops import Loops
    from controller.metrics.carried import Carried
    from controller.reconcile.lease import Lease
    from controller.reconcile.tick import Ticker
    from sql.listen import ListenState
    from sql.pool import Pool


@dataclass(slots=True)
class ControlContext:
    """One control process."""

    config: Settings
    id: UUID
    loops: Loops
    listening: ListenState
    runtime: Path
    pool: Pool | None = None
    """None in static mode without Postgres."""
    schema: str = "not checked yet"
    """What is wrong with the schema, or "ok"."""
    leases: dict[str, Lease] = field(default_factory=dict)
    carried: Carried = field(default_factory=router.carried)
    ticker: Ticker | None = None
