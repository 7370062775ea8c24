"""Scopes, rotated keys, people and sessions: applies sql/migrations/0013_tenancy.sql."""

from __future__ import annotations

from sql.revision import apply

revision = "0013"
down_revision = "0012"


def upgrade() -> None:
    """Apply the frozen file of this revision."""
    apply(revision)
