"""Models that answer instead of one that cannot: when, in which order, and how it is told."""

from __future__ import annotations

import math
import time
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from controller.metrics.router import families
from controller.router.breaker import Phase
from controller.router.config import Retries, StaticEndpoint, StaticKey, Timeouts
from controller.router.errors import ApiError
from controller.router.fallbacks import NONE, WORDS, chain, chosen
from controller.router.table import Model, RouteTable
from tests.router.test_last_resort import wear
from tests.router.wire import Answer, until

if TYPE_CHECKING:
    from tests.router.conftest import House

PLENTY = Retries(attempts=3, ratio=1.0, floor=1000)
BUSY = {"status": 503}
TOO_LONG = {"status": 400, "body": {"error": {"message": "prompt too long"}}}
EXPLAIN = {"x_llmgw_explain": "1"}
SOON = Timeouts(headers_s=1.0, first_token_s=1.0)
"""Over soon for an engine that says nothing, and not for the one that answers instead."""


async def start(house: House, *behaviours: dict[str, Any] | None, **changes: Any) -> list[str]:
    """One engine per model a, b, ..., each falling back to the next; None = nobody listens."""
    names = ["a", "b", "c", "d"][: len(behaviours)]
    urls = []
    for how in behaviours:
        if how is None:
            urls.append(house.dead())
        else:
            urls.append(house.engine(**how).url)
    pairs = zip(names, urls, strict=True)
    await house.start(
        **{
            "endpoints": tuple(StaticEndpoint(f"on-{n}", url, (n,)) for n, url in pairs),
            "fallbacks": tuple((a, (b,)) for a, b in pairwise(names)),
            "aliases": (("short", "a"),),
            "retries": PLENTY,
            **changes,
        }
    )
    return names


async def told(house: House, **fields: Any) -> Answer:
    return await house.ask(**{"model": "a", "headers": EXPLAIN, **fields})


def models(answer: Answer, *, stream: bool) -> set[str]:
    documents = [orjson.loads(e) for e in answer.events[:-1]] if stream else [answer.json]
    return {document["model"] for document in documents}


# -- the chain -----------------------------------------------------------------------------------

NAMES = st.sampled_from("abcdef")


@given(st.dictionaries(NAMES, st.lists(NAMES, max_size=4)), NAMES)
def test_C10_a_chain_has_each_model_once_and_ends(graph: dict[str, list[str]], start: str) -> None:
    names = {name: Model(name, fallbacks=tuple(others)) for name, others in graph.items()}
    order = list(chain(start, names))
    assert len(order) == len(set(order))
    assert start not in order
    reached, edge = {start}, {start}
    while edge:
        edge = {o for n in edge for o in graph.get(n, []) if o in graph} - reached
        reached |= edge
    assert set(order) == reached - {start}


def test_nearer_models_come_first() -> None:
    graph = {"a": ("b", "c"), "b": ("a", "d"), "c": (), "d": ("b",)}
    names = {name: Model(name, fallbacks=others) for name, others in graph.items()}
    assert list(chain("a", names)) == ["b", "c", "d"]
    assert list(chain("gone", names)) == []


def test_the_header_says_when() -> None:
    assert chosen(b"none") == NONE
    assert chosen(b"Timeout, refusal") == {"timeout", "refusal"}
    for bad in (b"", b"nobody", b"none,error", b"error,", b"\xff"):
        error = chosen(bad)
        assert isinstance(error, ApiError)
        assert error.status == 400
        assert all(word in error.message for word in WORDS)


