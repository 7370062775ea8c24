"""Fallbacks by scope and key: applies sql/migrations/0017_fallback_levels.sql."""

from __future__ import annotations

from sql.revision import apply

revision = "0017"
down_revision = "0016"


def upgrade() -> None:
    """Apply the frozen file of this revision."""
    apply(revision)
