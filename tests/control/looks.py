"""Snapshots out of tables that a test made up, without a database."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from controller.reconcile.look import TABLES
from controller.reconcile.mirror import Clock, Look, Mirror

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from controller.placement.model import Snapshot

CLOCK = Clock(now=100.0, started_at=0.0, change=1, seen="10:10:", blind=False, heard_at=None)


def look(tables: Mapping[str, Sequence[Any]], clock: Clock = CLOCK) -> Look:
    """A look at everything in these tables; the absent ones are empty."""
    every = {name: tables.get(name, ()) for name in TABLES}
    nodes = [row["id"] for row in every["nodes"]]
    replicas = [row["id"] for row in every["replicas"]]
    return Look(clock, True, nodes, replicas, every)


def build(tables: Mapping[str, Sequence[Any]]) -> tuple[Snapshot, list[str]]:
    """What a new mirror makes of them, and its notes."""
    return Mirror().take(look(tables))
