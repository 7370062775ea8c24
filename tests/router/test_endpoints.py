"""Every endpoint of the client port: what reaches the engine, and the shape of our own errors."""

from __future__ import annotations

import gzip
import json
import time
from typing import TYPE_CHECKING, Any

import pytest

from controller.router.body import MOST_MARKS
from controller.router.config import Limits, StaticEndpoint, Timeouts
from controller.router.errors import ApiError
from controller.router.routes import find
from tests.router.wire import Answer, chat_body, until

if TYPE_CHECKING:
    from tests.router.conftest import House

JSON_PATHS = [
    ("/v1/chat/completions", "chat.completions"), ("/v1/completions", "completions"),
    ("/v1/embeddings", "embeddings"), ("/v1/responses", "responses"),
    ("/v1/messages", "messages"), ("/v1/messages/count_tokens", "messages.count_tokens"),
    ("/v1/rerank", "rerank"), ("/v2/rerank", "rerank"), ("/rerank", "rerank"),
    ("/v1/score", "score"), ("/score", "score"), ("/v1/audio/speech", "audio.speech"),
    ("/v1/images/generations", "images.generations"), ("/tokenize", "tokenize"),
    ("/detokenize", "detokenize"),
]  # fmt: skip


async def post(house: House, path: str, document: Any, **headers: Any) -> Answer:
    wire = await house.wire()
    await wire.post(path, document, **headers)
    answer = await wire.answer()
    wire.close()
    return answer


async def test_every_endpoint_passes_its_bytes(house: House) -> None:
    house.engine(raw='{"odd" : [1.0]}')
    await house.start()
    for number, (path, name) in enumerate(JSON_PATHS):
        body = b'{"model": "m",  "odd": [1.0, "\\u00e9"]}'
        answer = await post(house, path + "?beta=true", body)
        assert (answer.status, answer.body) == (200, b'{"odd" : [1.0]}')
        record = house.engines[0].records[number]
        assert (record.path, record.body) == (path + "?beta=true", body)
        assert (await house.row(number))["endpoint"] == name


async def test_tokenize_under_v1_is_asked_where_engines_have_it(house: House) -> None:
    await house.start()
    for path in ("/v1/tokenize?a=1", "/v1/detokenize"):
        assert (await post(house, path, {"model": "m", "prompt": "x"})).status == 200
    paths = [record.path for record in house.engines[0].records]
    assert paths == ["/tokenize?a=1", "/detokenize"]


@pytest.mark.parametrize(
    "path", ["/v1/embeddings", "/v1/rerank", "/v1/score", "/v1/messages/count_tokens", "/tokenize",
             "/detokenize", "/v1/audio/speech"],
)  # fmt: skip
async def test_stream_is_no_word_where_no_events_come(house: House, path: str) -> None:
    """While it waits it gets no head of ours, which would be the wrong one: its answer would be
    told as an error, and count against its replica."""
    engine = house.engine(hold=True, plain=True)
    at = StaticEndpoint("e0", engine.url, ("m",), depth=1)
    await house.start(endpoints=(at,), timeouts=Timeouts(comment_s=0.05))
    first, waits = await house.wire(), await house.wire()
    await first.chat()
    await until(lambda: engine.held() == 1)
    await waits.post(path, {"model": "m", "stream": True})
    await until(lambda: house.core.admission.count == 1)
    house.core.deadlines.sweep(time.monotonic() + 1)
    engine.release(2)
    for wire in (first, waits):
        answer = await wire.answer()
        assert (answer.status, answer.headers["content-type"]) == (200, "application/json")
    assert [row["status"] for row in house.rows] == ["ok", "ok"]


async def test_binary_answers_pass_untouched(house: House) -> None:
    sound = bytes(range(256)) * 300 + b'"usage": {"prompt_tokens": 9}'
    house.engine(raw=sound, kind="audio/mpeg", framing="chunked")
    await house.start()
    answer = await post(house, "/v1/audio/speech", {"model": "m", "input": "hi", "voice": "x"})
    assert (answer.headers["content-type"], answer.body) == ("audio/mpeg", sound)
    assert "prompt_tokens" not in await house.row()


async def test_usage_is_asked_for_only_where_engines_know_it(house: House) -> None:
    await house.start()
    for path, _ in JSON_PATHS:
        await post(house, path, {"model": "m", "stream": True})
    asked = [r.path for r in house.engines[0].records if "stream_options" in r.document]
    assert asked == ["/v1/chat/completions", "/v1/completions"]


