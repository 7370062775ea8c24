"""Keys on several routers before one Postgres: revoked, rotated, moved, deleted, unknown, away."""

from __future__ import annotations

import time
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from hashlib import sha256
from typing import TYPE_CHECKING, Any

import pytest
import trio

from controller.router.auth import Key, Shown
from controller.router.config import RouterConfig, Timeouts
from controller.router.errors import BAD_KEY
from controller.router.server import run_router
from sql import queries
from sql.listen import listen
from sql.pool import open_pool
from tests.router.test_database import look, prepare
from tests.router.wire import PATIENCE_S, Wire, until
from tests.tcp_proxy import TcpProxy

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

    from controller.router.server import Running
    from tests.conftest import Database
    from tests.fake_engine import FakeEngine
    from tests.router.wire import Answer

pytestmark = pytest.mark.slow

NEVER_S = 600.0
"""A refresh that is due after the test: what happens before was told by a hint."""


@dataclass
class Gate:
    """Some routers on one database, each with connections of its own."""

    nursery: trio.Nursery
    database: Database
    routers: list[Running] = field(default_factory=list)

    async def add(self, *, pool_port: int = 0, listen_port: int = 0, **changes: Any) -> Running:
        """One more router; its pool or its LISTEN may go by a proxy."""
        own = self.database.settings(via(self.database.controller_url, pool_port))
        heard = self.database.settings(via(self.database.controller_url, listen_port))
        times = {"refresh_s": changes.pop("refresh_s", NEVER_S), "peek_s": NEVER_S}
        config = RouterConfig(
            host="127.0.0.1", port=0, handle_signals=False, timeouts=Timeouts(**times), **changes
        )
        pool = await self.nursery.start(held, partial(open_pool, own))

        heard_at: list[float] = []

        async def listening(on_hint: Any, on_reconnect: Any) -> None:
            async def connected() -> None:
                heard_at.append(time.monotonic())
                on_reconnect()

            await listen(heard, on_hint, connected)

        running = await self.nursery.start(run_router, config, pool, queries("router"), listening)
        core = running.core

        def settled() -> bool:
            """What it reads because it listens now is read: nothing more is until a hint."""
            began, ended = core.keys.read_at or 0.0, core.table_loaded_at or 0.0
            return bool(heard_at) and heard_at[0] <= began <= ended

        await until(settled)
        self.routers.append(running)
        return running

    def do(self, statement: str) -> Any:
        """The value that a statement returns."""
        return look(self.database, f"select {statement}")[0][0]

    async def ask(self, running: Running, key: str, **fields: Any) -> Answer:
        """One chat on a connection of its own."""
        wire = await Wire.open(running.port)
        await wire.post("/v1/chat/completions", {"model": "m", **fields}, key=key)
        answer = await wire.answer()
        wire.close()
        return answer

    async def statuses(self, key: str) -> list[int]:
        return [(await self.ask(running, key)).status for running in self.routers]

    async def refused(self, running: Running, key: str) -> None:
        """Returns once this router refuses the key."""
        with trio.fail_after(PATIENCE_S):
            while (answer := await self.ask(running, key)).status != 401:
                assert answer.status == 200
                await trio.lowlevel.checkpoint()


def via(url: str, port: int) -> str:
    """The same database behind a proxy."""
    if not port:
        return url
    head, _, rest = url.rpartition(":")
    return f"{head}:{port}/{rest.partition('/')[2]}"


async def held(opens: Any, task_status: Any = trio.TASK_STATUS_IGNORED) -> None:
    async with opens() as pool:
        task_status.started(pool)
        await trio.sleep_forever()


@asynccontextmanager
async def streaming(running: Running, key: str) -> AsyncIterator[Wire]:
    """A stream of which the first token came."""
    wire = await Wire.open(running.port)
    await wire.post("/v1/chat/completions", {"model": "m", "stream": True}, key=key)
    await wire.until(b"tok0")
    await wire.until(b"\n\n")
    try:
        yield wire
    finally:
        wire.close()


@pytest.fixture
async def gate(
    nursery: trio.Nursery, database: Database, engine: FakeEngine, asyncio_loop: None
) -> AsyncIterator[Gate]:
    prepare(database, engine.url)
    made = Gate(nursery, database)
    yield made
    for running in made.routers:
        running.stop()
    nursery.cancel_scope.cancel()


@contextmanager
def proxy(database: Database) -> Iterator[TcpProxy]:
    port = int(database.controller_url.rpartition(":")[2].partition("/")[0])
    with TcpProxy(port) as made:
        yield made


def hash_of(secret: str) -> str:
    return rf"'\x{sha256(secret.encode()).hexdigest()}'"


