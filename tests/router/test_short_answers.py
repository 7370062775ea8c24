"""Answers that stop too soon and look whole: the client and the usage row are told the truth."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from controller.router.config import Limits
from controller.router.dialect import CHAT, TEXT
from controller.router.errors import upstream_failed
from controller.router.plain import SHORT_BYTES, open_relay
from controller.router.relay import Head, StreamRelay, Wish
from tests.router.wire import ShortAnswer, post_bytes, until

if TYPE_CHECKING:
    from tests.router.conftest import House

PATH = "/v1/chat/completions"
GONE = upstream_failed("m", "closed early")


def token(index: int = 0, finish: str | None = None) -> bytes:
    choice = {"index": index, "delta": {"content": "x"}, "finish_reason": finish}
    return b"data: " + json.dumps({"choices": [choice]}).encode() + b"\n\n"


def opened(choices: int = 1, kind: bytes = b"text/event-stream") -> Any:
    wish = Wish("m", b"r", False, False, False, CHAT, None, None, choices=choices)
    return open_relay(Head(200, [(b"content-type", kind)], None, kind), wish, Limits())


# -- streams -------------------------------------------------------------------------------------


@pytest.mark.parametrize("cut", [8, 20, len(token(0, "stop")) - 4])
async def test_A07_an_event_cut_by_the_close_is_no_last_word(house: House, cut: int) -> None:
    """What is left of it could name an end that its engine did not live to tell."""
    raw = (token() + token(0, "stop")[:cut]).decode()
    house.engine(raw=raw, framing="close")
    await house.start()
    answer = await house.ask(stream=True)
    assert answer.body.startswith(token() + b'data: {"error"')  # a line of its own
    assert answer.events[-1] == "[DONE]"
    row = await house.row()
    assert (row["status"], row["error_code"]) == ("partial", "upstream_failed")


def test_A07_what_no_blank_line_ended_does_not_swallow_our_error_event() -> None:
    relay = opened()
    out = relay.feed(token() + token().rstrip()) + relay.finish()
    assert out.count(b"\n\ndata: ") == 2
    assert b"}data:" not in out
    assert (relay.outcome, relay.code) == ("partial", "upstream_failed")


@pytest.mark.parametrize(
    ("ends", "outcome"),
    [([0, 1], "ok"), ([1, 0], "ok"), ([0, 0], "partial"), ([0], "partial"), ([], "partial")],
)
@pytest.mark.parametrize("apart", [False, True])
def test_A25_two_choices_without_done_are_complete_when_both_have_ended(
    ends: list[int], outcome: str, *, apart: bool
) -> None:
    relay = opened(choices=2)
    pieces = [token(0), token(1)]
    for index in ends:
        pieces += [token(index, "stop"), *([token(1)] * 5 * apart)]
    out = b"".join([relay.feed(piece) for piece in pieces]) + relay.finish()
    assert (b"error" in out, relay.outcome) == (outcome != "ok", outcome)


async def test_A25_of_two_choices_one_ended(house: House) -> None:
    house.engine(raw=(token(0) + token(1) + token(0, "stop")).decode())
    await house.start()
    for fields in ({"n": 2}, {"prompt": ["a", "b"]}):
        assert b"error" in (await house.ask(stream=True, **fields)).body
    assert b"error" not in (await house.ask(stream=True, n=1, prompt=[5, 6])).body
    await until(lambda: len(house.rows) == 3)
    assert [row["status"] for row in house.rows] == ["partial", "partial", "ok"]


async def test_A25_two_images_are_no_choices_that_would_have_to_end(house: House) -> None:
    done = b'data: {"type":"image_generation.completed","b64_json":"AA=="}\n\n' * 2
    house.engine(raw=done)
    await house.start()
    wire = await house.wire()
    await wire.post("/v1/images/generations", {"model": "m", "n": 2, "stream": True})
    assert (await wire.answer()).body == done
    assert (await house.row())["status"] == "ok"


@pytest.mark.parametrize("end", ["finished", "died", "left"])
def test_an_abort_stays_one_however_its_stream_ends(end: str) -> None:
    relay = opened()
    relay.feed(token() + token(0, "abort") + b"data: [DONE]\n\n")
    if end == "finished":
        relay.finish()
    elif end == "died":
        relay.broken(GONE)
    assert (relay.outcome, relay.code) == ("partial", "engine_aborted")


async def test_who_leaves_after_an_abort_has_no_whole_answer(house: House) -> None:
    house.engine(raw=(token(0, "abort") + b"data: [DONE]\n\n").decode(), end_delay=20)
    await house.start()
    wire = await house.wire()
    await wire.chat(stream=True)
    await wire.until(b"[DONE]\n\n")
    wire.close()
    row = await house.row()
    assert (row["status"], row["error_code"]) == ("partial", "engine_aborted")


@pytest.mark.parametrize("mark", ["\ufeff", ""])
async def test_a_byte_order_mark_hides_no_first_event(house: House, mark: str) -> None:
    error = {"error": {"message": "full", "code": 503}}
    house.engine(raw=f"{mark}data: {json.dumps(error)}\n\ndata: [DONE]\n\n")
    await house.start()
    assert (await house.ask(stream=True)).status == 503
    assert (await house.row())["status"] == "error"


def test_a_byte_order_mark_hides_no_model() -> None:
    wish = Wish("m", b"r", False, False, False, TEXT, None, b'"nick"')
    relay = StreamRelay(Head(200, [], None), wish, Limits())
    assert b'"nick"' in relay.feed(b'\xef\xbb\xbfdata: {"model": "m"}\n\n')


# -- plain answers -------------------------------------------------------------------------------


@pytest.mark.parametrize("cut", [0, 1, 40, -1])
@pytest.mark.parametrize("version", [b"HTTP/1.1", b"HTTP/1.0"])
async def test_H14_a_document_cut_by_the_close_is_a_failure(
    house: House, cut: int, version: bytes
) -> None:
    """An engine that dies closes its sockets in good order, as one that has finished."""
    house.engine(framing="close", die_at=cut)
    await house.start()
    wire = await house.wire()
    request = post_bytes(PATH, {"model": "m", "messages": []})
    await wire.send(request.replace(b"HTTP/1.1", version, 1))
    answer = await wire.answer()
    assert (answer.status, answer.code) == (502, "upstream_failed")
    assert (await house.row())["status"] == "error"


@pytest.mark.parametrize("how", [{}, {"framing": "chunked"}, {"gzip": True}])
@pytest.mark.parametrize("ask", [{}, {"model": "short"}, {"stream": True}])
async def test_A07_an_empty_answer_is_none(
    house: House, how: dict[str, Any], ask: dict[str, Any]
) -> None:
    """It looked like a success, was billed, and an SDK's stream ended without a word."""
    house.engine(plain=True, raw="", **how)
    await house.start()
    pool = house.core.fleet.pools["e0"]
    answer = await house.ask(**ask)
    assert (answer.status, answer.code) == (502, "upstream_failed")
    row = await house.row()
    assert (row["status"], row.get("prompt_tokens")) == ("error", None)
    assert house.core.stats.upstream_failures == {("e0", "no_answer"): 1}
    assert not pool.breaker.spotless
    assert pool.in_flight == 0
    wire = await house.wire()
    for _ in range(2):  # an empty text may be what was said
        await wire.chat(fake={"kind": "text/plain"}, **ask)
        assert (await wire.answer()).status == 200


