"""Choosing among replicas: power of two choices, weights, slow start, prefixes near their cache."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from random import Random
from typing import TYPE_CHECKING, Any

import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st

from controller.router.affinity import LEADING, SLOTS, Ring, affinity, leading
from controller.router.choose import Group, Want, choose
from controller.router.config import StaticEndpoint
from controller.router.scoring import BALANCED, CACHE, LATENCY, RAMP_S, drag, ramp, smoothed
from controller.router.table import from_rows
from tests.router.wire import until

if TYPE_CHECKING:
    from tests.router.conftest import House


@dataclass
class Place:
    """A pool as the choice sees it."""

    in_flight: int = 0
    key: str = "a"
    weight: float = 1.0
    depth: int = 1 << 30
    foreign: float = 0.0
    drag: float = 1.0
    first_byte_s: float = 0.0


@dataclass
class Load:
    pool: Place = field(default_factory=Place)


def loads(*in_flight: int, **fields: Any) -> list[Load]:
    return [Load(Place(n, f"r{k:03}", **fields)) for k, n in enumerate(in_flight)]


@given(st.lists(st.integers(0, 9), min_size=1, max_size=6), st.integers(0, 2**32 - 1))
def test_the_choice_is_never_the_worse_of_two(numbers: list[int], bits: int) -> None:
    candidates = loads(*numbers)
    chosen = choose(candidates, bits)
    assert chosen is not None
    if len(numbers) > 1:
        assert sum(c.pool.in_flight >= chosen.pool.in_flight for c in candidates) >= 2


def test_equal_loads_are_spread_and_nobody_is_left_out() -> None:
    random = Random(7)
    candidates = loads(*[0] * 5)
    for _ in range(5000):
        chosen = choose(candidates, random.getrandbits(32))
        assert chosen is not None
        chosen.pool.in_flight += 1
    counts = [c.pool.in_flight for c in candidates]
    assert max(counts) - min(counts) <= 5
    assert choose([], 3) is None


@pytest.mark.parametrize("profile", [BALANCED, LATENCY, CACHE])
def test_C08_a_burst_over_three_routers_overloads_no_engine(profile: Any) -> None:
    for seed in range(200):
        random = Random(seed)
        routers = [Group(loads(*[0] * 8, depth=4)) for _ in range(3)]
        for number in range(32):  # all before any router hears of another's
            want = Want(profile, random.getrandbits(32))
            chosen = routers[number % 3].pick(random.getrandbits(32), want)
            assert chosen is not None
            chosen.pool.in_flight += 1
        sums = [sum(r.members[n].pool.in_flight for r in routers) for n in range(8)]
        assert max(sums) <= 2 * 32 / 8, (seed, sums)


def test_weights_divide_requests_even_when_nothing_runs() -> None:
    random = Random(3)
    group = Group([Load(Place(0, "a", 1.0)), Load(Place(0, "b", 3.0))])
    counts = Counter(
        chosen.pool.key
        for _ in range(4000)
        if (chosen := group.pick(random.getrandbits(32), Want())) is not None
    )
    assert 2.5 < counts["b"] / counts["a"] < 3.5


def test_a_heavier_or_deeper_replica_gets_more_at_once() -> None:
    random = Random(3)
    small, large = (
        Place(0, "a", drag=drag(4, 1, None, 99)),
        Place(0, "b", drag=drag(12, 1, None, 99)),
    )
    group = Group([Load(small), Load(large)])
    for _ in range(160):
        chosen = group.pick(random.getrandbits(32), Want())
        assert chosen is not None
        chosen.pool.in_flight += 1
    assert (small.in_flight, large.in_flight) == (40, 120)


def test_what_others_run_and_a_full_cache_count() -> None:
    idle, used = Place(2, "a"), Place(0, "b", foreign=5.0)
    assert BALANCED.prefers(idle, used)
    assert drag(8, 1, 0.5, 99) == drag(8, 1, None, 99)
    assert drag(8, 1, 1.0, 99) == pytest.approx(2 * drag(8, 1, None, 99))


def test_a_new_replica_is_ramped_up() -> None:
    ages = [ramp(age) for age in (0.0, RAMP_S / 2, RAMP_S, 10 * RAMP_S)]
    assert ages == pytest.approx([0.1, 0.55, 1.0, 1.0])
    random = Random(5)
    group = Group([Load(Place(0, f"r{n}", drag=drag(8, 1, None, 99))) for n in range(4)])
    new = group.members[0].pool
    new.drag = drag(8, 1, None, 0.0)
    for _ in range(310):
        chosen = group.pick(random.getrandbits(32), Want())
        assert chosen is not None
        chosen.pool.in_flight += 1
    assert new.in_flight == 10  # a tenth of the others' hundred


def test_the_faster_replica_is_preferred_by_latency_until_it_is_busier() -> None:
    slow, fast = Place(0, "a", first_byte_s=0.4), Place(0, "b", first_byte_s=0.1)
    assert LATENCY.prefers(fast, slow)
    assert not LATENCY.prefers(slow, fast)
    fast.in_flight = 4
    assert LATENCY.prefers(slow, fast)
    unknown = Place(1, "c")
    assert not LATENCY.prefers(unknown, Place(0, "d", first_byte_s=9.0))  # by load
    assert smoothed(0.0, 1.0) == 1.0
    assert smoothed(1.0, 2.0) == pytest.approx(1.2)


# -- affinity ------------------------------------------------------------------------------------

MEMBERS = st.lists(st.text(min_size=1, max_size=8), min_size=2, max_size=12, unique=True)


@given(MEMBERS, st.sampled_from([1.0, 2.0]))
def test_a_replica_that_comes_or_goes_moves_only_its_share(keys: list[str], weight: float) -> None:
    *rest, one = [(key, weight) for key in keys]
    before, after = Ring(tuple(rest)), Ring((*rest, (one[0], 1.0)))
    for slot in range(0, SLOTS, 16):
        winner = after.ranked(slot)[0]
        assert winner in (before.ranked(slot)[0], len(rest))


def test_slots_are_shared_out_by_weight() -> None:
    members = tuple((f"r{n}", 3.0 if n == 0 else 1.0) for n in range(8))
    wins = Counter(Ring(members).ranked(slot)[0] for slot in range(SLOTS))
    assert wins[0] == pytest.approx(SLOTS * 0.3, rel=0.1)
    assert min(wins[n] for n in range(1, 8)) > SLOTS * 0.07
    assert Ring(members).ranked(5) == Ring(members).ranked(5 + SLOTS)


def test_one_session_stays_until_its_replica_is_too_busy() -> None:
    group = Group(loads(*[0] * 8))
    want = Want(CACHE, 77)
    chosen = [group.pick(n, want) for n in range(200)]
    assert len({id(c) for c in chosen}) == 1
    for n in range(200):
        found = group.pick(n * 7919, want)
        assert found is not None
        found.pool.in_flight += 1
    running = sorted(c.pool.in_flight for c in group.members)
    assert running[-1] <= 200 / 8 * 1.25 + 1  # one hot key overloads nobody
    assert running[0] > 10


def test_a_table_read_again_keeps_the_ranking() -> None:
    group = Group(loads(0, 0, 0))
    assert Group(loads(0, 0, 0), group).ring is group.ring
    assert Group(loads(0, 0), group).ring is not group.ring


HELLO = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "hello"}]
MORE = [*HELLO, {"role": "assistant", "content": "hi"}, {"role": "user", "content": "and"}]


def test_the_key_is_the_session_or_the_beginning_of_the_prompt() -> None:
    chat = {"model": "m", "messages": HELLO}
    assert affinity([], chat) == affinity([], {"messages": MORE, "temperature": 1})
    assert affinity([], chat) != affinity([], {"messages": HELLO[1:]})
    for session in ({"user": "u1"}, {"prompt_cache_key": "u1"}, {"metadata": {"user_id": "u1"}}):
        assert affinity([], {**chat, **session}) == affinity([], session)
    header = [(b"x-llmgw-session", b"s")]
    assert affinity(header, {"user": "u1"}) == affinity(header, chat)
    assert affinity([], {"model": "m"}) is None
    parts = [{"role": "user", "content": [{"type": "text", "text": "hello"}]}]
    assert leading({"messages": parts}) == "hello"
    assert leading({"system": "S", "messages": parts}) == "S\nhello"
    assert leading({"instructions": "S", "input": "q"}) == "S\nq"
    assert leading({"prompt": ["a", "b"]}) == "a\nb"
    assert affinity([], {"prompt": [1, 2]}) != affinity([], {"prompt": [1, 3]})


@given(st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner, max_size=4)
    | st.dictionaries(st.sampled_from(["role", "content", "text", "messages", "user_id"]), inner),
    max_leaves=20,
))  # fmt: skip
def test_any_document_has_a_key_or_none(value: Any) -> None:
    for field_ in ("messages", "prompt", "input", "system", "user", "metadata"):
        affinity([], {field_: value})


def test_the_look_at_a_prompt_is_bounded() -> None:
    assert len(leading({"prompt": "x" * 10**6})) == LEADING
    assert len(leading({"messages": [{"content": "y" * 600}] * 99})) <= LEADING + 16


# -- through a router ----------------------------------------------------------------------------


async def test_C08_a_burst_through_one_router(house: House) -> None:
    engines = [house.engine(hold=True) for _ in range(8)]
    await house.start()
    async with trio.open_nursery() as nursery:
        for _ in range(32):
            nursery.start_soon(house.ask)
        await until(lambda: sum(engine.held() for engine in engines) == 32)
        shares = [len(engine.chats()) for engine in engines]
        for engine in engines:
            engine.release(32)
    assert sum(shares) == 32
    assert max(shares) <= 8, shares
    await until(house.idle)


@pytest.mark.parametrize("alone_for", [(), ("other",)])
async def test_who_has_no_depth_of_its_own_does_not_draw_the_requests_of_who_has(
    house: House, alone_for: tuple[str, ...]
) -> None:
    """Its default is large, so that nobody is bounded by it, and tells nothing of its size: not
    because another model has nobody else either."""
    engines = [house.engine(hold=True) for _ in range(3)]
    depths = (4, 32, None)
    await house.start(
        endpoints=tuple(
            StaticEndpoint(f"e{n}", engine.url, ("m",) if depth else ("m", *alone_for), depth)
            for n, (engine, depth) in enumerate(zip(engines, depths, strict=True))
        )
    )
    async with trio.open_nursery() as nursery:
        for number in range(1, 21):
            nursery.start_soon(house.ask)
            await until(lambda number=number: sum(engine.held() for engine in engines) == number)
        small, large, unknown = (engine.held() for engine in engines)
        for engine in engines:
            engine.release(20)
    assert large > 2 * unknown, "as if that were as small as the smallest"
    assert 0 < small <= 4
    await until(house.idle)


def test_only_a_measured_depth_tells_how_large_a_replica_is() -> None:
    row = {"model": "m", "state": "ready", "endpoint": "http://h:1", "share": 9}
    rows = [
        {**row, "replica_id": 1, "depth_source": "measured"},
        {**row, "replica_id": 2, "depth_source": "default"},
    ]
    (model,) = from_rows([{"name": "m", "aliases": [], "fallbacks": []}], rows).models
    assert [(replica.depth, replica.sized) for replica in model.replicas] == [(9, True), (9, False)]


async def test_a_session_goes_to_one_replica_by_header_profile(house: House) -> None:
    engines = [house.engine() for _ in range(4)]
    await house.start()
    for _ in range(12):
        headers = {"x-llmgw-profile": "cache", "x-llmgw-session": "s1"}
        assert (await house.ask(headers=headers)).status == 200
    assert sorted(len(engine.chats()) for engine in engines) == [0, 0, 0, 12]


async def test_the_profile_of_all_requests_is_a_setting(house: House) -> None:
    engines = [house.engine() for _ in range(4)]
    await house.start(scoring="cache")
    for _ in range(12):
        assert (await house.ask(user="u7")).status == 200
    assert sorted(len(engine.chats()) for engine in engines) == [0, 0, 0, 12]


async def test_an_unknown_profile_is_refused_with_the_right_ones(house: House) -> None:
    await house.start()
    answer = await house.ask(headers={"x-llmgw-profile": "fastest"})
    assert (answer.status, answer.code) == (400, "unknown_profile")
    assert "balanced, latency, cache" in answer.json["error"]["message"]
    assert house.engines[0].chats() == []
