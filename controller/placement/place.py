"""Finds places: the first profile in order of preference that fits, on the best node.

`Planner` serves one plan. It takes what it gives from its own ledger, so two replicas of one plan
never get the same card. Called by `reconcile/decide.py`; knows nothing of states and backoffs.
"""

from __future__ import annotations

from bisect import insort
from collections import Counter
from dataclasses import replace
from functools import cached_property
from hashlib import blake2b
from typing import TYPE_CHECKING, Final

from controller.placement import filters, score
from controller.placement.apart import Hosts
from controller.placement.chosen import Chosen
from controller.placement.gang import Gang, Gangs
from controller.placement.ledger import Ledger, Shape
from controller.placement.refused import Batch, Refusals, without_nodes, without_profiles

if TYPE_CHECKING:
    from collections.abc import Iterable
    from collections.abc import Set as AbstractSet

    from controller.placement.model import Model, Node, Place, Profile, Replica

FAILURES_TO_AVOID: Final = 3
"""A replica that failed this often in a row is better tried on another node."""

OCCUPYING: Final = frozenset({"starting", "ready", "draining"})
"""States in which a replica counts as being on its node for the spread."""


class Demand:
    """Profiles that ask for the same; what shapes answered is remembered for the whole plan."""

    def __init__(self, profile: Profile, ledger: Ledger) -> None:
        self.profile = profile
        self._ledger = ledger
        self._codes: list[bytes] = []
        self._feasible: list[tuple[float, Shape]] = []

    @property
    def evaluations(self) -> int:
        """How often the rules ran: once for each shape, which is what the size test counts."""
        return len(self._codes)

    def codes(self) -> list[bytes]:
        """By shape: the codes with which it is refused, empty for those that pass."""
        self.feasible()
        return self._codes

    def feasible(self) -> list[tuple[float, Shape]]:
        """(-points, shape) of shapes that pass all rules, best first."""
        for shape in range(len(self._codes), len(self._ledger.examples)):
            node = self._ledger.examples[shape]
            reasons = filters.refusals(self.profile, node)
            self._codes.append(",".join(reason.code for reason in reasons).encode())
            if not reasons:
                insort(self._feasible, (-sum(score.base(self.profile, node).values()), shape))
        return self._feasible

    def mark(self) -> bytes:
        """Which node is refused for which codes, whatever the shapes they happen to be in."""
        self.feasible()
        found: dict[bytes, int] = {}
        for codes, prints in zip(self._codes, self._ledger.prints, strict=True):
            found[codes] = found.get(codes, 0) + prints
        text = repr(sorted(item for item in found.items() if item[1]))
        return blake2b(text.encode(), digest_size=16).digest()


