"""What clients may send, and what they get when it is refused."""

from __future__ import annotations

import gzip
import json
import tracemalloc
import zlib
from typing import TYPE_CHECKING, Any

import openai
import pytest
import trio
import zstandard

from controller.router.body import inflate
from controller.router.config import Limits
from controller.router.errors import ApiError
from tests.router.wire import chat_body, post_bytes, until

if TYPE_CHECKING:
    from tests.router.conftest import House

PATH = "/v1/chat/completions"
MIB = 1024 * 1024


async def test_paths_methods_and_lists(house: House) -> None:
    await house.start()
    wire = await house.wire()
    models = await wire.get("/v1/models")
    assert [entry["id"] for entry in models.json["data"]] == ["m", "other", "short"]
    assert (await wire.get("/v1/models/short")).json["parent"] == "m"
    for entry in models.json["data"]:
        openai.types.Model.model_validate(entry)  # all that its API promises, `created` too
    assert (await wire.get("/v1/models/none")).code == "model_not_found"
    assert (await wire.get("/healthz", key=None)).status == 200
    assert (await wire.get("/readyz", key=None)).json == {"status": "ready"}
    assert ((await wire.get("/v1/nope")).status, (await wire.get("/v1/nope")).code) == (
        404, "unknown_url",
    )  # fmt: skip
    wrong = await wire.get(PATH)
    assert (wrong.status, wrong.headers["allow"]) == (405, "POST")
    assert set(wrong.json["error"]) == {"message", "type", "param", "code"}
    await wire.send(b"HEAD /healthz HTTP/1.1\r\nhost: t\r\n\r\n")
    assert (await wire.answer(head_only=True)).status == 200
    await wire.chat()
    assert (await wire.answer()).status == 200
    assert len(house.rows) == 1


async def test_a_key_sees_and_uses_its_models_only(house: House) -> None:
    await house.start()
    wire = await house.wire()
    models = await wire.get("/v1/models", key="sk-narrow")
    assert [entry["id"] for entry in models.json["data"]] == ["other"]
    await wire.post(PATH, chat_body(), key="sk-narrow")
    refused = await wire.answer()
    await wire.post(PATH, chat_body(model="absent"), key="sk-narrow")
    absent = await wire.answer()
    assert (refused.status, refused.code) == (404, "model_not_found")
    assert refused.body.replace(b"'m'", b"'absent'") == absent.body
    await wire.post(PATH, chat_body(model="other"), key="sk-narrow")
    assert (await wire.answer()).status == 200


async def test_B19_all_bad_keys_get_one_answer(house: House) -> None:
    await house.start()
    wire = await house.wire()
    bodies = set()
    for key in (None, "", "wrong", "x" * 10_240, "schlüssel", "sk-test2", "' or 1=1 --"):
        await wire.post(PATH, chat_body(), key=key)
        answer = await wire.answer()
        assert answer.status == 401
        assert key is None or len(key) < 3 or key not in answer.body.decode()
        bodies.add(answer.body)
    await wire.send(post_bytes(PATH, chat_body(), key=None, authorization="Basic sk-test"))
    bodies.add((await wire.answer()).body)
    assert len(bodies) == 1
    assert house.rows == []


async def test_A34_a_known_model_without_replica_is_503_with_retry_after(house: House) -> None:
    house.engine()
    await house.start(aliases=())
    house.core.fleet.swap(house.core.fleet.table, {})
    answer = await house.ask()
    assert (answer.status, answer.code) == (503, "no_ready_replica")
    assert answer.headers["retry-after"].isdigit()


@pytest.mark.parametrize(
    ("body", "code"),
    [(b"{", "invalid_json"), (b"[]", "invalid_json"), (b"{}", "missing_model"),
     (b'{"model": 1}', "missing_model"), (b"", "invalid_json"), (b"\xff", "invalid_json")],
)  # fmt: skip
async def test_bad_bodies(house: House, body: bytes, code: str) -> None:
    await house.start()
    wire = await house.wire()
    await wire.post(PATH, body)
    answer = await wire.answer()
    assert (answer.status, answer.code) == (400, code)
    await wire.chat()
    assert (await wire.answer()).status == 200