async def test_B16_a_revoked_key_is_refused_everywhere_with_notifications_dead_too(
    gate: Gate, database: Database, engine: FakeEngine
) -> None:
    engine.default = {"tokens": 3, "hold_after": 1}
    with proxy(database) as px:
        told = await gate.add()
        ends = await gate.add(revoked_streams="end")
        deaf = await gate.add(listen_port=px.port, refresh_s=2.0)
        engine.default = {}
        assert await gate.statuses("sk-db") == [200, 200, 200]
        px.mode = "blackhole"
        engine.default = {"tokens": 3, "hold_after": 1}
        async with streaming(told, "sk-db") as finishes, streaming(ends, "sk-db") as cut:
            engine.default = {}
            gate.do("llmgw.key_revoke_v1('me', 'abcdef')")
            for running in (told, ends, deaf):
                await gate.refused(running, "sk-db")
            assert b"key_revoked" in await cut.until(b"\n\n")
            assert await cut.closed()
            engine.release()
            await finishes.until(b"[DONE]")
    await until(lambda: not told.core.exchanges and not ends.core.exchanges)
    counted = ends.core.stats.snapshot()["counts"]
    assert counted["revoked_requests_ended"] == 1


@pytest.mark.interpreted
async def test_B17_both_secrets_are_good_until_the_grace_ends(
    gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    routers = [await gate.add(), await gate.add()]

    async def rotated(secret: str, grace_s: float) -> None:
        gate.do(f"llmgw.key_rotate_v1('me', 'abcdef', {hash_of(secret)}, {grace_s})")
        for running in routers:  # the hint has come when the former secret has an end
            await until(partial(ends, running))

    def ends(running: Running) -> bool:
        found = running.core.keys.find(b"Bearer sk-db", Shown())
        return found is BAD_KEY or (isinstance(found, Key) and found.expires_at is not None)

    ahead = [0.0]
    for running in routers:  # a refresh that is under way must not set the clock back
        set_clock = running.core.keys.set_clock
        shifted = partial(lambda plain, now: plain(now + ahead[0]), set_clock)
        monkeypatch.setattr(running.core.keys, "set_clock", shifted)

    def later(seconds: float) -> None:
        for running in routers:
            now = running.core.keys.now()
            assert now is not None
            running.core.keys.set_clock(now + seconds - ahead[0])  # which adds what it was ahead
        ahead[0] += seconds

    assert await gate.statuses("sk-db") == [200, 200]
    await rotated("sk-two", 60)
    for seconds in (0, 30):
        later(seconds)
        assert await gate.statuses("sk-db") == [200, 200]
        assert await gate.statuses("sk-two") == [200, 200]
    later(40)
    assert await gate.statuses("sk-db") == [401, 401]
    assert await gate.statuses("sk-two") == [200, 200]

    await rotated("sk-three", 3600)  # inside the first one's grace by Postgres's clock
    later(70)
    assert [await gate.statuses(key) for key in ("sk-db", "sk-two", "sk-three")] == [
        [401, 401],
        [200, 200],
        [200, 200],
    ]
    gate.do(f"llmgw.key_rotate_v1('me', 'abcdef', {hash_of('sk-four')}, 0)")
    for running in routers:
        await gate.refused(running, "sk-two")
        await gate.refused(running, "sk-three")
    assert await gate.statuses("sk-four") == [200, 200]


async def test_B19_what_is_no_key_is_told_in_the_same_words(gate: Gate) -> None:
    running = await gate.add()
    for name, column in (("revokd", "revoked_at"), ("expird", "expires_at")):
        secret = hash_of(f"sk-{name}-{'s' * 43}")
        gate.do(f"llmgw.key_create_v1('me', '{name}', {secret}, 'k', null, null)")
        past = f"{column} = now() - interval '1 min' where id = '{name}'"
        look(gate.database, f"update llmgw_core.api_key set {past} returning 1")
    tried = [
        f"sk-revokd-{'s' * 43}".encode(),
        f"sk-expird-{'s' * 43}".encode(),
        f"sk-nobody-{'s' * 43}".encode(),
        b"k" * 10_240,
        "schlüssel".encode(),
        b"\xff\xfe\xfd",
        b"' or 1=1 --",
    ]
    answers = set()
    for key in tried:
        for path in (b"/v1/chat/completions", b"/v1/models"):
            wire = await Wire.open(running.port)
            verb = b"GET" if path == b"/v1/models" else b"POST"
            head = b"%b %b HTTP/1.1\r\nhost: t\r\nauthorization: Bearer %b\r\n" % (verb, path, key)
            length = b"" if verb == b"GET" else b"content-length: 2\r\n"
            await wire.send(head + b"x-request-id: r\r\n" + length + b"\r\n")
            if verb == b"POST":
                await wire.send(b"{}")
            answer = await wire.answer()
            wire.close()
            answer.headers.pop("connection", None)
            answers.add((answer.status, answer.body, tuple(sorted(answer.headers.items()))))
    assert len(answers) == 1, answers
    [(status, body, _)] = answers
    assert status == 401
    for word in (b"sk-", b"k" * 20, b"sha", b"select", b"postgres", b"llmgw_core", b"Traceback"):
        assert word not in body


async def test_a_key_is_known_as_soon_as_it_is_made(gate: Gate) -> None:
    running = await gate.add()
    gate.do("llmgw.scope_create_v1('me', 'org', 'acme', null, null)")
    gate.do("llmgw.scope_create_v1('me', 'user', 'ada', 'acme', null)")
    gate.do(f"llmgw.key_create_v2('me', 'newone', {hash_of('sk-new')}, 'k', null, null,"
            " 'acme/ada', '{127.0.0.0/8}', '{\"app\": \"chat\"}')")  # fmt: skip
    # Its head alone: invited once it is known, refused when it is nobody's.
    for key, first in (("sk-new", 100), ("sk-wrong", 401)):
        wire = await Wire.open(running.port)
        head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: t\r\nauthorization: Bearer {key}\r\n"
        await wire.send(f"{head}expect: 100-continue\r\ncontent-length: 13\r\n\r\n".encode())
        assert (await wire.answer()).status == first
        if first == 100:
            await wire.send(b'{"model":"m"}')
            assert (await wire.answer()).status == 200
        wire.close()
    found = running.core.keys.find(b"Bearer sk-new", Shown())
    assert isinstance(found, Key)
    org, user = (gate.do(f"id from llmgw.scopes where name = '{name}'") for name in ("acme", "ada"))
    assert (found.chain, found.org, found.team, found.user) == ((org, user), org, None, user)
    assert (found.tenant, found.tags) == (f"scope {org}", {"app": "chat"})

    gate.do(f"llmgw.key_create_v2('me', 'faraway', {hash_of('sk-far')}, 'k', null, null, null,"
            " '{192.0.2.0/24}', null)")  # fmt: skip
    answer = await gate.ask(running, "sk-far")
    assert (answer.status, answer.code) == (403, "ip_not_allowed")


async def test_a_deleted_tenant_with_running_streams(gate: Gate, engine: FakeEngine) -> None:
    """They finish and are billed; nothing new is begun; history keeps the names."""
    running = await gate.add()
    gate.do("llmgw.scope_create_v1('me', 'org', 'acme', null, null)")
    gate.do("llmgw.key_move_v1('me', 'abcdef', 'acme')")
    engine.default = {"tokens": 3, "hold_after": 1}
    async with streaming(running, "sk-db") as wire:
        assert gate.do("llmgw.scope_delete_v1('me', 'acme')")["keys"] == 1
        await gate.refused(running, "sk-db")
        engine.release()
        await wire.until(b"[DONE]")
    rows = "select key_id, status, completion_tokens from llmgw_core.usage_event where stream"
    await until(lambda: look(gate.database, rows))
    assert look(gate.database, rows) == [("abcdef", "ok", 3)]
    assert gate.do("scope from llmgw.keys where id = 'abcdef'") == "acme"


async def test_a_subtree_that_moves_while_requests_run(gate: Gate, nursery: trio.Nursery) -> None:
    routers = [await gate.add(), await gate.add()]
    for kind, name, parent in (("org", "a", "null"), ("org", "b", "null"), ("team", "t", "'a'")):
        gate.do(f"llmgw.scope_create_v1('me', '{kind}', '{name}', {parent}, null)")
    gate.do("llmgw.key_move_v1('me', 'abcdef', 'a/t')")
    over, statuses = trio.Event(), set[int]()

    async def hammer(running: Running) -> None:
        while not over.is_set():
            statuses.add((await gate.ask(running, "sk-db")).status)

    async with trio.open_nursery() as hammers:
        for running in routers:
            hammers.start_soon(hammer, running)
        for _ in range(5):
            for here, there in (("a", "b"), ("b", "a")):
                move = f"llmgw.scope_move_v1('me', '{here}/t', '{there}')"
                await trio.to_thread.run_sync(gate.do, move)
        await trio.to_thread.run_sync(gate.do, "llmgw.scope_move_v1('me', 'a/t', 'b')")
        chain = tuple(gate.do("chain from llmgw_core.scope_line where path = 'b/t'"))

        def arrived() -> bool:
            found = [running.core.keys.find(b"Bearer sk-db", Shown()) for running in routers]
            return all(isinstance(key, Key) and key.chain == chain for key in found)

        await until(arrived)
        over.set()
    assert statuses == {200}


async def test_with_postgres_away_known_keys_go_on_and_others_are_not_called_unknown(
    gate: Gate, database: Database
) -> None:
    with proxy(database) as px:
        running = await gate.add(pool_port=px.port)
        assert (await gate.ask(running, "sk-db")).status == 200
        gate.do(f"llmgw.key_create_v1('me', 'newone', {hash_of('sk-new')}, 'k', null, null)")
        px.mode = "blackhole"
        answer = await gate.ask(running, "sk-new")
        assert (answer.status, answer.code) == (503, "auth_unavailable")
        assert answer.headers["retry-after"] == "2"
        assert (await gate.ask(running, "sk-db")).status == 200
        px.mode = "pass"
        with trio.fail_after(2 * PATIENCE_S):
            while (await gate.ask(running, "sk-new")).status != 200:
                await trio.lowlevel.checkpoint()