class Planner:
    """Places replicas one after another on one working copy of the fleet."""

    def __init__(
        self, nodes: Iterable[Node], models: Iterable[Model], replicas: Iterable[Replica], seed: int
    ) -> None:
        """`models` are those that may be placed, `replicas` all of theirs that are alive."""
        wanted = tuple(models)
        self.ledger = Ledger(nodes, (p for m in wanted for p in m.profiles), seed)
        self._seed = seed
        self._demands: dict[tuple[object, ...], Demand] = {}
        self._holders = self._find_holders({model.source for model in wanted})
        homes = self.ledger.homes
        kinds = frozenset(homes.values())
        self._hosts = {model.name: Hosts(homes, kinds) for model in wanted}
        self._count(replicas)

    def _count(self, replicas: Iterable[Replica]) -> None:
        single: dict[str, list[str]] = {name: [] for name in self._hosts}
        for replica in replicas:
            if replica.state not in OCCUPYING or replica.model not in single:
                continue
            if len(replica.shards) == 1:  # nearly all: counted at once
                single[replica.model].append(replica.shards[0].node_id)
            else:
                self._hosts[replica.model].add(shard.node_id for shard in replica.shards)
        for name, node_ids in single.items():
            self._hosts[name].add_single(node_ids)

    @property
    def evaluations(self) -> int:
        """How often the rules ran over a shape in this plan."""
        return sum(demand.evaluations for demand in self._demands.values())

    def place(self, model: Model, replica: Replica) -> tuple[Place | None, Refusals]:
        """A place that is taken at once, or none; and what was refused on the way.

        With a place, the refusals are those of the profiles that were preferred to the chosen one.
        """
        if not model.profiles:
            return None, without_profiles(model)
        if not self.ledger.nodes:
            return None, without_nodes(model)
        refused: list[Batch] = []
        held = bool(self._holders.get(model.source))
        liking = score.Liking(model.source, self._hosts[model.name], _avoided(replica), held)
        for profile in model.profiles:
            nodes, group = self._nodes(profile, liking)
            if nodes:
                found = Chosen(model, profile, replica, nodes, group, self._seed).place(liking)
                for shard in found.shards:
                    self.ledger.take(shard, model.name)
                self._hosts[model.name].add(node.id for node in nodes)
                return found, Refusals(model.name, refused)
            refused.append(self._refused(profile))
        return None, Refusals(model.name, refused)

    def partners(self, profile: Profile) -> frozenset[str]:
        """Nodes that could be part of a gang of this profile now: for people who ask."""
        return self._gangs.partners(profile, self._by_class(profile))

    @cached_property
    def _gangs(self) -> Gangs:
        """Only plans that place over several nodes look at what connects them."""
        return Gangs(self.ledger)

    def _nodes(
        self, profile: Profile, liking: score.Liking
    ) -> tuple[tuple[Node, ...], Gang | None]:
        """The nodes for one replica in the order of its ranks; none when it does not fit."""
        if profile.shards == 1:
            node = self._best(self._demand(profile), liking)
            return (() if node is None else (node,)), None
        best = self._gangs.best(profile, self._by_class(profile), liking)
        return (() if best is None else best.nodes), best

    def _refused(self, profile: Profile) -> Batch:
        demand = self._demand(profile)
        if profile.shards == 1:
            return Batch(profile, self.ledger.present(), demand.mark())
        unmet = self._gangs.unmet(profile, self._by_class(profile))
        return Batch(profile, self.ledger.present(), self._gangs.mark(demand, unmet), unmet)

    def _by_class(self, profile: Profile) -> list[Demand]:
        """The demand of a gang, one for each class of cards: a gang has cards of one class."""
        if profile.gpus == 0 or profile.gpu_class is not None:
            return [self._demand(profile)]
        there = [self.ledger.examples[shape] for _, shape in self._demand(profile).feasible()]
        classes = sorted({gpu.class_ for node in there for gpu in node.gpus})
        return [self._demand(replace(profile, gpu_class=name)) for name in classes]

    def _demand(self, profile: Profile) -> Demand:
        key = _asks_for(profile)
        found = self._demands.get(key)
        if found is None:
            found = self._demands[key] = Demand(profile, self.ledger)
        return found

    def _best(self, demand: Demand, liking: score.Liking) -> Node | None:
        """The node with the most points; among equals the lowest tie."""
        holders = self._holders.get(liking.source, [])
        best: tuple[float, int, str] | None = None
        for minus_base, shape in demand.feasible():
            if best is not None and -minus_base + liking.most < -best[0]:
                break
            for tie, node_id, bonus in self._contenders(shape, holders, liking):
                rank = (minus_base - bonus, tie, node_id)
                best = rank if best is None else min(best, rank)
        return None if best is None else self.ledger.nodes[best[2]]

    def _contenders(
        self, shape: Shape, holders: list[tuple[int, str]], liking: score.Liking
    ) -> Iterable[tuple[int, str, float]]:
        """The best holder of the weights and the best other node of a shape, and few others."""
        ledger = self.ledger
        of_shape = ((t, n) for t, n in holders if ledger.shapes[n] == shape)
        plenty = score.SPREAD + self._apart(shape, liking.hosts)
        for members, enough in (
            (of_shape, plenty + score.WEIGHTS),
            (iter(ledger.members[shape]), plenty),
        ):
            for tie, node_id in members:
                bonus = liking.bonus(ledger.nodes[node_id])
                yield tie, node_id, bonus
                if bonus >= enough:
                    break

    def _apart(self, shape: Shape, hosts: Hosts) -> float:
        """The most that a node of the shape without a replica of the model has for being apart."""
        if not hosts.shares:
            return 0.0
        ledger = self.ledger
        ours = Counter(ledger.homes[id_] for id_ in hosts.on if ledger.shapes.get(id_) == shape)
        there = ledger.housed[shape]
        return hosts.best(home for home, count in there.items() if count > ours[home])

    def _find_holders(self, sources: AbstractSet[str]) -> dict[str, list[tuple[int, str]]]:
        found: dict[str, list[tuple[int, str]]] = {}
        for node in self.ledger.nodes.values():
            for source in sources & node.sources_on_disk:
                found.setdefault(source, []).append((self.ledger.tie(node.id), node.id))
        for holders in found.values():
            holders.sort()
        return found


def _asks_for(profile: Profile) -> tuple[object, ...]:
    """All of a profile that rules and scores read."""
    return (
        profile.engine,
        profile.engine_version,
        tuple(sorted((label, tuple(values)) for label, values in profile.pool_labels.items())),
        profile.gpu_class,
        profile.gpus,
        profile.gpu_memory_mib,
        profile.fit_mib,
        profile.uncut,
        profile.share,
        profile.cpus,
        profile.memory_mib,
        profile.arch,
        profile.cpu_flags,
        profile.shards,
        profile.fabric,
        profile.driver_min,
        profile.cuda_min,
        profile.exclude_nodes,
        profile.alone_of,
        profile.weights_mib and (profile.spec.get("source"), profile.weights_mib),
    )


def _avoided(replica: Replica) -> frozenset[str]:
    """Nodes of the last launch, once it has failed often; its shards are still in the snapshot."""
    if replica.restarts < FAILURES_TO_AVOID:
        return frozenset()
    return frozenset(shard.node_id for shard in replica.shards)