async def test_A28_nothing_of_ours_and_no_secret_reaches_the_engine(house: House) -> None:
    await house.start()
    wire = await house.wire()
    await wire.post(
        PATH,
        chat_body(unknown={"kept": [1, None]}),
        cookie="a=b",
        x_llmgw_profile="latency",
        x_llmgw_wait="9",
        x_llmgw_priority="batch",
        x_llmgw_fallback="none",
        x_llmgw_explain="1",
        openai_organization="tenant",
        openai_project="tenant",
        proxy_authorization="Basic secret",
        x_api_key="secret",
        x_custom="kept",
        connection="keep-alive, x-hop",
        x_hop="dropped",
        accept_encoding="zstd, br, gzip",
    )
    assert (await wire.answer()).status == 200
    record = house.engines[0].records[0]
    assert set(record.headers) == {
        "host", "content-type", "x-custom", "accept-encoding", "x-request-id", "content-length",
    }  # fmt: skip
    assert record.headers["accept-encoding"] == "identity"
    assert record.document == chat_body(unknown={"kept": [1, None]})
    assert record.body == json.dumps(chat_body(unknown={"kept": [1, None]})).encode()


async def test_A28_of_a_stream_under_an_alias_only_name_and_usage_change(house: House) -> None:
    await house.start()
    answer = await house.ask(model="short", stream=True, metadata={"tag": "mine"}, user="u")
    assert answer.status == 200
    sent = chat_body(stream=True, metadata={"tag": "mine"}, user="u")
    usage = {"stream_options": {"include_usage": True}}
    assert house.engines[0].records[0].document == {**sent, **usage}


async def test_request_ids_are_echoed_made_and_passed_on(house: House) -> None:
    await house.start()
    wire = await house.wire()
    await wire.post(PATH, chat_body(), x_request_id="mine-1")
    assert (await wire.answer()).headers["x-request-id"] == "mine-1"
    assert house.engines[0].records[0].headers["x-request-id"] == "mine-1"
    for bad in ("a" * 200, "with space", "<script>"):
        await wire.post(PATH, b"{", x_request_id=bad)
        answer = await wire.answer()
        assert answer.headers["x-request-id"].startswith("req-")
    ids = [row["id"] for row in house.rows]
    assert len(set(ids)) == 4
    assert house.rows[0]["request_id"] == "mine-1"


@pytest.mark.slow
@pytest.mark.parametrize(("size_mib", "status"), [(8, 200), (17, 200), (40, 413)])
async def test_A31_normal_image_prompts_pass(house: House, size_mib: int, status: int) -> None:
    await house.start()
    wire = await house.wire()
    body = json.dumps(chat_body(image="x" * (size_mib * MIB))).encode()

    async def send() -> None:
        try:
            await wire.send(post_bytes(PATH, body))
        except trio.BrokenResourceError:
            assert status == 413  # refused while it was still being sent

    async with trio.open_nursery() as nursery:
        nursery.start_soon(send)
        answer = await wire.answer()
        assert answer.status == status
        nursery.cancel_scope.cancel()
    if status == 413:
        assert answer.code == "request_too_large"
        assert house.core.stats.refusals == {"request_too_large": 1}
        assert (await house.row())["http_status"] == 413
    else:
        assert house.engines[0].records[0].body == body


def chunked(*pieces: bytes) -> bytes:
    return b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in pieces)


CHUNKED_HEAD = (
    f"POST {PATH} HTTP/1.1\r\nhost: t\r\nauthorization: Bearer sk-test\r\n"
    "transfer-encoding: chunked\r\n\r\n"
).encode()


