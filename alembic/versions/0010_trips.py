"""Trips of breakers: applies sql/migrations/0010_trips.sql."""

from __future__ import annotations

from sql.revision import apply

revision = "0010"
down_revision = "0009"


def upgrade() -> None:
    """Apply the frozen file of this revision."""
    apply(revision)
