"""Streams and plain answers pass byte for byte, except what the contract says."""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING, Any

import openai
import orjson
import pytest
import trio

from controller.router import reactor
from controller.router.config import Timeouts
from tests.router.wire import Wire, chat_body, post_bytes, until

if TYPE_CHECKING:
    from tests.router.conftest import House

USAGE = '{"prompt_tokens": 7, "completion_tokens": 3, "total_tokens": 10}'


async def direct(house: House, **fields: Any) -> bytes:
    """The body that the engine itself gives."""
    wire = await Wire.open(house.engines[0].port)
    await wire.send(post_bytes("/v1/chat/completions", chat_body(**fields)))
    answer = await wire.answer()
    wire.close()
    return answer.body


async def test_A10_bytes_cut_anywhere_arrive_whole(house: House) -> None:
    house.engine(text="漢字🙂", byte_gap=0.0005, framing="close", tokens=2)
    await house.start()
    fields = {"stream": True, "stream_options": {"include_usage": True}}
    answer = await house.ask(**fields)
    assert answer.body == await direct(house, **fields)
    row = await house.row()
    assert (row["prompt_tokens"], row["completion_tokens"], row["cached_tokens"]) == (7, 2, 2)
    assert row["ttft_ms"] > 0


@pytest.mark.parametrize("line_end", ["\n", "\r\n", "\r"])
@pytest.mark.parametrize("prefix", ["data: ", "data:"])
@pytest.mark.parametrize("byte_gap", [None, 0.0])
async def test_A11_every_line_end_is_understood(
    house: House, line_end: str, prefix: str, byte_gap: float | None
) -> None:
    extra = f": a comment{line_end}{line_end}event: x{line_end}id: 1{line_end}{line_end}"
    house.engine(line_end=line_end, prefix=prefix, byte_gap=byte_gap, extra=extra)
    await house.start()
    fields = {"stream": True, "stream_options": {"include_usage": True}}
    answer = await house.ask(**fields)
    assert answer.body == await direct(house, **fields)
    row = await house.row()
    assert (row["status"], row["completion_tokens"]) == ("ok", 3)


