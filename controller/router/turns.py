"""Flows that take turns, by weight: start-time fair queueing (Goyal, Vin and Cheng, 1996). Pure.

One request costs one turn. Each flow has a tag, the virtual time at which its next turn is due; the
lowest tag goes first and its flow's tag moves on by 1/weight. A flow that returns is not served for
the time it was away: a new one starts at the present virtual time, and one that ran empty keeps its
tag until the others have passed it. Of two flows that wait all the while, the turns differ by less
than one of each, by weight.

A flow may be looked past, when nothing in it can go. It goes first when something can, once: what
it could not use meanwhile is not made up for.
"""

from __future__ import annotations

from collections.abc import Hashable
from heapq import heapify, heappop, heappush, heapreplace
from typing import TYPE_CHECKING, Final, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

Q = TypeVar("Q")
Lane = Hashable
"""What one waits for: all in a lane can go when its first one can."""
ANY: Final = ""
"""The lane of those for whom everything will do: they are rivals of all others."""


def rivals(waiting: Mapping[Lane, int], lane: Lane) -> int:
    """How many of those that wait may go where one in `lane` would."""
    found = waiting.get(ANY, 0)
    return found if lane == ANY else found + waiting.get(lane, 0)


class Flow(Generic[Q]):
    """One that takes turns: what waits in it, and when its next turn is due."""

    __slots__ = ("name", "queue", "tag", "waiting", "weight")

    def __init__(self, name: str, queue: Q, weight: float, tag: float) -> None:
        self.name = name
        self.queue = queue
        self.weight = weight
        self.tag = tag
        self.waiting = 0


class Turns(Generic[Q]):
    """Flows by name. Every operation is O(log flows), unless some are looked past; whoever adds or
    drops says so here."""

    def __init__(self) -> None:
        self.flows: dict[str, Flow[Q]] = {}
        self.waiting = 0
        self.lanes: dict[Lane, int] = {}  # how many wait in each; none is empty
        self._weight = 0.0  # of the flows in which something waits
        self._due: list[tuple[float, int, str]] = []  # each flow once, empty ones too
        self._now = 0.0  # virtual time: the highest tag served
        self._born = 0  # of equal tags the older flow goes first

    def flow(self, name: str, weight: float, queue: Callable[[], Q]) -> Flow[Q]:
        """The flow of that name, made where there is none; its weight is `weight` from now on."""
        flow = self.flows.get(name)
        if flow is None:
            flow = self.flows[name] = Flow(name, queue(), weight, self._now)
            self._born += 1
            heappush(self._due, (flow.tag, self._born, name))
        elif flow.weight != weight:
            if flow.waiting:
                self._weight += weight - flow.weight
            flow.weight = weight
        return flow

    def add(self, flow: Flow[Q], lane: Lane) -> None:
        """One more waits in `flow`."""
        if not flow.waiting:
            self._weight += flow.weight
        flow.waiting += 1
        self.waiting += 1
        self.lanes[lane] = self.lanes.get(lane, 0) + 1

    def drop(self, flow: Flow[Q], lane: Lane) -> None:
        """One less waits in it. When nothing waits at all, the past is forgotten."""
        flow.waiting -= 1
        self.waiting -= 1
        self.lanes[lane] -= 1
        if not self.lanes[lane]:
            del self.lanes[lane]
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

    def in_order(self) -> list[Flow[Q]]:
        """All flows in which something waits, and the one whose turn it is first."""
        self._due.sort()  # which is a heap, too
        flows = [self.flows[name] for _, _, name in self._due]
        passed = {flow.name for flow in flows if not flow.waiting and flow.tag <= self._now}
        if passed:  # while the first is looked past, `next` does not come by them
            self._due = [due for due in self._due if due[2] not in passed]
            for name in passed:
                del self.flows[name]
        return [flow for flow in flows if flow.waiting]

    def served(self, flow: Flow[Q]) -> None:
        """The flow has had a turn: the next one, or the first of those not looked past."""
        self._now = max(self._now, flow.tag)
        flow.tag = self._now + 1 / flow.weight
        place = 0
        while self._due[place][2] != flow.name:
            place += 1
        due = flow.tag, self._due[place][1], flow.name
        if place:
            self._due[place] = due
            heapify(self._due)
        else:
            heapreplace(self._due, due)

    def share(self, flow: Flow[Q] | None, weight: float) -> float:
        """What part of the turns a flow of that weight gets while it waits, from above 0 to 1."""
        others = self._weight - (flow.weight if flow is not None and flow.waiting else 0.0)
        return weight / (others + weight)
