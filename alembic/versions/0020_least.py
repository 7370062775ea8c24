"""What waits takes at least: applies sql/migrations/0020_least.sql."""

from __future__ import annotations

from sql.revision import apply

revision = "0020"
down_revision = "0019"


def upgrade() -> None:
    """Apply the frozen file of this revision."""
    apply(revision)
