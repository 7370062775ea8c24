"""What engines tell of their load, and what is done without it."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st

from controller.router.config import Watching
from controller.router.gauges import Reading, read_page
from controller.router.pool import MOST_DEPTH
from controller.router.scoring import RAMP_S
from controller.router.signals import RARELY_S, STALE_S, UNTRIED_S, Signal, ask
from tests.router.wire import PATIENCE_S, until

if TYPE_CHECKING:
    from controller.router.pool import Pool
    from tests.router.conftest import House

VLLM = """# HELP vllm:num_requests_running Number of requests in model execution batches.
vllm:num_requests_running{engine="0",model_name="a} b"} 3.0
vllm:num_requests_running{engine="1",model_name="a} b"} 2.0
vllm:num_requests_waiting_by_reason{reason="capacity"} 70.0
vllm:num_requests_waiting{engine="0"} 4.0
vllm:kv_cache_usage_perc{engine="0"} 0.25
vllm:kv_cache_usage_perc{engine="1"} 0.75
"""
SGLANG = 'sglang:num_running_reqs{m="x"} 6 1700000000000\nsglang:num_queue_reqs{m="x"} 1\n'
RANKS = """sglang:num_running_reqs{dp_rank="0",model_name="m",pp_rank="0",priority=""} 5.0
sglang:num_running_reqs{dp_rank="0",model_name="m",pp_rank="0",priority="1"} 3.0
sglang:num_running_reqs{dp_rank="0",model_name="m",pp_rank="0",priority="-2"} 2.0
sglang:num_running_reqs{dp_rank="0",model_name="m",pp_rank="1",priority=""} 5.0
sglang:num_running_reqs{dp_rank="1",model_name="m",pp_rank="0",priority=""} 2.0
sglang:num_queue_reqs{dp_rank="0",model_name="m",pp_rank="0",priority=""} 4.0
sglang:num_queue_reqs{dp_rank="0",model_name="m",pp_rank="0",priority="1"} 4.0
sglang:token_usage{dp_rank="0",pp_rank="0",priority=""} 0.5
sglang:token_usage{dp_rank="1",pp_rank="0",priority=""} 0.25
"""
"""Two ranks, priorities and two stages, which tell of the same requests again."""
TOLD_TWICE = 'sglang:num_running_reqs{priority=""} 3\nsglang:num_running_reqs{priority="0"} 3\n'
LLAMACPP = "llamacpp:requests_processing 1\nllamacpp:requests_deferred 2"


@pytest.mark.parametrize(
    ("page", "reading"),
    [(VLLM, Reading(5.0, 4.0, 0.75)), (SGLANG, Reading(6.0, 1.0, None)),
     (RANKS, Reading(7.0, 4.0, 0.5)), (TOLD_TWICE, Reading(3.0, 0.0, None)),
     (LLAMACPP, Reading(1.0, 2.0, None)), ("", None), ("up 1\n", None), ("<html>", None)],
)  # fmt: skip
def test_pages(page: str, reading: Reading | None) -> None:
    assert read_page(page.encode()) == reading


@pytest.mark.parametrize("value", ["NaN", "+Inf", "-1", "x", ""])
def test_values_that_cannot_be(value: str) -> None:
    with pytest.raises(ValueError, match=r"\w"):
        read_page(f"vllm:num_requests_running {value}\n".encode())


@given(st.binary(max_size=200), st.sampled_from([b"vllm:num_requests_running", b"\n", b"x"]))
def test_no_page_does_anything_but_raise_value_error(page: bytes, start: bytes) -> None:
    try:
        read_page(start + page)
    except ValueError:
        return


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine of these tests answers from a thread of ours."""
    monkeypatch.setattr("controller.router.signals.WITHIN_S", PATIENCE_S)


async def start(house: House, **how: Any) -> Pool:
    house.engine(**how)
    await house.start(watching=Watching(metrics_s=0.05, health_s=0))
    return house.core.fleet.pools["e0"]


async def test_what_others_run_there_is_known(house: House) -> None:
    pool = await start(house, metrics=VLLM)
    assert (await house.ask()).status == 200
    await until(lambda: pool.signal.state == "fresh")
    await until(lambda: pool.foreign == 9.0 + 4.0)  # less, of a page from before our answer
    (shown,) = house.core.snapshot()["endpoints"]
    assert shown["running"] == 5.0
    assert shown["kv"] == 0.75


