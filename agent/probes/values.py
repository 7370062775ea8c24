"""Values as tools print them: numbers with units, spellings of "no value", versions, PCI ids.

Pure. Called by every parser of tool output; nothing here raises, whatever the text.
"""

from __future__ import annotations

import re
from typing import Final, Literal

Reason = Literal["absent", "not_supported", "deprecated", "permission", "lost", "error"]
"""Why a value is missing. Only `lost` and `error` say something about the health of a device."""

MIB_PER: Final = {"b": 2**-20, "kib": 2**-10, "mib": 1.0, "gib": 2.0**10, "tib": 2.0**20}
_QUANTITY: Final = re.compile(r"([+-]?[0-9][0-9.,' \u00a0\u2009\u202f]*)([a-z%/µ]*)", re.IGNORECASE)
_PCI: Final = re.compile(
    r"(?:([0-9a-f]{1,8}):)?([0-9a-f]{1,2}):([0-9a-f]{1,2})\.([0-7])", re.IGNORECASE
)
_VERSION: Final = re.compile(r"[0-9A-Za-z][0-9A-Za-z.+_-]{0,63}")
_REASONS: Final[tuple[tuple[str, Reason], ...]] = (
    ("gpu is lost", "lost"),
    ("not supported", "not_supported"),
    ("deprecated", "deprecated"),
    ("insufficient permission", "permission"),
    ("unknown error", "error"),
    ("err!", "error"),
    ("not found", "absent"),
)
LAST_LINE: Final = 1000
"""Characters of a last line that are looked at."""
_NOISE: Final = re.compile(
    r"\x1b\[[0-9;?]{0,32}[A-Za-z]|\x1b[@-Z\\-_]|[\x00-\x08\x0b-\x1f\x7f\ufeff\ufffe\uffff]"
)
_INTEGRATED: Final = re.compile(
    r"\b(GB10|N1X?|Thor|Orin|Xavier|Tegra\w{0,8}|nvgpu|Jetson)\b", re.IGNORECASE
)


def plain(text: str) -> str:
    """Text without ANSI escapes and control characters; lines end in a newline only."""
    return _NOISE.sub("", text)


def settled(text: str, whole: re.Pattern[str]) -> str:
    """Text without a last line that may have been cut off: half a number is a wrong number.

    Tools end each line. One that has no end stays only where it is a `whole` one by its content.
    """
    at = text.rfind("\n", -LAST_LINE, len(text)) + 1
    if not at and len(text) > LAST_LINE:
        return text
    return text if whole.fullmatch(plain(text[at:]).strip()) else text[:at]


def integrated(name: str | None) -> bool:
    """Whether a product is a part without memory of its own, which shares the host's."""
    return name is not None and _INTEGRATED.search(name[:200]) is not None


def reason(text: str | None) -> Reason | None:
    """Why a printed value is none; None when the text may be a value."""
    word = (text or "").strip().strip("[]").strip().lower()
    if word in {"", "n/a", "none", "unknown"}:
        return "absent"
    return next((why for spelling, why in _REASONS if spelling in word), None)


def quantity(text: str | None) -> tuple[float, str] | None:
    """A number and its unit in lower case (`"66.92 W"` -> `(66.92, "w")`), or None.

    Takes blanks, apostrophes and `,` before three digits as thousands separators, any other
    single `,` as a decimal comma: drivers do not localise, wrappers around them do.
    """
    match = _QUANTITY.fullmatch((text or "").strip()) if text and len(text) < 100 else None
    if match is None:
        return None
    digits = re.sub(r"[' \u00a0\u2009\u202f]", "", match[1])
    if re.fullmatch(r"[+-]?[0-9]{1,3}(,[0-9]{3})+(\.[0-9]+)?", digits):
        digits = digits.replace(",", "")
    try:
        return float(digits.replace(",", ".")), match[2].lower()
    except ValueError:
        return None


def number(text: str | None, *units: str) -> float | None:
    """A number whose unit is one of `units` (lower case; none printed is accepted), or None."""
    parsed = quantity(text)
    return parsed[0] if parsed is not None and parsed[1] in {"", *units} else None


def mib(text: str | None) -> int | None:
    """A size in MiB; a bare number is MiB already (`nounits`). Negative sizes are unknown."""
    parsed = quantity(text)
    factor = MIB_PER.get(parsed[1] or "mib") if parsed is not None else None
    if parsed is None or factor is None or parsed[0] < 0:
        return None
    return int(parsed[0] * factor)


def whole(text: str | None) -> int | None:
    """A whole number without a unit (`"12"`), or None."""
    stripped = (text or "").strip()
    return int(stripped) if re.fullmatch(r"[+-]?[0-9]{1,19}", stripped, re.ASCII) else None


def version(text: str | None) -> str | None:
    """A version without what newer drivers append: `610.57.04 [Deprecated; ...]` -> `610.57.04`."""
    if reason((text or "").split("[")[0]) is not None:
        return None
    match = _VERSION.match((text or "").strip())
    return match[0] if match else None


def pci_bus_id(text: str | None) -> str | None:
    """A PCI address as sysfs writes it: nvidia-smi's `0000000F:01:00.0` -> `000f:01:00.0`."""
    match = _PCI.fullmatch((text or "").strip())
    if match is None:
        return None
    domain, bus, device = (int(part or "0", 16) for part in match.group(1, 2, 3))
    return f"{domain:04x}:{bus:02x}:{device:02x}.{match[4]}"


def cpu_list(text: str | None) -> frozenset[int] | None:
    """CPU numbers of a kernel list such as `0-3,8`; an empty list is empty, nonsense is None."""
    cpus: set[int] = set()
    for part in filter(None, (text or "").strip().split(",")):
        match = re.fullmatch(r"([0-9]{1,6})(?:-([0-9]{1,6}))?", part.strip(), re.ASCII)
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
        if last < first or last - first > 65536:
            return None
        cpus.update(range(first, last + 1))
    return frozenset(cpus) if text is not None else None
