"""Gives profiles the size of the smallest card on which they fit. Called by `snapshot.py`.

Facts of weights and profiles change seldom, so what was worked out once is kept.
"""

from __future__ import annotations

import json
from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING, Final, NamedTuple

from controller.placement.fit import smallest_card, uncut

if TYPE_CHECKING:
    from collections.abc import Mapping

    from controller.placement.model import Profile

KEPT: Final = 8192
"""Profiles remembered: more than a large catalog has."""


def fitted(profile: Profile, facts: Mapping[str, str]) -> Profile:
    """The profile with ``fit_mib`` and ``uncut``, as far as the facts (source -> JSON) tell them.

    A profile without cards needs none, and one that says how much memory it needs is believed.
    """
    document = facts.get(profile.spec["source"])
    if document is None or profile.gpus == 0:
        return profile
    args = tuple(str(word) for word in profile.spec["args"] or ())
    env = tuple(sorted((profile.spec["env"] or {}).items()))
    how = _How(profile.engine, args, env, profile.gpus, profile.shards, profile.fabric)
    need, fault = _found(document, how)
    if profile.gpu_memory_mib is not None:
        need = None
    return replace(profile, fit_mib=need, uncut=fault)


class _How(NamedTuple):
    """All of a profile that the estimate reads."""

    engine: str
    args: tuple[str, ...]
    env: tuple[tuple[str, str], ...]
    gpus: int
    shards: int
    fabric: str


@lru_cache(maxsize=KEPT)
def _found(document: str, how: _How) -> tuple[int | None, str | None]:
    """MiB of the smallest card, and why there is none."""
    try:
        facts = json.loads(document)
    except ValueError:  # a number of thousands of digits: odd facts are unknown ones
        return None, None
    asked = how._asdict() | {"env": dict(how.env)}
    return smallest_card(facts, **asked), uncut(facts, **asked)
