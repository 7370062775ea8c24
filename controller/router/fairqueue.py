"""Whose turn it is when requests wait: fair between classes, in a class between tenants. Pure.

Start-time fair queueing (Goyal, Vin and Cheng, 1996), one request costing one turn. Each flow has
a tag, the virtual time at which its next turn is due; the lowest tag goes first and its flow's tag
moves on by 1/weight. A flow that returns is not served for the time it was away: a new one starts
at the present virtual time, and one that ran empty keeps its tag until the others have passed it.
Of two flows that wait all the while, the turns differ by less than one of each, by weight.
"""

from __future__ import annotations

from collections import OrderedDict
from heapq import heappop, heappush, heapreplace
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")
Q = TypeVar("Q")
Weighted = tuple[str, float]  # a name and its weight, above 0
Fifo = OrderedDict[T, None]
Names = tuple[Weighted, Weighted]  # of a class, and of a tenant in it


class Flow(Generic[Q]):
    """One that takes turns: what waits in it, and when its next turn is due."""

    __slots__ = ("queue", "tag", "waiting", "weight")

    def __init__(self, queue: Q, weight: float, tag: float) -> None:
        self.queue = queue
        self.weight = weight
        self.tag = tag
        self.waiting = 0


class Turns(Generic[Q]):
    """Flows by name. Every operation is O(log flows); whoever adds or drops says so here."""

    def __init__(self) -> None:
        self.flows: dict[str, Flow[Q]] = {}
        self.waiting = 0
        self._weight = 0.0  # of the flows in which something waits
        self._due: list[tuple[float, int, str]] = []  # each flow once, empty ones too
        self._now = 0.0  # virtual time: the tag served last
        self._born = 0  # of equal tags the older flow goes first

    def flow(self, name: str, weight: float, queue: Callable[[], Q]) -> Flow[Q]:
        """The flow of that name, made where there is none; its weight is `weight` from now on."""
        flow = self.flows.get(name)
        if flow is None:
            flow = self.flows[name] = Flow(queue(), weight, self._now)
            self._born += 1
            heappush(self._due, (flow.tag, self._born, name))
        elif flow.weight != weight:
            if flow.waiting:
                self._weight += weight - flow.weight
            flow.weight = weight
        return flow

    def add(self, flow: Flow[Q]) -> None:
        """One more waits in `flow`."""
        if not flow.waiting:
            self._weight += flow.weight
        flow.waiting += 1
        self.waiting += 1

    def drop(self, flow: Flow[Q]) -> None:
        """One less waits in it. When nothing waits at all, the past is forgotten."""
        flow.waiting -= 1
        self.waiting -= 1
        if not self.waiting:
            self.flows.clear()
            self._due.clear()
            self._weight = self._now = 0.0
        elif not flow.waiting:
            self._weight -= flow.weight

    def next(self) -> Flow[Q]:
        """The flow whose turn it is. Something must wait."""
        while True:
            name = self._due[0][2]
            flow = self.flows[name]
            if flow.waiting:
                return flow
            heappop(self._due)
            del self.flows[name]

    def served(self, flow: Flow[Q]) -> None:
        """The flow that `next` gave has had its turn."""
        _, born, name = self._due[0]
        self._now = flow.tag
        flow.tag += 1 / flow.weight
        heapreplace(self._due, (flow.tag, born, name))

    def share(self, flow: Flow[Q] | None, weight: float) -> float:
        """What part of the turns a flow of that weight gets while it waits, from above 0 to 1."""
        others = self._weight - (flow.weight if flow is not None and flow.waiting else 0.0)
        return weight / (others + weight)


Place = tuple[Flow[Turns[Fifo[T]]], Flow[Fifo[T]], Names]


class FairQueue(Generic[T]):
    """What waits, by class and tenant. Items are hashable and wait at most once."""

    def __init__(self) -> None:
        self._classes: Turns[Turns[Fifo[T]]] = Turns()
        self._where: dict[T, Place[T]] = {}

    def __len__(self) -> int:
        return self._classes.waiting

    def push(self, item: T, kind: Weighted, tenant: Weighted, *, front: bool = False) -> None:
        """`item` waits behind its tenant's others, or before them."""
        outer = self._classes.flow(*kind, Turns)
        inner = outer.queue.flow(*tenant, OrderedDict)
        inner.queue[item] = None
        if front:
            inner.queue.move_to_end(item, last=False)
        self._where[item] = outer, inner, (kind, tenant)
        outer.queue.add(inner)
        self._classes.add(outer)

    def first(self) -> T:
        """Whose turn it is; it stays. Something must wait."""
        return next(iter(self._classes.next().queue.next().queue))

    def take(self) -> T:
        """Whose turn it is; it is gone and its tenant and class have had their turn."""
        outer = self._classes.next()
        inner = outer.queue.next()
        item = next(iter(inner.queue))
        outer.queue.served(inner)
        self._classes.served(outer)
        self.remove(item)
        return item

    def remove(self, item: T) -> Names:
        """`item` waits no longer, and nobody is charged a turn. KeyError when it did not wait."""
        outer, inner, names = self._where.pop(item)
        del inner.queue[item]
        outer.queue.drop(inner)
        self._classes.drop(outer)
        return names

    def items(self) -> list[T]:
        """All that wait, in no order that matters."""
        return list(self._where)

    def place(self, kind: Weighted, tenant: Weighted) -> float:
        """At most so many turns until one that comes now has had its own."""
        outer = self._classes.flows.get(kind[0])
        inner = None if outer is None else outer.queue.flows.get(tenant[0])
        among = 1.0 if outer is None else outer.waiting + 1.0
        own = 1.0 if inner is None else inner.waiting + 1.0
        if outer is not None:
            among = min(among, own / outer.queue.share(inner, tenant[1]))
        return min(len(self) + 1.0, among / self._classes.share(outer, kind[1]))

    def gives_way(self, kind: Weighted, tenant: Weighted, places: int) -> T | None:
        """Who leaves a queue of so many `places`, all taken, for one that comes now: the newest of
        the tenant that has most of them for its share. None when the one that comes has its own.
        """
        outer = self._classes.flows.get(kind[0])
        inner = None if outer is None else outer.queue.flows.get(tenant[0])
        own = 1.0 if inner is None else inner.waiting + 1.0
        within = 1.0 if outer is None else outer.queue.share(inner, tenant[1])
        if own > places * within * self._classes.share(outer, kind[1]):
            return None  # told without a look at all tenants: a flood is refused cheaply
        most, newest = own / (kind[1] * tenant[1]), None
        for group in self._classes.flows.values():
            for flow in group.queue.flows.values():
                held = flow.waiting / (group.weight * flow.weight)
                if held > most:
                    most, newest = held, flow
        return None if newest is None else next(reversed(newest.queue))
