"""A database with a fleet at rest in it: large_fleet.sql, statement by statement. Blocking."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import psycopg

FILL = Path(__file__).with_suffix(".sql")


def fill(connection: psycopg.Connection[Any], **sizes: int) -> None:
    """Insert so many `nodes`, `replicas` and `models`; planner statistics are right afterwards."""
    for statement in FILL.read_text().split(";\n"):
        if statement.strip():
            connection.execute(statement, sizes)
    connection.execute("vacuum (analyze)")
