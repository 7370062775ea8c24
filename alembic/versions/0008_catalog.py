"""Prices and catalog files: applies sql/migrations/0008_catalog.sql."""

from __future__ import annotations

from sql.revision import apply

revision = "0008"
down_revision = "0007"


def upgrade() -> None:
    """Apply the frozen file of this revision."""
    apply(revision)
