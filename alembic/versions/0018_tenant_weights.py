"""Weights of tenants: applies sql/migrations/0018_tenant_weights.sql."""

from __future__ import annotations

from sql.revision import apply

revision = "0018"
down_revision = "0017"


def upgrade() -> None:
    """Apply the frozen file of this revision."""
    apply(revision)
