"""Scaling by demand: applies sql/migrations/0004_demand.sql."""

from __future__ import annotations

from sql.revision import apply

revision = "0004"
down_revision = "0003"


def upgrade() -> None:
    """Apply the frozen file of this revision."""
    apply(revision)