# -- requests ------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("how", "reason", "attempts"),
    [
        (BUSY, "unavailable", "2"),
        ({"status": 500}, "error", "2"),
        ({"close": "always"}, "error", "2"),
        (None, "error", "3"),
        ({"delay": 60}, "timeout", "2"),
    ],
)
async def test_C10_plain_calls_and_streams_fall_back_alike(
    house: House, how: dict[str, Any] | None, reason: str, attempts: str, stream: bool
) -> None:
    await start(house, how, {}, timeouts=SOON)
    answer = await told(house, model="short", stream=stream)
    assert answer.status == 200
    assert models(answer, stream=stream) == {"short"}  # as with any alias
    assert answer.headers["x-llmgw-model"] == "b"
    assert answer.headers["x-llmgw-replica"] == "on-b"
    assert answer.headers["x-llmgw-fallback"] == f"b; on={reason}; by=settings"
    assert int(answer.headers["x-llmgw-attempts"]) >= int(attempts)
    assert answer.headers["x-llmgw-queue-ms"] == "0"
    row = await house.row()
    assert (row["model_asked"], row["model"], row["status"]) == ("short", "b", "ok")
    counted = house.core.snapshot()
    again = sum(n for _, n in counted["retries"])
    assert row["attempts"] == 1 + again + 1, "the first, those made again, the fallback"
    assert counted["admissions"] == [["a", "at_once", 1]]
    assert {model for model, *_ in counted["tokens"]} == {"b"}, "of the model of the row"
    assert [model for model, _ in counted["itl"]] == ["b"] * stream
    (family,) = [f for f in families([house.core.snapshot()]) if f.name == "llmgw_fallbacks"]
    (sample,) = family.samples
    assert sample.labels == {"model": "a", "fallback": "b", "reason": reason}
    assert sample.value == 1
    await until(house.idle)


@pytest.mark.parametrize(
    "how",
    [{"first_delay": 60}, {"error_first": {"error": {"code": 503}}}, {"raw": ""},
     {"raw": ": ping\n\n", "framing": "close"}, {"raw": "", "gzip": True}],
)  # fmt: skip
async def test_C10_a_stream_without_a_token_falls_back(house: House, how: dict[str, Any]) -> None:
    await start(house, how, {}, timeouts=SOON)
    answer = await told(house, stream=True)
    assert answer.headers["x-llmgw-model"] == "b"
    assert models(answer, stream=True) == {"a"}
    assert b"error" not in answer.body


async def test_C10_a_fallback_has_its_own_time(house: House) -> None:
    """It had what the model left of it: nothing, where that had used all its time."""
    await start(house, {"delay": 60}, {"delay": 0.5}, timeouts=Timeouts(total_s=2.0))
    answer = await told(house)
    assert answer.headers["x-llmgw-fallback"] == "b; on=timeout; by=settings"
    assert answer.status == 200


async def test_C10_a_lone_fallback_is_tried_again_for_its_connect_timeout(house: House) -> None:
    """Not if its model had been asked for longer than that."""
    slow, late = house.engine(delay=60), house.engine()
    late.stop()
    await house.start(
        endpoints=(StaticEndpoint("on-a", slow.url, ("a",)),
                   StaticEndpoint("on-b", late.url, ("b",))),
        fallbacks=(("a", ("b",)),), retries=PLENTY,
        timeouts=Timeouts(headers_s=0.6, connect_s=0.5),
    )  # fmt: skip
    wire = await house.wire()
    await wire.chat(model="a")
    await until(lambda: ("on-b", "connect_failed") in house.core.stats.upstream_failures)
    late.start()
    assert (await wire.answer()).status == 200


async def test_C10_an_answer_that_nobody_can_read_falls_back(house: House) -> None:
    await start(house, {"headers": "content-encoding: gzip\r\n"}, {})  # and it is none
    answer = await told(house, model="short")
    assert answer.headers["x-llmgw-fallback"] == "b; on=error; by=settings"
    assert house.core.stats.upstream_failures == {("on-a", "no_answer"): 1}


async def test_C10_a_model_without_a_replica_falls_back(house: House) -> None:
    engine = house.engine()
    await house.start(
        endpoints=(StaticEndpoint("x", "http://no-such-host.invalid:1", ("a",)),
                   StaticEndpoint("y", engine.url, ("b",))),
        fallbacks=(("a", ("b",)),), retries=Retries(1, 0.0, 0),
    )  # fmt: skip
    answer = await told(house)
    assert answer.headers["x-llmgw-fallback"] == "b; on=unavailable; by=settings"
    assert answer.headers["x-llmgw-attempts"] == "1"
    assert house.core.snapshot()["admissions"] == [["b", "at_once", 1]]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("asked", ["none", "unavailable"])
