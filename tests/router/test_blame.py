"""Errors that an engine tells as events: the status they mean, and comments before them."""

from __future__ import annotations

import json
from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st

from controller.router.blame import error_in, error_of, tells_error
from controller.router.breaker import BreakerRules, Phase
from controller.router.config import Limits, Retries, Timeouts
from controller.router.dialect import CHAT
from controller.router.plain import SHORT_BYTES
from controller.router.relay import HELD_BYTES, Head, StreamRelay, Wish
from controller.router.sse import Scanner
from tests.router.wire import until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from tests.router.conftest import House

PLENTY = Retries(attempts=3, ratio=1.0, floor=1000)
PING = ": ping\n\n"


# -- the status it means -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "status"),
    [
        ({"type": "overloaded_error", "message": "Overloaded"}, 529),  # Anthropic
        ({"type": "rate_limit_error"}, 429),
        ({"type": "api_error"}, 500),
        ({"type": "timeout_error"}, 504),
        ({"type": "request_too_large"}, 413),
        ({"code": "rate_limit_exceeded", "message": "slow down"}, 429),  # OpenAI
        ({"code": "server_error"}, 500),
        ({"code": "context_length_exceeded", "type": "invalid_request_error"}, 400),
        ({"code": None, "type": "server_error"}, 500),
        ({"code": 400, "type": "BadRequestError"}, 400),  # vLLM
        ({"type": "InternalServerError"}, 500),
        ({"code": 503, "type": "unavailable_error"}, 503),  # llama.cpp
        ({"code": "503"}, 503),
        ({"code": "Gateway Timeout"}, 504),
        ({"code": 502, "type": "overloaded_error"}, 502),  # a number is the more exact word
        ({"code": 200, "type": "overloaded_error"}, 529),
        ({"code": True}, 502),
        ({"code": "odd", "type": ["odd"]}, 502),
        ({}, 502),
        ("odd", 502),
        (7, 502),
    ],
)
def test_A08_an_error_in_words_has_the_status_that_it_means(error: Any, status: int) -> None:
    found = error_of(error, "m")
    assert found.status == status
    assert found.message
    assert found.retry_after_s == (1 if status in (429, 503, 529) else None)


SCALARS = st.none() | st.booleans() | st.integers() | st.text()
WORDS = st.sampled_from(("code", "type", "message"))


@given(st.recursive(SCALARS, lambda inner: st.lists(inner) | st.dictionaries(WORDS, inner)))
def test_A08_whatever_an_engine_says_is_an_error(error: Any) -> None:
    found = error_of(error, "m")
    assert 400 <= found.status <= 599
    assert all(isinstance(word, str) for word in (found.type, found.code, found.message))


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/chat/completions"])
async def test_A08_an_overloaded_engine_that_says_so_in_words_is_passed_over(
    house: House, path: str
) -> None:
    told = {"type": "error", "error": {"type": "overloaded_error", "message": "Overloaded"}}
    raw = f"event: error\ndata: {json.dumps(told)}\n\n"
    house.engine(raw=raw)
    house.engine(raw=raw)
    house.engine(raw=raw)
    await house.start(retries=PLENTY)
    wire = await house.wire()
    await wire.post(path, {"model": "m", "messages": [], "max_tokens": 5, "stream": True})
    answer = await wire.answer()
    assert (answer.status, answer.headers["retry-after"]) == (529, "1")
    assert answer.json["error"]["type"] == "overloaded_error"
    assert answer.json["error"]["message"] == "Overloaded"
    assert [len(engine.chats()) for engine in house.engines] == [1, 1, 1]
    assert house.core.stats.retries == {"busy": 2}
    assert {pool.breaker.phase for pool in house.core.fleet.everyone()} == {Phase.HELD}


def tgi(message: str, kind: str) -> str:
    """A stream of TGI that fails before its first token; its head said 200."""
    return f'data:{{"error":"{message}","error_type":"{kind}"}}\n\ndata:[DONE]\n\n'


async def test_C02_a_busy_tgi_is_passed_over(house: House) -> None:
    """It was taken for broken: five of these shut a replica that only had enough to do."""
    for _ in range(3):
        house.engine(raw=tgi("Model is overloaded", "overloaded"))
    await house.start(retries=PLENTY)
    answer = await house.ask(stream=True)
    assert (answer.status, answer.headers["retry-after"]) == (503, "1")
    assert answer.json["error"]["message"] == "Model is overloaded"
    assert [len(engine.chats()) for engine in house.engines] == [1, 1, 1]
    assert {pool.breaker.phase for pool in house.core.fleet.everyone()} == {Phase.HELD}


