"""How fast links of one kind usually are, and which are slower.

Pure. Called by problems.py for its sentences and by map.py for its marks.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from controller.fabric.model import Graph, Link


@dataclass(frozen=True, slots=True)
class Usual:
    """What most links of one kind have."""

    gbps: float
    word: str
    """`4x NDR`, or empty."""


def usual_rates(graph: Graph) -> dict[int, Usual]:
    """Index of a link -> what most links of its kind have; links of a kind without majority: none.

    A kind is a pair of levels, for hosts also the model of the adapter (where the scan has it):
    an older card on a new leaf is no fault.
    """
    level = {s.guid: s.level or 0 for s in graph.switches}
    kinds: dict[tuple[object, ...], list[int]] = {}
    for i, link in enumerate(graph.links):
        if link.kind in {"host", "trunk"} and link.gbps is not None:
            model = graph.device_ids.get(link.a) if link.kind == "host" else None
            ends = sorted((level.get(link.a, 0), level.get(link.b, 0)))
            kinds.setdefault((link.kind, model, *ends), []).append(i)
    usual: dict[int, Usual] = {}
    for members in kinds.values():
        rates = Counter((graph.links[i].gbps, rate_word(graph.links[i])) for i in members)
        speeds = Counter(graph.links[i].gbps for i in members)
        most, count = speeds.most_common(1)[0]
        if most is not None and 2 * count > len(members):
            word = min((w for (g, w) in rates if g == most), key=lambda w: (-rates[most, w], w))
            usual.update(dict.fromkeys(members, Usual(most, word)))
    return usual


def slow_links(graph: Graph) -> dict[int, Usual]:
    """Indices of links that are slower than the usual of their kind -> that usual."""
    return {
        i: usual
        for i, usual in usual_rates(graph).items()
        if (rate := graph.links[i].gbps) is not None and rate < usual.gbps
    }


def rate_word(link: Link) -> str:
    """`4x NDR`, with ? for what the scan does not say."""
    return f"{link.width or '?'} {link.speed or '?'}"
