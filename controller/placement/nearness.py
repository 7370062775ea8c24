"""Which of a node's usable cards a shard gets: those that are near each other. Pure.

Called by `chosen.py` when the node is known, and by `score.py`, because a node where the cards go
together is better than one where they do not. Cards of one NVLink island first, then
of one NUMA node; of several groups that would do, the smallest, so that big ones stay whole.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, TypeVar

from controller.placement.cards import claimed_mib, usable

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterable

    from controller.placement.model import Gpu, Node, Profile

T = TypeVar("T")


def nearest(profile: Profile, node: Node) -> list[Gpu]:
    """The cards for one shard, by index; empty when the profile wants none or too few are usable.

    A shared card that is in use goes first, the fullest of them: untouched ones stay whole.
    """
    found = usable(profile, node) if profile.gpus else []
    if len(found) <= profile.gpus:
        return found
    begun = [gpu for gpu in found if gpu.claims]
    if len(begun) >= profile.gpus:
        return sorted(begun, key=_fullness)[: profile.gpus]
    return sorted(begun + _near([g for g in found if not g.claims], profile.gpus - len(begun)),
                  key=lambda gpu: gpu.index)  # fmt: skip


def closeness(cards: Iterable[Gpu]) -> float:
    """1 for cards of one NVLink island, 0.5 for cards of one NUMA node only, 0 for others.

    One card is as close to itself as can be; unknown wiring is no closeness.
    """
    found = list(cards)
    if len(found) < 2:
        return 1.0
    if _same(found, lambda gpu: gpu.island):
        return 1.0
    return 0.5 if _same(found, lambda gpu: gpu.numa) else 0.0


def _same(cards: list[Gpu], place: Callable[[Gpu], int | None]) -> bool:
    return place(cards[0]) is not None and len({place(gpu) for gpu in cards}) == 1


def _fullness(gpu: Gpu) -> tuple[int, int]:
    return (-(claimed_mib(gpu) or 0), gpu.index)


def _near(cards: list[Gpu], count: int) -> list[Gpu]:
    """`count` of the cards: out of one island and there out of one NUMA node where that goes."""
    for place in (lambda gpu: gpu.island, lambda gpu: gpu.numa):
        cards = _group(cards, place, count) or cards
    return cards[:count]


def _group(
    cards: list[Gpu], place: Callable[[Gpu], Hashable | None], count: int
) -> list[Gpu] | None:
    """The smallest group of one known place with at least `count` cards; None without one."""
    groups: defaultdict[Hashable, list[Gpu]] = defaultdict(list)
    for gpu in cards:
        if (where := place(gpu)) is not None:
            groups[where].append(gpu)
    enough = [group for group in groups.values() if len(group) >= count]
    return min(enough, key=lambda group: (len(group), group[0].index), default=None)
