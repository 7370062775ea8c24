"""Stored answers of /v1/responses: applies sql/migrations/0012_responses.sql."""

from __future__ import annotations

from sql.revision import apply

revision = "0012"
down_revision = "0011"


def upgrade() -> None:
    """Apply the frozen file of this revision."""
    apply(revision)
