"""Depth of replicas and time in the queue: applies sql/migrations/0011_admission.sql."""

from __future__ import annotations

from sql.revision import apply

revision = "0011"
down_revision = "0010"


def upgrade() -> None:
    """Apply the frozen file of this revision."""
    apply(revision)
