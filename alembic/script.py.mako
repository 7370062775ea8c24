"""${message}: applies sql/migrations/${rev_id}_*.sql."""

from __future__ import annotations

from sql.revision import apply

revision = ${repr(up_revision)}
down_revision = ${repr(down_revision)}


def upgrade() -> None:
    apply(revision)
