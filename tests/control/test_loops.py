"""Loops that never end, what they tell, and readiness made of it (F26, H08)."""

from __future__ import annotations

import math
from itertools import pairwise
from types import SimpleNamespace

import pytest
import structlog
import trio
from structlog.testing import capture_logs

from controller import health
from controller.context import ControlContext
from controller.loops import LONGEST_PAUSE_S, Loops, leaves
from sql.errors import DatabaseAway
from sql.listen import ListenState


@pytest.fixture
def said():
    structlog.reset_defaults()
    with capture_logs() as lines:
        yield lines


async def test_F26_a_loop_that_fails_or_ends_is_run_again(autojump_clock, nursery, said):
    loops = Loops()
    ends = iter([ValueError("odd"), None, DatabaseAway("gone")])
    rounds = 0
    four = trio.Event()

    async def body(loop):
        nonlocal rounds
        rounds += 1
        error = next(ends, four)
        if error is four:
            loop.succeeded()
            four.set()
            await trio.sleep_forever()
        if error is not None:
            raise error

    loop = loops.add("tick", 15)
    nursery.start_soon(loops.run, loop, body)
    await four.wait()
    assert (rounds, loop.errors, loop.error, loop.age_s()) == (4, 3, None, 0)
    assert [line["error"] for line in said] == ["ValueError: odd", "DatabaseAway: gone"]
    # A trace for what is our own fault, one line for a database that is away.
    assert [line["exc_info"] is None for line in said] == [False, True]


async def test_H08_each_leaf_of_a_group_is_told_once_and_the_loop_runs_again(
    autojump_clock, nursery, said
):
    loops = Loops()
    second = trio.Event()

    async def fail(error):
        raise error

    async def body(loop):
        if loop.errors:
            second.set()
            await trio.sleep_forever()
        async with trio.open_nursery() as inner:
            inner.start_soon(fail, ValueError("first"))
            inner.start_soon(fail, DatabaseAway("second"))

    loop = loops.add("x", 5)
    nursery.start_soon(loops.run, loop, body)
    await second.wait()
    assert len(said) == 1
    assert sorted(said[0]["error"].split("; ")) == ["DatabaseAway: second", "ValueError: first"]


def test_H08_leaves_of_nested_groups():
    inner = ExceptionGroup("b", [ValueError("1"), KeyError("2")])
    assert leaves(ExceptionGroup("a", [inner, OSError("3")])) == [
        "ValueError: 1",
        "KeyError: '2'",
        "OSError: 3",
    ]


async def test_pauses_grow_to_a_bound_and_begin_anew_after_a_success(autojump_clock, nursery, said):
    loops = Loops()
    began: list[float] = []
    enough = trio.Event()

    async def body(loop):
        began.append(trio.current_time())
        if len(began) == 12:
            loop.succeeded()
        if len(began) == 14:
            enough.set()
        raise ValueError

    nursery.start_soon(loops.run, loops.add("x", 5), body)
    await enough.wait()
    pauses = [round(b - a, 3) for a, b in pairwise(began)]
    assert max(pauses) == LONGEST_PAUSE_S
    assert pauses == [*sorted(pauses[:11]), 0.1, 0.2]


async def test_a_silent_loop_is_trouble(autojump_clock):
    loops = Loops()
    loop = loops.add("tick", 15)
    loops.add("presence", math.inf)
    await trio.sleep(15)
    assert not list(loops.troubles())
    await trio.sleep(1)
    assert list(loops.troubles()) == ["loop tick has not succeeded for 16 s: it hangs"]
    loop.error = "DatabaseAway: gone"
    assert list(loops.troubles()) == ["loop tick has not succeeded for 16 s: DatabaseAway: gone"]
    loop.succeeded()
    assert not list(loops.troubles())


class Answering:
    """A pool that answers after a while, or fails."""

    def __init__(self, after_s: float = 0, error: Exception | None = None) -> None:
        self.after_s, self.error = after_s, error

    async def fetchval(self, _query: str) -> int:
        await trio.sleep(self.after_s)
        if self.error is not None:
            raise self.error
        return 1


def context_of(pool: object, schema: str = "ok", **listening: object) -> ControlContext:
    config = SimpleNamespace()
    state = ListenState(**({"connected": True} | listening))
    return ControlContext(config, None, Loops(), state, None, pool=pool, schema=schema)


async def test_readiness_says_in_words_what_is_missing(autojump_clock):
    now = trio.current_time()
    assert await health.reasons(context_of(Answering())) == []
    assert await health.reasons(context_of(Answering(60))) == [
        "the database is away: no answer in time"
    ]
    assert trio.current_time() - now == pytest.approx(health.DATABASE_S, abs=0.1)
    away = context_of(
        Answering(error=DatabaseAway("refused")), "not checked yet", connected=False, error="closed"
    )
    away.loops.add("tick", 1)
    await trio.sleep(2)
    assert await health.reasons(away) == [
        "the database is away: refused",
        "not checked yet",
        "not listening for changes: closed",
        "loop tick has not succeeded for 2 s: it hangs",
    ]
    silent = context_of(Answering(), heard_at=trio.current_time())
    assert await health.reasons(silent) == []
    await trio.sleep(health.SILENT_S + 1)
    assert await health.reasons(silent) == ["the channel for changes is silent; polling goes on"]


async def test_without_a_database_only_loops_count(autojump_clock):
    context = context_of(None, "not checked yet", connected=False)
    assert await health.reasons(context) == []
