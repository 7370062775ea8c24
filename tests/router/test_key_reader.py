"""The keys in memory against the database's: whatever changes, in whatever order it is seen."""

from __future__ import annotations

from functools import partial
from hashlib import sha256
from random import Random
from typing import TYPE_CHECKING, Any

import psycopg
import pytest
import trio
import trio.testing

from controller.router.config import RouterConfig
from controller.router.core import Core
from controller.router.key_reader import KeyReader
from controller.router.key_rows import KeyRows
from sql import queries
from tests.router.test_keys import QUERIES, Shelf, digest, row
from tests.router.wire import until

if TYPE_CHECKING:
    from collections.abc import Iterator

    from controller.router.errors import ApiError
    from sql.pool import Pool
    from tests.conftest import Database

NAMES = [f"key{n:03}" for n in range(12)]
ROTATE = "select llmgw.key_rotate_v1('t', %s, %s, %s)"
CREATE = "select llmgw.key_create_v2('t', %s, %s, 'k', null, null, %s, null, null)"

SAYS = '{"fallback": ["error", "refusal"]}'


class Tenants:
    """Random changes, some of them in a transaction that stays open for a while."""

    def __init__(self, database: Database, seed: int) -> None:
        self.random = Random(seed)
        self.owner = database.connect()
        self.slow = database.connect()
        self.slow.autocommit = False
        self.secrets = dict.fromkeys(NAMES, 0)
        for kind, name, parent in (("org", "a", None), ("org", "b", None), ("team", "t", "a")):
            made = (kind, name, parent)
            self.owner.execute("select llmgw.scope_create_v1('t', %s, %s, %s, null)", made)
        for name in NAMES:
            # What changes above the key whose transactions stay open would wait for its lock.
            place = None if name == NAMES[0] else self.random.choice(["a", "b", "a/t", None])
            self.owner.execute(CREATE, (name, self.hash(name), place))

    def hash(self, name: str) -> bytes:
        return sha256(f"{name} {self.secrets[name]}".encode()).digest()

    def any_secret(self) -> bytes:
        name = self.random.choice(NAMES)
        number = self.random.randint(0, self.secrets[name])
        return sha256(f"{name} {number}".encode()).digest()

    def change(self) -> None:
        """One change; refusals are part of it."""
        name = self.random.choice(NAMES)
        connection = self.owner
        if self.random.random() < 0.3 and name == NAMES[0]:
            connection = self.slow  # only this key's: others must not wait for its lock
        elif name == NAMES[0]:
            return
        try:
            self._change(connection, name)
        except psycopg.Error as error:
            if error.sqlstate not in ("LG003", "LG005"):
                raise
            if connection is self.slow:
                self.slow.rollback()

    def _change(self, connection: psycopg.Connection[Any], name: str) -> None:
        kind = self.random.choice(["rotate", "rotate", "models", "revoke", "key", "scope", "says"])
        if kind == "rotate":
            self.secrets[name] += 1
            grace = self.random.choice([0, 60, 3600])
            connection.execute(ROTATE, (name, self.hash(name), grace))
        elif kind == "models":
            models = self.random.choice([None, ["m"], ["n"]])
            text = "update llmgw_core.api_key set models = %s where id = %s"
            connection.execute(text, (models, name))
        elif kind == "revoke" and self.random.random() < 0.2:
            connection.execute("select llmgw.key_revoke_v1('t', %s)", (name,))
        elif kind == "key" and connection is self.owner:
            place = self.random.choice(["a", "b", None])
            connection.execute("select llmgw.key_move_v1('t', %s, %s)", (name, place))
        elif kind == "scope" and connection is self.owner:
            here, there = self.random.choice([("a/t", "b"), ("b/t", "a")])
            connection.execute("select llmgw.scope_move_v1('t', %s, %s)", (here, there))
        elif kind == "says" and connection is self.owner:
            said = self.random.choice(['{"fallback": null}', '{"fallback": []}', SAYS])
            place = self.random.choice(["a", "b", "a/t", "b/t"])
            if "/" not in place:
                said = self.random.choice([said, '{"weight": 0.3}', '{"weight": 7}'])
            connection.execute("select llmgw.scope_change_v1('t', %s, %s::jsonb)", (place, said))
        elif kind == "says":
            connection.execute("select llmgw.key_change_v1('t', %s, %s::jsonb)", (name, SAYS))

    def close(self) -> None:
        self.slow.rollback()
        self.slow.close()
        self.owner.close()


