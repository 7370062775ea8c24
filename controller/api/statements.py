"""The statements of the admin API by name, out of their files."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

from sql import queries

if TYPE_CHECKING:
    from collections.abc import Mapping


@cache
def statements() -> Mapping[str, str]:
    """Those of admin.sql, tenancy.sql, bounds.sql and usage.sql in sql/queries."""
    files = "admin", "tenancy", "bounds", "usage"
    return {name: text for file in files for name, text in queries(file).items()}