async def test_C10_nobody_waits_for_replicas_that_fail_where_another_model_may_answer(
    house: House, asked: str, stream: bool
) -> None:
    """Else each request waits for the end of a pause, to be the probe that fails (up to 30 s)."""
    await start(house, {}, {})
    breaker = house.core.fleet.pools["on-a"].breaker
    breaker.resume(time.monotonic() + 1.0, 1.0)
    answer = await told(house, headers={**EXPLAIN, "x_llmgw_fallback": asked}, stream=stream)
    assert answer.status == 200
    if asked == "none":
        assert answer.headers["x-llmgw-model"] == "a"
        assert int(answer.headers["x-llmgw-queue-ms"]) > 100
    else:
        assert answer.headers["x-llmgw-fallback"] == "b; on=unavailable; by=request"
        assert answer.headers["x-llmgw-queue-ms"] == "0"
        assert (breaker.phase, house.engines[0].chats()) == (Phase.OPEN, [])


async def test_C10_who_is_busy_is_waited_for_before_another_model_answers(house: House) -> None:
    await start(house, {}, {})
    house.core.fleet.pools["on-a"].busy()
    assert (await told(house)).headers["x-llmgw-model"] == "a"


@pytest.mark.parametrize("how", [{"status": 500}, None])
async def test_C10_who_failed_and_finds_only_replicas_that_fail_falls_back_at_once(
    house: House, how: dict[str, Any] | None
) -> None:
    bad = house.dead() if how is None else house.engine(**how).url
    other, instead = house.engine(), house.engine()
    await house.start(
        endpoints=(StaticEndpoint("bad", bad, ("a",)), StaticEndpoint("tripped", other.url, ("a",)),
                   StaticEndpoint("b", instead.url, ("b",))),
        fallbacks=(("a", ("b",)),), retries=PLENTY,
    )  # fmt: skip
    house.core.fleet.pools["tripped"].breaker.resume(time.monotonic() + 10.0, 10.0)
    answer = await told(house)
    assert answer.headers["x-llmgw-fallback"] == "b; on=error; by=settings"
    assert answer.headers["x-llmgw-queue-ms"] == "0"
    assert other.chats() == []


async def test_C10_another_model_answers_before_a_last_resort_does(house: House) -> None:
    await start(house, {}, {})
    pool = house.core.fleet.pools["on-a"]
    assert (await told(house)).headers["x-llmgw-model"] == "a"
    while pool.breaker.closed:
        pool.answered(500)
    answer = await told(house)
    assert answer.headers["x-llmgw-fallback"] == "b; on=unavailable; by=settings"
    answer = await told(house, headers={**EXPLAIN, "x_llmgw_fallback": "none"})
    assert (answer.status, answer.headers["x-llmgw-breaker"]) == (200, "open")


@pytest.mark.parametrize("lately", [True, False])
async def test_C10_a_model_that_works_answers_before_a_last_resort_nearer_in_the_chain(
    house: House, lately: bool
) -> None:
    await start(house, {"status": 500}, {"status": 500}, {})
    pools = house.core.fleet.pools
    for name in ("on-a", "on-b"):
        wear(pools[name], time.monotonic())
    if not lately:
        pools["on-a"].breaker.good_at = -math.inf
    answer = await told(house)
    assert (answer.status, answer.headers["x-llmgw-model"]) == (200, "c")
    assert [len(engine.chats()) for engine in house.engines] == [0, 0, 1]


async def test_C10_a_last_resort_answers_before_another_model_does_that_is_no_better(
    house: House,
) -> None:
    await start(house, {}, {"status": 500})
    for pool in house.core.fleet.everyone():
        wear(pool, time.monotonic())
    answer = await told(house)
    assert (answer.status, answer.headers["x-llmgw-model"]) == (200, "a")
    house.core.fleet.pools["on-b"].breaker.hurry()  # its next request is a probe
    answer = await told(house)
    assert (answer.status, answer.headers["x-llmgw-model"]) == (200, "a")
    first, other = house.engines
    assert other.chats() == []
    first.default, other.default = {"status": 500}, {}
    answer = await told(house)
    assert answer.headers["x-llmgw-fallback"] == "b; on=error; by=settings"


