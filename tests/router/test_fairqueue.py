"""Whose turn it is: nobody idle while others wait, shares, order, no starvation."""

from __future__ import annotations

import math
from collections import Counter
from itertools import count, pairwise
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controller.router.admission import BATCH, INTERACTIVE
from controller.router.fairqueue import FairQueue
from controller.router.pace import ENOUGH, WINDOW_S, Pace
from controller.router.turns import ANY

if TYPE_CHECKING:
    from collections.abc import Container

KINDS = (INTERACTIVE, BATCH)
TENANTS = (("a", 1.0), ("b", 1.0), ("c", 2.0), ("d", 0.5))
LANES = (ANY, "x", "y")
closings = st.sets(st.sampled_from(LANES))

steps = st.lists(
    st.one_of(
        st.tuples(
            st.just("push"),
            st.sampled_from(KINDS),
            st.sampled_from(TENANTS),
            st.sampled_from(LANES),
        ),
        st.tuples(st.just("take"), closings),
        st.tuples(st.just("remove"), st.integers(0, 1000)),
    ),
    max_size=120,
)


def take(queue: FairQueue[Any], closed: Container[str] = ()) -> Any:
    """The turn of the next one whose lane is open; None when there is none."""
    item = queue.first(closed)
    if item is not None:
        queue.take(item)
    return item


@given(steps)
def test_any_sequence_gives_out_everything_once_and_first_come_first_in_a_tenant(
    sequence: list[tuple[Any, ...]],
) -> None:
    queue: FairQueue[int] = FairQueue()
    waiting: dict[tuple[Any, Any], dict[int, Any]] = {}  # numbers and their lanes
    numbers = count()
    for step in sequence:
        everything = [(where, n) for where, line in waiting.items() for n in line]
        lanes = Counter(lane for line in waiting.values() for lane in line.values())
        if step[0] == "push":
            number = next(numbers)
            queue.push(number, *step[1:])
            waiting.setdefault((step[1], step[2]), {})[number] = step[3]
        elif step[0] == "take":
            first = queue.first(step[1])
            assert take(queue, step[1]) == first
            assert (first is None) == (not lanes.keys() - step[1])
            for line in waiting.values():
                if first in line:
                    assert first == next(n for n, lane in line.items() if lane not in step[1])
                    del line[first]
        elif everything:
            where, number = everything[step[1] % len(everything)]
            queue.remove(number)
            del waiting[where][number]
        assert sorted(queue.items()) == sorted(n for line in waiting.values() for n in line)
        assert len(queue) == len(queue.items()) == sum(queue.lanes.values())
        kind, tenant = KINDS[len(waiting) % 2], TENANTS[len(queue) % 4]
        for lane in LANES:
            rivals = {
                where: sum(one in (ANY, lane) for one in line.values())
                for where, line in waiting.items()
                if line
            }
            assert queue.place(kind, tenant, lane) == pytest.approx(place(rivals, kind, tenant))


def place(lines: dict[Any, int], kind: Any, tenant: Any) -> float:
    """Its own requests and it, times what the others get meanwhile; everybody at most."""
    kinds = {k for k, _ in lines} | {kind}
    tenants = {t for k, t in lines if k == kind} | {tenant}
    among = sum(n for (k, _), n in lines.items() if k == kind) + 1
    own = lines.get((kind, tenant), 0) + 1
    among = min(among, own * sum(w for _, w in tenants) / tenant[1])
    return min(sum(lines.values()) + 1, among * sum(w for _, w in kinds) / kind[1])


@given(st.lists(st.tuples(st.sampled_from(KINDS), st.integers(0, 3)), max_size=200), st.data())
def test_turns_differ_by_less_than_one_of_each_by_weight(
    others: list[tuple[tuple[str, float], int]], data: st.DataObject
) -> None:
    """Over any stretch in which two tenants of a class wait all the while, and so two classes,
    whatever others wait for."""
    queue: FairQueue[Any] = FairQueue()
    for number in range(60):
        for kind in KINDS:
            for tenant in TENANTS[:3]:
                queue.push((kind[0], tenant[0], number), kind, tenant)
    served: list[tuple[str, str]] = []
    for kind, pick in others:  # what else comes and goes does not matter
        if pick == 3:
            lane = data.draw(st.sampled_from(LANES))
            queue.push((kind[0], "d", data.draw(st.uuids())), kind, TENANTS[3], lane)
        kind_name, tenant_name, _ = take(queue, data.draw(closings) - {ANY})
        served.append((kind_name, tenant_name))
    start = data.draw(st.integers(0, len(served)))
    stretch = served[start:]
    classes = Counter(kind for kind, _ in stretch)
    by_tenant = Counter(tenant for kind, tenant in stretch if kind == INTERACTIVE[0])
    for got, (one, two) in (
        (classes, KINDS),
        *((by_tenant, pair) for pair in pairwise(TENANTS[:3])),
    ):
        left, right = got[one[0]] / one[1], got[two[0]] / two[1]
        assert abs(left - right) <= 1 / one[1] + 1 / two[1] + 1e-9


def test_a_batch_request_has_one_turn_in_ten() -> None:
    queue: FairQueue[Any] = FairQueue()
    for number in range(100):
        queue.push(("i", number), INTERACTIVE, ("a", 1.0))
        queue.push(("b", number), BATCH, ("a", 1.0))
    assert Counter(take(queue)[0] for _ in range(100)) == {"i": 90, "b": 10}


