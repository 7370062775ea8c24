"""`ops/bench path`: the router's own CPU for one request, without sockets and engines.

The kernel's part and the engines' are the same for every gateway; this is what our code adds, so it
can be compared between two revisions on a machine that has other things to do: the least of many
short rounds is told. A request comes in and goes to an engine's connection, its answer comes back,
and its usage row is rendered, as at work.
"""

from __future__ import annotations

import gc
import socket
import time
from dataclasses import dataclass
from hashlib import sha256
from typing import TYPE_CHECKING, Any, cast

import click
import orjson

from controller.router import pool
from controller.router.auth import Key
from controller.router.bounds import Bounds
from controller.router.client import ClientConnection
from controller.router.config import RouterConfig, StaticEndpoint
from controller.router.core import Core
from controller.router.reactor import IN, OUT
from controller.router.record import Ending, record
from controller.router.tokens import Tokens
from ops.benchmarks import processes

if TYPE_CHECKING:
    from collections.abc import Callable

    import trio

    from controller.router.connection import Connection
    from controller.router.reactor import Reactor
    from controller.router.upstream import UpstreamConnection

CLIENTS = 32
ROUNDS, PER_ROUND = 40, 10
FAR_S = 1e6
MODEL, SECRET = "m", "sk-bench"
HEAD = "POST /v1/chat/completions HTTP/1.1\r\nHost: llmgw:8080\r\nAuthorization: Bearer %s\r\n"
HEAD += "Content-Type: application/json\r\nUser-Agent: bench/1.0\r\nAccept: */*\r\n"


class Plug:
    """In the place of a socket: gives what was put in, takes everything."""

    family = socket.AF_INET
    _numbers = iter(range(1000, 10**9))

    def __init__(self) -> None:
        self.inbox = b""
        self._number = next(self._numbers)

    def fileno(self) -> int:
        return self._number

    def send(self, data: bytes) -> int:
        return len(data)

    def recv(self, _most: int) -> bytes:
        return self.inbox

    def getsockopt(self, *_: int) -> int:
        return 0

    def setblocking(self, _flag: bool) -> None: ...

    def setsockopt(self, *_: object) -> None: ...

    def close(self) -> None: ...


class NoReactor:
    """Nothing is waited for here."""

    pieces = 0

    def register(self, *_: object) -> None: ...

    modify = unregister = close_socket = call_soon = register

    def send_soon(self, sender: Connection) -> None:
        """Each turn is one event here."""
        sender.send_held()


@dataclass(frozen=True)
class Stage:
    """A router with clients and engines, of which only the sockets are not real."""

    core: Core
    clients: list[ClientConnection]

    def send(self, request: bytes) -> list[UpstreamConnection]:
        """Each client sends a request; the engines' connections that carry them."""
        for client in self.clients:
            cast("Plug", client.sock).inbox = request
            client.on_event(IN)
        pools = self.core.fleet.pools.values()
        found = [one for each in pools for one in each._open]  # noqa: SLF001
        return [one for one in found if one.owner is not None]

    def forget(self) -> None:
        """The rows so far are as good as written."""
        while self.core.usage.batch(1000):
            self.core.usage.written()


def make(limits: int) -> Stage:
    """`limits`: so many budgets and limits hold for the key."""
    ends = [
        StaticEndpoint(name, f"http://127.0.0.1:{n}", (MODEL,)) for n, name in ((1, "a"), (2, "b"))
    ]
    core = Core(RouterConfig(endpoints=tuple(ends), seed=1), cast("trio.Nursery", None))
    core.reactor.close()
    core.reactor = core.fleet.reactor = cast("Reactor", NoReactor())
    key = Key("key", org=1, team=2, chain=(1, 2))
    core.keys.fix({sha256(SECRET.encode()).digest(): key})
    core.keys.set_clock(time.time())
    core.tenancy.bounds = bounded(limits)
    table = core.statics.table()
    known = {
        r.endpoint: (socket.AF_INET, ("127.0.0.1", 1)) for m in table.models for r in m.replicas
    }
    core.fleet.swap(table, known)
    return Stage(core, [ClientConnection(core, cast("Any", Plug()), "::1") for _ in range(CLIENTS)])


