"""What the leader leaves alone: applies sql/migrations/0016_notes.sql."""

from __future__ import annotations

from sql.revision import apply

revision = "0016"
down_revision = "0015"


def upgrade() -> None:
    """Apply the frozen file of this revision."""
    apply(revision)