def test_who_returns_is_not_served_for_the_time_it_was_away_and_not_for_coming_alone() -> None:
    queue: FairQueue[Any] = FairQueue()
    for number in range(50):
        queue.push(("a", number), INTERACTIVE, ("a", 1.0))
    for _ in range(20):
        take(queue)
    got: Counter[str] = Counter()
    queue.push(("b", -1), INTERACTIVE, ("b", 1.0))
    for number in range(20):  # b has never more than one waiting
        who, _ = take(queue)
        got[who] += 1
        if who == "b":
            queue.push(("b", number), INTERACTIVE, ("b", 1.0))
    assert abs(got["a"] - got["b"]) <= 2


def test_who_was_looked_past_goes_first_when_its_lane_opens_and_then_takes_turns() -> None:
    queue: FairQueue[Any] = FairQueue()
    for number in range(50):
        queue.push(("x", number), INTERACTIVE, ("x", 1.0), "x")
        queue.push(("a", number), INTERACTIVE, ("a", 1.0))
    assert [take(queue, {"x"}) for _ in range(20)] == [("a", n) for n in range(20)]
    assert [take(queue)[0] for _ in range(8)] == list("xxaxaxax")
    assert take(queue, {ANY, "x"}) is None


def test_tenants_that_come_and_go_while_another_is_looked_past_are_forgotten() -> None:
    queue: FairQueue[Any] = FairQueue()
    queue.push("waits", INTERACTIVE, ("x", 1.0), "x")
    for number in range(100):
        queue.push(number, INTERACTIVE, (f"tenant {number}", 1.0))
        assert take(queue, {"x"}) == number
    for number in range(3):  # they could have had as many turns by then
        queue.push(number, INTERACTIVE, ("a", 1.0))
        assert take(queue, {"x"}) == number
    assert set(queue._classes.next().queue.flows) == {"x", "a"}
    assert take(queue) == "waits"


@given(
    st.lists(st.tuples(st.sampled_from(KINDS), st.sampled_from(TENANTS)), max_size=60), st.data()
)
def test_nobody_waits_much_longer_than_its_place(
    before: list[tuple[tuple[str, float], tuple[str, float]]], data: st.DataObject
) -> None:
    """Whatever comes later: that bound is what a request is refused by."""
    queue: FairQueue[Any] = FairQueue()
    numbers = count()
    for kind, tenant in before:
        queue.push(next(numbers), kind, tenant)
        if data.draw(st.booleans()):
            take(queue)
    kind, tenant = data.draw(st.sampled_from(KINDS)), data.draw(st.sampled_from(TENANTS))
    place = queue.place(kind, tenant)
    assert place <= len(queue) + 1
    queue.push("me", kind, tenant)
    turns = 1
    while take(queue) != "me":
        turns += 1
    # Tags are not fractions of a turn: each flow may be one ahead, in its class and among tenants.
    assert turns <= math.ceil(place) + (len(TENANTS) + 1) * math.ceil(10 / kind[1])


def test_a_full_queue_takes_from_who_has_most_for_its_share() -> None:
    queue: FairQueue[Any] = FairQueue()
    for number in range(8):
        queue.push(("a", number), INTERACTIVE, ("a", 1.0))
    for number in range(2):
        queue.push(("b", number), INTERACTIVE, ("b", 1.0))
    assert queue.gives_way(INTERACTIVE, ("a", 1.0), 10) is None
    assert queue.gives_way(INTERACTIVE, ("b", 1.0), 10) == ("a", 7)
    assert queue.gives_way(INTERACTIVE, ("c", 1.0), 10) == ("a", 7)
    assert queue.gives_way(BATCH, ("a", 1.0), 10) is None  # its tenth of the places is all there is
    queue.push(("x", 0), BATCH, ("a", 1.0))
    queue.push(("x", 1), BATCH, ("a", 1.0))
    assert queue.gives_way(INTERACTIVE, ("c", 1.0), 12) == ("x", 1)


def test_pace_is_unknown_then_measured_then_slower_in_a_stall() -> None:
    pace = Pace()
    pace.start(100.0)
    for turn in range(1, ENOUGH + 1):
        assert pace.seconds(1, 100.0 + turn / 2) is None
        pace.took(100.0 + turn / 2)
    now = 100.0 + ENOUGH / 2
    assert pace.seconds(10, now) == pytest.approx(5.0, rel=0.2)
    stalled = pace.seconds(10, now + 60)
    assert stalled is not None
    assert stalled > 50
    assert pace.seconds(1, now + 1e9) == math.inf
    pace.start(now + WINDOW_S / 2)  # empty for a moment: that time is not counted
    assert pace.seconds(10, now + WINDOW_S / 2) == pytest.approx(5.0, rel=0.2)
    pace.start(now + 3 * WINDOW_S)
    assert pace.seconds(1, now + 3 * WINDOW_S) is None


def test_a_pace_is_forgotten_although_all_who_come_are_refused_for_it() -> None:
    pace = Pace()
    pace.start(0.0)
    for turn in range(1, ENOUGH + 1):
        pace.took(60.0 * turn)
    last = 60.0 * ENOUGH
    for second in range(int(WINDOW_S)):  # one comes every second, and waits for nothing
        pace.start(last + second)
        told = pace.seconds(1, last + second)
        assert told is not None
        assert told > 20
    pace.start(last + WINDOW_S + 1)
    assert pace.seconds(1, last + WINDOW_S + 1) is None
