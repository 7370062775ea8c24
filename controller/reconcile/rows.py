"""Reads rows one by one; a bad row costs itself only and is told of. Pure.

Used by `node_rows`, `replica_rows` and `catalog_rows`, which turn the rows of `queries/tick.sql`
into the values that decisions are made of.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import fields
from functools import cache
from operator import attrgetter
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

T = TypeVar("T")
Row = Any


class Notes(defaultdict[Any, list[str]]):
    """Key of an object -> a sentence for each of its rows that could not be read."""

    def __init__(self) -> None:
        super().__init__(list)


def each(
    rows: Iterable[Row],
    make: Callable[[Row], T],
    kind: str,
    key: str,
    notes: Notes,
) -> list[T]:
    """Every row that can be read; one that cannot becomes a note (D10)."""
    made: list[T] = []
    for row in rows:
        try:
            made.append(make(row))
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            notes[row[key]].append(
                f"{kind} row {dict(row)!r:.200} is left out: {type(error).__name__} {error}"
            )
    return made


def whole(made: T) -> T:
    """``made``, unless it has a null where the model knows none: a constraint was dropped."""
    kind: Any = type(made)
    names, values = _required(kind)
    if None in values(made):
        nulls = ", ".join(name for name in names if getattr(made, name) is None)
        raise ValueError(f"null in {nulls}")
    return made


def at_least(made: T, **lowest: float) -> T:
    """``made``, unless one of these numbers is lower: a constraint was dropped. None may be."""
    for name, low in lowest.items():
        value = getattr(made, name)
        if value is not None and not value >= low:
            raise ValueError(f"{name} is {value}, less than {low:g}")
    return made


@cache
def _required(kind: type) -> tuple[tuple[str, ...], Callable[[Any], Any]]:
    names = tuple(field.name for field in fields(kind) if "None" not in str(field.type))
    return names, attrgetter(*names)
