"""What routers are granted: never more than there is, by whatever is asked, killed or late."""

from __future__ import annotations

from contextlib import contextmanager
from itertools import count
from typing import TYPE_CHECKING, Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from controller.router.allowance import Allowance, Kind, Told
from tests.sql.spending import Asking, budget, key, limit, spend, used

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.sql.fleet import Fleet

names = count(100000)
JOIN = "select llmgw_core.controller_join_v1(%s, 'router', 'h', 1, '0') as number"
SUM = """
select b.micros, w.spent, coalesce(sum(a.amount), 0) as held
from llmgw_core.budget b
cross join lateral (
    select llmgw_core.budget_spent(b.id, b.period, b.zone, clock_timestamp()) as spent) w
left join llmgw_core.allowance a on a.kind = 'money' and a.object_id = b.id
where b.id = %s group by b.micros, w.spent"""


def now(fleet: Fleet) -> str:
    found: str = fleet.value("select clock_timestamp()::text")
    return found


class Router:
    """A router as far as one budget goes: the allowance is the router's own code."""

    def __init__(self, fleet: Fleet, key_id: str, number: int) -> None:
        self.fleet = fleet
        self.key_id = key_id
        self.asking = Asking(fleet)
        self.one = Allowance(Kind.MONEY, number, 0)
        self.running: list[int] = []  # what each reserved
        self.rows: list[dict[str, Any]] = []  # not flushed
        self.made = 0
        self.clock = 1.0

    def ask(self, need: int = 0, *, lost: bool = False) -> None:
        """One call; `lost`: Postgres did it and the answer never came."""
        self.clock += 1
        one = self.one
        if need:
            one.want(need)
        asked = one.ask(self.clock, self.made, self.made - len(self.rows))
        ((_, _, *told),) = self.asking.ask((asked.kind, asked.id, *asked[3:]))
        if need:
            one.unwant(need)
        if not lost:
            one.told(Told(*told), self.clock, self.clock)

    def begin(self, bound: int) -> bool:
        """A request, if what is here is enough or Postgres has it."""
        if self.one.lacks(bound, self.clock):
            self.ask(bound)
        if self.one.lacks(bound, self.clock):
            return False
        self.one.take(bound)
        self.running.append(bound)
        return True

    def end(self, share: float) -> None:
        if self.running:
            bound = self.running.pop(0)
            cost = round(bound * share)
            self.one.settle(bound, cost, 0)
            self.made += 1
            self.rows.append(used(self.key_id, cost, now(self.fleet)))

    def flush(self, *, lost: bool = False) -> None:
        """`lost`: written, and the router does not know; rows written twice are charged once."""
        spend(self.fleet, *(row for row in self.rows if "done" not in row), router=self.asking.id)
        for row in self.rows:
            row["done"] = True
        if not lost:
            self.rows.clear()


STEPS = st.lists(
    st.tuples(
        st.integers(0, 2),
        st.one_of(
            st.tuples(st.just("begin"), st.integers(1, 400)),
            st.tuples(st.just("end"), st.floats(0, 1)),
            st.tuples(st.sampled_from(["ask", "ask lost", "flush", "flush lost"]), st.just(0)),
            st.tuples(st.sampled_from(["kill", "kill for good"]), st.just(0)),
        ),
    ),
    max_size=60,
)


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(steps=STEPS, micros=st.integers(1, 2000))
def test_spent_and_reserved_never_pass_a_budget_with_routers_killed(fleet, steps, micros):
    with three(fleet, micros) as (routers, number, graves):
        for which, (what, value) in steps:
            router = routers[which]
            match what:
                case "begin":
                    router.begin(value)
                case "end":
                    router.end(value)
                case "ask" | "ask lost":
                    router.ask(lost=what == "ask lost")
                case "flush" | "flush lost":
                    router.flush(lost=what == "flush lost")
                case _:
                    graves.append(router)
                    routers[which] = Router(fleet, router.key_id, number)
                    if what == "kill":
                        router.flush()  # what its spool kept is settled by the next one
            (row,) = fleet.rows(SUM, number)
            assert row["spent"] + row["held"] <= micros
        everyone = [*routers, *graves]
        # What runs could still cost its bounds, and what was made and is not written its costs.
        owed = sum(sum(r.running) for r in routers)
        owed += sum(row["cost_micros"] for r in everyone for row in r.rows if "done" not in row)
        assert fleet.rows(SUM, number)[0]["spent"] + owed <= micros
        finish(routers)
        assert_reachable(fleet, number, micros, Router(fleet, routers[0].key_id, number))


