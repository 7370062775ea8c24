"""Figures as people read them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping


def age(seconds: float | None) -> str:
    """``12s``, ``5m``, ``3h``, ``2d``; ``-`` when unknown."""
    if seconds is None:
        return "-"
    for unit, length in (("d", 86400), ("h", 3600), ("m", 60)):
        if seconds >= 2 * length:
            return f"{int(seconds // length)}{unit}"
    return f"{int(seconds)}s"


def size(count: float | None) -> str:
    """Bytes as ``1.5 GiB``; ``-`` when unknown."""
    if count is None:
        return "-"
    for unit, length in (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if count >= length:
            return f"{count / length:.1f} {unit}"
    return f"{int(count)} B"


def rate(count: float | None) -> str:
    """Bytes per second."""
    return "-" if count is None else f"{size(count)}/s"


def gigabytes(count: float | None) -> str:
    """A figure that is in GiB already."""
    return "-" if count is None else f"{count:g} GiB"


def joined(items: Iterable[object] | None) -> str:
    """``a, b``; ``-`` when there are none."""
    return ", ".join(str(item) for item in items or []) or "-"


def pairs(items: Mapping[str, object]) -> str:
    """``a=1, b=2``; ``-`` when there are none."""
    return joined(f"{name}={value}" for name, value in items.items())


def tags_of(words: Iterable[str]) -> dict[str, str]:
    """Tags out of ``NAME=VALUE`` words; a usage error for anything else."""
    found = {}
    for word in words:
        name, equals, value = word.partition("=")
        if not name or not equals:
            raise click.UsageError(f"--tag takes NAME=VALUE, not {word!r}")
        found[name] = value
    return found


def fallback_of(word: str) -> list[str] | None:
    """Why another model may answer: ``none``, ``inherit`` (None), or reasons between commas."""
    if word == "inherit":
        return None
    return [] if word == "none" else [reason.strip() for reason in word.split(",")]


def fallback(thing: Mapping[str, Any]) -> str:
    """What a scope or key says of it; ``-`` when nothing."""
    return (",".join(thing["fallback"]) or "none") if "fallback" in thing else "-"


def weight(scope: Mapping[str, Any]) -> str:
    """Its turns for one of another; ``-`` where the scope at the top says it."""
    return f"{scope['weight']:g}" if "weight" in scope else "-"


def counts(by_word: Mapping[str, int]) -> str:
    """``3 ready, 1 lost``; ``none`` when empty."""
    return ", ".join(f"{n} {word}" for word, n in sorted(by_word.items())) or "none"


def bar(used: int, total: int, width: int = 20) -> str:
    """``[#####---------------]``; anything used shows, and only all used fills it."""
    filled = 0 if total == 0 else used * width // total
    if used:
        filled = max(1, filled)
    return f"[{'#' * filled}{'-' * (width - filled)}]"


def on_nodes(replica: Mapping[str, Any]) -> str:
    """``n1:[0 1] n2:[0 1]``."""
    parts = (f"{s['node']}:[{' '.join(map(str, s['gpus']))}]" for s in replica.get("shards", []))
    return " ".join(parts) or "-"
