"""Answers whose form is not what was hoped for: compressed, embeddings as numbers, odd choices."""

from __future__ import annotations

import base64
import gzip
import json
import struct
from typing import TYPE_CHECKING, Any

import httpx
import openai
import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st

from controller.router.config import Limits
from controller.router.dialect import CHAT
from controller.router.plain import open_relay
from controller.router.relay import Head, Wish
from controller.router.unzip import Unzip
from controller.router.vectors import BASE64, FLOAT, MOST_BYTES, form_of, in_form
from tests.router.wire import PATIENCE_S

if TYPE_CHECKING:
    from tests.router.conftest import House

USAGE = {"prompt_tokens": 7, "completion_tokens": 3, "total_tokens": 10}
LONG = "an/upstream-name-much-longer-than-the-alias"


def stream_text(model: str = "m") -> bytes:
    chunks: list[dict[str, Any]] = [
        {"model": model, "choices": [{"index": 0, "delta": {"content": "héllo"}}]},
        {"model": model, "choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]},
        {"model": model, "choices": [], "usage": USAGE},
    ]
    events = [json.dumps(chunk, ensure_ascii=False) for chunk in chunks] + ["[DONE]"]
    return "".join(f"data: {event}\n\n" for event in events).encode()


PLAIN = json.dumps({"model": LONG, "choices": [{"message": {"content": "é" * 50}}], "usage": USAGE})


# -- compressed ----------------------------------------------------------------------------------


@pytest.mark.parametrize("framing", ["length", "chunked"])
async def test_A16_a_compressed_plain_answer_passes_and_is_counted(
    house: House, framing: str
) -> None:
    house.engine(raw=PLAIN, gzip=True, framing=framing)
    await house.start()
    answer = await house.ask()
    assert answer.headers["content-encoding"] == "gzip"
    assert gzip.decompress(answer.body) == PLAIN.encode()
    row = await house.row()
    assert (row["prompt_tokens"], row["completion_tokens"]) == (7, 3)
    assert "estimated" not in row


@pytest.mark.parametrize(
    "body", [b"no gzip", gzip.compress(b" " * 5_000_000), gzip.compress(b"") * 1000]
)
def test_A16_an_answer_that_we_cannot_read_is_not_kept(body: bytes) -> None:
    """Nobody can say whether it is an error, and it may be of any size."""
    wish = Wish("m", b"r", True, False, False, CHAT, None, None)
    headers = [(b"content-encoding", b"gzip")]
    relay = open_relay(Head(200, headers, None, b"application/json", b"gzip"), wish, Limits())
    first = relay.feed(body)
    assert first.endswith(body + b"\r\n")
    assert relay.feed(body) == first[first.index(b"\r\n\r\n") + 4 :]


async def test_A17_a_compressed_answer_under_an_alias_is_sent_plain(house: House) -> None:
    house.engine(raw=PLAIN, gzip=True)
    await house.start()
    wire = await house.wire()
    for _ in range(2):  # the length is right: the connection serves again
        await wire.chat(model="short")
        answer = await wire.answer()
        assert "content-encoding" not in answer.headers
        assert answer.body == PLAIN.replace(LONG, "short").encode()
        assert answer.headers["content-length"] == str(len(answer.body))


async def test_A17_a_compressed_answer_that_is_cut_is_no_answer(house: House) -> None:
    cut = gzip.compress(PLAIN.encode())[:-9]
    house.engine(raw=cut, headers="content-encoding: gzip\r\n")
    await house.start()
    answer = await house.ask(model="short")
    assert (answer.status, answer.code) == (502, "upstream_failed")


@pytest.mark.parametrize("model", ["m", "short"])
async def test_A16_a_compressed_stream_is_read_and_sent_plain(house: House, model: str) -> None:
    house.engine(raw=stream_text(), gzip=True, framing="chunked", byte_gap=0)
    await house.start()
    answer = await house.ask(stream=True, model=model)
    assert "content-encoding" not in answer.headers
    kept = stream_text(model).split(b"\n\n")
    assert answer.body == b"\n\n".join([*kept[:2], *kept[3:]])  # without the usage we asked for
    row = await house.row()
    assert (row["status"], row["prompt_tokens"], row["completion_tokens"]) == ("ok", 7, 3)


@pytest.mark.parametrize("kind", ["Application/JSON", "APPLICATION/JSON; Charset=UTF-8"])
async def test_a_media_type_has_no_case(house: House, kind: str) -> None:
    """RFC 9110, 8.3.1. Its usage was not read, nor the name that the client knows restored."""
    house.engine()
    await house.start()
    answer = await house.ask(model="short", fake={"kind": kind})
    assert answer.headers["content-type"] == kind
    assert answer.json["model"] == "short"
    row = await house.row()
    assert (row["prompt_tokens"], row["completion_tokens"]) == (7, 3)


@pytest.mark.parametrize("coding", ["identity", "none ", "Identity", "GZIP "])
async def test_A16_a_stream_that_says_how_it_is_not_compressed_is_a_stream(
    house: House, coding: str
) -> None:
    """Servers say so to keep proxies from compressing what must not wait. Words have no case."""
    squeezed = coding == "GZIP "
    raw = gzip.compress(stream_text()) if squeezed else stream_text()
    house.engine(raw=raw, headers=f"content-encoding: {coding}\r\n")
    await house.start()
    answer = await house.ask(stream=True, model="short")
    assert answer.headers.get("content-encoding") == (None if squeezed else coding)
    kept = stream_text("short").split(b"\n\n")
    assert answer.body == b"\n\n".join([*kept[:2], *kept[3:]])
    row = await house.row()
    assert (row["prompt_tokens"], row["completion_tokens"]) == (7, 3)


async def test_A16_real_clients_read_compressed_answers(house: House) -> None:
    engine = house.engine(raw=PLAIN, gzip=True)
    await house.start()
    base = f"http://127.0.0.1:{house.port}/v1"
    headers = {"authorization": "Bearer sk-test"}
    async with httpx.AsyncClient(headers=headers, timeout=PATIENCE_S) as client:
        document = {"model": "m", "messages": []}
        got = await client.post(f"{base}/chat/completions", json=document)
        assert got.json()["usage"] == USAGE
    engine.default["raw"] = stream_text()

    def streamed() -> list[str | None]:
        with (
            openai.OpenAI(base_url=base, api_key="sk-test", max_retries=0) as sdk,
            sdk.chat.completions.create(model="m", messages=[], stream=True) as chunks,
        ):
            return [chunk.choices[0].delta.content for chunk in chunks]

    assert (await trio.to_thread.run_sync(streamed))[0] == "héllo"


async def test_A19_engines_are_asked_for_plain_answers(house: House) -> None:
    await house.start()
    await house.ask(headers={"accept_encoding": "zstd, br, gzip"})
    assert house.engines[0].records[0].headers["accept-encoding"] == "identity"
    assert (await house.row())["prompt_tokens"] == 7


@pytest.mark.parametrize("raw", [b"no gzip at all", gzip.compress(b"x" * 50_000_000)])
def test_what_cannot_be_unzipped_is_nothing(raw: bytes) -> None:
    unzip = Unzip(b"gzip")
    assert unzip.feed(raw) == b""
    assert unzip.failed
    assert unzip.feed(raw) == b""


def test_a_text_zipped_in_several_parts_is_read_to_its_end() -> None:
    unzip, data = Unzip(b"gzip"), gzip.compress(b"ab") + gzip.compress(b"cd")
    assert b"".join(unzip.feed(data[at : at + 7]) for at in range(0, len(data), 7)) == b"abcd"
    assert unzip.whole
    assert unzip.feed(data[:9]) == b""
    assert not unzip.whole
    many = Unzip(b"gzip")
    assert many.feed(gzip.compress(b"") * 2000) == b""
    assert many.failed


# -- embeddings ----------------------------------------------------------------------------------

NUMBERS = [[0.5, -0.25, 3.0], [1e-3, 0.0, -7.5]]


def embeddings(vectors: list[Any]) -> str:
    data = [{"object": "embedding", "index": n, "embedding": v} for n, v in enumerate(vectors)]
    usage = {"prompt_tokens": 12, "total_tokens": 12}
    return json.dumps({"object": "list", "data": data, "model": "m", "usage": usage})


def packed(numbers: list[float]) -> str:
    return base64.b64encode(struct.pack(f"<{len(numbers)}f", *numbers)).decode()


@pytest.mark.parametrize("engine_packs", [False, True])
async def test_A26_the_sdk_gets_its_vectors(house: House, engine_packs: bool) -> None:
    vectors = [packed(vector) for vector in NUMBERS] if engine_packs else NUMBERS
    house.engine(raw=embeddings(vectors))
    await house.start()
    base = f"http://127.0.0.1:{house.port}/v1"
    async with openai.AsyncOpenAI(base_url=base, api_key="sk-test", max_retries=0) as sdk:
        for more in (
            {}, {"encoding_format": "base64"}, {"encoding_format": "float"}, {"dimensions": 3},
        ):  # fmt: skip
            for model in ("m", "short"):
                got = await sdk.embeddings.create(model=model, input=["a", "b"], **more)  # type: ignore[arg-type]
                found = [entry.embedding for entry in got.data]
                if more.get("encoding_format") == "base64":
                    assert found == [packed(vector) for vector in NUMBERS]
                else:
                    assert [pytest.approx(vector) for vector in NUMBERS] == found
                assert got.model == model
    assert {row["prompt_tokens"] for row in house.rows} == {12}


async def test_A26_numbers_asked_for_pass_untouched(house: House) -> None:
    house.engine(raw=embeddings(NUMBERS))
    await house.start()
    wire = await house.wire()
    for more in ({}, {"encoding_format": "float"}):
        await wire.post("/v1/embeddings", {"model": "m", "input": "a", **more})
        assert (await wire.answer()).body == embeddings(NUMBERS).encode()


async def test_A26_numbers_of_an_engine_that_only_packs(house: House) -> None:
    house.engine(raw=embeddings([packed(vector) for vector in NUMBERS]))
    await house.start()
    wire = await house.wire()
    for more in ({}, {"encoding_format": "float"}, {"encoding_format": None}):
        await wire.post("/v1/embeddings", {"model": "m", "input": ["a", "b"], **more})
        answer = (await wire.answer()).json
        assert [e["embedding"] for e in answer["data"]] == [pytest.approx(v) for v in NUMBERS]
        assert [e["index"] for e in answer["data"]] == [0, 1]
        assert answer["usage"] == {"prompt_tokens": 12, "total_tokens": 12}
    await wire.post("/v1/embeddings", {"model": "m", "input": "a", "encoding_format": "bytes"})
    assert (await wire.answer()).body == house.engines[0].default["raw"].encode()


async def test_A26_what_an_engine_refuses_is_a_clear_400(house: House) -> None:
    told = {"error": {"message": "encoding_format: only float", "code": 400}}
    house.engine(status=400, body=told)
    await house.start()
    wire = await house.wire()
    await wire.post("/v1/embeddings", {"model": "m", "input": "a", "encoding_format": "base64"})
    answer = await wire.answer()
    assert (answer.status, answer.json) == (400, told)


async def test_A26_a_very_large_answer_passes_as_it_is(house: House) -> None:
    raw = embeddings([[0.123456789] * 400_000])
    assert len(raw) > MOST_BYTES
    house.engine(raw=raw)
    await house.start()
    wire = await house.wire()
    await wire.post("/v1/embeddings", {"model": "m", "input": "a", "encoding_format": "base64"})
    assert (await wire.answer()).body == raw.encode()


@pytest.mark.parametrize(
    "body",
    [b"", b"{}", b'{"embedding": [1', b'{"data": 5, "embedding": [1]}', b'{"embedding": [1]}',
     b'{"data": [{"embedding": [1, "x"]}]}', b'{"data": [{"embedding": [1e300]}]}'],
)  # fmt: skip
def test_answers_that_are_no_embeddings_stay(body: bytes) -> None:
    assert in_form(body, BASE64) == body


@pytest.mark.parametrize("text", ["AAAA", "AAAAAA", "AAAA AAAA", "é", "====", "!!!!"])
def test_what_is_no_packed_vector_stays(text: str) -> None:
    body = json.dumps({"data": [{"embedding": text}]}).encode()
    assert in_form(body, FLOAT) == body


@given(st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False)))
def test_A26_a_vector_is_the_same_in_both_forms(vector: list[float]) -> None:
    body = json.dumps({"data": [{"embedding": vector}]}).encode()
    text = in_form(body, BASE64)
    assert json.loads(text)["data"][0]["embedding"] == packed(vector)
    assert json.loads(in_form(text, FLOAT))["data"][0]["embedding"] == vector


