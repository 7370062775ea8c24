"""JSON as AMD's tools print it: behind warnings, and with values in three shapes. Pure.

Called by amd_smi.py and rocm_smi.py. A value is a number, a text with or without a unit, or
`{"value": 73, "unit": "%"}`; `N/A` stands for none in each of them.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from typing import Final

from agent.probes import values

LIMIT: Final = 8 * 2**20
MAX_STARTS: Final = 32
_MIB_PER: Final = {"kb": 2**-10, "mb": 1.0, "gb": 2.0**10, "tb": 2.0**20} | values.MIB_PER
"""AMD's tools write MB for MiB: an MI300X of 192 GiB has 196592."""


def document(text: str) -> object | None:
    """The first object or list that starts a line and can be read; None when there is none.

    Warnings stand before it. Indented ones are parts of a document that was cut off: a part of the
    cards must not pass for all of them.
    """
    decoder = json.JSONDecoder(parse_constant=lambda _: None)
    cut = text[:LIMIT]
    for tries, match in enumerate(re.finditer(r"^[\[{]", cut, re.MULTILINE)):
        if tries >= MAX_STARTS:
            break
        try:
            found: object = decoder.raw_decode(cut, match.end() - 1)[0]
        except (ValueError, RecursionError):
            continue
        if isinstance(found, (dict, list)) and found:
            return found
    return None


def said(text: str) -> str:
    """What a tool printed instead of a document: its first line."""
    lines = (line.strip()[:200] for line in text[:65536].splitlines())
    first = next((line for line in lines if line.strip("= ")), "no output")
    if first in {"[]", "{}"}:
        return "no cards"
    if first.startswith("=="):
        return f"text instead of JSON, without a line for each card: {first.strip('= ')}"
    return f"not readable: {first}" if first[0] in "[{" else first


def at(record: object, *keys: str) -> object | None:
    """What is found by following keys; None where one is missing."""
    for key in keys:
        if not isinstance(record, Mapping):
            return None
        record = record.get(key)
    return record


def text(record: object, *keys: str) -> str | None:
    """A value as text with its unit; None for none, N/A, lists and objects without a value."""
    found = at(record, *keys)
    if isinstance(found, Mapping):
        unit = found.get("unit")
        value = text(found, "value")
        return f"{value} {unit}" if value and isinstance(unit, str) and unit.strip() else value
    if isinstance(found, bool) or not isinstance(found, (str, int, float)):
        return None
    if isinstance(found, float) and not math.isfinite(found):
        return None
    said = found.strip()[:200] if isinstance(found, str) else _digits(found)
    return None if said is None or values.reason(said) is not None else said


def _digits(found: float) -> str | None:
    """A number as text; one beyond all measure is none, and too long to be written anyway."""
    if abs(found) >= 1e18:
        return None
    return str(found) if isinstance(found, int) else f"{found:f}"


def number(record: object, keys: tuple[str, ...], *units: str) -> float | None:
    """A number whose unit is one of `units` (lower case) or not told."""
    return values.number(text(record, *keys), *units)


def whole(record: object, *keys: str) -> int | None:
    """A whole number that is not negative, without a unit."""
    found = values.whole(text(record, *keys))
    return found if found is not None and found >= 0 else None


def mib(record: object, *keys: str) -> int | None:
    """A size in MiB."""
    parsed = values.quantity(text(record, *keys))
    factor = _MIB_PER.get(parsed[1] or "mb") if parsed is not None else None
    if parsed is None or factor is None or parsed[0] < 0:
        return None
    return int(parsed[0] * factor)
