"""Usage rows with scopes and cost, and their sums: applies sql/migrations/0014_usage.sql."""

from __future__ import annotations

from sql.revision import apply

revision = "0014"
down_revision = "0013"


def upgrade() -> None:
    """Apply the frozen file of this revision."""
    apply(revision)