@pytest.mark.parametrize("stream", [False, True])
async def test_C10_a_fallback_without_room_answers_when_it_has_some(
    house: House, stream: bool
) -> None:
    """It had been asked for room once, and never again."""
    failing, instead = house.engine(), house.engine(hold=True)
    await house.start(
        endpoints=(StaticEndpoint("on-a", failing.url, ("a",)),
                   StaticEndpoint("on-b", instead.url, ("b",), 1)),
        fallbacks=(("a", ("b",)),), retries=PLENTY,
    )  # fmt: skip
    house.core.fleet.pools["on-a"].breaker.resume(time.monotonic() + 20.0, 20.0)
    full, wire = await house.wire(), await house.wire()
    await full.chat(model="b")
    await until(instead.held)
    await wire.chat(model="a", stream=stream, headers=EXPLAIN)
    await until(lambda: house.core.admission.waiting("a") == 1)
    instead.release(2)
    answer = await wire.answer()
    assert answer.headers["x-llmgw-fallback"] == "b; on=unavailable; by=settings"
    assert (await full.answer()).status == 200
    assert failing.chats() == []


@pytest.mark.parametrize("stream", [False, True])
async def test_C10_who_waits_while_all_replicas_trip_falls_back_where_it_may_and_there_is_room(
    house: House, stream: bool
) -> None:
    full, instead = house.engine(hold=True), house.engine(hold=True)
    await house.start(
        endpoints=(StaticEndpoint("on-a", full.url, ("a",), 1),
                   StaticEndpoint("on-b", instead.url, ("b",), 1)),
        fallbacks=(("a", ("b",)),), retries=PLENTY,
    )  # fmt: skip
    wires, admission = [await house.wire() for _ in range(4)], house.core.admission
    await wires[0].chat(model="a")
    await until(full.held)
    for number, word in enumerate(("none", "unavailable", "unavailable"), start=1):
        headers = {**EXPLAIN, "x_llmgw_fallback": word}
        await wires[number].chat(model="a", stream=stream, headers=headers)
        await until(lambda number=number: admission.waiting("a") == number)
    house.core.fleet.pools["on-a"].breaker.resume(time.monotonic() + 20.0, 20.0)
    await until(instead.held)
    assert admission.waiting("a") == 2, "who may not, and who finds no room"
    instead.release(2)
    for wire in wires[2:]:
        answer = await wire.answer()
        assert answer.headers["x-llmgw-fallback"] == "b; on=unavailable; by=request"
    assert admission.waiting("a") == 1
    assert len(full.chats()) == 1
    wires[0].close()
    wires[1].close()
    await until(house.idle)


async def test_an_attempt_that_is_not_made_again_is_no_retry(house: House) -> None:
    await start(house, None, {}, timeouts=Timeouts(connect_s=30.0))
    core, fleet = house.core, house.core.fleet
    wire = await house.wire()
    await wire.chat(model="a", headers=EXPLAIN)
    await until(lambda: core.stats.upstream_failures)
    gone = RouteTable(tuple(model for model in fleet.table.models if model.name == "b"))
    fleet.swap(gone, {pool.endpoint: pool.address for pool in fleet.pools.values()})
    answer = await wire.answer()
    assert answer.status == 503, "the name is gone from the table, and its chain with it"
    (row,) = house.rows
    assert row["attempts"] == 1 + sum(core.stats.retries.values())


async def test_chains_end_and_the_last_answer_is_told(house: House) -> None:
    await start(
        house, BUSY, BUSY, {"status": 503, "body": {"last": True}},
        fallbacks=(("a", ("b",)), ("b", ("a", "c")), ("c", ("a",))),
    )  # fmt: skip
    answer = await told(house)
    assert (answer.status, answer.json) == (503, {"last": True})
    assert [len(engine.chats()) for engine in house.engines] == [1, 1, 1]
    row = await house.row()
    assert (row["model"], row["attempts"], row["status"]) == ("c", 3, "error")
    await until(house.idle)


