"""What the tick's parts keep between two ticks: what was told, what was read, why to wait."""

from __future__ import annotations

import re

import pytest

from controller.placement.model import Attempt, Move, Refusal
from controller.reconcile.commit import REFUSALS, Writer
from controller.reconcile.guard import GAP_S, Guard
from controller.reconcile.snapshot import Seen
from controller.reconcile.tick import TickStats
from tests.control import looks
from tests.control.duties import duty

ATTEMPTS = "select model from llmgw_core.decision where kind = 'attempt' order by id"


def refusal(model: str, node: str = "n1", code: str = "gpu_taken") -> Refusal:
    return Refusal(model, "p", None, node, code, "said", "1", "0")


def attempt(model: str, size: int = 1, code: str = "gpu_taken") -> Attempt:
    return Attempt(model, False, [refusal(model, f"n{i}", code) for i in range(size)])


@pytest.fixture
async def leader(asyncio_loop, database, fleet):
    for name in ("a", "b", "c"):
        fleet.model(name)
    async with duty(database.settings()) as one:
        yield one


def told(fleet) -> list[str]:
    return [row["model"] for row in fleet.rows(ATTEMPTS)]


async def test_D10_the_same_refusal_again_is_no_reason_to_look_at_once(leader):
    term = await leader.leads()
    writer = Writer(leader.pool, leader.lease, TickStats())
    never = [Move(999, "a", "ready", "failed", "nobody has it")]
    assert [await writer.items(term, never) for _ in range(3)] == [True, False, False]
    assert await writer.items(term, []) is False
    assert await writer.items(term, never) is True


async def test_an_attempt_is_told_once_and_again_when_it_changes_or_another_led(leader, fleet):
    term = await leader.leads()
    stats = TickStats()
    writer = Writer(leader.pool, leader.lease, stats)
    await writer.attempts(term, [attempt("a"), attempt("b")])
    await writer.attempts(term, [attempt("a"), attempt("b")])
    assert told(fleet) == ["a", "b"]
    await writer.attempts(term, [attempt("a", 2, "node_draining"), attempt("b")])
    assert told(fleet) == ["a", "b", "a"]
    assert stats.rejections == {("b", "gpu_taken"): 1, ("a", "node_draining"): 2}
    writer.forget()
    assert stats.rejections == {}
    checked = "select checked_at from llmgw_core.attempt where model = 'b'"
    before = fleet.value(checked)
    await writer.attempts(term, [attempt("b")])
    assert fleet.value(checked) > before  # asked again; the database knows that it is the same
    assert told(fleet) == ["a", "b", "a"]
    await writer.attempts(term, [attempt("a")])
    writer.keep_only({"b"})
    assert stats.rejections == {("b", "gpu_taken"): 1}


async def test_many_refusals_are_written_over_several_ticks_and_nobody_starves(leader, fleet):
    term = await leader.leads()
    writer = Writer(leader.pool, leader.lease, TickStats())
    half = REFUSALS // 2 + 1
    for turn in range(3):  # each model changes in every tick
        every = [attempt(name, half + turn) for name in "abc"]
        await writer.attempts(term, every)
    assert told(fleet) == ["a", "b", "c"]
    # One that is larger than a tick's share is written whole, by itself.
    await writer.attempts(term, [attempt("a", REFUSALS + 1)])
    assert told(fleet)[-1] == "a"
    assert fleet.value("select max(position) from llmgw_core.rejection") == REFUSALS + 1


async def test_an_attempt_in_parts_counts_whole_and_is_not_written_twice(leader, fleet):
    term = await leader.leads()
    large = attempt("a", 2 * REFUSALS + 5)
    for _ in range(2):  # the second writer is another leader's, which was told nothing
        await Writer(leader.pool, leader.lease, TickStats()).attempts(term, [large, attempt("b")])
    await Writer(leader.pool, leader.lease, TickStats()).attempts(term, [attempt("b", 3)])
    assert told(fleet) == ["a", "b"]
    counted = fleet.rows("select model, code, candidates from llmgw.why_not order by model")
    assert counted == [
        {"model": "a", "code": "gpu_taken", "candidates": 2 * REFUSALS + 5},
        {"model": "b", "code": "gpu_taken", "candidates": 3},
    ]
    assert fleet.value("select count(*) from llmgw_core.rejection") == 2 * REFUSALS + 8
    detail = fleet.value("select detail from llmgw_core.decision where model = 'a'")
    assert detail == {"refusals": 2 * REFUSALS + 5}


def seen(now: float, started: float = 0.0, guard_s: float = 60.0) -> Seen:
    return Seen(looks.build({})[0], now, started, 0, guard_s, ())


def test_the_guard_holds_after_a_new_leader_a_gap_and_a_restart_and_then_ends():
    guard = Guard()
    assert guard.is_new(7)
    assert guard.why(seen(1000), 7, 10.0) == "a new leader has just begun"
    assert not guard.is_new(7)
    for now in range(11, 70):
        assert guard.why(seen(990 + now), 7, float(now)) is not None
    assert guard.why(seen(1060), 7, 70.0) is None
    # A tick that itself takes long is no gap; a pause after it is.
    guard.looked(100.0)
    assert guard.why(seen(1095), 7, 105.0) is None
    assert guard.why(seen(1200), 7, 106.0 + GAP_S) == "there was no tick for a while"
    assert guard.why(seen(1260), 7, 130.0) is not None
    for now in range(131, 182):
        guard.why(seen(1130 + now), 7, float(now))
    assert guard.why(seen(1400), 7, 182.0) is None
    # A restarted database: until a minute after its start, and no longer.
    assert re.search("database", guard.why(seen(2000, started=1990), 7, 183.0) or "")
    for now in range(184, 233):
        assert guard.why(seen(1817 + now, started=1990), 7, float(now)) is not None
    assert guard.why(seen(2051, started=1990), 7, 234.0) is None
    assert guard.why(seen(2052, started=1990), 8, 235.0) == "a new leader has just begun"
