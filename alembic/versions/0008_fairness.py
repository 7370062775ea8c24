"""The fairness limit: applies sql/migrations/0008_fairness.sql."""

from __future__ import annotations

from sql.revision import apply

revision = "0008"
down_revision = "0005"


def upgrade() -> None:
    """Apply the frozen file of this revision."""
    apply(revision)
