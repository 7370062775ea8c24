"""Gives profiles the size of the smallest card on which they fit. Called by `snapshot.py`.

Facts of weights and profiles change seldom, so what was worked out once is kept.
"""

from __future__ import annotations

import json
from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING, Final

from controller.placement.fit import smallest_card

if TYPE_CHECKING:
    from collections.abc import Mapping

    from controller.placement.model import Profile

KEPT: Final = 8192
"""Profiles remembered: more than a large catalog has."""


def fitted(profile: Profile, facts: Mapping[str, str]) -> Profile:
    """The profile with ``fit_mib``, as far as the facts (source -> JSON document) tell it.

    A profile without cards needs none, and one that says how much memory it needs is believed.
    """
    document = facts.get(profile.spec["source"])
    if document is None or profile.gpus == 0 or profile.gpu_memory_mib is not None:
        return profile
    args = tuple(str(word) for word in profile.spec["args"] or ())
    env = tuple(sorted((profile.spec["env"] or {}).items()))
    need = _need(document, profile.engine, args, env, profile.gpus, profile.shards)
    return replace(profile, fit_mib=need)


@lru_cache(maxsize=KEPT)
def _need(
    document: str,
    engine: str,
    args: tuple[str, ...],
    env: tuple[tuple[str, str], ...],
    gpus: int,
    shards: int,
) -> int | None:
    try:
        found = json.loads(document)
    except ValueError:  # a number of thousands of digits: odd facts are unknown ones
        return None
    return smallest_card(found, engine=engine, args=args, env=dict(env), gpus=gpus, shards=shards)
