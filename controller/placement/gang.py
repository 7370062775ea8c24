"""Replicas over several nodes: which nodes together, all of them or none (D13).

Nodes that pass all filters are put together by what connects them (`fabric.py`) and by kind: the
shards of one replica have cards of one class and one version of the engine. The best group wins:
the best transport, then the NVLink domain with the fewest replicas of the model, then the fewest
nodes left over (a gang of 4 takes a domain of 4 and leaves one of 18 whole), then points, then the
seed. Called by `place.Planner`.
"""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, Final

from controller.placement.chance import draw
from controller.placement.fabric import NETWORK, NVLINK, Fabrics, Group
from controller.placement.filters import free_ports
from controller.placement.reasons import Code, Reason
from controller.placement.together import Entry, Table, Together, best

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from controller.placement.ledger import Ledger
    from controller.placement.model import Gpu, Node, Profile, Replica
    from controller.placement.place import Demand
    from controller.placement.score import Liking

ALL_PORTS: Final = 65536


@dataclass(frozen=True, slots=True)
class Gang:
    """The nodes of one replica in the order of its ranks; rank 0 is the head."""

    group: Group
    nodes: tuple[Node, ...]
    class_: str | None
    """The class of all its cards; None without cards."""


class Gangs:
    """All gangs of one plan."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._fabrics = Fabrics(ledger.present())
        self._together: dict[int, Together] = {}
        """By id of the demand, which lives as long as the plan."""

    def best(self, profile: Profile, demands: Sequence[Demand], liking: Liking) -> Gang | None:
        """The best group's best nodes, or None; ``demands`` are the profile's, one for each class.

        Only groups that tie for transport, replicas of the model there and nodes left over have
        their points counted.
        """
        count = profile.shards
        fit: dict[tuple[int, int, int], list[tuple[Group, str | None, list[Entry]]]] = {}
        for class_, table in self._by_kind(demands):
            for number, entries in table.items():
                if len(entries) >= count:
                    group = self._fabrics.groups[number]
                    key = (group.rank, _together(group, liking), len(entries) - count)
                    fit.setdefault(key, []).append((group, class_, entries))
        if not fit:
            return None
        found = [
            (best(entries, count, liking, self._ledger.nodes), group, class_)
            for group, class_, entries in fit[min(fit)]
        ]
        entries, group, class_ = min(
            found, key=lambda f: (sum(e[0] for e in f[0]), [e[1:] for e in f[0]], f[1].key)
        )
        # By name: neighbours get neighbouring ranks, and every launch has the same order.
        ids = sorted(id_ for _, _, id_ in entries)
        return Gang(group, tuple(self._ledger.nodes[id_] for id_ in ids), class_)

    def partners(self, profile: Profile, demands: Sequence[Demand]) -> frozenset[str]:
        """Nodes of every group that is large enough, whichever would be chosen."""
        return frozenset(
            id_
            for _, table in self._by_kind(demands)
            for entries in table.values()
            if len(entries) >= profile.shards
            for _, _, id_ in entries
        )

    def unmet(self, profile: Profile, demands: Sequence[Demand]) -> Unmet:
        """What there was instead of a gang."""
        most: dict[int, int] = {}
        inside: dict[int, set[str]] = {}
        for _, table in self._by_kind(demands):
            for number, entries in table.items():
                most[number] = max(most.get(number, 0), len(entries))
                inside.setdefault(number, set()).update(entry[2] for entry in entries)
        mixed = frozenset(n for n, ids in inside.items() if len(ids) > most[n])
        return Unmet(profile, self._fabrics, most, mixed)

    def mark(self, demand: Demand, unmet: Unmet) -> bytes:
        """Which node is refused for which codes, those of groups included."""
        ledger = self._ledger
        prints: dict[tuple[bytes, object], int] = {}
        example: dict[tuple[bytes, object], Node] = {}
        standing = self._fabrics.standing(unmet.profile)
        for codes, members in zip(demand.codes(), ledger.members, strict=True):
            for _, id_ in members:
                key = (codes, standing[id_])
                example.setdefault(key, ledger.nodes[id_])
                prints[key] = prints.get(key, 0) + ledger.print_of(id_)
        told: dict[bytes, int] = {}
        for (codes, alike), total in prints.items():
            node = example[codes, alike]
            more = ",".join(reason.code for reason in unmet.reasons(node, passes=not codes))
            text = codes + b"/" + more.encode()
            told[text] = told.get(text, 0) + total
        return blake2b(repr(sorted(told.items())).encode(), digest_size=16).digest()

    def _by_kind(self, demands: Sequence[Demand]) -> Iterator[tuple[str | None, Table]]:
        for demand in demands:
            known = self._together.get(id(demand))
            if known is None:
                known = Together(self._ledger, self._fabrics, demand)
                self._together[id(demand)] = known
            for table in known.tables():
                yield known.class_, table


@dataclass(frozen=True, slots=True)
class Unmet:
    """Why a profile found no gang, node by node; kept for those who ask for sentences later."""

    profile: Profile
    fabrics: Fabrics
    most: dict[int, int]
    """Group -> nodes of one kind in it that could take a shard."""
    mixed: frozenset[int]
    """Groups with nodes of more than one kind."""

    def reasons(self, node: Node, *, passes: bool) -> list[Reason]:
        """Reasons besides the filters' own; ``passes``: the filters have none.

        A node that does not pass hears of a group only if it would be too small even with it.
        """
        found = self.fabrics.outside(self.profile, node)
        numbers = self.fabrics.of(self.profile, node.id)
        # All nodes together are too few: then so are those of each group among them.
        for number in numbers[-1:] if 0 in numbers else numbers:
            there = self.most.get(number, 0)
            if there + (not passes) < self.profile.shards:
                found.append(self._too_small(number, there))
        return found

    def _too_small(self, number: int, there: int) -> Reason:
        group = self.fabrics.groups[number]
        alike = " of one card class and engine version" if number in self.mixed else ""
        return Reason(
            Code.GANG_TOO_SMALL, group.wanted(self.profile.shards), f"{there}{alike} {group.name}"
        )


def _together(group: Group, liking: Liking) -> int:
    """Replicas of the model that a failure of the group's NVLink domain would take along."""
    return liking.hosts.in_domain(group.key) if group.transport == NVLINK else 0