@pytest.mark.parametrize("raw", ['{"a": {}}\n', ' [{"logprob": -Infinity}]', "null", "7"])
async def test_a_whole_document_that_the_close_ends_passes(house: House, raw: str) -> None:
    house.engine(framing="close", raw=raw, byte_gap=0.001)
    await house.start()
    assert (await house.ask()).body == raw.encode()
    assert (await house.row())["status"] == "ok"


@pytest.mark.parametrize("framing", ["length", "chunked"])
@pytest.mark.parametrize("reason", ["abort", "stop"])
async def test_a_plain_answer_that_its_engine_aborted_is_partial(
    house: House, framing: str, reason: str
) -> None:
    text = json.dumps({"finish_reason": "abort"}) if reason == "stop" else "half of"
    choice = {"index": 0, "message": {"content": text}, "finish_reason": reason}
    body = {"choices": [choice], "usage": {"prompt_tokens": 7, "completion_tokens": 3}}
    house.engine(body=body, framing=framing)
    await house.start()
    assert (await house.ask()).json == body
    row = await house.row()
    told = ("ok", None) if reason == "stop" else ("partial", "engine_aborted")
    assert (row["status"], row.get("error_code")) == told
    assert (row["prompt_tokens"], row["completion_tokens"]) == (7, 3)


