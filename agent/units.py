"""Sizes and times as people write them in settings. Pure; called by config and its parts."""

from __future__ import annotations

import re

_SIZES = {"": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}
_TIMES = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400}


def size_bytes(text: str | int) -> int:
    """`16MiB` as bytes; ValueError for anything else than a number and KiB, MiB, GiB or TiB."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?) ?([KMGT]iB)?", str(text).strip())
    if match is None:
        raise ValueError(f"{text!r} is not a size such as 512MiB or 16GiB")
    return int(float(match[1]) * _SIZES[match[2] or ""])


def seconds(text: str | float) -> float:
    """`90s`, `10m`, `1h` or a number as seconds; ValueError for anything else."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?) ?([smhd])?", str(text).strip())
    if match is None:
        raise ValueError(f"{text!r} is not a time such as 90s, 10m or 1h")
    return float(match[1]) * _TIMES[match[2] or ""]
