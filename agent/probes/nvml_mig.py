"""MIG devices from NVML's facts: units that a shard can be given. Pure. Called by nvml_card.py."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Final

from agent.probes.card import MigDevice
from agent.probes.gpus import plannable
from agent.probes.nvml_values import mapping, mib, whole, word

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    Facts = Mapping[str, Any]

MAX_SLICES: Final = 64
EIGHTHS: Final = 8
"""MIG cuts a card's memory into eighths, whatever few MiB the driver keeps of them."""


def slices(value: object, card_mib: int | None) -> tuple[MigDevice, ...]:
    """The devices, each once; `card_mib` is the memory of the whole card.

    Compute instances of one GPU instance share its memory: each gets a part by its processors.
    """
    listed = [mapping(facts) for facts in value[:MAX_SLICES]] if isinstance(value, list) else []
    once = {word(facts.get("uuid")): facts for facts in listed}
    once.pop(None, None)
    return tuple(_device(facts, card_mib, _share(facts, once.values())) for facts in once.values())


def _share(facts: Facts, devices: Iterable[Facts]) -> float:
    """The part of its GPU instance's memory that a device may plan with, 0 to 1."""
    gi = whole(facts.get("gi"))
    siblings = [other for other in devices if gi is not None and whole(other.get("gi")) == gi]
    counts = [whole(other.get("multiprocessors")) or 0 for other in siblings]
    if not siblings or not all(counts):
        return 1 / max(len(siblings), 1)
    return (whole(facts.get("multiprocessors")) or 0) / sum(counts)


def _device(facts: Facts, card_mib: int | None, share: float) -> MigDevice:
    memory = mapping(facts.get("memory"))
    total = plannable(mib(memory.get("total")), mib(memory.get("reserved")))
    whole_mib = total or whole(facts.get("memory_mb")) or None
    used = mib(memory.get("used"))
    return MigDevice(
        uuid=word(facts.get("uuid")),
        index=whole(facts.get("index")),
        gi=whole(facts.get("gi")),
        ci=whole(facts.get("ci")),
        profile=_profile(facts, card_mib),
        memory_mib=int(whole_mib * share) if whole_mib else None,
        memory_used_mib=int(used * share) if used is not None else None,
        multiprocessors=whole(facts.get("multiprocessors")),
    )


def _profile(facts: Facts, card_mib: int | None) -> str | None:
    """`3g.40gb`, or `1c.3g.40gb` for a part of its processors.

    The driver ends the device's name with it; an older one leaves that to the attributes. Sizes
    there are rounded up to eighths of the card and then to whole GiB, as in the profile names.
    """
    name = (word(facts.get("name")) or "").partition(" MIG ")[2].strip()
    if name:
        return name
    gpu, compute = whole(facts.get("gpu_slices")), whole(facts.get("compute_slices"))
    memory = whole(facts.get("memory_mb"))
    if not gpu or not memory or not card_mib:
        return None
    share = math.ceil(memory / card_mib * EIGHTHS) / EIGHTHS
    size = math.floor(share * math.ceil(card_mib / 1024) + 0.5)
    part = f"{compute}c." if compute and compute < gpu else ""
    return f"{part}{gpu}g.{size}gb"
