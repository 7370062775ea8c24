"""What differs between two documents of one object, field by field. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

HIDDEN: Final = "(not shown)"


@dataclass(frozen=True, slots=True)
class Difference:
    """One field: ``min_replicas``, or ``profiles.cpu.args``. None: not set."""

    field: str
    was: Any
    now: Any


def differences(was: Mapping[str, Any], now: Mapping[str, Any]) -> tuple[Difference, ...]:
    """Fields that differ by name, profiles last; these are matched by their names."""
    return tuple(_between("", was, now))


def _between(prefix: str, was: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[Difference]:
    for field in sorted({*was, *now}, key=lambda field: (field == "profiles", field)):
        before, after = was.get(field), now.get(field)
        if before == after:
            continue
        if field == "profiles":
            yield from _profiles(before or [], after or [])
        elif field == "env":
            yield from _variables(f"{prefix}env.", before or {}, after or {})
        else:
            yield Difference(prefix + field, before, after)


def _variables(prefix: str, was: Mapping[str, str], now: Mapping[str, str]) -> Iterator[Difference]:
    """Values may be secrets: only that they differ is told."""
    for name in sorted({*was, *now}):
        if was.get(name) != now.get(name):
            yield Difference(
                prefix + name,
                HIDDEN if name in was else None,
                HIDDEN if name in now else None,
            )


def _profiles(was: list[dict[str, Any]], now: list[dict[str, Any]]) -> Iterator[Difference]:
    before, after = ({p["name"]: p for p in profiles} for profiles in (was, now))
    if list(before) != list(after):  # some came or went, or the order of preference changed
        yield Difference("profiles", list(before), list(after))
    for name in after:
        if name in before:
            yield from _between(f"profiles.{name}.", before[name], after[name])