@pytest.mark.parametrize(
    ("header", "settings", "falls"),
    [
        (None, (), False), ("refusal", (), True), ("none", ("refusal",), False),
        (None, ("refusal",), True), ("error,timeout", ("refusal",), False),
    ],
)  # fmt: skip
@pytest.mark.parametrize("stream", [False, True])
async def test_C10_refusals_fall_back_where_the_request_or_the_settings_say_so(
    house: House, header: str | None, settings: tuple[str, ...], falls: bool, stream: bool
) -> None:
    await start(house, TOO_LONG, {}, fallback_on=frozenset(settings))
    headers = EXPLAIN if header is None else {**EXPLAIN, "x_llmgw_fallback": header}
    answer = await told(house, headers=headers, stream=stream)
    assert answer.status == (200 if falls else 400)
    level = "settings" if header is None else "request"
    reasons = ",".join(sorted((header or ",".join(settings) or "none").split(",")))
    assert answer.headers["x-llmgw-fallback-on"] == f"{reasons}; by={level}"
    if falls:
        assert answer.headers["x-llmgw-fallback"] == f"b; on=refusal; by={level}"
    else:
        assert answer.json == TOO_LONG["body"]
        assert "x-llmgw-fallback" not in answer.headers
    sent = house.engines[0].chats()[0].headers
    assert not [name for name in sent if name.startswith("x-llmgw")]


async def test_a_request_may_forbid_it(house: House) -> None:
    await start(house, BUSY, {})
    answer = await told(house, headers={"x_llmgw_fallback": "none"})
    assert answer.status == 503
    bad = await told(house, headers={"x_llmgw_fallback": "maybe"})
    assert (bad.status, bad.code) == (400, "invalid_fallback")
    await until(house.idle)


async def test_a_key_for_the_model_is_served_by_its_fallback_and_by_nothing_else(
    house: House,
) -> None:
    await start(house, BUSY, {}, keys=(StaticKey("only-a", "sk-a", ("a",)),))
    assert (await told(house, headers={"key": "sk-a"})).status == 200
    assert (await told(house, model="b", headers={"key": "sk-a"})).status == 404


async def test_the_budget_bounds_fallbacks_too(house: House) -> None:
    await start(house, BUSY, {}, retries=Retries(3, 0.0, 1))
    assert (await told(house)).status == 200
    refused = await told(house)
    assert (refused.status, refused.headers["retry-after"]) == (503, "1")
    assert house.core.stats.retries_refused == {"fallback": 1}


async def test_C10_refusals_fall_back_however_many_there_are(house: House) -> None:
    """A model for short prompts before one for long ones: a tenth of these had been answered."""
    await start(
        house, TOO_LONG, {}, retries=Retries(3, 0.0, 0), fallback_on=frozenset(("refusal",))
    )
    for _ in range(3):
        assert (await told(house)).headers["x-llmgw-fallback"] == "b; on=refusal; by=settings"
    assert house.core.stats.retries_refused == {}


async def test_a_fallback_that_nobody_can_pay_is_no_probe(house: House) -> None:
    await start(house, BUSY, {}, retries=Retries(3, 0.0, 0))
    breaker = house.core.fleet.pools["on-b"].breaker
    for _ in range(5):
        breaker.failed(time.monotonic())
    breaker.hurry()
    assert (await house.ask(model="a")).status == 503
    assert house.core.snapshot()["retries_refused"] == [["fallback", 1]]
    assert (breaker.phase, breaker.trips) == (Phase.OPEN, 1), "nothing was sent there"
    assert (await house.ask(model="b", headers={"x_llmgw_wait": "0"})).status == 200
    assert breaker.closed


async def test_explanations_are_for_who_asks(house: House) -> None:
    await start(house, {}, {})
    assert not [n for n in (await house.ask(model="a")).headers if n.startswith("x-llmgw")]
    plain = await told(house)
    assert plain.headers["x-llmgw-replica"] == "on-a"
    assert plain.headers["x-llmgw-attempts"] == "1"
    assert "x-llmgw-fallback" not in plain.headers
    alone = {**EXPLAIN, "x_fake": '{"die_at": 0}', "x_llmgw_fallback": "none"}
    lost = await told(house, headers=alone)
    assert (lost.status, lost.headers["x-llmgw-replica"]) == (502, "on-a")


async def test_a_running_request_counts_for_the_model_that_serves_it(house: House) -> None:
    await start(house, BUSY, {"delay": 60})
    wire = await house.wire()
    await wire.chat(model="a")
    await until(house.engines[1].chats)
    assert sorted(house.core.snapshot()["in_flight"]) == [["a", 0], ["b", 1]]
    wire.close()
    await until(house.idle)
