"""What controller and agent share: the schema, named queries and the way to Postgres.

`sql` imports neither `agent` nor `controller` (import-linter enforces it).
"""

from __future__ import annotations

import re
from functools import cache
from importlib import resources
from types import MappingProxyType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

_NAME = re.compile(r"^-- name: (\w+)\s*$", re.MULTILINE)


@cache
def queries(file: str) -> Mapping[str, str]:
    """The named statements of ``sql/queries/<file>.sql``: name -> SQL text.

    Raises ValueError for a name given twice, FileNotFoundError for an unknown file.
    """
    text = (resources.files(__name__) / "queries" / f"{file}.sql").read_text()
    parts = _NAME.split(text)[1:]
    found: dict[str, str] = {}
    for name, body in zip(parts[::2], parts[1::2], strict=True):
        if name in found:
            raise ValueError(f"sql/queries/{file}.sql names {name} twice: give one another name")
        found[name] = body.strip().rstrip(";")
    return MappingProxyType(found)
