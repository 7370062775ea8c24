"""Values of NVML's child as Python ones: what is not of the kind is unknown. Pure.

Called by nvml_card.py, nvml_links.py and nvml_mig.py for every single value: the child is ours, but
what it passes on is a driver's.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from agent.probes import values

if TYPE_CHECKING:
    from collections.abc import Mapping


def word(value: object) -> str | None:
    """A name; None for the spellings of "no value"."""
    return value[:200] if isinstance(value, str) and values.reason(value) is None else None


def number(value: object) -> float | None:
    """A measure. NVML writes all ones for "not available"."""
    known = isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < 1e9
    return float(value) if known else None  # type: ignore[arg-type]


def whole(value: object) -> int | None:
    """A count or a number of something; negative is unknown."""
    return value if type(value) is int and 0 <= value < 2**31 else None


def truth(value: object) -> bool | None:
    """A yes or no, when told."""
    return value if isinstance(value, bool) else None


def mib(value: object) -> int | None:
    """Bytes to MiB. NVML writes 2**64-1 for "not available"."""
    return value // 2**20 if type(value) is int and 0 <= value < 2**60 else None


def mapping(value: object) -> Mapping[str, Any]:
    """A group of facts; empty when it is none."""
    return value if isinstance(value, dict) else {}