# -- keys and errors -----------------------------------------------------------------------------


async def test_a_key_comes_in_either_header(house: House) -> None:
    await house.start()
    for headers in (
        {"x_api_key": "sk-test"}, {"x_api_key": "no", "authorization": "Bearer sk-test"},
        {"authorization": "Bearer sk-test", "x_api_key": "no"},
    ):  # fmt: skip
        answer = await post(house, "/v1/messages", chat_body(), key=None, **headers)
        assert answer.status == 200
    bad = await post(
        house, "/v1/messages", chat_body(), key=None, authorization="Bearer no", x_api_key="sk-test"
    )
    assert bad.status == 401
    for record in house.engines[0].records:
        assert not {"x-api-key", "authorization"} & set(record.headers)


async def test_errors_have_anthropics_shape_at_messages_only(house: House) -> None:
    house.engine()
    await house.start(limits=Limits(body_bytes=10_000))
    big = {"model": "m", "x": "x" * 20_000}
    cases: list[tuple[Any, dict[str, Any], int, str]] = [
        (chat_body(), {"key": "wrong"}, 401, "authentication_error"),
        (chat_body(model="absent"), {}, 404, "not_found_error"),
        (b"{", {}, 400, "invalid_request_error"),
        (big, {}, 413, "request_too_large"),
        (chat_body(), {"content_encoding": "br"}, 415, "invalid_request_error"),
    ]
    for body, headers, status, kind in cases:
        told = await post(house, "/v1/messages", body, **headers)
        assert (told.status, told.json["type"]) == (status, "error")
        assert set(told.json) == {"type", "error"}
        assert told.json["error"]["type"] == kind
        assert set(told.json["error"]) == {"type", "message"}
        for path in ("/v1/chat/completions", "/v1/responses"):
            other = await post(house, path, body, **headers)
            assert other.status == status
            assert set(other.json["error"]) == {"message", "type", "param", "code"}
    missing = await post(house, "/v1/messages/batches", chat_body())
    assert (missing.status, missing.json["error"]["type"]) == (404, "not_found_error")
    house.core.fleet.swap(house.core.fleet.table, {})
    none = await post(house, "/v1/messages", chat_body())
    assert (none.status, none.json["error"]["type"]) == (503, "overloaded_error")
    assert none.headers["retry-after"].isdigit()


async def test_an_unknown_model_learns_nothing(house: House) -> None:
    await house.start()
    for path, _ in JSON_PATHS:
        answer = await post(house, path, {"model": "absent"})
        assert answer.status == 404
        for secret in ("other", "short", house.engines[0].url, str(house.engines[0].port)):
            assert secret not in answer.body.decode()


# -- model lists ---------------------------------------------------------------------------------

NAMES = ("org/name:tag", "größe/模型", "a b%2f", "plain")


@pytest.mark.parametrize("name", NAMES)
async def test_a_model_is_found_by_any_spelling_of_its_name(house: House, name: str) -> None:
    engine = house.engine()
    await house.start(endpoints=(StaticEndpoint("e", engine.url, NAMES),))
    spellings = {"".join(f"%{byte:02X}" for byte in name.encode())}
    if name.isascii() and "%" not in name:  # other bytes are no HTTP: llhttp refuses them
        spellings |= {name, name.replace("/", "%2f")}
    wire = await house.wire()
    for spelling in spellings:
        answer = await wire.get(f"/v1/models/{spelling}")
        assert (answer.status, answer.json["id"]) == (200, name)
    chat = await house.ask(model=name)
    assert chat.json["model"] == name


async def test_models_in_anthropics_form(house: House) -> None:
    await house.start()
    wire = await house.wire()
    head = "HTTP/1.1\r\nhost: t\r\nx-api-key: sk-test\r\nanthropic-version: 2023-06-01\r\n\r\n"
    await wire.send(f"GET /v1/models {head}".encode())
    page = (await wire.answer()).json
    assert [entry["id"] for entry in page["data"]] == ["m", "other", "short"]
    assert (page["first_id"], page["last_id"], page["has_more"]) == ("m", "short", False)
    await wire.send(f"GET /v1/models/short {head}".encode())
    assert (await wire.answer()).json == {
        "type": "model", "id": "short", "display_name": "short",
        "created_at": "1970-01-01T00:00:00Z",
    }  # fmt: skip


def test_a_name_that_is_no_utf8_is_no_crash() -> None:
    route = find(b"GET", b"/v1/models/\xff%ff")
    assert not isinstance(route, ApiError)
    assert route.argument == "\ufffd\ufffd"


