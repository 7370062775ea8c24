"""Many clients at once that send anything anyhow: each gets its answers, and counts once."""

from __future__ import annotations

import gzip
import json
import ssl
from collections import Counter
from random import Random
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
import trio

from tests.router.conftest import NEVER_OPEN
from tests.router.test_tls import certificate
from tests.router.wire import Answer, Wire, chunk_of, until

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from pathlib import Path

    from controller.router.core import Core
    from tests.fake_engine import FakeEngine
    from tests.router.conftest import House
    from tests.router.tenants import Routers

pytestmark = pytest.mark.slow

CLIENTS = 80
REFUSES = {"error": {"message": "no", "type": "x", "code": "y", "param": None}}
WHOLE = ("plain", "slow", "gzip", "stream", "events", "long")
OTHERS = (
    "models", "head", "options", "bad", "nobody", "unknown", "refused", "silent", "dies", "told",
)  # fmt: skip
TOLD = ("outcome", "status", "error_code", "prompt_tokens", "completion_tokens")
"""What the log says of a request as its row does."""


class Want(NamedTuple):
    """One request of a client's, and what becomes of it."""

    kind: str
    data: bytes
    status: int
    words: str = ""  # the whole answer's
    bodiless: bool = False
    ends: bool = False  # its connection may end behind it


