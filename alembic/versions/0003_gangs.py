"""Replicas over several nodes: applies sql/migrations/0003_gangs.sql."""

from __future__ import annotations

from sql.revision import apply

revision = "0003"
down_revision = "0002"


def upgrade() -> None:
    """Apply the frozen file of this revision."""
    apply(revision)
