"""What a replica takes of a card beside weights and cache, as lines of the estimate.

Pure. Called by `fit.py`. The constants err high; each says what it stands for.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil
from typing import TYPE_CHECKING, Final

from controller.placement import fit_memory

if TYPE_CHECKING:
    from controller.placement.fit_args import Ask
    from controller.placement.fit_facts import Facts

MIB: Final = 2**20
CONTEXT_MIB: Final = 600
"""A process on a card: driver context, loaded kernels, workspaces of the math libraries."""
COMMUNICATION_MIB: Final = 1024
"""Buffers between cards: channels of NCCL and those of the engine's own reductions."""
GRAPHS_MIB: Final = 256
GRAPHS_MIB_PER_LAYER: Final = 16
"""Recorded CUDA graphs: about half a GiB for 32 layers, two for 126."""
SENSES_MIB: Final = 1536
"""Engines try the largest image once before they count what is left for the cache."""
RESERVE_MIB: Final = 512
"""SGLang's own rule for what stays outside of weights and cache: a fixed part,"""
RESERVE_PER_TOKEN: Final = 1.5
RESERVE_PER_SEQUENCE: Final = 2
RESERVE_PER_CARD: Final = 128
RESERVE_BIG_MIB: Final = 10 * 1024
RESERVE_BIG_FROM_MIB: Final = 60 * 1024
"""MiB for each token and sequence of a step and each card; on large cards 10 GiB at least."""


@dataclass(frozen=True, slots=True)
class Line:
    """One part of the need of the fullest card."""

    name: str
    mib: int
    why: str


def fixed(ask: Ask, cards: int) -> list[Line]:
    """What every process takes, whatever the model."""
    found = [Line("context", CONTEXT_MIB, "driver, kernels and libraries of one process")]
    if cards > 1 and ask.engine != "llamacpp":
        found.append(Line("communication", COMMUNICATION_MIB, "buffers between the cards"))
    return found


def working(f: Facts, ask: Ask, card_mib: int | None) -> list[Line]:
    """What one step takes while it runs. SGLang sets an amount aside unless told a share."""
    batched, at_once = fit_memory.step(ask, card_mib)
    if ask.engine == "sglang" and ask.share is None:
        aside = _reserve(ask, batched, at_once, card_mib) + (SENSES_MIB if f.multimodal else 0)
        return [Line("reserve", aside, "what SGLang leaves beside its own share")]
    size = fit_memory.workspace(f, ask, batched, at_once)
    why = f"{batched} tokens, or {at_once} sequences of {f.vocab} scores, in one step"
    found = [Line("activations", ceil(size / MIB), why)]
    if f.multimodal:
        found.append(Line("images", SENSES_MIB, "the largest image, tried once at the start"))
    if ask.engine != "llamacpp" and not ask.eager and f.kind != "encoder":
        layers = int(fit_memory.known(f.layers, "layers"))
        size = GRAPHS_MIB + GRAPHS_MIB_PER_LAYER * layers
        found.append(Line("graphs", size, f"recorded CUDA graphs of {layers} layers"))
    return found


def _reserve(ask: Ask, batched: int, at_once: int, card_mib: int | None) -> int:
    found = RESERVE_MIB + RESERVE_PER_CARD * ask.tp * ask.pp + RESERVE_PER_SEQUENCE * at_once
    found += ceil(RESERVE_PER_TOKEN * max(batched, fit_memory.BATCHED_SMALL))
    big = card_mib is None or card_mib > RESERVE_BIG_FROM_MIB
    return max(found, RESERVE_BIG_MIB) if big else found
