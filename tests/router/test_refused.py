"""What is told of requests that are refused early: to the client, in the log, in the rows."""

from __future__ import annotations

import json
from hashlib import sha256
from typing import TYPE_CHECKING, Any

import pytest
import trio

from controller.router.clock import monotonic
from controller.router.config import Limits
from controller.router.http1 import RequestReader
from controller.router.key_reader import KeyReader
from tests.router.wire import chat_body, chunk_of, post_bytes, until

if TYPE_CHECKING:
    from pathlib import Path

    from controller.router.config import Timeouts
    from tests.router.conftest import House

CHAT = "/v1/chat/completions"
TOLD = "endpoint", "key", "status", "error_code", "bytes_in"


async def logged(path: Path, number: int) -> list[tuple[Any, ...]]:
    """The first lines of the access log, as far as these tests look at them."""
    await until(lambda: path.exists() and path.read_bytes().count(b"\n") >= number)
    lines = [json.loads(text) for text in path.read_text().splitlines()]
    return [tuple(line[name] for name in TOLD) for line in lines]


@pytest.mark.parametrize("expects", [False, True])
async def test_A38_whose_request_was_refused_and_where_is_told(
    house: House, tmp_path: Path, *, expects: bool
) -> None:
    """With `expects` the body never comes, so it is refused by its head."""
    path = tmp_path / "log"
    await house.start(access_log=str(path))
    head, _, body = post_bytes(CHAT, chat_body(), key=None).partition(b"\r\n\r\n")
    good = b"\r\nauthorization: Bearer sk-test"
    for more in (
        b"",
        good + b"\r\ncontent-encoding: br",
        good + b"\r\nx-llmgw-priority: urgent",
        good + b"\r\nx-llmgw-wait: soon",
    ):
        wire = await house.wire()
        last = b"\r\nexpect: 100-continue\r\n\r\n" if expects else b"\r\n\r\n" + body
        await wire.send(head + more + last)
        assert (await wire.answer()).status >= 400
    size = 0 if expects else len(body)
    assert await logged(path, 4) == [
        ("chat.completions", None, 401, "invalid_api_key", size),
        ("chat.completions", "k", 415, "unsupported_encoding", size),
        ("chat.completions", "k", 400, "invalid_priority", size),
        ("chat.completions", "k", 400, "invalid_wait", size),
    ]
    told = [row["error_code"] for row in house.rows]
    assert told == ["unsupported_encoding", "invalid_priority", "invalid_wait"]


async def test_a_head_that_is_never_whole_is_refused_in_its_endpoints_form(house: House) -> None:
    await house.start(cors=frozenset(("https://a.example",)))
    for flaw in (
        b"a b: c\r\n\r\n",
        b"content-length: 5\r\ncontent-length: 5\r\n\r\n",
        b"x: " + b"y" * 70_000,
    ):
        wire = await house.wire()
        head = b"POST /v1/messages HTTP/1.1\r\nhost: t\r\nx-request-id: mine\r\n"
        # The parser tells of a header when it has seen the next one.
        await wire.send(head + b"origin: https://a.example\r\naccept: */*\r\n" + flaw)
        answer = await wire.answer()
        assert (answer.status, answer.json["type"]) == (400 + 31 * (len(flaw) > 99), "error")
        assert answer.headers["x-request-id"] == answer.headers["request-id"] == "mine"
        assert answer.headers["access-control-allow-origin"] == "https://a.example"
        assert await wire.closed()


async def test_what_came_of_a_body_that_is_refused_is_counted(house: House, tmp_path: Path) -> None:
    path = tmp_path / "log"
    await house.start(access_log=str(path), limits=Limits(body_bytes=1000))
    head = post_bytes(CHAT, b"").replace(b"content-length: 0", b"transfer-encoding: chunked")
    for number, (body, status) in enumerate((
        (chunk_of(b"x" * 600) + chunk_of(b"y" * 500), 413),
        (chunk_of(b"x" * 30) + b"no chunk", 400),
    )):  # fmt: skip
        wire = await house.wire()
        await wire.send(head + body)
        assert (await wire.answer()).status == status
        found = (await logged(path, number + 1))[-1]
        assert found == ("chat.completions", "k", status, found[3], (1100, 30)[number])


