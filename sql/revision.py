"""What an alembic revision does: apply its one frozen SQL file as the owner role."""

from __future__ import annotations

from importlib import resources

from alembic import op
from sql.migrate import run_script


def apply(revision: str) -> None:
    """Runs ``sql/migrations/<revision>_*.sql``; raises LookupError unless there is exactly one."""
    folder = resources.files("sql") / "migrations"
    found = [entry for entry in folder.iterdir() if entry.name.startswith(f"{revision}_")]
    if len(found) != 1:
        raise LookupError(
            f"revision {revision} needs exactly one file sql/migrations/{revision}_*.sql"
        )
    run_script(op.get_bind(), found[0].read_text())
    run_script(op.get_bind(), "reset role")  # alembic notes the revision as the migrating user
