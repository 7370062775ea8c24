"""Failure domains: nodes that go down together, and how many replicas of a model each holds. Pure.

A zone and a rack are what the agents' labels say, an NVLink domain is what the cards say. A label
that is missing is unknown: such a node shares nothing that anybody could name. Used by `place.py`
and `candidates.py` to count, by `score.py` for points.
"""

from __future__ import annotations

import math
from collections import Counter
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from collections.abc import Set as AbstractSet

    from controller.placement.model import Node

ZONE, RACK, DOMAIN = "zone", "rack", "domain"

LABELS: Final = {
    ZONE: ("topology.kubernetes.io/zone", "zone"),
    RACK: ("topology.kubernetes.io/rack", "rack"),
}
"""The first that a node has counts. Kubernetes defines that of zones (kubernetes.io, "Well-Known
Labels"); the one of racks is only made like it, and the plain words are ours."""

SHARED: Final = {ZONE: -100.0, RACK: -100.0, DOMAIN: -60.0}
"""Half of it for one replica in the same failure domain, two thirds for two, never all of it. One
is more than a download (40) or a node kept whole, and less than two replicas on one node (150)."""

Domain = tuple[str, str]
"""Kind and name."""
Home = tuple[Domain, ...]
"""The failure domains of a node, the largest first."""


def home(node: Node) -> Home:
    """All that are known. Racks are named within a zone: r1 of two zones are two racks."""
    zone, rack = (_label(node, kind) for kind in (ZONE, RACK))
    inside = rack if zone is None else f"{zone}/{rack}"
    found = ((ZONE, zone), (RACK, rack and inside), (DOMAIN, node.nvlink_domain))
    return tuple((kind, name) for kind, name in found if name)


class Hosts:
    """Where replicas of one model are: how many on each node and in each failure domain."""

    def __init__(self, homes: Mapping[str, Home], kinds: AbstractSet[Home]) -> None:
        """``homes`` of all nodes that can be chosen; ``kinds`` is each of them once."""
        self._homes = homes
        self._kinds = kinds
        self._inside: Counter[Domain] = Counter()
        self._points: dict[Home, float] = {}
        self._most: float | None = None
        self.on: Counter[str] = Counter()
        """Node -> replicas with a shard there."""

    def add(self, node_ids: Iterable[str]) -> None:
        """One more replica, with shards on these nodes."""
        there = set(node_ids)
        self.on.update(there)
        self._inside.update({domain for id_ in there for domain in self._homes.get(id_, ())})
        self._points, self._most = {}, None

    def add_single(self, node_ids: Iterable[str]) -> None:
        """One more replica on each of these nodes, as often as it is named."""
        more = Counter(node_ids)
        self.on.update(more)
        inside = self._inside
        for id_, count in more.items():
            for domain in self._homes.get(id_, ()):
                inside[domain] += count
        self._points, self._most = {}, None

    def parts(self, node_id: str) -> dict[str, float]:
        """Points by kind for each failure domain of the node that holds replicas already."""
        return {
            kind: SHARED[kind] * count / (1 + count)
            for kind, name in self._homes[node_id]
            if (count := self._inside[kind, name])
        }

    def points(self, node_id: str) -> float:
        """The sum of `parts`."""
        return self.of(self._homes[node_id])

    def of(self, home: Home) -> float:
        """The same for all nodes of one home: 0 or less."""
        if not self.shares:
            return 0.0
        found = self._points.get(home)
        if found is None:
            counts = ((SHARED[kind], self._inside[kind, name]) for kind, name in home)
            found = self._points[home] = sum(most * n / (1 + n) for most, n in counts)
        return found

    @property
    def shares(self) -> bool:
        """Whether any failure domain holds a replica."""
        return bool(self._inside)

    @property
    def most(self) -> float:
        """No node of the fleet has more of these points."""
        if self._most is None:
            self._most = self.best(self._kinds)
        return self._most

    def best(self, homes: Iterable[Home]) -> float:
        """The most points of any of these homes; 0 without any."""
        found = -math.inf
        for one in homes:
            found = max(found, self.of(one))
            if found == 0.0:  # one that holds no replica: there is nothing better
                break
        return found if math.isfinite(found) else 0.0

    def in_domain(self, name: str) -> int:
        """Replicas in an NVLink domain."""
        return self._inside[DOMAIN, name]


def _label(node: Node, kind: str) -> str | None:
    return next((node.labels[label] for label in LABELS[kind] if node.labels.get(label)), None)