@pytest.mark.interpreted
async def test_pieces_of_streams_are_counted_for_the_pause(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reactor pauses after many of them; here after each."""
    pauses: list[float] = []
    monkeypatch.setattr(reactor, "PIECES_TO_GATHER", 1)
    monkeypatch.setattr(reactor, "sleep", pauses.append)
    house.engine(tokens=5, gap=0.01)
    await house.start()
    await house.ask()
    assert not pauses
    await house.ask(stream=True)
    assert set(pauses) == {reactor.PAUSE_S}


async def test_A11_a_last_event_without_blank_line_counts(house: House) -> None:
    raw = f'data: {{"choices": [], "usage": {USAGE}}}\n\ndata: [DONE]'
    house.engine(raw=raw)
    await house.start()
    answer = await house.ask(stream=True, stream_options={"include_usage": True})
    assert answer.body == raw.encode()
    row = await house.row()
    assert (row["status"], row["completion_tokens"]) == ("ok", 3)


async def test_A11_an_endless_event_is_a_clean_error(house: House) -> None:
    engine = house.engine(raw="data: " + "x" * 32 * 1024 * 1024)
    await house.start()
    answer = await house.ask(stream=True)
    assert (answer.status, answer.code) == (502, "upstream_failed")
    await until(house.idle)
    record = engine.records[0]
    await until(lambda: record.closed)  # it was cut in the middle: the rest was never read
    assert not record.answered


@pytest.mark.parametrize(
    ("options", "shown"),
    [(None, False), ({"include_usage": False}, False), ({"include_usage": True}, True)],
)
@pytest.mark.parametrize("unasked", [False, True])
async def test_A23_usage_is_shown_only_to_who_asked(
    house: House, options: Any, shown: bool, unasked: bool
) -> None:
    house.engine(usage_always=unasked)
    await house.start()
    fields = {"stream_options": options} if options is not None else {}
    answer = await house.ask(stream=True, **fields)
    *pieces, done = [orjson.loads(event) for event in answer.events[:-1]] + answer.events[-1:]
    assert done == "[DONE]"
    assert [bool(piece["choices"]) for piece in pieces] == [True] * 3 + [False] * shown
    assert [piece for piece in pieces if piece.get("usage")] == pieces[3:]
    assert (await house.row())["completion_tokens"] == 3
    assert house.engines[0].records[0].document["stream_options"]["include_usage"] is True


async def test_a_plain_answer_is_untouched_and_counted(house: House) -> None:
    await house.start()
    answer = await house.ask()
    assert answer.body == await direct(house)
    assert answer.headers["content-length"] == str(len(answer.body))
    row = await house.row()
    assert (row["status"], row["prompt_tokens"], row["completion_tokens"]) == ("ok", 7, 3)
    assert "ttft_ms" not in row
    assert row["key_id"] == "k"


async def test_B07_what_no_engine_tells_is_estimated_and_says_so(house: House) -> None:
    house.engine(usage=False, tokens=400, text="word")
    await house.start()
    sent = len(json.dumps(chat_body()))
    await house.ask()
    await house.ask(stream=True)
    plain, streamed = house.rows
    for row in (plain, streamed):
        assert (row["status"], row["estimated"]) == ("ok", True)
        assert 350 <= row["completion_tokens"] <= 400
        assert sent // 4 <= row["prompt_tokens"] <= sent // 4 + 10
    assert house.core.snapshot()["estimated"] == [["m", 2]]


@pytest.mark.parametrize("stream", [False, True])
async def test_A17_an_alias_is_swapped_and_restored(house: House, stream: bool) -> None:
    await house.start()
    wire = await house.wire()
    for _ in range(2):  # the length is right: the connection serves again
        await wire.post("/v1/chat/completions", chat_body(model="short", stream=stream, extra=1))
        answer = await wire.answer()
        documents = (
            [orjson.loads(event) for event in answer.events[:-1]] if stream else [answer.json]
        )
        assert {document["model"] for document in documents} == {"short"}
    sent = house.engines[0].records[0].document
    assert (sent["model"], sent["extra"]) == ("m", 1)
    row = await house.row()
    assert (row["model_asked"], row["model"]) == ("short", "m")


async def test_gzip_from_an_engine_passes_with_its_header(house: House) -> None:
    house.engine(gzip=True)
    await house.start()
    answer = await house.ask()
    assert answer.headers["content-encoding"] == "gzip"
    assert answer.body[:2] == b"\x1f\x8b"
    assert house.engines[0].records[0].headers["accept-encoding"] == "identity"


@pytest.mark.parametrize("framing", ["length", "chunked", "close"])
async def test_every_framing_of_an_engine_is_understood(house: House, framing: str) -> None:
    house.engine(framing=framing)
    await house.start()
    wire = await house.wire()
    for _ in range(3):
        await wire.chat()
        assert (await wire.answer()).json["choices"][0]["message"]["content"] == "toktoktok"


async def test_a_slow_reader_stops_the_engine_being_read(house: House) -> None:
    house.engine(text="x" * 50_000, tokens=600)  # 30 MB
    await house.start()
    wire = await house.wire()
    await wire.chat(stream=True)
    await wire.until(b"xxxx")
    client = await until(lambda: next(iter(house.core.clients)))
    await until(lambda: client.pending > 256 * 1024)
    peak = 0
    for _ in range(100):
        await trio.sleep(0.005)
        peak = max(peak, client.pending)
    assert 0 < peak < 700_000
    assert not house.engines[0].records[0].answered
    rest = await wire.answer_from_chunks()
    assert rest.endswith(b"data: [DONE]\n\n")
    assert (await house.row())["status"] == "ok"


async def test_a_reader_that_never_reads_is_cut(house: House) -> None:
    house.engine(text="x" * 50_000, tokens=600)
    await house.start(timeouts=Timeouts(client_write_s=0.3))
    wire = await house.wire()
    await wire.chat(stream=True)
    row = await house.row()
    assert row["status"] == "client_closed"
    await until(house.idle)


async def test_an_http10_client_gets_plain_framing(house: House) -> None:
    house.engine(framing="chunked")
    await house.start()
    wire = await house.wire()
    data = post_bytes("/v1/chat/completions", chat_body(stream=True))
    await wire.send(data.replace(b"HTTP/1.1", b"HTTP/1.0", 1))
    answer = await wire.answer()
    assert "transfer-encoding" not in answer.headers
    assert answer.events[-1] == "[DONE]"
    assert len(answer.events) == 4


async def test_the_openai_sdk_streams_and_asks(house: House) -> None:
    await house.start()

    def use() -> tuple[str, str, int, list[str], list[float]]:
        url = f"http://127.0.0.1:{house.port}/v1"
        messages: Any = [{"role": "user", "content": "x"}]
        with openai.OpenAI(base_url=url, api_key="sk-test", max_retries=0) as client:
            with client.chat.completions.create(
                model="m", messages=messages, stream=True
            ) as stream:
                text = "".join(chunk.choices[0].delta.content or "" for chunk in stream)
            plain = client.chat.completions.create(model="short", messages=messages)
            models = [model.id for model in client.models.list()]
            vectors = client.embeddings.create(model="m", input="x", encoding_format="float")
            with pytest.raises(openai.NotFoundError):
                client.chat.completions.create(model="nope", messages=messages)
            with pytest.raises(openai.AuthenticationError):
                client.with_options(api_key="bad").models.list()
        assert plain.usage is not None
        return (
            text, plain.model, plain.usage.completion_tokens, models, vectors.data[0].embedding
        )  # fmt: skip

    text, model, tokens, models, vector = await trio.to_thread.run_sync(use)
    assert text == "tok0 tok1 tok2 "
    assert (model, tokens) == ("short", 3)
    assert models == ["m", "other", "short"]
    assert vector == [0.5, -0.25]


async def test_completions_pass(house: House) -> None:
    await house.start()
    wire = await house.wire()
    await wire.post("/v1/completions", {"model": "m", "prompt": "x"})
    assert (await wire.answer()).status == 200
    assert (await house.row())["endpoint"] == "completions"
    assert json.loads(house.engines[0].records[0].body) == {"model": "m", "prompt": "x"}


async def test_the_first_token_after_a_comment_of_ours_is_the_first_token(house: House) -> None:
    """The comment had made the stream one that is under way: the time told was that of its end."""
    engine = house.engine(tokens=5, hold_after=[0, 1])
    await house.start(timeouts=Timeouts(comment_s=0.1))
    wire = await house.wire()
    began = time.monotonic()
    await wire.chat(stream=True)
    await wire.until(b": keep-alive")
    engine.release()
    await wire.until(b"tok0")
    first_s = time.monotonic() - began
    await wire.until(b": keep-alive")
    engine.release()
    await wire.until(b"[DONE]")
    row = await house.row()
    assert 90 <= row["ttft_ms"] <= first_s * 1000
    assert row["total_ms"] - row["ttft_ms"] >= 90  # as long as a comment takes
    assert row["upstream_id"] == "c-1"
    stats = house.core.stats.models["m"]
    assert stats.ttft.count == stats.itl.count == 1
    pace_ms = (row["total_ms"] - row["ttft_ms"]) / 4
    assert stats.itl.total * 1000 == pytest.approx(pace_ms, abs=0.01)


@pytest.mark.parametrize("how", [{"status": 400}, {"error_first": {"error": {"code": 400}}}])
async def test_an_error_is_no_first_token(house: House, how: dict[str, Any]) -> None:
    """Engines refuse in no time: counted, they made a slow model look fast."""
    await house.start()
    assert (await house.ask(stream=True, fake=how)).status == 400
    assert "ttft_ms" not in await house.row()
    assert house.core.stats.models["m"].ttft.count == 0
