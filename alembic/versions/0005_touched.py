"""What changed since a look: applies sql/migrations/0005_touched.sql."""

from __future__ import annotations

from sql.revision import apply

revision = "0005"
down_revision = "0004"


def upgrade() -> None:
    """Apply the frozen file of this revision."""
    apply(revision)