async def test_C01_a_request_that_tgi_refuses_is_its_clients_fault(house: House) -> None:
    told = "Input validation error: `inputs` tokens + `max_new_tokens` must be <= 4096"
    for _ in range(2):
        house.engine(raw=tgi(told, "validation"))
    await house.start(retries=PLENTY)
    for number in range(1, 7):
        answer = await house.ask(stream=True)
        assert (answer.status, answer.json["error"]["message"]) == (422, told)
        assert sum(len(engine.chats()) for engine in house.engines) == number  # once each
    assert all(pool.breaker.spotless for pool in house.core.fleet.everyone())


async def test_A08_an_error_with_no_choices_is_no_success(house: House) -> None:
    error = {"error": {"message": "capacity", "code": 502}, "choices": []}
    house.engine(error_first=error)
    await house.start()
    pool = house.core.fleet.pools["e0"]
    answer = await house.ask(stream=True, stream_options={"include_usage": True})
    assert (answer.status, answer.json["error"]["message"]) == (502, "capacity")
    row = await house.row()
    assert (row["status"], row["http_status"]) == ("error", 502)
    assert "completion_tokens" not in row
    assert not pool.breaker.spotless


# -- a plain answer ------------------------------------------------------------------------------

CAPACITY = {"error": {"message": "capacity", "code": 502}, "choices": []}


@pytest.mark.parametrize("how", [{}, {"byte_gap": 0.0}, {"gzip": True}, {"framing": "close"}])
@pytest.mark.parametrize("model", ["m", "alias"])
async def test_A08_an_error_in_a_plain_200_is_a_failure(
    house: House, how: dict[str, Any], model: str
) -> None:
    house.engine(body=CAPACITY, **how)
    await house.start(aliases=(("alias", "m"),))
    pool = house.core.fleet.pools["e0"]
    answer = await house.ask(model=model)
    assert (answer.status, answer.json["error"]["message"]) == (502, "capacity")
    row = await house.row()
    assert (row["status"], row["http_status"], row["error_code"]) == ("error", 502, "upstream_502")
    assert "completion_tokens" not in row
    assert not pool.breaker.spotless


async def test_A08_an_error_in_a_plain_200_goes_to_another(house: House) -> None:
    bad = house.engine(body={"error": "the model is busy"})
    house.engine()
    await house.start(retries=PLENTY)
    while not bad.chats():
        assert (await house.ask()).json["choices"]
    assert {row["status"] for row in house.rows} == {"ok"}


@pytest.mark.parametrize(
    "body",
    [
        {"object": "response", "status": "failed", "error": {"code": "server_error"}, "output": []},
        {
            "object": "response",
            "status": "completed",
            "error": None,
            "output": [{"type": "message"}],
        },
        {"choices": [{"index": 0, "error": {"message": "cut"}, "finish_reason": "error"}]},
        {"choices": [{"index": 0}], "error": {"message": "a warning"}},
        {"data": [], "error": None},
        ["error"],
    ],
)
@pytest.mark.parametrize("gap", [None, 0.0])
async def test_A08_an_answer_with_a_word_on_errors_passes_as_it_is(
    house: House, body: Any, gap: float | None
) -> None:
    engine = house.engine(body=body, byte_gap=gap)
    await house.start()
    answer = await house.ask()
    assert (answer.status, answer.body) == (200, json.dumps(body).encode())
    assert house.core.fleet.pools["e0"].breaker.spotless
    assert len(engine.chats()) == 1


@pytest.mark.parametrize("error", [["capacity"], 502, True])
async def test_A08_an_error_of_any_form_in_a_plain_200_is_a_failure(
    house: House, error: Any
) -> None:
    house.engine(body={"error": error})
    await house.start()
    answer = await house.ask()
    assert (answer.status, answer.json["error"]["message"]) == (502, str(error))
    row = await house.row()
    assert (row["status"], row["error_code"]) == ("error", "upstream_502")
    assert "prompt_tokens" not in row


@asynccontextmanager
async def two_pieces(first: bytes, second: bytes) -> AsyncIterator[tuple[str, trio.Event]]:
    """An engine that sends the second half of its answer when it is told to go on."""
    go_on = trio.Event()
    head = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"

    async def serve(stream: trio.SocketStream) -> None:
        await stream.receive_some(65536)
        await stream.send_all(head % len(first + second) + first)
        await go_on.wait()
        await stream.send_all(second)

    async with trio.open_nursery() as nursery:
        listeners = await nursery.start(partial(trio.serve_tcp, serve, 0, host="127.0.0.1"))
        yield f"http://127.0.0.1:{listeners[0].socket.getsockname()[1]}", go_on
        nursery.cancel_scope.cancel()