@pytest.mark.parametrize(
    ("how", "why"),
    [({"metrics": None}, "no answer within"), ({"metrics": 500}, "HTTP 500"),
     ({"metrics": "vllm:num_requests_running NaN"}, "unreadable"),
     ({"metrics": "\0\1<>"}, "no known name"), ({"close": "always"}, "ended early")],
)  # fmt: skip
async def test_C07_without_metrics_our_own_counts_do(
    house: House, how: dict[str, Any], why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = await loaded(house)
    if how == {"metrics": None}:
        monkeypatch.setattr("controller.router.signals.WITHIN_S", 0.1)
    pool.signal.good_until -= STALE_S  # as if that were long ago
    house.engines[0].default = how
    await ask(pool, trio.CapacityLimiter(1), 60.0)
    assert pool.signal.state == "stale_metrics"
    assert (pool.foreign, pool.drag * MOST_DEPTH) == (0.0, 1.0)
    (shown,) = house.core.snapshot()["endpoints"]
    assert shown["signal"] == "stale_metrics"
    assert why in shown["why"]
    assert "running" not in shown  # unknown is not zero
    if "close" not in how:
        assert (await house.ask()).status == 200  # requests flow


async def loaded(house: House) -> Pool:
    """A replica, no new one, that has told of much load, and is asked by nobody but the test."""
    page = (
        "vllm:num_requests_running 999\nvllm:num_requests_waiting 9\nvllm:kv_cache_usage_perc 1\n"
    )
    house.engine(metrics=page)
    await house.start()
    pool = house.core.fleet.pools["e0"]
    pool.since -= 2 * RAMP_S
    assert (await house.ask()).status == 200
    await ask(pool, trio.CapacityLimiter(1), 1.0)
    assert (pool.foreign, round(pool.drag * MOST_DEPTH, 3)) == (999 + 9 + 9, 2.0)
    return pool


async def test_C07_an_engine_that_has_no_metrics_any_more_has_no_load_any_more(
    house: House,
) -> None:
    pool = await loaded(house)
    house.engines[0].default = {"metrics": 404}
    await ask(pool, trio.CapacityLimiter(1), 60.0)
    assert pool.signal.state == "no_metrics"
    assert (pool.foreign, pool.drag * MOST_DEPTH) == (0.0, 1.0)


async def test_a_replica_that_was_slow_gets_another_chance(house: House) -> None:
    slow, quick = house.engine(), house.engine()
    await house.start(scoring="latency", watching=Watching(metrics_s=0, health_s=0))
    pools = house.core.fleet.pools
    pools["e0"].timed(9.0)
    pools["e1"].timed(0.001)
    for _ in range(10):
        assert (await house.ask()).status == 200
    assert (len(slow.chats()), len(quick.chats())) == (0, 10)
    pools["e0"].last_used = time.monotonic() - UNTRIED_S
    await until(lambda: not pools["e0"].first_byte_s)
    assert pools["e1"].first_byte_s
    told = {
        shown["replica"]: shown.get("first_byte_s") for shown in house.core.snapshot()["endpoints"]
    }
    assert told["e0"] is None  # unknown, not zero
    while not slow.chats():
        assert (await house.ask()).status == 200
    assert 0 < pools["e0"].first_byte_s < 8.0  # of the 9 s nothing is left


@pytest.mark.parametrize("status", [400, 429, 500, 503])
async def test_how_soon_a_replica_refuses_is_not_how_fast_it_answers(
    house: House, status: int
) -> None:
    house.engine(status=status)
    await house.start(scoring="latency")
    pool = house.core.fleet.pools["e0"]
    assert (await house.ask()).status == status
    assert pool.first_byte_s == 0.0, "unknown"
    house.engines[0].default = {}
    assert (await house.ask()).status == 200
    assert pool.first_byte_s > 0.0


async def test_an_engine_without_metrics_is_asked_rarely(house: House) -> None:
    pool = await start(house, metrics=404)
    assert (await house.ask()).status == 200
    await until(lambda: pool.signal.state == "no_metrics")
    assert pool.signal.next_at > time.monotonic() + RARELY_S / 2
    assert pool.signal.as_json() == {"signal": "no_metrics"}


async def test_a_replica_that_nobody_uses_is_not_asked(house: House) -> None:
    house.engine()
    await start(house)
    await house.ask()
    await until(lambda: any(p.signal.state == "fresh" for p in house.core.fleet.everyone()))
    assert {p.signal.state for p in house.core.fleet.everyone()} == {"fresh", "unknown"}


def test_one_missed_page_is_forgiven_until_the_last_is_old() -> None:
    signal = Signal()
    signal.told(Reading(1.0, 0.0, None), 100.0, 2.0)
    signal.missed("HTTP 500", 102.0)
    assert (signal.state, signal.running) == ("fresh", 1.0)
    signal.missed("HTTP 500", 100.0 + STALE_S + 0.1)
    assert (signal.state, signal.running) == ("stale_metrics", None)
