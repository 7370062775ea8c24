"""What changed since a look: applies sql/migrations/0009_touched.sql."""

from __future__ import annotations

from sql.revision import apply

revision = "0009"
down_revision = "0004"


def upgrade() -> None:
    """Apply the frozen file of this revision."""
    apply(revision)
