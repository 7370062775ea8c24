"""Which schema revisions this program knows, by the names of sql/migrations, without alembic."""

from __future__ import annotations

from functools import cache
from importlib import resources


@cache
def revisions() -> tuple[str, ...]:
    """All revisions, oldest first: the leading numbers of the frozen migration files."""
    folder = resources.files("sql") / "migrations"
    names = (entry.name for entry in folder.iterdir() if entry.name.endswith(".sql"))
    return tuple(sorted(name.partition("_")[0] for name in names))


def head() -> str:
    """The newest revision that this program knows."""
    return revisions()[-1]
