"""Whose turn it is when requests wait: fair between classes, in a class between tenants. Pure.

How turns are taken is `turns.py`. Not every replica will do for every request, so each waits in a
lane. Who takes a turn names the lanes that are closed now: they are looked past, and keep nobody
behind them.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, Final, Generic, TypeVar

from controller.router.turns import ANY, Flow, Lane, Turns, rivals

if TYPE_CHECKING:
    from collections.abc import Container, Mapping

T = TypeVar("T")
Weighted = tuple[str, float]  # a name and its weight, above 0
NONE: Final[frozenset[str]] = frozenset()


class Own(Generic[T]):
    """What waits of one tenant in a class: first come first, in each lane."""

    __slots__ = ("_came", "lanes")

    def __init__(self) -> None:
        self.lanes: dict[Lane, OrderedDict[T, int]] = {}  # none is empty
        self._came = 0

    def push(self, item: T, lane: Lane) -> None:
        if lane not in self.lanes:
            self.lanes[lane] = OrderedDict()
        self._came += 1
        self.lanes[lane][item] = self._came

    def remove(self, item: T, lane: Lane) -> None:
        del self.lanes[lane][item]
        if not self.lanes[lane]:
            del self.lanes[lane]

    def first(self, closed: Container[Lane]) -> T | None:
        """The first that can go; None when none can."""
        first, came = None, self._came + 1
        for lane, items in self.lanes.items():
            if lane not in closed:
                item = next(iter(items))
                if items[item] < came:
                    first, came = item, items[item]
        return first

    def newest(self) -> T | None:
        """Who came last; None when nobody waits."""
        newest, came = None, 0
        for items in self.lanes.values():
            item = next(reversed(items))
            if items[item] > came:
                newest, came = item, items[item]
        return newest

    def count(self) -> dict[Lane, int]:
        """How many wait in each lane."""
        return {lane: len(items) for lane, items in self.lanes.items()}


Outer = Flow[Turns[Own[T]]]
Inner = Flow[Own[T]]


class FairQueue(Generic[T]):
    """What waits, by class and tenant. Items are hashable and wait at most once."""

    def __init__(self) -> None:
        self._classes: Turns[Turns[Own[T]]] = Turns()
        self._where: dict[T, tuple[Outer[T], Inner[T], Lane]] = {}

    def __len__(self) -> int:
        return self._classes.waiting

    @property
    def lanes(self) -> Mapping[Lane, int]:
        """How many wait in each lane in which somebody does."""
        return self._classes.lanes

    def push(self, item: T, kind: Weighted, tenant: Weighted, lane: Lane = ANY) -> None:
        """`item` waits behind its tenant's others."""
        outer = self._classes.flow(*kind, Turns)
        inner = outer.queue.flow(*tenant, Own)
        inner.queue.push(item, lane)
        self._where[item] = outer, inner, lane
        outer.queue.add(inner, lane)
        self._classes.add(outer, lane)

    def first(self, closed: Container[Lane] = NONE) -> T | None:
        """Whose turn it is; it stays. None when nobody waits, or in closed lanes only."""
        if not self._classes.waiting:
            return None
        first = self._classes.next().queue.next().queue.first(closed)
        if first is not None:
            return first
        for outer in self._classes.in_order():
            for inner in outer.queue.in_order():
                first = inner.queue.first(closed)
                if first is not None:
                    return first
        return None

    def take(self, item: T) -> None:
        """It is the turn of `item`, as `first` said: it is gone, and its tenant and class are
        charged."""
        outer, inner, _ = self._where[item]
        outer.queue.served(inner)
        self._classes.served(outer)
        self.remove(item)

    def remove(self, item: T) -> None:
        """`item` waits no longer, and nobody is charged a turn. KeyError when it did not wait."""
        outer, inner, lane = self._where.pop(item)
        inner.queue.remove(item, lane)
        outer.queue.drop(inner, lane)
        self._classes.drop(outer, lane)

    def items(self) -> list[T]:
        """All that wait, in no order that matters."""
        return list(self._where)

    def place(self, kind: Weighted, tenant: Weighted, lane: Lane = ANY) -> float:
        """At most so many turns until one that comes now has had its own, if no lane that it waits
        for is closed."""
        outer = self._classes.flows.get(kind[0])
        inner = None if outer is None else outer.queue.flows.get(tenant[0])
        among = 1.0 if outer is None else 1.0 + rivals(outer.queue.lanes, lane)
        own = 1.0 if inner is None else 1.0 + rivals(inner.queue.count(), lane)
        if outer is not None:
            among = min(among, own / outer.queue.share(inner, tenant[1]))
        everyone = 1.0 + rivals(self._classes.lanes, lane)
        return min(everyone, among / self._classes.share(outer, kind[1]))

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
        return None if newest is None else newest.queue.newest()
