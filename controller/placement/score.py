"""How good a node is for a shard, in named parts that are kept and shown.

The node's own parts (`base`) are the same for all nodes of a shape; the rest (`bonus`) depends on
the model: its weights, its other replicas, its failures. All parts are points and simply add up.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from controller.placement.filters import must_install
from controller.placement.nearness import closeness, nearest

if TYPE_CHECKING:
    from collections.abc import Set as AbstractSet

    from controller.placement.apart import Hosts
    from controller.placement.model import Node, Profile

SPREAD: Final = 300.0
"""Two replicas on one node die together: avoiding that outweighs all else together."""
CARDS_KEPT: Final = 50.0
"""Work that needs no card leaves nodes with cards alone where it can."""
WEIGHTS: Final = 40.0
"""Weights on disk save minutes to hours of download."""
WHOLE: Final = 20.0
"""An empty node stays empty for whoever needs a whole one."""
PACKING: Final = 10.0
"""Among nodes in use, the one that is left with the least."""
INSTALL: Final = -45.0
"""A node that must install the engine first takes minutes and may fail: more than a download."""
NEAR: Final = 8.0
"""Cards of one NVLink island work together at several times the speed of PCIe."""
ELSEWHERE: Final = -140.0
"""After repeated failures on a node, another one is worth a download or a failure domain that is
shared (`apart.SHARED`, 130 at first), but not two replicas on one node."""


@dataclass(frozen=True, slots=True)
class Liking:
    """What a replica's model makes of nodes: holders of its weights, hosts of its replicas."""

    source: str
    hosts: Hosts
    """Where live replicas of the model are, those of this plan included."""
    avoid: AbstractSet[str] = frozenset()
    """Nodes where this replica failed again and again."""
    held: bool = True
    """Whether any node holds the weights."""

    @property
    def most(self) -> float:
        """No node has more points that depend on the model."""
        return SPREAD + self.hosts.most + (WEIGHTS if self.held else 0.0)

    def bonus(self, node: Node) -> float:
        """Points that depend on the model."""
        points = SPREAD / (1 + self.hosts.on[node.id]) + self.hosts.points(node.id)
        if self.source in node.sources_on_disk:
            points += WEIGHTS
        return points + ELSEWHERE if node.id in self.avoid else points

    def parts(self, node: Node) -> dict[str, float]:
        """The same by name."""
        found = {"spread": SPREAD / (1 + self.hosts.on[node.id])} | self.hosts.parts(node.id)
        found["weights"] = WEIGHTS if self.source in node.sources_on_disk else 0.0
        if node.id in self.avoid:
            found["elsewhere"] = ELSEWHERE
        return found


def base(profile: Profile, node: Node) -> dict[str, float]:
    """Points by name that depend on the node alone; the node has passed all filters."""
    parts = _of_use(profile, node)
    return parts | {"engine": INSTALL} if must_install(profile, node) else parts


def _of_use(profile: Profile, node: Node) -> dict[str, float]:
    if profile.gpus > 0:
        return _with_cards(profile, node)
    return {
        "packing": PACKING * _host_use(profile, node),
        "whole": WHOLE if _in_use(node) else 0.0,
        "cards_kept": 0.0 if node.gpus else CARDS_KEPT,
    }


def _with_cards(profile: Profile, node: Node) -> dict[str, float]:
    free = [gpu for gpu in node.gpus if gpu.healthy and not gpu.claims]
    taken = nearest(profile, node)
    newly = sum(not gpu.claims for gpu in taken)
    left = len(free) - newly
    keeps_whole = _in_use(node) or newly == len(node.gpus)
    return {
        "packing": PACKING * (1 - left / len(node.gpus)),
        "whole": WHOLE if keeps_whole else 0.0,
        "near": NEAR * closeness(taken),
    }


def _in_use(node: Node) -> bool:
    return node.shards_live > 0 or any(gpu.claims for gpu in node.gpus)


def _host_use(profile: Profile, node: Node) -> float:
    """The fuller of cores and memory once the shard is there, 0 to 1; unknown counts as empty."""
    cpus = (node.cpus_claimed + (profile.cpus or 0.0)) / node.cpus if node.cpus else 0.0
    claimed = node.memory_claimed_mib + (profile.memory_mib or 0)
    memory = claimed / node.memory_mib if node.memory_mib else 0.0
    return min(1.0, max(cpus, memory))
