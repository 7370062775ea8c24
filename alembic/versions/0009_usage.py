"""Reasoning tokens and estimates of usage rows: applies sql/migrations/0009_usage.sql."""

from __future__ import annotations

from sql.revision import apply

revision = "0009"
down_revision = "0008"


def upgrade() -> None:
    """Apply the frozen file of this revision."""
    apply(revision)