@pytest.mark.parametrize(
    ("asked", "form"),
    [("base64", BASE64), ("float", FLOAT), (None, FLOAT), ("bytes", None), (["base64"], None)],
)
def test_the_form_is_what_the_request_says(asked: Any, form: str | None) -> None:
    assert form_of({"encoding_format": asked}) == form


# -- choices and usage ---------------------------------------------------------------------------


@pytest.mark.parametrize("model", ["m", "short"])
async def test_A25_choices_keep_their_index_and_all_their_fields(house: House, model: str) -> None:
    chunks: list[dict[str, Any]] = [
        {"model": "m", "choices": [{"index": index, "delta": {"content": "x", "refusal": None},
         "logprobs": {"content": [{"token": "x", "logprob": -0.5, "top_logprobs": []}]}}]}
        for index in (1, 0, 1, 0)
    ]  # fmt: skip
    chunks += [
        {"model": "m", "choices": [{"index": n, "delta": {}, "finish_reason": "stop"}]}
        for n in (1, 0)
    ]
    chunks.append({"model": "m", "choices": [], "usage": USAGE})
    events = "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks) + "data: [DONE]\n\n"
    house.engine(raw=events)
    await house.start()
    answer = await house.ask(
        stream=True, n=2, logprobs=True, model=model, stream_options={"include_usage": True}
    )
    assert answer.body.decode() == events.replace('"model": "m"', f'"model": "{model}"')
    row = await house.row()
    assert (row["prompt_tokens"], row["completion_tokens"]) == (7, 3)