class Client:
    """Requests in one piece or many, without waiting for answers; some leave in the middle."""

    def __init__(self, random: Random, number: int, key: str) -> None:
        self._random = random
        self._key = key
        self.leaves = random.random() < 0.3
        count = random.randrange(1, 9)
        self.wants = [self._want(f"w{number}-{n} ") for n in range(count)]

    def _want(self, word: str) -> Want:
        random = self._random
        kind = random.choice((*WHOLE, *WHOLE, *OTHERS))
        if kind == "models":
            return Want(kind, self._head("GET", "/v1/models") + b"\r\n", 200)
        if kind == "head":
            return Want(kind, self._head("HEAD", "/v1/models") + b"\r\n", 200, bodiless=True)
        if kind == "options":
            return Want(kind, self._head("OPTIONS", "/v1/embeddings") + b"\r\n", 204, bodiless=True)
        if kind == "bad":
            return Want(kind, self._post(b'{"model": "m", '), 400)
        if kind == "unknown":
            return Want(kind, self._post(b'{"model": "nothing"}'), 404)
        if kind == "nobody":
            return Want(kind, self._post(b'{"model": "m"}', key=f"nobody-{word}"), 401, ends=True)
        return self._chat(kind, word)

    def _chat(self, kind: str, word: str) -> Want:
        random = self._random
        tokens = random.randrange(1, 12)
        fake: dict[str, Any] = {"tokens": tokens, "text": word}
        status, ends = 200, False
        if kind == "slow":
            fake |= {"delay": random.random() / 20, "byte_gap": 0.000_2}
        elif kind == "gzip":
            fake |= {"gzip": True}
        elif kind == "events":
            fake |= {"gap": 0.002, "line_end": random.choice(["\n", "\r\n", "\r"])}
            fake |= {"framing": random.choice(["chunked", "close"])}
        elif kind == "long":
            word *= 5000
            fake["text"] = word
        elif kind == "refused":
            status, fake = 400, {"status": 400, "body": REFUSES}
        elif kind == "silent":
            status, fake = 502, {"close": "always"}
        elif kind == "told":
            status, fake = 400, {"error_first": {"error": {"message": "no", "code": 400}}}
        elif kind == "dies":
            ends = True
            fake |= {"tokens": tokens + 3, "die_at": 2, "die": random.choice(["rst", "fin"])}
        streams = kind in ("stream", "events", "dies", "told")
        said = "hi " * random.choice([1, 1, 3000])
        body = {"model": "m", "messages": [{"content": said}], "fake": fake, "stream": streams}
        words = word * tokens if kind in WHOLE else ""
        return Want(kind, self._post(json.dumps(body).encode()), status, words, ends=ends)

    def _head(self, method: str, path: str, key: str = "") -> bytes:
        return f"{method} {path} HTTP/1.1\r\nhost: t\r\nx-api-key: {key or self._key}\r\n".encode()

    def _post(self, body: bytes, key: str = "") -> bytes:
        head, random = self._head("POST", "/v1/chat/completions", key), self._random
        if random.random() < 0.15:
            body, head = gzip.compress(body), head + b"content-encoding: gzip\r\n"
        if random.random() < 0.7:
            return head + b"content-length: %d\r\n\r\n" % len(body) + body
        cut = random.randrange(1, len(body))
        chunks = chunk_of(body[:cut]) + chunk_of(body[cut:]) + b"0\r\n\r\n"
        return head + b"transfer-encoding: chunked\r\n\r\n" + chunks

    async def talk(self, wire: Wire) -> None:
        """Send all, and look at each answer; or leave while that goes on."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._send, wire)
            if self.leaves:
                await trio.sleep(self._random.random() / 10)  # that is how it is: anywhere
                (wire.reset if self._random.random() < 0.5 else wire.close)()
            else:
                await self._hear(wire)
            nursery.cancel_scope.cancel()

    async def _send(self, wire: Wire) -> None:
        data = b"".join(want.data for want in self.wants)
        most = self._random.choice([len(data), len(data), 5000, 50 if len(data) < 9000 else 5000])
        try:
            while data:
                size = self._random.randrange(1, most + 1) if most < len(data) else len(data)
                piece, data = data[:size], data[size:]
                await wire.send(piece)
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            pass  # it was answered before all of it was there, or leaves

    async def _hear(self, wire: Wire) -> None:
        for want in self.wants:
            answer = await wire.answer(head_only=want.bodiless)
            where = (want.kind, answer, [one.kind for one in self.wants])
            # Where nothing was sent when its engine died, that is told by a status.
            assert answer.status in (want.status, 502 if want.kind == "dies" else 0), where
            assert not want.words or said(answer) == want.words, where
            if want.ends:
                return
            assert "connection" not in answer.headers, where


def said(answer: Answer) -> str:
    """The words of a whole answer, plain or streamed."""
    body = answer.body
    if answer.headers.get("content-encoding") == "gzip":
        body = gzip.decompress(body)
    if answer.headers["content-type"] == "application/json":
        return str(json.loads(body)["choices"][0]["message"]["content"])
    # Not `splitlines`, which knows more ends of lines.
    lines = body.decode().replace("\r\n", "\n").replace("\r", "\n").split("\n")
    events = [line[6:] for line in lines if line.startswith("data: ")]
    assert events.pop() == "[DONE]"
    choices = [choice for event in events for choice in json.loads(event)["choices"]]
    return "".join(choice["delta"].get("content") or "" for choice in choices)


async def crowd(seed: int, opened: Callable[[], Awaitable[Wire]], keys: list[str]) -> None:
    """All of them at once."""
    clients = [
        Client(Random(f"{seed} {number}"), number, keys[number % len(keys)])
        for number in range(CLIENTS)
    ]

    async def one(client: Client) -> None:
        wire = await opened()
        await client.talk(wire)
        wire.close()

    async with trio.open_nursery() as nursery:
        for client in clients:
            nursery.start_soon(one, client)


async def told(core: Core, log: Path) -> list[dict[str, Any]]:
    """The lines of all requests, once nothing runs any more; they are what was counted."""
    await until(lambda: not core.exchanges and not core.clients)
    counted = Counter[str]()
    for _, outcome, number in core.snapshot()["outcomes"]:
        counted[outcome] += number
    await until(lambda: log.exists() and log.read_text().count("\n") >= counted.total())
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    assert Counter(line["outcome"] for line in lines) == counted
    assert counted["ok"] > CLIENTS
    assert "internal_error" not in {line["error_code"] for line in lines}
    return lines


def alike(lines: list[dict[str, Any]], rows: list[tuple[Any, ...]]) -> None:
    """Each request of a key for an engine has one row, which says what its line says."""
    for_engines = [line for line in lines if line["key"] and line["endpoint"] != "models"]
    for_engines = [line for line in for_engines if line["endpoint"] != "other"]
    expected = [(line["request_id"], *(line[name] for name in TOLD)) for line in for_engines]
    assert sorted(rows, key=str) == sorted(expected, key=str)


@pytest.mark.parametrize("tls", [False, True], ids=["plain", "tls"])
async def test_H_each_gets_its_answers_in_order_and_one_row(
    house: House, tmp_path: Path, *, tls: bool
) -> None:
    log, more, opened = tmp_path / "log", {}, house.wire
    house.engine()
    house.engine()
    if tls:
        more = {"tls_cert": tmp_path / "cert.pem", "tls_key": tmp_path / "key.pem"}
        certificate(more["tls_cert"], more["tls_key"])
        trusts = ssl.create_default_context(cafile=str(more["tls_cert"]))

        async def opened() -> Wire:
            wire = await Wire.open(house.port)
            house.wires.append(wire)
            wire.stream = trio.SSLStream(wire.raw, trusts, server_hostname="127.0.0.1")
            return wire

    await house.start(access_log=log, breaker=NEVER_OPEN, **more)
    await crowd(7, opened, ["sk-test"])
    lines = await told(house.core, log)
    assert house.idle()
    names = ("request_id", "status", "http_status", *TOLD[2:])
    alike(lines, [tuple(row.get(name) for name in names) for row in house.rows])


async def test_H_the_same_where_keys_are_looked_up_and_have_budgets(
    routers: Routers, engine: FakeEngine, tmp_path: Path
) -> None:
    keys, log = [f"key{number:03}" for number in range(CLIENTS)], tmp_path / "log"
    routers.prepare(engine, *keys)
    for key in keys[::3]:
        routers.budget(key, 100_000_000)
    for key in keys[::4]:
        routers.limit(key, requests=10_000, parallel=50)
    await routers.start(access_log=log, breaker=NEVER_OPEN)
    await crowd(8, routers.open, keys)
    lines = await told(routers.running[0].core, log)
    await until(routers.written)
    columns = "request_id, status, http_status, error_code, prompt_tokens, completion_tokens"
    alike(lines, routers.execute(f"select {columns} from llmgw_core.usage_event"))
