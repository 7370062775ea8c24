"""Weights of tenants: applies sql/migrations/0019_tenant_weights.sql."""

from __future__ import annotations

from sql.revision import apply

revision = "0019"
down_revision = "0018"


def upgrade() -> None:
    """Apply the frozen file of this revision."""
    apply(revision)