def bounded(number: int) -> Bounds:
    """A budget, then limits, on the levels of the key in turn, with enough of everything here."""
    row = {"level": "team", "key_id": None, "gone": False, "micros": 10**12, "period": "day"}
    limit = {"requests_per_min": 10**9, "tokens_per_min": 10**9, "parallel": 10**6, "model": None}
    some = [row | limit | {"id": n, "scope_id": 1 + n % 2} for n in range(number)]
    bounds = Bounds()
    bounds.learn(some[:1], some[1:])
    for one in bounds.of(Key("key", chain=(1, 2))):
        allowance = bounds.allowance(one)
        allowance.amount, allowance.until = one.whole, time.monotonic() + FAR_S
    return bounds


def body(*, stream: bool) -> bytes:
    """A chat of 2 KiB."""
    turns = [{"role": "system", "content": "You are"}, {"role": "user", "content": "word " * 380}]
    more = {"stream_options": {"include_usage": True}} if stream else {}
    asked = {"model": MODEL, "messages": turns, "max_tokens": 64, "stream": stream} | more
    text = orjson.dumps(asked)
    return (HEAD % SECRET).encode() + b"Content-Length: %d\r\n\r\n" % len(text) + text


def answer() -> bytes:
    """64 tokens in one piece."""
    said = {"index": 0, "message": {"role": "assistant", "content": "tok " * 64}}
    usage = {"prompt_tokens": 500, "completion_tokens": 64, "total_tokens": 564}
    told = {"id": "chatcmpl-1", "model": MODEL, "choices": [said | {"finish_reason": "stop"}]}
    text = orjson.dumps(told | {"usage": usage})
    head = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
    return head % len(text) + text


def least_us(work: Callable[[], int]) -> float:
    """Microseconds of CPU for one of what `work` did so many of: the least of all rounds."""
    before, found = gc.get_threshold(), []
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)  # as the router's process has it
    for _ in range(ROUNDS):
        start = time.process_time()
        number = sum(work() for _ in range(PER_ROUND))
        found.append((time.process_time() - start) / number)
    gc.set_threshold(*before)
    gc.unfreeze()
    return min(found) * 1e6


def plain(limits: int) -> float:
    """A request that does not stream."""
    stage, request, told = make(limits), body(stream=False), answer()

    def work() -> int:
        for connection in stage.send(request):
            cast("Plug", connection.sock).inbox = told
            connection.on_event(IN | OUT)
        stage.forget()
        return len(stage.clients)

    work()
    rows = stage.core.tenancy.rows
    if rows != len(stage.clients):
        raise click.ClickException(f"{rows} of {len(stage.clients)} requests came to their end")
    return least_us(work)


def event() -> float:
    """One event of a stream that is under way."""
    stage = make(0)
    head = (
        b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
    )
    part = {"index": 0, "delta": {"content": " tok"}, "finish_reason": None}
    chunk = b"data: " + orjson.dumps({"id": "c", "model": MODEL, "choices": [part]}) + b"\n\n"
    piece = b"%x\r\n%b\r\n" % (len(chunk), chunk)
    under_way = stage.send(body(stream=True))
    for connection in under_way:
        cast("Plug", connection.sock).inbox = head + piece
        connection.on_event(IN | OUT)

    def work() -> int:
        for connection in under_way:
            cast("Plug", connection.sock).inbox = piece
            connection.on_event(IN)
        return len(under_way)

    return least_us(work)


def kept() -> tuple[float, float]:
    """Of a request: what counting costs, and counting with the usage row and its rendering."""
    stage = make(0)
    (exchange, *_) = [one.owner for one in stage.send(body(stream=False))]
    of_engine = cast("Any", exchange)
    ending, key = Ending("ok", 200, None, Tokens(500, 64)), of_engine.key

    def work() -> int:
        for _ in range(100):
            record(stage.core, of_engine, ending)
        stage.forget()
        return 100

    whole = least_us(work)
    of_engine.key = None
    counted = least_us(work)
    of_engine.key = key
    return counted, whole


@click.command()
def path() -> None:
    """The router's own CPU for a request and for an event, without sockets."""
    pool.begin_connecting = cast("Any", lambda *_: Plug())
    counted, row = kept()
    print(f"machine: {processes.machine()}")
    for words, us in (
        ("a request that does not stream", plain(0)),
        ("the same, one budget and three limits on its way", plain(4)),
        ("an event of a stream", event()),
        ("of a request: counters of the metrics", counted),
        ("of a request: these, its usage row and its rendering", row),
    ):
        print(f"{us:7.2f} us  {words}")
