"""Budgets and limits: applies sql/migrations/0015_budgets.sql."""

from __future__ import annotations

from sql.revision import apply

revision = "0015"
down_revision = "0014"


def upgrade() -> None:
    """Apply the frozen file of this revision."""
    apply(revision)