@contextmanager
def three(fleet: Fleet, micros: int) -> Iterator[tuple[list[Router], int, list[Router]]]:
    """Three routers with one key that has a budget."""
    name = key(fleet, f"prop{next(names)}")
    number = budget(fleet, name, micros)
    yield [Router(fleet, name, number) for _ in range(3)], number, []


def finish(routers: list[Router]) -> None:
    for router in routers:
        while router.running:
            router.end(1.0)
        router.flush()
        for _ in range(80):  # until nothing was taken for long
            router.ask()


def assert_reachable(fleet: Fleet, number: int, micros: int, other: Router) -> None:
    """Nothing is wedged: what is not spent can be had, once what the dead held is over."""
    expire = "update llmgw_core.allowance set expires_at = clock_timestamp() - interval '1 s'"
    fleet.admin.execute(expire + " where object_id = %s and amount > 0", (number,))
    left = int(micros - fleet.rows(SUM, number)[0]["spent"])
    assert left >= 0
    assert left == 0 or other.begin(left)
    assert not other.begin(1)


def test_a_call_that_was_held_up_undoes_no_later_one(fleet):
    number = budget(fleet, key(fleet, "late01"), 1000)
    router, other = Asking(fleet), Asking(fleet)
    assert router.amount("money", number, need=600) == 600
    ((_, _, amount, *_),) = router.ask(("money", number, 0, 0, 0, 0), call=0)
    assert amount is None
    assert other.amount("money", number, need=600) == 400


def test_near_the_end_nothing_is_held_ahead_and_single_requests_pass(fleet):
    number = budget(fleet, key(fleet, "near01"), 1000)
    routers = [Asking(fleet) for _ in range(3)]
    for router in routers:
        fleet.controller.execute(JOIN, (router.id,))
    ahead = [router.amount("money", number, idle=900) for router in routers]
    assert ahead[0] == 83  # a twelfth: three routers, together a quarter
    assert sum(ahead) <= 250
    for router, held in zip(routers, ahead, strict=True):
        spend(fleet, used("near01", held, now(fleet)), router=router.id)
    spend(fleet, used("near01", 990 - sum(ahead), now(fleet)))
    assert [router.amount("money", number, idle=900) for router in routers] == [0, 0, 0]
    assert routers[0].amount("money", number, need=5) == 5


def test_who_lacks_what_others_hold_unused_gets_it(fleet):
    number = budget(fleet, key(fleet, "hurry1"), 1000)
    one, two = Asking(fleet), Asking(fleet)
    kept = one.amount("money", number, idle=200)
    assert kept > 0
    ((_, _, amount, spare, busy, free, *_),) = two.ask(("money", number, 0, 0, 1000, 0))
    assert (amount, spare, busy, free) == (1000 - kept, kept, 0, 0)
    ((_, _, amount, _, _, _, ahead, *_),) = one.ask(("money", number, 0, kept, 0, 200))
    assert (amount, ahead) == (kept, 0)  # it is told to keep nothing, and brings it back
    assert one.amount("money", number) == 0
    assert two.amount("money", number, need=1000) == 1000


def test_what_requests_elsewhere_use_is_told_apart_from_what_is_spent(fleet):
    name = key(fleet, "busy01")
    number, slots = budget(fleet, name, 1000), limit(fleet, name, parallel=5)
    one, two = Asking(fleet), Asking(fleet)
    one.amount("money", number, need=700)
    one.amount("slots", slots, need=3)
    one.ask(("money", number, 600, 0, 0, 0), ("slots", slots, 2, 0, 0, 0))
    spend(fleet, used(name, 250, now(fleet)), router=one.id)
    money, slot = two.ask(("money", number, 0, 0, 900, 0), ("slots", slots, 0, 0, 5, 0))
    assert money[2:6] == [400, 0, 350, 0]
    assert slot[2:6] == [3, 0, 2, 0]


