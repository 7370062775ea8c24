"""Prices and catalog files: applies sql/migrations/0007_catalog.sql."""

from __future__ import annotations

from sql.revision import apply

revision = "0007"
down_revision = "0006"


def upgrade() -> None:
    """Apply the frozen file of this revision."""
    apply(revision)