# -- bodies --------------------------------------------------------------------------------------

DEEP = b'{"model":"m","a":' + b"[" * 100_000 + b"]" * 100_000 + b"}"
DEEPER = b"[" * 300 + b"]" * 300 + b"}"  # we can read it, but not write it again
BAD = [
    (DEEP, "invalid_json"), (b'{"model":"m","model":"m","a":' + DEEPER, "invalid_json"),
    (b'{"model":"m","a":"\xff"}', "invalid_json"), (b'{"model":"m\x00"}', "invalid_json"),
    (b'{"model":"m","a":"\\ud800"}', "invalid_json"), (b'{"model":"m","a":NaN}', "invalid_json"),
    (b'\xef\xbb\xbf{"model":"m"}', "invalid_json"),
    ('{"model":"m"}'.encode("utf-16"), "invalid_json"),
    (b'{"model":"m"}{}', "invalid_json"), (b'"m"', "invalid_json"), (b"null", "invalid_json"),
    (b'{"model":["m"]}', "missing_model"), (b'{"model":null}', "missing_model"),
    (b'{"model":""}', "missing_model"), (b'{"model":{"a":1}}', "missing_model"),
    (b'{"model":"m","Model":"other"}', "ambiguous_model"),
    (b'{"MODEL":"other","model":"m"}', "ambiguous_model"),
    (b'{"model":"m","stream":"true"}', "invalid_type"),
    (b'{"model":"m","stream":1}', "invalid_type"),
    (b'{"model":"m","stream":true,"stream_options":[]}', "invalid_type"),
    (b'{"model":"m\\u0000"}', "model_not_found"),
]  # fmt: skip


@pytest.mark.parametrize(("body", "code"), BAD, ids=range(len(BAD)))
async def test_bad_json_is_refused_in_bounded_work(house: House, body: bytes, code: str) -> None:
    await house.start()
    answer = await post(house, "/v1/chat/completions", body)
    assert (answer.status, answer.code) == (404 if code == "model_not_found" else 400, code)
    assert house.engines[0].records == []
    assert (await house.ask()).status == 200


@pytest.mark.parametrize("value", [b"[],", b'{"":{"":[]}},'])
async def test_a_body_of_too_many_values_is_not_parsed(house: House, value: bytes) -> None:
    """A few of them, zipped to 30 KB each, had stopped all others for seconds."""
    await house.start()
    body = b'{"model":"m","a":[' + value * (MOST_MARKS // 2) + b"0]}"
    answer = await post(house, "/v1/chat/completions", gzip.compress(body), content_encoding="gzip")
    assert (answer.status, answer.code) == (413, "request_too_large")
    fewer = b'{"model":"m","a":[' + b"0," * (MOST_MARKS - 9) + b"0]}"
    assert (await post(house, "/v1/chat/completions", fewer)).status == 200


@pytest.mark.parametrize("words", [b"", b"\\u0060\\u007F\\u007b"])  # as .NET spells them
async def test_a_deep_body_passes_where_nothing_of_it_must_change(
    house: House, words: bytes
) -> None:
    await house.start()
    body = b'{"model":"m","b":"' + words + b'","a":' + DEEPER
    assert (await post(house, "/v1/chat/completions", body)).status == 200
    assert house.engines[0].records[0].body == body


@pytest.mark.parametrize(
    "body",
    [b'{"model":"other","model":"m"}', b'{"mod\\u0065l":"other","model":"m"}',
     b'{"model":"other","mod\\u0065l":"m"}', b'{"stream":true,"model":"m","stream":false}',
     b'{"a":{"model":1,"model":2},"model":"m"}'],
)  # fmt: skip
async def test_of_two_equal_keys_the_engine_gets_the_one_we_read(house: House, body: bytes) -> None:
    await house.start()
    assert (await post(house, "/v1/chat/completions", body)).status == 200
    sent = house.engines[0].records[0].body
    pairs = json.loads(sent, object_pairs_hook=lambda found: found)
    assert [value for key, value in pairs if key == "model"] == ["m"]
    assert len({key for key, _ in pairs}) == len(pairs)
    assert json.loads(sent) == json.loads(body)


async def test_nested_keys_of_the_same_name_change_nothing(house: House) -> None:
    await house.start()
    body = b'{ "model":"m", "tools":[{"model": {"stream": 1.0, "model": "x"}}], "stream": false}'
    assert (await post(house, "/v1/chat/completions", body)).status == 200
    assert house.engines[0].records[0].body == body