@pytest.mark.parametrize("code", [502, 400])
@pytest.mark.parametrize("first", [b"\n", b'{"id": "%b", ' % (b"x" * SHORT_BYTES)])
async def test_A08_an_error_whose_beginning_had_passed_costs_nothing(
    house: House, first: bytes, code: int
) -> None:
    """Hosted APIs send blanks while they work; one that failed then was billed by its bytes."""
    told = json.dumps({"error": {"message": "capacity", "code": code}}).encode()
    second = told if first.isspace() else told[1:]
    async with two_pieces(first, second) as (url, go_on):
        await house.start(url)
        wire = await house.wire()
        await wire.chat()
        assert (await wire.head())[0] == 200
        go_on.set()
        assert await wire.exactly(len(first + second)) == first + second
        row = await house.row()
    code_told = "upstream_error_event" if code == 502 else "upstream_400"
    assert (row["status"], row["http_status"], row["error_code"]) == ("error", 200, code_told)
    assert not {"prompt_tokens", "completion_tokens", "estimated"} & row.keys()
    assert house.core.fleet.pools["e0"].breaker.spotless is (code == 400)


@pytest.mark.parametrize("usage", [None, {"input_tokens": 5, "output_tokens": 2}])
@pytest.mark.parametrize("how", [{}, {"byte_gap": 0.0}, {"gzip": True}, {"framing": "close"}])
@pytest.mark.parametrize("model", ["m", "short"])
async def test_A08_a_response_that_failed_is_passed_on_and_costs_nothing(
    house: House, usage: Any, how: dict[str, Any], model: str
) -> None:
    """As `response.failed` in a stream; its breaker does not care, for it may be the client's."""
    error = {"code": "server_error", "message": "it broke"}
    told = {"object": "response", "status": "failed", "error": error, "output": [], "usage": usage}
    engine = house.engine(body=told, **how)
    await house.start()
    wire = await house.wire()
    await wire.post("/v1/responses", {"model": model, "input": "x"})
    answer = await wire.answer()
    assert answer.status == 200
    row = await house.row()
    assert (row["status"], row["http_status"], row["error_code"]) == (
        "error",
        200,
        "response_failed",
    )
    assert not {"prompt_tokens", "completion_tokens", "estimated"} & {
        k for k, v in row.items() if v
    }
    assert house.core.fleet.pools["e0"].breaker.spotless
    assert len(engine.chats()) == 1


@given(
    st.binary() | st.text().map(str.encode) | SCALARS.map(lambda told: json.dumps(told).encode())
)
def test_A08_no_plain_answer_breaks_the_search_for_an_error(body: bytes) -> None:
    assert error_in(body) is None
    told = b'{"error": ' + body + b"}"
    assert tells_error(told) or not isinstance(error_in(told), str | dict)


@pytest.mark.parametrize("stream", [False, True])
async def test_C01_a_clients_error_in_a_200_proves_that_the_engine_works(
    house: House, *, stream: bool
) -> None:
    engine = house.engine(status=500)
    await house.start(breaker=BreakerRules(failures_in_row=1, pause_s=0.05))
    (pool,) = house.core.fleet.everyone()
    assert (await house.ask()).status == 500
    assert pool.breaker.phase is Phase.OPEN
    told = {"error": {"message": "too long", "code": 400}}
    engine.default = {"body": told, "error_first": told}
    assert (await house.ask(stream=stream)).status == 400  # it waited for the probe's time
    assert pool.breaker.closed


@pytest.mark.parametrize("stream", [False, True])
async def test_A08_an_odd_status_in_a_200_is_a_failure_of_its_replica(
    house: House, *, stream: bool
) -> None:
    told = {"error": {"message": "no storage", "code": 507}}
    house.engine(body=told, error_first=told)
    await house.start()
    pool = house.core.fleet.pools["e0"]
    assert (await house.ask(stream=stream)).status == 507
    assert not pool.breaker.spotless


@pytest.mark.parametrize("before", ["", PING])
async def test_A08_a_stream_of_nothing_but_its_end_is_no_answer(house: House, before: str) -> None:
    bad = house.engine(raw=before + "data: [DONE]\n\n")
    good = house.engine()
    await house.start()
    while not bad.chats():
        answer = await house.ask(stream=True)
    assert (answer.status, answer.json["error"]["code"]) == (502, "upstream_failed")
    row = house.rows[-1]
    assert (row["status"], row["error_code"]) == ("error", "upstream_failed")
    assert not house.core.fleet.pools["e0"].breaker.spotless
    assert all(row["status"] == "ok" for row in house.rows[: len(good.chats())])