async def test_A32_the_limit_holds_for_chunked_bodies_too(house: House) -> None:
    await house.start(limits=Limits(body_bytes=100_000))
    wire = await house.wire()
    await wire.send(CHUNKED_HEAD + chunked(*[b"x" * 9_000] * 12))
    answer = await wire.answer()
    assert (answer.status, answer.code) == (413, "request_too_large")
    assert await wire.closed()


@pytest.mark.parametrize(("over", "status"), [(0, 200), (1, 413)])
async def test_A32_at_the_limit_and_one_above(house: House, over: int, status: int) -> None:
    body = json.dumps(chat_body()).encode()
    await house.start(limits=Limits(body_bytes=len(body) - over))
    wire = await house.wire()
    await wire.post(PATH, body)
    assert (await wire.answer()).status == status
    wire = await house.wire()
    await wire.send(CHUNKED_HEAD + chunked(body[:10], body[10:]) + b"0\r\n\r\n")
    assert (await wire.answer()).status == status


async def test_A32_more_bytes_than_announced_are_another_request(house: House) -> None:
    await house.start()
    wire = await house.wire()
    data = post_bytes(PATH, b'{"model": ')
    await wire.send(data + b"x" * 100_000)
    assert (await wire.answer()).status == 400
    assert (await wire.answer()).status in (400, 431)
    assert await wire.closed()


@pytest.mark.parametrize(
    ("coding", "data"),
    [("gzip", gzip.compress), ("zstd", zstandard.compress), ("deflate", zlib.compress)],
)
async def test_A20_compressed_bodies_are_understood(house: House, coding: str, data: Any) -> None:
    await house.start(limits=Limits(inflated_bytes=100_000))
    wire = await house.wire()
    body = json.dumps(chat_body()).encode()
    await wire.post(PATH, data(body), content_encoding=coding)
    assert (await wire.answer()).status == 200
    assert house.engines[0].records[0].body == body
    assert "content-encoding" not in house.engines[0].records[0].headers
    if coding != "deflate":  # the others may come in several parts
        await wire.post(PATH, data(body[:9]) + data(body[9:]), content_encoding=coding)
        assert (await wire.answer()).status == 200
        assert house.engines[0].records[1].body == body
    await wire.post(PATH, data(b" " * 5_000_000), content_encoding=coding)
    bomb = await wire.answer()
    assert (bomb.status, bomb.code) == (413, "request_too_large")
    for corrupt in (data(body)[:-6], b"rubbish", data(body) + b"rubbish", data(b"") * 2000):
        await wire.post(PATH, corrupt, content_encoding=coding)
        assert (await wire.answer()).status == 400


@pytest.mark.parametrize("coding", [b"gzip", b"zstd", b"deflate"])
def test_A20_a_bomb_costs_no_more_memory_than_the_limit(coding: bytes) -> None:
    machine: Any = {
        b"gzip": zlib.compressobj(9, zlib.DEFLATED, 31),
        b"zstd": zstandard.ZstdCompressor().compressobj(),
        b"deflate": zlib.compressobj(9),
    }[coding]
    piece = b" " * (8 * MIB)
    bomb = b"".join([machine.compress(piece) for _ in range(8)] + [machine.flush()])
    assert len(bomb) < MIB  # of 64 MiB
    tracemalloc.start()
    try:
        answer = inflate(coding, bomb, MIB)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert isinstance(answer, ApiError)
    assert answer.status == 413
    assert peak < 4 * MIB


async def test_A20_an_unknown_coding_is_415(house: House) -> None:
    await house.start()
    wire = await house.wire()
    await wire.post(PATH, b"x", content_encoding="br")
    answer = await wire.answer()
    assert (answer.status, answer.code) == (415, "unsupported_encoding")


def expecting(body_length: int, key: str = "sk-test") -> bytes:
    return (
        f"POST {PATH} HTTP/1.1\r\nhost: t\r\nauthorization: Bearer {key}\r\n"
        f"expect: 100-continue\r\ncontent-length: {body_length}\r\n\r\n"
    ).encode()


