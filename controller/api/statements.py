"""The statements of the admin API by name, out of their files."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

from sql import queries

if TYPE_CHECKING:
    from collections.abc import Mapping


@cache
def statements() -> Mapping[str, str]:
    """Those of sql/queries/admin.sql, sql/queries/tenancy.sql and sql/queries/bounds.sql."""
    return {**queries("admin"), **queries("tenancy"), **queries("bounds")}