# -- what is counted -----------------------------------------------------------------------------


@pytest.mark.parametrize("how", [{"status": 400}, {"status": 503}, {"error_first": {"error": "x"}}])
async def test_an_error_has_no_time_to_first_token(house: House, how: dict[str, Any]) -> None:
    """Errors are quick: counted as tokens they make an engine that fails look fast."""
    house.engine(**how)
    await house.start()
    assert (await house.ask(stream=True)).status >= 400
    assert "ttft_ms" not in await house.row()
    assert house.core.stats.models["m"].ttft.count == 0


@pytest.mark.parametrize("status", [301, 302, 307, 308])
async def test_a_redirect_is_no_answer_and_sends_no_client_away(house: House, status: int) -> None:
    house.engine(status=status, headers="location: https://elsewhere/\r\n", body=None)
    await house.start()
    answer = await house.ask()
    assert (answer.status, answer.json["error"]["code"]) == (502, "upstream_failed")
    assert f"redirects (status {status})" in answer.json["error"]["message"]
    assert "location" not in answer.headers
    row = await house.row()
    assert (row["status"], row["http_status"]) == ("error", 502)
    assert "prompt_tokens" not in row
    assert not house.core.fleet.pools["e0"].breaker.spotless


async def test_not_modified_is_no_answer_that_anybody_pays_for(house: House) -> None:
    house.engine(status=304, body=None)
    await house.start()
    wire = await house.wire()
    await wire.chat()
    assert (await wire.answer(head_only=True)).status == 304
    row = await house.row()
    assert (row["status"], row["error_code"]) == ("error", "upstream_304")
    assert "prompt_tokens" not in row


async def test_an_engine_that_would_speak_another_protocol_speaks_no_http(house: House) -> None:
    house.engine(status=101, headers="upgrade: h2c\r\nconnection: upgrade\r\n")
    await house.start()
    assert (await house.ask()).status == 502
    assert house.core.stats.upstream_failures == {("e0", "not_http"): 1}


# -- plain answers cut short ---------------------------------------------------------------------


@pytest.mark.parametrize("framing", ["length", "chunked"])
@pytest.mark.parametrize("die", ["rst", "fin"])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/audio/speech"])
async def test_H14_a_cut_plain_answer_is_an_abort(
    house: House, framing: str, die: str, path: str
) -> None:
    how = {"kind": "audio/mpeg", "raw": "x" * 80} if "audio" in path else {"raw": "x" * 2000}
    die_at = 40 if "audio" in path else SHORT_BYTES + 40
    house.engine(framing=framing, die_at=die_at, die=die, first_delay=0.05, **how)
    await house.start()
    wire = await house.wire()
    await wire.post(path, {"model": "m", "input": "x", "messages": []})
    with pytest.raises(ShortAnswer) as short:
        await wire.answer()
    assert len(short.value.body) <= die_at
    assert await wire.closed()  # nothing more may come over it
    row = await house.row()
    assert row["status"] in ("partial", "error")
    await until(house.idle)


@pytest.mark.parametrize("framing", ["length", "chunked"])
@pytest.mark.parametrize("die", ["rst", "fin"])
async def test_H14_a_plain_answer_cut_before_its_head_went_out_is_an_error(
    house: House, framing: str, die: str
) -> None:
    house.engine(framing=framing, die_at=40, die=die, first_delay=0.05)
    house.engine(framing=framing, die_at=40, die=die, first_delay=0.05)
    await house.start()
    answer = await house.ask()
    assert (answer.status, answer.json["error"]["code"]) == (502, "upstream_failed")
    assert sum(len(engine.chats()) for engine in house.engines) == 1, "A14: never made again"
    row = await house.row()
    assert (row["status"], row["http_status"]) == ("error", 502)
    await until(house.idle)


def test_A35_blanks_before_a_plain_answer_go_at_once() -> None:
    """Engines send them so that no proxy cuts a long silence."""
    wish = Wish("m", b"r", False, False, False, CHAT, None, None)
    kind = b"application/json"
    relay = open_relay(Head(200, [(b"content-type", kind)], 40, kind), wish, Limits())
    assert relay.feed(b"\n").endswith(b"\r\n\r\n\n")
    assert relay.feed(b'{"choices"') == b'{"choices"'
    other = open_relay(Head(200, [(b"content-type", kind)], 40, kind), wish, Limits())
    assert other.feed(b'{"choices"') == b"", "it may be an error yet"
