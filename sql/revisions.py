"""What schema this program carries: revisions, functions and views, without alembic.

Alembic and SQLAlchemy take over a second to import; seeing that all is up to date needs neither.
"""

from __future__ import annotations

import hashlib
from functools import cache
from importlib import resources
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from importlib.resources.abc import Traversable


@cache
def revisions() -> tuple[str, ...]:
    """All revisions, oldest first: the leading numbers of the frozen migration files."""
    folder = resources.files("sql") / "migrations"
    names = (entry.name for entry in folder.iterdir() if entry.name.endswith(".sql"))
    return tuple(sorted(name.partition("_")[0] for name in names))


def head() -> str:
    """The newest revision that this program knows."""
    return revisions()[-1]


def code_files(folder: str) -> list[Traversable]:
    """The files of ``functions`` or ``views`` in the order in which they are applied."""
    entries = (resources.files("sql") / folder).iterdir()
    return sorted((e for e in entries if e.name.endswith(".sql")), key=lambda e: e.name)


@cache
def code_digest() -> str:
    """Digest of all functions and views as this program carries them."""
    digest = hashlib.sha256()
    for entry in code_files("functions") + code_files("views"):
        digest.update(entry.read_bytes())
    return digest.hexdigest()