def answered(told: list[ApiError | None], asked: int) -> bool:
    return len(told) == asked


@pytest.fixture(params=range(4))
def tenants(database: Database, request: pytest.FixtureRequest) -> Iterator[Tenants]:
    made = Tenants(database, request.param)
    yield made
    made.close()


@pytest.mark.slow
async def test_after_a_refresh_memory_is_what_a_fresh_read_gives(
    tenants: Tenants, pool: Pool, nursery: trio.Nursery
) -> None:
    core = Core(RouterConfig(), nursery)
    texts = queries("router")
    reader = KeyReader(core, pool, texts)
    nursery.start_soon(core.reactor.run)
    nursery.start_soon(reader.run)
    await reader.refresh()
    told: list[ApiError | None] = []
    asked = compared = 0
    for _ in range(60):
        for _ in range(tenants.random.randint(0, 4)):
            await trio.to_thread.run_sync(tenants.change)
        if tenants.random.random() < 0.2:
            await trio.to_thread.run_sync(tenants.slow.commit)
        cache = core.keys.cache
        if tenants.random.random() < 0.3:
            cache.drop(tenants.random.choice(NAMES))  # as when others were used more
        async with trio.open_nursery() as both:
            for _ in range(tenants.random.randint(0, 3)):
                asked += 1
                reader.ask(tenants.any_secret(), told.append)
            both.start_soon(reader.refresh)
        await until(partial(answered, told, asked))
        await reader.refresh()
        rows = await pool.fetch(texts["keys_by_id"], cache.ids)
        fresh = {found["id"]: KeyRows().secrets_of(found) for found in rows}
        assert set(fresh) == set(cache.ids)
        for secrets in fresh.values():
            for one, key in secrets.items():
                compared += 1
                assert cache.get(one) == key
        assert len(cache._by_hash) == sum(map(len, fresh.values()))
    assert compared > 100
    nursery.cancel_scope.cancel()


async def test_an_answer_from_before_a_change_is_in_memory_before_the_change_is_read(
    nursery: trio.Nursery,
) -> None:
    """Else a key that is looked up while it is revoked would stay for ever."""

    class Both(Shelf):
        """Tells which statements came, and of one key that changed."""

        def __init__(self) -> None:
            super().__init__()
            self.came: list[str] = []

        async def fetch(self, statement: str, *args: Any) -> list[Any]:
            self.came.append(statement)
            if statement == "by hash":
                return await super().fetch(statement, *args)
            await trio.lowlevel.checkpoint()
            return [{"mark": "9", "ids": ["k"]}] if statement == "changed" else []

    texts = {"keys_by_hash": "by hash", "keys_changed": "changed", "keys_first": "first",
             "keys_by_id": "by id"}  # fmt: skip
    core, shelf, told = Core(RouterConfig(), nursery), Both(), list[Any]()
    shelf.rows = [row("k")]
    reader = KeyReader(core, shelf, {**QUERIES, **texts})
    nursery.start_soon(core.reactor.run)
    nursery.start_soon(reader.run)
    await reader.refresh()
    reader.ask(digest("k"), told.append)  # the answer is on its way: the key is good
    await until(lambda: "by hash" in shelf.came)
    nursery.start_soon(reader.refresh)  # meanwhile it was revoked
    await trio.testing.wait_all_tasks_blocked()
    assert shelf.came == ["changed", "first", "by hash"]
    shelf.answers.set()
    await until(lambda: "by id" in shelf.came)
    await until(lambda: told == [None] and not len(core.keys.cache))
    nursery.cancel_scope.cancel()
