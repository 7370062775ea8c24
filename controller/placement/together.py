"""The nodes that could take a shard of a gang, by what connects them, best first.

One for each demand over several nodes, made and asked by `gang.Gangs`. It follows the plan: what
the ledger has taken since it was last asked is taken out, so that a gang costs what changed and
not what there is.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from typing import TYPE_CHECKING

from controller.placement.filters import ANY_ENGINE

if TYPE_CHECKING:
    from collections.abc import Sequence

    from controller.placement.fabric import Fabrics
    from controller.placement.ledger import Ledger, Shape
    from controller.placement.model import Node, Profile
    from controller.placement.place import Demand
    from controller.placement.score import Liking

Entry = tuple[float, int, str]
"""(-points that depend on the node alone, tie, node id): the lowest is the best."""
Table = dict[int, list[Entry]]
"""Number of a group -> its nodes, the best first."""


class Together:
    """Feasible nodes by kind and group; nodes of one kind have one version of the engine."""

    def __init__(self, ledger: Ledger, fabrics: Fabrics, demand: Demand) -> None:
        self._ledger = ledger
        self._of = fabrics.of
        self._demand = demand
        self._kinds: dict[object, Table] = {}
        self._entries: dict[str, tuple[Table, Entry]] = {}
        self._seen = len(ledger.taken)
        for minus, shape in demand.feasible():
            table = self._table(shape)
            for tie, id_ in ledger.members[shape]:
                entry = (minus, tie, id_)
                self._entries[id_] = (table, entry)
                for number in self._of(demand.profile, id_):
                    table.setdefault(number, []).append(entry)
        for table in self._kinds.values():
            for entries in table.values():
                entries.sort()

    @property
    def class_(self) -> str | None:
        """The class of the cards, when there are any."""
        return self._demand.profile.gpu_class

    def tables(self) -> list[Table]:
        """By kind, as the plan has left the nodes so far; not to be changed."""
        taken = self._ledger.taken
        if self._seen < len(taken):
            points = {shape: minus for minus, shape in self._demand.feasible()}
            for id_ in dict.fromkeys(taken[self._seen :]):
                self._again(id_, points)
            self._seen = len(taken)
        return list(self._kinds.values())

    def _again(self, id_: str, points: dict[Shape, float]) -> None:
        numbers = self._of(self._demand.profile, id_)
        if id_ in self._entries:
            table, entry = self._entries.pop(id_)
            for number in numbers:
                del table[number][bisect_left(table[number], entry)]
        shape = self._ledger.shapes[id_]
        if shape in points:
            table, entry = self._table(shape), (points[shape], self._ledger.tie(id_), id_)
            self._entries[id_] = (table, entry)
            for number in numbers:
                insort(table.setdefault(number, []), entry)

    def _table(self, shape: Shape) -> Table:
        kind = _versions(self._demand.profile, self._ledger.examples[shape])
        return self._kinds.setdefault(kind, {})


def best(
    entries: Sequence[Entry], count: int, liking: Liking, nodes: dict[str, Node]
) -> list[Entry]:
    """The ``count`` best of a group once the model's own points are added; reads no more than
    it must: no node can have more than `Liking.most`."""
    found: list[Entry] = []
    for minus, tie, id_ in entries:
        if len(found) == count and found[-1] <= (minus - liking.most, tie, id_):
            break
        insort(found, (minus - liking.bonus(nodes[id_]), tie, id_))
        del found[count:]
    return found


def _versions(profile: Profile, node: Node) -> object:
    """What must be the same on all nodes of a gang besides the class of cards."""
    if profile.engine == ANY_ENGINE or profile.engine_version is not None or node.engines is None:
        return None
    return node.engines.get(profile.engine)