@pytest.mark.parametrize("options", [None, {"include_usage": False}, {"include_usage": True}])
async def test_A23_usage_in_the_last_piece_stays_for_all(
    house: House, options: dict[str, bool] | None
) -> None:
    last = {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}], "usage": USAGE}
    raw = stream_text().split(b"\n\n")[0] + f"\n\ndata: {json.dumps(last)}\n\n".encode()
    house.engine(raw=raw)
    await house.start()
    answer = await house.ask(stream=True, **({"stream_options": options} if options else {}))
    assert answer.body == raw
    assert (await house.row())["completion_tokens"] == 3


async def test_A22_null_usage_takes_the_short_way(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    from controller.router.sse import Scanner

    chunk = b'data: {"choices":[{"delta":{"content":"x"}}],"usage": null}\n\n'

    def never(*_: object) -> bytes:
        raise AssertionError("such an event was split and parsed")

    monkeypatch.setattr(Scanner, "_read", never)
    renamed = Scanner(10_000, model=b'"short"')
    for _ in range(5000):
        assert renamed.feed(chunk) == chunk
    scanner = Scanner(10_000)
    monkeypatch.setattr(Scanner, "_split", never)
    for _ in range(5000):
        assert scanner.feed(chunk) is chunk
    assert scanner.made() == 4999
