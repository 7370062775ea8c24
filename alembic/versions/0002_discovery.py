"""Hardware discovery: applies sql/migrations/0002_discovery.sql."""

from __future__ import annotations

from sql.revision import apply

revision = "0002"
down_revision = "0001"


def upgrade() -> None:
    """Apply the frozen file of this revision."""
    apply(revision)
