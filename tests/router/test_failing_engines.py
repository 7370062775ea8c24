"""Engines that fail: honest statuses, no silent short answers, and no work done twice."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any

import openai
import pytest
import trio

from controller.metrics.router import families
from controller.router.config import Retries, Timeouts
from tests import fake_engine
from tests.router.conftest import NEVER_OPEN
from tests.router.wire import ShortAnswer, post_bytes, until
from tests.tcp_proxy import TcpProxy

if TYPE_CHECKING:
    from tests.router.conftest import House

# -- in the middle of a stream -------------------------------------------------------------------


async def kill_variant(house: House) -> subprocess.Popen[str]:
    command = [sys.executable, fake_engine.__file__]
    how = json.dumps({"tokens": 9, "die_at": 3, "die": "kill"})
    child = subprocess.Popen([*command, "--default", how], stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    port = json.loads(child.stdout.readline())["port"]
    await house.start(f"http://127.0.0.1:{port}")
    return child


@pytest.mark.parametrize("die", ["rst", "fin"])
async def test_A07_engine_dies_mid_stream(house: House, die: str) -> None:
    house.engine(tokens=9, die_at=3, die=die)
    await house.start()
    wire = await house.wire()
    await wire.chat(stream=True)
    answer = await wire.answer()
    check_told(answer.events)
    assert await wire.closed()
    await check_partial(house)


async def test_A07_engine_is_killed_mid_stream(house: House) -> None:
    child = await kill_variant(house)
    try:
        wire = await house.wire()
        await wire.chat(stream=True)
        answer = await wire.answer()
        check_told(answer.events)
        assert await wire.closed()
        await check_partial(house)
    finally:
        child.kill()
        child.communicate()


def check_told(events: list[str]) -> None:
    *tokens, error, done = events
    assert len(tokens) == 3
    assert done == "[DONE]"
    told = json.loads(error)["error"]
    assert set(told) == {"message", "type", "param", "code"}
    assert told["code"] == "upstream_failed"


async def check_partial(house: House) -> None:
    row = await house.row()
    assert (row["status"], row["error_code"]) == ("partial", "upstream_failed")
    await until(house.idle)
    assert len(house.rows) == 1


@pytest.mark.parametrize("die", ["rst", "fin"])
async def test_A07_the_sdk_raises(house: House, die: str) -> None:
    house.engine(tokens=9, die_at=3, die=die)
    await house.start()

    def read() -> str:
        url = f"http://127.0.0.1:{house.port}/v1"
        text = ""
        with openai.OpenAI(base_url=url, api_key="sk-test", max_retries=0) as client:
            stream = client.chat.completions.create(
                model="m", messages=[{"role": "user", "content": "x"}], stream=True
            )
            try:
                for chunk in stream:
                    text += chunk.choices[0].delta.content or ""
            except openai.APIError as error:
                return f"{text}| {error.code}"
        return text

    assert await trio.to_thread.run_sync(read) == "tok0 tok1 tok2 | upstream_failed"


async def test_A07_a_stream_in_good_framing_without_its_end_is_told(house: House) -> None:
    house.engine(raw='data: {"choices":[{"index":0,"delta":{"content":"a"}}]}\n\n')
    await house.start()
    answer = await house.ask(stream=True)
    assert json.loads(answer.events[1])["error"]["code"] == "upstream_failed"
    assert (await house.row())["status"] == "partial"


@pytest.mark.parametrize("silent_s", [0, 0.5])
async def test_A07_an_empty_finish_reason_is_no_end(house: House, silent_s: float) -> None:
    """Some engines have one in every event: where they die or are silent, nothing is complete."""
    event = 'data: {"choices":[{"index":0,"delta":{"content":"a"},"finish_reason":""}]}\n\n'
    house.engine(raw=event * 3, end_delay=silent_s)
    await house.start(timeouts=Timeouts(comment_s=0.1))
    answer = await house.ask(stream=True)
    assert json.loads(answer.events[3])["error"]["code"] == "upstream_failed"
    assert (b": keep-alive" in answer.body) == bool(silent_s)
    assert (await house.row())["status"] == "partial"


async def test_a_stream_that_ends_without_done_but_finished_is_ok(house: House) -> None:
    house.engine(done=False)  # transformers serve never says [DONE]
    await house.start()
    answer = await house.ask(stream=True)
    assert answer.events[-1] != "[DONE]"
    assert len(answer.events) == 3
    assert (await house.row())["status"] == "ok"


async def test_dying_after_done_is_no_failure(house: House) -> None:
    house.engine(framing="close")
    await house.start()
    answer = await house.ask(stream=True)
    assert answer.events[-1] == "[DONE]"
    assert (await house.row())["status"] == "ok"


# -- errors inside a 200 -------------------------------------------------------------------------


async def test_A08_an_error_event_first_becomes_its_status(house: House) -> None:
    error = {"error": {"message": "capacity", "code": 503, "type": "busy"}, "choices": []}
    house.engine(error_first=error)
    await house.start()
    answer = await house.ask(stream=True)
    assert answer.status == 503
    assert answer.json["error"]["message"] == "capacity"
    assert answer.headers["retry-after"].isdigit()
    row = await house.row()
    assert (row["status"], row["http_status"]) == ("error", 503)
    assert "completion_tokens" not in row
    await until(house.idle)


async def test_A08_an_error_event_later_passes_and_counts(house: House) -> None:
    house.engine(error_at=2)
    await house.start()
    answer = await house.ask(stream=True)
    assert answer.status == 200
    assert json.loads(answer.events[2])["error"]["message"] == "engine broke"
    assert answer.events[-1] == "[DONE]"
    row = await house.row()
    assert (row["status"], row["error_code"]) == ("partial", "upstream_error_event")
    assert "completion_tokens" not in row


async def test_an_engine_that_aborts_is_partial_though_it_looks_complete(house: House) -> None:
    event = {"choices": [{"index": 0, "delta": {}, "finish_reason": "abort"}]}
    raw = f"data: {json.dumps(event)}\n\ndata: [DONE]\n\n"
    house.engine(raw=raw)
    await house.start()
    assert (await house.ask(stream=True)).body == raw.encode()
    row = await house.row()
    assert (row["status"], row["error_code"]) == ("partial", "engine_aborted")


@pytest.mark.parametrize("status", [400, 404, 422, 429, 500, 503])
async def test_the_engines_own_errors_pass_unchanged(house: House, status: int) -> None:
    house.engine(status=status, body={"error": "as it is"})
    await house.start()
    answer = await house.ask(stream=True)
    assert answer.status == status
    assert answer.json == {"error": "as it is"}
    row = await house.row()
    assert (row["status"], row["error_code"]) == ("error", f"upstream_{status}")


@pytest.mark.parametrize("code", [400, 429, 500, 503])
async def test_an_error_is_recorded_alike_as_status_and_as_first_event(
    house: House, code: int
) -> None:
    told = {"message": "no", "type": "odd", "code": code}
    ways: list[dict[str, Any]] = [
        {"fake": {"status": code, "body": {"error": told}}},
        {"stream": True, "fake": {"status": code, "body": {"error": told}}},
        {"stream": True, "fake": {"error_first": {"error": told}}},
        {
            "stream": True,
            "fake": {"error_first": {"error": {**told, "code": "word", "type": code}}},
        },
    ]
    house.engine()
    await house.start(breaker=NEVER_OPEN)
    for way in ways:
        assert (await house.ask(**way)).status == code
    ends = [(row["status"], row["error_code"], row["http_status"]) for row in house.rows]
    assert ends == [("error", f"upstream_{code}", code)] * len(ways)
    stats = house.core.stats
    assert stats.refusals == {}  # it was the engine; and its words are no label of ours
    assert stats.upstream_failures == ({} if code == 400 else {("e0", str(code)): len(ways)})


@pytest.mark.parametrize(
    ("how", "cause"),
    [
        ({"raw": ""}, "no_answer"),
        ({"raw": ": ping\n\n"}, "no_answer"),
        ({"raw": 'data: {"choices": [{"index": 0, "delta": {"content": "a"}}]}\n\n'}, "no_answer"),
        ({"error_at": 1}, "error_event"),
        ({"die_at": 1}, "closed_early"),
        ({"die_at": 0}, "closed_early"),
    ],
)
async def test_a_stream_without_its_end_is_a_failure_of_its_replica(
    house: House, how: dict[str, Any], cause: str
) -> None:
    house.engine(**how)
    await house.start()
    await house.ask(stream=True)
    await until(lambda: len(house.rows))
    assert house.core.stats.upstream_failures == {("e0", cause): 1}
    assert not house.core.fleet.pools["e0"].breaker.spotless


# -- connections ---------------------------------------------------------------------------------


@pytest.mark.parametrize("die", ["rst", "fin"])
async def test_H14_where_only_the_close_ends_an_answer_a_cut_one_is_reset(
    house: House, die: str
) -> None:
    """An HTTP/1.0 client has no chunks: an orderly close would make the short answer whole."""
    house.engine(framing="chunked", die_at=40, die=die, gap=0.05, kind="audio/mpeg", raw="x" * 80)
    await house.start()
    wire = await house.wire()
    data = post_bytes("/v1/audio/speech", {"model": "m", "input": "x"})
    await wire.send(data.replace(b"HTTP/1.1", b"HTTP/1.0", 1))
    with pytest.raises(ShortAnswer):
        await wire.answer()
    await until(house.idle)


async def test_A13_an_idle_connection_that_died_is_replaced(house: House) -> None:
    house.engine(close_after=True)
    await house.start()
    for _ in range(20):
        assert (await house.ask()).status == 200
    assert {row["status"] for row in house.rows} == {"ok"}


async def test_A13_connections_that_close_as_a_request_comes_are_not_seen(house: House) -> None:
    engine = house.engine()
    await house.start()
    wire = await house.wire()
    for number in range(60):
        engine.drop_connections()  # the router hears of both in one turn, in either order
        await wire.chat(stream=number % 2 == 0)
        assert (await wire.answer()).status == 200
    assert {row["status"] for row in house.rows} == {"ok"}
    assert len(engine.chats()) == 60
    assert engine.connections == 60


async def test_A13_a_restart_between_requests_is_not_seen(house: House) -> None:
    engine = house.engine()
    await house.start(timeouts=Timeouts(connect_s=30.0))
    assert (await house.ask()).status == 200
    engine.stop()
    started = trio.Event()

    async def restart() -> None:
        await trio.sleep(0.25)
        engine.start()
        started.set()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(restart)
        assert (await house.ask()).status == 200
    assert house.core.stats.retries["connect_failed"] >= 1


async def test_A13_a_connection_that_closes_under_a_request_is_counted(house: House) -> None:
    engine = house.engine(close="reused")
    await house.start()
    for _ in range(5):
        assert (await house.ask(stream=True)).status == 200
    assert {row["status"] for row in house.rows} == {"ok"}
    assert len(engine.chats()) == 9
    page = families([house.core.snapshot()])
    (family,) = [each for each in page if each.name == "llmgw_upstream_retries"]
    assert {s.labels["reason"]: s.value for s in family.samples} == {"stale_connection": 4}


async def test_A14a_zero_bytes_on_a_reused_connection_is_sent_again_once(house: House) -> None:
    engine = house.engine(close="reused")
    await house.start()
    for _ in range(3):
        assert (await house.ask()).status == 200
    assert house.core.stats.retries == {"stale_connection": 2}
    assert len(engine.chats()) == 5
    assert [row["attempts"] for row in house.rows] == [1, 2, 2]


async def test_A13_a_connection_that_had_died_counts_as_no_engine(house: House) -> None:
    first, other = house.engine(close="reused"), house.engine()
    await house.start(retries=Retries(2, 0.0, 1))
    pool = house.core.fleet.pools["e1"]
    pool.in_flight += 1  # so that the other one is asked first
    assert (await house.ask()).status == 200
    first.default = {"close": "reused", "status": 503}
    assert (await house.ask()).status == 200
    assert (len(first.chats()), len(other.chats())) == (3, 1)
    pool.in_flight -= 1


async def test_A14b_zero_bytes_on_new_connections_hit_two_engines_at_most(house: House) -> None:
    house.engine(close="always")
    house.engine(close="always")
    house.engine(close="always")
    await house.start()
    answer = await house.ask()
    assert (answer.status, answer.code) == (502, "upstream_failed")
    assert sum(len(engine.chats()) for engine in house.engines) == 2
    assert max(len(engine.chats()) for engine in house.engines) == 1


async def test_A14b_the_other_engine_answers(house: House) -> None:
    house.engine(close="always")
    house.engine()
    await house.start()
    for _ in range(8):
        assert (await house.ask()).status == 200
    assert house.core.stats.retries["closed_unanswered"] >= 1


async def test_A14_who_may_go_elsewhere_once_meets_no_dead_connection(house: House) -> None:
    """It would be a 502, though the other engine works: a third one may not get the request."""
    idle, failing = house.engine(close="reused"), house.engine()
    await house.start()
    while not (idle.chats() and failing.chats()):
        assert (await house.ask()).status == 200
    failing.default = {"status": 500}
    while "engine_error" not in house.core.stats.retries:
        assert (await house.ask()).status == 200


@pytest.mark.parametrize("how", [{"die_at": 0, "first_delay": 0.05}, {"die_at": 1, "gap": 0.02}])
async def test_A14cd_nothing_is_sent_again_after_a_head(house: House, how: dict[str, Any]) -> None:
    house.engine(tokens=5, **how)
    house.engine(tokens=5, **how)
    await house.start()
    await house.ask(stream=True)
    assert sum(len(engine.chats()) for engine in house.engines) == 1


async def test_a_refused_connection_goes_to_another_replica(house: House) -> None:
    engine = house.engine()
    await house.start(house.dead(), engine.url)
    for _ in range(10):
        assert (await house.ask()).status == 200
    assert house.core.stats.upstream_failures[("e0", "connect_failed")] >= 1


async def test_nobody_listens_is_a_502_soon(house: House, quick: Any) -> None:
    await house.start(house.dead(), timeouts=quick)
    answer = await house.ask()
    assert (answer.status, answer.code) == (502, "upstream_failed")


@pytest.mark.parametrize(
    ("how", "stream", "passed"),
    [
        ({"delay": 60}, False, "headers_s"),
        ({"first_delay": 60}, True, "first_token_s"),
        ({"tokens": 3, "gap": 60}, True, "idle_s"),
    ],
)
async def test_slow_engines_are_timeouts(
    house: House, how: dict[str, Any], stream: bool, passed: str
) -> None:
    house.engine(**how)
    await house.start(timeouts=Timeouts(**{passed: 0.4}))
    answer = await house.ask(stream=stream)
    if "gap" in how:
        assert json.loads(answer.events[1])["error"]["code"] == "upstream_timeout"
        assert (await house.row())["status"] == "partial"
    else:
        assert (answer.status, answer.code) == (504, "upstream_timeout")
    await until(house.idle)


async def test_a_blackholed_engine_is_a_timeout(house: House) -> None:
    engine = house.engine()
    with TcpProxy(engine.port, mode="blackhole") as proxy:
        await house.start(proxy.url, timeouts=Timeouts(headers_s=0.4))
        assert (await house.ask()).status == 504


async def test_no_http_at_all_is_a_502(house: House) -> None:
    async def rubbish(stream: trio.SocketStream) -> None:
        async with stream:
            await stream.receive_some(65536)
            await stream.send_all(b"SSH-2.0-OpenSSH_9\r\n")

    async with trio.open_nursery() as nursery:
        listeners = await nursery.start(trio.serve_tcp, rubbish, 0)
        port = listeners[0].socket.getsockname()[1]
        await house.start(f"http://127.0.0.1:{port}")
        assert (await house.ask()).status == 502
        nursery.cancel_scope.cancel()
    await until(house.idle)


@pytest.mark.slow
async def test_H08_reset_timeout_and_leaving_at_once_map_to_a_status(
    house: House, quick: Any
) -> None:
    engine = house.engine(delay=0.35)
    with TcpProxy(engine.port) as proxy:
        await house.start(proxy.url, timeouts=quick, breaker=NEVER_OPEN)
        statuses = []

        async def one(number: int) -> None:
            wire = await house.wire()
            await wire.chat()
            if number % 3 == 0:
                await trio.sleep(0.3)
                wire.close()
                return
            statuses.append((await wire.answer()).status)

        async with trio.open_nursery() as nursery:
            for number in range(60):
                nursery.start_soon(one, number)
            # On a busy machine some are over before they get there.
            await until(lambda: len(engine.chats()) >= 60 or len(house.rows) == 60)
            await trio.sleep(0.3)
            proxy.reset()
    assert set(statuses) <= {200, 502, 504}
    assert len(statuses) == 40
    await until(house.idle)
    assert {row["http_status"] for row in house.rows} <= {200, 499, 502, 504}
    assert len(house.rows) == 60


async def test_an_answer_that_came_in_time_is_no_timeout_though_we_read_it_late(
    house: House,
) -> None:
    """As when the machine is busy: both the deadline's sweep and the answer are due then."""
    engine = house.engine(hold=True)
    await house.start()
    pool = house.core.fleet.pools["e0"]
    for number in range(8):  # either may be first
        wire = await house.wire()
        await wire.chat()
        await until(lambda number=number: len(engine.chats()) == number + 1)
        (up,) = (one for one in pool._open if one.owner is not None)
        engine.release()
        while not engine.chats()[number].answered:
            time.sleep(0.001)
        up._heard -= house.core.config.timeouts.headers_s
        house.core.deadlines.set(up, time.monotonic())
        time.sleep(2 * house.core.deadlines.step)
        assert (await wire.answer()).status == 200
        wire.close()
