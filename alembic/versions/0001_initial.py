"""The first schema: applies sql/migrations/0001_initial.sql."""

from __future__ import annotations

from sql.revision import apply

revision = "0001"
down_revision = None


def upgrade() -> None:
    """Apply the frozen file of this revision."""
    apply(revision)
