"""The fairness limit: applies sql/migrations/0006_fairness.sql."""

from __future__ import annotations

from sql.revision import apply

revision = "0006"
down_revision = "0005"


def upgrade() -> None:
    """Apply the frozen file of this revision."""
    apply(revision)