def master_port(node: Node, port: int, replica: Replica, seed: int) -> int:
    """Where the shards meet, on the head: another port at each launch.

    A process that outlived its launch still knocks at the old one, and an engine that listens
    there would take it for its own.
    """
    last = {shard.master_port for shard in replica.shards}
    free = [p for p in free_ports(node, ALL_PORTS) if p != port]
    assert free, f"node {node.id} passed the filter for ports"
    fresh = [p for p in free if p not in last] or free
    launch = [shard.id for shard in replica.shards]
    return fresh[draw(seed, replica.id, replica.restarts, *launch) % len(fresh)]


def document(gang: Gang, node: Node, gpus: Sequence[Gpu], meeting: int) -> dict[str, Any]:
    """What the agent of one shard is told of the others."""
    return {
        "head": gang.nodes[0].mgmt_addr,
        "master_port": meeting,
        "nodes": len(gang.nodes),
        "transport": gang.group.transport,
        "hcas": _devices(gang.group, node, gpus),
    }


def _devices(group: Group, node: Node, gpus: Sequence[Gpu]) -> list[str]:
    """The node's ports on the fabric, those nearest to the shard's cards first."""
    if group.transport in (NVLINK, NETWORK):
        return []
    there = node.fabrics[group.key]
    near = [gpu.nearest_nic for gpu in gpus]
    return sorted(there, key=lambda port: (_place(port.partition(":")[0], near), there.index(port)))


def _place(hca: str, near: Sequence[str | None]) -> int:
    return near.index(hca) if hca in near else len(near)
