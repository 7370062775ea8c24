"""What connects nodes: NVLink domains, physical InfiniBand and RoCE fabrics, the plain network.

`Fabrics` is made once for a plan, by `gang.py`: a node's connections do not change within it. A
group is a set of nodes that can work together over one of these.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from controller.placement.reasons import Code, Reason

if TYPE_CHECKING:
    from collections.abc import Iterable

    from controller.placement.model import Node, Profile

DOMAIN: Final = "nvlink-domain"
ANY: Final = "any"
NVLINK, INFINIBAND, ROCE, NETWORK = "nvlink", "infiniband", "roce", "network"
TRANSPORTS: Final = (NVLINK, INFINIBAND, ROCE, NETWORK)
"""Best first: what the shards of one replica talk over."""


@dataclass(frozen=True, slots=True)
class Group:
    """Nodes that share one connection; ``key`` names it among others of its transport."""

    transport: str
    key: str

    @property
    def rank(self) -> int:
        """0 is the best transport."""
        return TRANSPORTS.index(self.transport)

    def wanted(self, nodes: int) -> str:
        """``4 nodes in one NVLink domain``: what a gang of so many needs of such a group."""
        if self.transport == NETWORK:
            return f"{nodes} nodes"
        return f"{nodes} nodes " + ("in one NVLink domain" if self.transport == NVLINK else ON_ONE)

    @property
    def name(self) -> str:
        """``in NVLink domain 6b1e.0``, ``on fabric ib:0008f1``, ``in all``."""
        if self.transport == NETWORK:
            return "in all"
        return f"in NVLink domain {self.key}" if self.transport == NVLINK else f"on {self.key}"

    @property
    def over(self) -> str:
        """The same of a gang that works there."""
        return "over the network" if self.transport == NETWORK else self.name


ON_ONE: Final = "on one InfiniBand or RoCE fabric"
PLAIN: Final = Group(NETWORK, "")


class Fabrics:
    """Which groups each node is in, and why not in others. Groups are numbers in here."""

    def __init__(self, nodes: Iterable[Node]) -> None:
        there = self._nodes = tuple(nodes)
        self._standings: dict[tuple[str, bool], dict[str, object]] = {}
        self.groups: list[Group] = [PLAIN]
        self._numbers: dict[Group, int] = {PLAIN: 0}
        self._agreed = _agreed_names(there)
        self._domain: dict[str, tuple[int, ...]] = {}
        self._fabrics: dict[str, tuple[int, ...]] = {}
        for node in there:
            self._domain[node.id] = self._numbered(_domains(node))
            self._fabrics[node.id] = self._numbered(
                Group(INFINIBAND if key.startswith("ib:") else ROCE, key)
                for key in sorted(node.fabrics)
                if self._agrees(node, key)
            )
        self._domains_exist = any(node.nvlink_domain for node in there)

    def of(self, profile: Profile, node_id: str) -> tuple[int, ...]:
        """Numbers of the groups through which the profile's shards could work on this node."""
        domains = self._domain[node_id] if _may_use_nvlink(profile) else ()
        if profile.fabric == DOMAIN:
            return domains
        found = domains + self._fabrics[node_id]
        return (*found, 0) if profile.fabric == ANY else found

    def outside(self, profile: Profile, node: Node) -> list[Reason]:
        """Why the node is in no group of a kind that the profile could use; `any` has no outside.

        Of NVLink nobody is told where no node is in a domain and a fabric would do as well.
        """
        if profile.fabric == ANY:
            return []
        found: list[Reason] = []
        if profile.fabric == DOMAIN or (_may_use_nvlink(profile) and self._domains_exist):
            found += _no_domain(node)
        if profile.fabric != DOMAIN:
            found += self._no_fabric(node)
        return found

    def standing(self, profile: Profile) -> dict[str, object]:
        """By node: equal for nodes that are in the same groups and outside others for the same."""
        key = (profile.fabric, _may_use_nvlink(profile))
        found = self._standings.get(key)
        if found is None:
            found = self._standings[key] = {
                node.id: (
                    self.of(profile, node.id),
                    tuple(reason.code for reason in self.outside(profile, node)),
                )
                for node in self._nodes
            }
        return found

    def _numbered(self, groups: Iterable[Group]) -> tuple[int, ...]:
        found = []
        for group in groups:
            number = self._numbers.setdefault(group, len(self.groups))
            if number == len(self.groups):
                self.groups.append(group)
            found.append(number)
        return tuple(found)

    def _agrees(self, node: Node, key: str) -> bool:
        """Whether the node gives the fabric no name, or the one that most others give it."""
        names = node.declared.get(key)
        return not names or names == self._agreed[key]

    def _no_fabric(self, node: Node) -> list[Reason]:
        if not node.fabrics:
            return [Reason(Code.FABRIC_UNKNOWN, ON_ONE, "no active port on a known fabric")]
        return [
            Reason(
                Code.FABRIC_NAMES_DIFFER,
                f"{', '.join(sorted(self._agreed[key]))} for {key}",
                ", ".join(sorted(node.declared[key])),
            )
            for key in sorted(node.fabrics)
            if not self._agrees(node, key)
        ]


def _may_use_nvlink(profile: Profile) -> bool:
    """NVLink connects cards: shards without any gain nothing from it."""
    return profile.gpus > 0 or profile.fabric == DOMAIN


def _domains(node: Node) -> tuple[Group, ...]:
    if node.nvlink_domain is None or node.imex_ready is not True:
        return ()
    return (Group(NVLINK, node.nvlink_domain),)


def _no_domain(node: Node) -> list[Reason]:
    found = []
    if node.nvlink_domain is None:
        have = node.nvlink_reason or "no NVLink domain"
        found.append(Reason(Code.NVLINK_NOT_JOINED, "every card in one NVLink domain", have))
    # Without a domain and without IMEX the machine was never meant to be in one.
    if node.imex_ready is False or (node.nvlink_domain is not None and node.imex_ready is None):
        have = node.imex_reason or "no cause reported"
        found.append(Reason(Code.IMEX_NOT_READY, "IMEX READY with a channel", have))
    return found


def _agreed_names(nodes: Iterable[Node]) -> dict[str, frozenset[str]]:
    """Physical fabric -> the names that most nodes give it; among equals the first by alphabet."""
    votes: dict[str, Counter[frozenset[str]]] = {}
    for node in nodes:
        for key in node.fabrics:
            names = node.declared.get(key)
            if names:
                votes.setdefault(key, Counter())[names] += 1
    return {
        key: min(found, key=lambda names: (-found[names], sorted(names)))
        for key, found in votes.items()
    }
