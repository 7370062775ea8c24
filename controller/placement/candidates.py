"""Nodes that could take one more replica of a model now, with the points of each. Pure.

What a plan keeps is the node that it chose; this is for people who ask what the others had. Called
by the admin API with a live snapshot.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from controller.placement import filters, score
from controller.placement.apart import Hosts, home
from controller.placement.place import OCCUPYING, Planner

if TYPE_CHECKING:
    from collections.abc import Mapping

    from controller.placement.model import Model, Node, Profile, Snapshot

MOST: Final = 10


@dataclass(frozen=True, slots=True)
class Candidate:
    """A node that passes all rules of the profile, and its points by name."""

    profile: str
    node: str
    parts: Mapping[str, float]

    @property
    def total(self) -> float:
        """All points; the highest is chosen, ties by seed."""
        return sum(self.parts.values())


def candidates(snapshot: Snapshot, model: Model) -> list[Candidate]:
    """The best nodes by the first profile that fits any, best first; [] when none does.

    For a replica over several nodes: those that could take a shard and have enough partners.
    """
    homes = {node.id: home(node) for node in snapshot.nodes}
    hosts = Hosts(homes, frozenset(homes.values()))
    for replica in snapshot.replicas:
        if replica.model == model.name and replica.state in OCCUPYING:
            hosts.add(shard.node_id for shard in replica.shards)
    liking = score.Liking(model.source, hosts)
    for profile in model.profiles:
        found = [
            Candidate(profile.name, node.id, score.base(profile, node) | liking.parts(node))
            for node in _fitting(snapshot, model, profile)
        ]
        if found:
            return sorted(found, key=lambda c: (-c.total, c.node))[:MOST]
    return []


def _fitting(snapshot: Snapshot, model: Model, profile: Profile) -> list[Node]:
    """Nodes that pass all rules; of a gang's, that are in a group which is large enough."""
    found = [node for node in snapshot.nodes if not filters.refusals(profile, node)]
    if profile.shards == 1 or not found:
        return found
    partners = Planner(snapshot.nodes, [model], [], 0).partners(profile)
    return [node for node in found if node.id in partners]
