"""Durations ("90s", "5m", "1h30m") and sizes ("512MiB", "80GiB") as people write them.

Owned by the catalog; the admin API reads its durations with the same words.
"""

from __future__ import annotations

import re
from typing import Annotated, Final

from pydantic import BeforeValidator, WithJsonSchema

_DURATION: Final = re.compile(r"(?:\d+(?:\.\d+)?(?:ms|s|m|h|d|w))+")
_DURATION_PART: Final = re.compile(r"(\d+(?:\.\d+)?)(ms|s|m|h|d|w)")
_SECONDS: Final = {"ms": 0.001, "s": 1, "m": 60, "h": 3600, "d": 86400, "w": 604800}
_SIZE: Final = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]i?B)", re.IGNORECASE)
_BYTES: Final = {
    "kib": 2**10,
    "mib": 2**20,
    "gib": 2**30,
    "tib": 2**40,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
}
LONGEST_S: Final = 10 * 365 * 86400.0


def seconds(value: object) -> float:
    """A duration in seconds, from "5m" or a plain number of seconds; ValueError otherwise."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        found = float(value)
    elif isinstance(value, str) and _DURATION.fullmatch(value.strip()):
        found = sum(float(n) * _SECONDS[unit] for n, unit in _DURATION_PART.findall(value))
    else:
        raise ValueError(f'{value!r} is not a duration: write "30s", "5m", "1h30m" or "7d"')
    if not 0 <= found <= LONGEST_S:
        raise ValueError(f"{value!r} is not a duration between 0 and ten years")
    return found


def mebibytes(value: object) -> int:
    """A size in MiB, rounded up, from "80GiB"; ValueError otherwise, for bare numbers too."""
    match = _SIZE.fullmatch(value.strip()) if isinstance(value, str) else None
    if match is None:
        raise ValueError(f'{value!r} is not a size: write it with its unit, "512MiB" or "80GiB"')
    count = float(match[1]) * _BYTES[match[2].lower()]
    if not 0 < count <= 2**60:
        raise ValueError(f"{value!r} is not a size between one byte and one EiB")
    return -int(-count // 2**20)


Seconds = Annotated[
    float,
    BeforeValidator(seconds),
    WithJsonSchema(
        {
            "anyOf": [{"type": "string", "examples": ["5m"]}, {"type": "number"}],
            "description": "duration",
        }
    ),
]
"""A field that takes a duration and holds seconds."""

Mebibytes = Annotated[
    int,
    BeforeValidator(mebibytes),
    WithJsonSchema({"type": "string", "examples": ["80GiB"], "description": "size with its unit"}),
]
"""A field that takes a size and holds MiB."""