@pytest.mark.parametrize("said", ["keep-alive", "comment"])
async def test_A08_the_end_of_nothing_does_not_reach_a_client_that_was_kept_waiting(
    house: House, said: str
) -> None:
    """Its head went out with our first comment: `[DONE]` would end the stream as a whole answer."""
    raw = "data: [DONE]\n\n"
    late = {"first_delay": 0.3} if said == "comment" else {"end_delay": 1.5}
    house.engine(raw=raw, **late)
    await house.start(timeouts=Timeouts(comment_s=0.1, first_token_s=1.0))
    answer = await house.ask(stream=True)
    assert answer.body.startswith(b": keep-alive\n\n")
    assert answer.body.index(b'"error"') < answer.body.index(b"[DONE]")
    assert (await house.row())["status"] in ("partial", "error")


@pytest.mark.parametrize("line_end", ["\n", "\r\n", "\r"])
def test_A08_no_end_before_the_beginning_is_passed_on(line_end: str) -> None:
    end, event = (f"data: {told}{2 * line_end}".encode() for told in ("[DONE]", '{"choices":[]}'))
    for cut in range(1, len(end) + 1):
        scanner = Scanner(1000)
        out = scanner.feed(end[:cut]) + scanner.feed(end[cut:] + event)
        assert out == event
        assert not scanner.done
        assert not scanner.ended_well()
        assert scanner.feed(end) + scanner.finish() == end
        assert scanner.ended_well()


# -- comments before it --------------------------------------------------------------------------


@pytest.mark.parametrize("gap", [None, 0.0])
@pytest.mark.parametrize("code", [503, 500])
async def test_A35_an_error_after_an_engines_comments_goes_to_another(
    house: House, gap: float | None, code: int
) -> None:
    error = f'data: {{"error": {{"message": "broken", "code": {code}}}}}\n\n'
    bad = house.engine(raw=3 * PING + error, byte_gap=gap)
    house.engine()
    await house.start(retries=PLENTY)
    while not bad.chats():
        answer = await house.ask(stream=True)
        assert answer.status == 200
        assert answer.body.startswith(b"data: ")
        assert b"error" not in answer.body
        assert b"ping" not in answer.body
    assert {row["status"] for row in house.rows} == {"ok"}
    await until(house.idle)


async def test_A35_an_error_after_an_engines_comments_keeps_its_status(house: House) -> None:
    house.engine(raw=PING + 'data: {"error": {"message": "too long", "code": 400}}\n\n')
    await house.start()
    answer = await house.ask(stream=True)
    assert (answer.status, answer.json["error"]["message"]) == (400, "too long")


@pytest.mark.parametrize("raw", [PING, PING + ": bye", ": bye", PING + "data: " + 300_000 * "x"])
async def test_A35_an_engine_that_fails_after_its_comments_is_a_status(
    house: House, raw: str
) -> None:
    house.engine(raw=raw, framing="close")
    await house.start(limits=Limits(event_bytes=200_000))
    answer = await house.ask(stream=True)
    assert (answer.status, answer.code) == (502, "upstream_failed")
    row = await house.row()
    assert row["status"] == "error"


@pytest.mark.parametrize("line_end", ["\n", "\r\n"])
async def test_A35_an_engines_comments_reach_the_client_with_its_first_event(
    house: House, line_end: str
) -> None:
    event = '{"choices":[{"index":0,"delta":{"content":"a"},"finish_reason":"stop"}]}'
    raw = f": ping{line_end}{line_end}: pong{line_end}{line_end}data: {event}{line_end}{line_end}"
    house.engine(raw=raw, byte_gap=0.001)
    await house.start()
    answer = await house.ask(stream=True)
    assert answer.body == raw.encode()
    row = await house.row()
    assert row["status"] == "ok"
    assert row["ttft_ms"] >= len(raw) - len(event) - 20  # a comment is no token


WISH = Wish("m", b"r", True, False, False, CHAT, None, None)
STREAM = Head(200, [(b"content-type", b"text/event-stream")], None, b"text/event-stream")


@pytest.mark.parametrize("chunks", [True, False])
def test_what_is_held_back_has_a_bound_and_is_not_lost(chunks: bool) -> None:
    relay = StreamRelay(STREAM, WISH._replace(chunks=chunks), Limits())
    sent, fed = b"", 0
    while not sent:
        assert relay.untouched
        sent += relay.feed(PING.encode())
        fed += 1
        assert fed < HELD_BYTES
    assert len(sent) < HELD_BYTES + 100
    sent += relay.feed(PING.encode())
    assert not relay.untouched
    assert sent.count(PING.encode()) == fed + 1
    assert sent.startswith(b"HTTP/1.1 200")


def test_our_own_comment_takes_what_is_held_back_along() -> None:
    relay = StreamRelay(STREAM, WISH, Limits())
    assert relay.feed(PING.encode()) == b""
    sent = relay.comment("keep-alive")
    assert sent.index(b"200 OK") < sent.index(b": ping") < sent.index(b": keep-alive")
    assert not relay.untouched