def test_parts_that_serve_nobody_are_not_held_by_who_waits(fleet):
    """Three routers with a part each, and requests that wait at all of them: one of them is served
    after the other, as long as there is enough for one."""
    number = budget(fleet, key(fleet, "parts1"), 300)
    routers = [Asking(fleet) for _ in range(3)]
    for router in routers:
        assert router.amount("money", number, need=100) == 100
    served = []
    for _ in range(4):
        for router in routers:
            waits = 0 if router in served else 130
            ((_, _, amount, *_),) = router.ask(("money", number, 0, 0, 2 * waits, 0, waits))
            if waits and amount >= waits:
                served.append(router)
                break  # it runs, and ends at once
    assert len(served) == 3


def test_a_budget_lowered_below_what_is_spent_grants_nothing_and_nothing_is_negative(fleet):
    number = budget(fleet, key(fleet, "lower1"), 1000)
    router = Asking(fleet)
    assert router.amount("money", number, need=300) == 300
    spend(fleet, used("lower1", 250, now(fleet)), router=router.id)
    assert budget(fleet, "lower1", 100) == number
    ((_, _, amount, _, _, free, ahead, whole, *_),) = router.ask(("money", number, 20, 30, 40, 90))
    assert (amount, ahead, whole) == (50, 0, 100)  # what runs goes on
    assert free < 0
    assert router.amount("money", number, need=10) == 0
    assert fleet.value("select min(amount) >= 0 from llmgw_core.allowance") is not False
    (row,) = fleet.rows("select spent, reserved, fraction from llmgw.budgets")
    assert (row["spent"], row["reserved"], float(row["fraction"])) == (250, 0, 2.5)


def test_late_rows_of_a_dead_router_are_taken_from_what_it_held(fleet):
    number = budget(fleet, key(fleet, "dead01"), 1000)
    dead, other = Asking(fleet), Asking(fleet)
    dead.amount("money", number, need=700)
    spend(fleet, used("dead01", 650, now(fleet)), router=dead.id)
    assert other.amount("money", number, need=400) == 300
    (row,) = fleet.rows(SUM, number)
    assert (row["spent"], row["held"]) == (650, 350)


def test_b05_slots_of_a_dead_router_are_free_and_those_of_a_live_one_are_not(fleet):
    number = limit(fleet, key(fleet, "slots1"), parallel=4)
    dead, live, asks = Asking(fleet), Asking(fleet), Asking(fleet)
    presence = fleet.controller.execute(JOIN, (live.id,)).fetchone()["number"]
    fleet.controller.execute("select pg_try_advisory_lock(7719, %s)", (presence,))
    assert dead.amount("slots", number, need=2) == 2
    assert live.amount("slots", number, need=1) == 1
    assert asks.amount("slots", number, need=4) == 1
    past = "update llmgw_core.allowance set renewed_at = clock_timestamp() - interval '3 s'"
    fleet.admin.execute(past)
    assert asks.amount("slots", number, need=4) == 3
    gone = "update llmgw_core.allowance set expires_at = clock_timestamp() - interval '1 s'"
    fleet.admin.execute(gone + " where router_id = %s", (live.id,))
    assert asks.amount("slots", number, need=4) == 4


def test_b04_a_minute_gives_out_its_whole_once_whoever_dies(fleet):
    number = limit(fleet, key(fleet, "rates1"), requests=60, tokens=1000)
    minute = "select floor(extract(epoch from clock_timestamp()) / 60)::int"
    began = fleet.value(minute)
    granted = 0
    for _ in range(6):  # each is a restart: what the one before had counts as used
        router = Asking(fleet)
        granted += router.amount("requests", number, need=17)
    assert router.amount("tokens", number, need=900) == 900
    if fleet.value(minute) == began:
        assert granted == 60
        assert Asking(fleet).amount("tokens", number, need=101) == 100
        assert fleet.rows("select requests, tokens, in_parallel from llmgw.limits") == [
            {"requests": 60, "tokens": 1000, "in_parallel": None}
        ]
    fleet.admin.execute("update llmgw_core.allowance set expires_at = clock_timestamp()")
    assert Asking(fleet).amount("requests", number, need=17) == 17


def test_what_is_no_bound_has_no_answer(fleet):
    number = limit(fleet, key(fleet, "none01"), parallel=1)
    asks = ("money", 77, 0, 0, 1, 0), ("tokens", number, 0, 0, 1, 0), ("slots", 78, 0, 0, 1, 0)
    assert Asking(fleet).ask(*asks) == [["money", 77], ["tokens", number], ["slots", 78]]
