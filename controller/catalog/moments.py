"""Moments as people write them: "24h" (that long ago) or a time such as 2026-11-30T08:00Z.

The admin API and llmgwctl read them with the same words.
"""

from __future__ import annotations

from datetime import UTC, date, datetime
from typing import Annotated

from pydantic import BeforeValidator, WithJsonSchema

from controller.catalog.units import seconds


def moment(value: object) -> float | datetime:
    """Seconds ago, or a time with its zone; a day is its midnight in UTC. ValueError otherwise."""
    text = value.strip() if isinstance(value, str) else value
    try:
        return seconds(text)
    except ValueError as error:
        if not isinstance(text, str) or not text[:4].isdigit():
            raise ValueError(f"{error}; or a time as 2026-11-30T08:00Z") from None
    try:
        if len(text) == len("2026-11-30"):
            day = date.fromisoformat(text)
            return datetime(day.year, day.month, day.day, tzinfo=UTC)
        found = datetime.fromisoformat(text)
    except ValueError:
        raise ValueError(f"{value!r} is no time: write it as 2026-11-30T08:00Z") from None
    if found.tzinfo is None:
        raise ValueError(f"{value!r} says no zone: write 2026-11-30T08:00Z or +01:00 at its end")
    return found


Moment = Annotated[
    float | datetime,
    BeforeValidator(moment),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "string", "examples": ["24h", "2026-11-30", "2026-11-30T08:00:00+01:00"]},
                {"type": "number"},
            ],
            "description": "so long ago, or a time",
        }
    ),
]
"""A field that takes a moment."""


def split(value: float | datetime | None) -> tuple[float | None, datetime | None]:
    """A moment as two arguments of a statement: seconds ago, or a time."""
    if value is None or isinstance(value, datetime):
        return None, value
    return value, None