@pytest.mark.parametrize("first", [70_300, 1, 8192, 40_000])
def test_a_long_head_is_refused_however_it_is_cut(first: int) -> None:
    data = b"GET / HTTP/1.1\r\nhost: t\r\n" + b"x: " + b"y" * 70_000 + b"\r\n\r\n"
    reader = RequestReader(Limits())
    reader.feed(data[:first])
    reader.feed(data[first:])
    assert reader.fault is not None
    assert reader.fault.status == 431
    assert not reader.ready


class Slow:
    """A stand-in for Postgres that knows no key and answers when it is let."""

    def __init__(self) -> None:
        self.asked = False
        self.answers = trio.Event()

    async def fetch(self, *_: object) -> list[Any]:
        self.asked = True
        await self.answers.wait()
        return []

    async def fetchval(self, *_: object) -> Any:
        await self.answers.wait()


async def test_a_fault_while_the_key_is_looked_up_is_told_once(
    house: House, tmp_path: Path
) -> None:
    path, slow = tmp_path / "log", Slow()
    await house.start(access_log=str(path))
    core = house.core
    core.keys.lazy = True
    core.key_reader = KeyReader(core, slow, {"keys_by_hash": ""})
    core.key_reader._begun.set()
    house.nursery.start_soon(core.key_reader.run)
    wire = await house.wire()
    head = post_bytes(CHAT, b"", key="sk-nobody")
    await wire.send(head.replace(b"content-length: 0", b"transfer-encoding: chunked"))
    await until(lambda: slow.asked)
    await wire.send(b"no chunk\r\n")
    [client] = core.clients
    await until(lambda: client._reader.fault)
    slow.answers.set()
    assert (await wire.answer()).code == "invalid_api_key"
    assert await wire.closed()
    assert core.keys.cache.is_unknown(sha256(b"sk-nobody").digest(), monotonic())
    assert core.stats.refusals == {"invalid_api_key": 1}
    assert [line[:4] for line in await logged(path, 1)] == [
        ("chat.completions", None, 401, "invalid_api_key")
    ]


async def test_who_was_too_slow_is_told_once_though_the_rest_comes_while_its_key_is_looked_up(
    house: House, quick: Timeouts
) -> None:
    slow = Slow()
    await house.start(timeouts=quick)
    core = house.core
    core.keys.lazy = True
    core.key_reader = KeyReader(core, slow, {"keys_by_hash": ""})
    core.key_reader._begun.set()
    house.nursery.start_soon(core.key_reader.run)
    wire = await house.wire()
    await wire.send(post_bytes(CHAT, b"{}", key="sk-nobody")[:-1])
    await until(lambda: core.exchanges)  # it was not complete in time
    await wire.send(b"}")
    [client] = core.clients
    await until(lambda: client._hushed)  # it is here
    slow.answers.set()
    assert (await wire.answer()).code == "invalid_api_key"
    assert await wire.closed()
    assert core.stats.refusals == {"invalid_api_key": 1}


async def test_anthropics_clients_find_the_id_where_they_look(house: House) -> None:
    """Its SDK knows `request-id` only; an engine's own would be of another request."""
    house.engine(headers="request-id: theirs\r\n")
    await house.start()
    wire = await house.wire()
    for fields, headers, status in (
        ({}, {}, 200),
        ({}, {"x_llmgw_explain": "1"}, 200),  # not by the short way
        ({"stream": True}, {}, 200),
        ({"model": "absent"}, {}, 404),
    ):
        await wire.post("/v1/messages", chat_body(**fields), x_request_id="mine", **headers)
        answer = await wire.answer()
        assert answer.status == status
        assert answer.headers["request-id"] == answer.headers["x-request-id"] == "mine"
    await wire.chat()
    assert "request-id" not in (await wire.answer()).headers
    for key, status in (("sk-test", 404), ("bad", 401)):
        asked = f"authorization: Bearer {key}\r\nanthropic-version: 2023-06-01\r\n\r\n"
        await wire.send(f"GET /v1/models/absent HTTP/1.1\r\nhost: t\r\n{asked}".encode())
        told = await wire.answer()
        assert (told.status, told.json["type"]) == (status, "error")
        assert told.headers["request-id"]