async def test_A38_a_good_request_is_invited(house: House) -> None:
    await house.start()
    wire = await house.wire()
    body = json.dumps(chat_body(padding="x" * 5 * MIB)).encode()
    await wire.send(expecting(len(body)))
    assert (await wire.head())[0] == 100
    await wire.send(body)
    assert (await wire.answer()).status == 200
    assert "expect" not in house.engines[0].records[0].headers


@pytest.mark.parametrize(
    ("length", "key", "status"), [(1000, "bad", 401), (40 * MIB, "sk-test", 413)]
)
async def test_A38_a_bad_one_gets_its_status_at_once(
    house: House, length: int, key: str, status: int
) -> None:
    await house.start()
    wire = await house.wire()
    await wire.send(expecting(length, key))
    assert (await wire.answer()).status == status
    assert await wire.closed()


async def test_A38_an_http10_client_is_not_sent_a_100(house: House) -> None:
    await house.start()
    wire = await house.wire()
    body = json.dumps(chat_body()).encode()
    await wire.send(expecting(len(body)).replace(b"HTTP/1.1", b"HTTP/1.0", 1))
    await until(lambda: any(client._examined for client in house.core.clients))
    await wire.send(body)
    assert (await wire.answer()).status == 200


async def test_requests_in_one_piece_are_answered_in_order(house: House) -> None:
    await house.start()
    wire = await house.wire()
    numbers = range(20)
    await wire.send(b"".join(post_bytes(PATH, chat_body(), x_request_id=str(n)) for n in numbers))
    for n in numbers:
        assert (await wire.answer()).headers["x-request-id"] == str(n)
    await wire.send(
        b"GET /healthz HTTP/1.1\r\nhost: t\r\nconnection: close\r\n\r\nGET / HTTP/1.1\r\n\r\n"
    )
    answer = await wire.answer()
    assert (answer.status, answer.headers["connection"]) == (200, "close")
    assert await wire.closed()


@pytest.mark.parametrize(
    "head",
    [b"GET / HTTP/1.1\r\nbad header\r\n\r\n", b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
     b"POST / HTTP/1.1\r\ncontent-length: 3\r\ntransfer-encoding: chunked\r\n\r\n",
     b"POST / HTTP/1.1\r\ntransfer-encoding: gzip\r\n\r\n", b"CONNECT a:1 HTTP/1.1\r\n\r\n"],
)  # fmt: skip
async def test_what_is_no_http_is_refused_and_closed(house: House, head: bytes) -> None:
    await house.start()
    wire = await house.wire()
    await wire.send(head)
    assert (await wire.answer()).status in (400, 405, 501)
    assert await wire.closed()


async def test_endless_and_too_many_headers_are_431(house: House) -> None:
    await house.start()
    for data in (b"a: b\r\n" * 200 + b"\r\n", b"x: " + b"y" * 100_000, b"a: b\r\n" * 20_000):
        wire = await house.wire()
        await wire.send(b"GET / HTTP/1.1\r\nhost: t\r\n" + data)
        assert (await wire.answer()).status == 431
        assert await wire.closed()


async def test_an_offer_to_upgrade_is_ignored(house: House) -> None:
    await house.start()
    wire = await house.wire()
    for _ in range(2):
        await wire.post(
            PATH, chat_body(), connection="Upgrade, HTTP2-Settings", upgrade="h2c",
            http2_settings="AAEA",
        )  # fmt: skip
        assert (await wire.answer()).status == 200
    assert "upgrade" not in house.engines[0].records[0].headers
    assert house.engines[0].records[0].document == chat_body()


async def test_a_request_that_never_ends_is_408(house: House, quick: Any) -> None:
    await house.start(timeouts=quick)
    wire = await house.wire()
    await wire.send(expecting(100)[:-10])
    assert (await wire.answer()).status == 408
    assert await wire.closed()
    await until(lambda: not house.core.clients)
