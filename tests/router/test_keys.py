"""Keys in memory: found by hash, bounded, judged by address and model; asked for once."""

from __future__ import annotations

from hashlib import sha256
from ipaddress import ip_network
from typing import TYPE_CHECKING, Any

import pytest
import trio

from controller.router.auth import Key, Keys, Shown, static_keys
from controller.router.checking import admit
from controller.router.clock import monotonic
from controller.router.config import RouterConfig, StaticKey
from controller.router.core import Core
from controller.router.errors import AUTH_UNAVAILABLE, BAD_KEY
from controller.router.http1 import Request
from controller.router.key_reader import MOST_ASKED, KeyReader
from controller.router.key_rows import KeyRows
from controller.router.keycache import KeyCache
from controller.router.table import Model
from tests.router.wire import until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator


def digest(secret: str) -> bytes:
    return sha256(secret.encode()).digest()


def known(*secrets: str, **fields: Any) -> Keys:
    """Each secret is a key called like it."""
    keys = Keys()
    for secret in secrets:
        keys.cache.learn(secret, {digest(secret): Key(secret, **fields)})
    return keys


def test_keys_are_found_by_hash() -> None:
    keys = Keys()
    keys.fix(static_keys([StaticKey("a", "s1"), StaticKey("b", "s2", ("m",))]))
    assert keys.find(b"Bearer s1", Shown()) == Key("a")
    assert keys.find(b"bearer s1", Shown()) == Key("a")
    assert keys.find(b"Bearer  s2 ", Shown()) == Key("b", frozenset({"m"}))
    for wrong in (b"", b"Bearer", b"Bearer ", b"Basic s1", b"Bearer s3", b"Bearer " + b"s" * 9999):
        assert keys.find(wrong, Shown()) is BAD_KEY


def test_a_connection_may_show_another_key_with_each_request() -> None:
    keys, shown = Keys(), Shown()
    keys.fix(static_keys([StaticKey("a", "s1"), StaticKey("b", "s2")]))
    showed = [
        b"Bearer s1",
        b"Bearer s1",
        b"Bearer s2",
        b"",
        b"Bearer s3",
        b"Bearer s2",
        b"bearer s1",
    ]
    found = [keys.find(each, shown) for each in showed]
    assert [key.id if isinstance(key, Key) else None for key in found] == [
        "a", "a", "b", None, None, "b", "a",
    ]  # fmt: skip
    keys.fix({})
    assert keys.find(b"bearer s1", shown) is BAD_KEY


def test_an_expiry_is_judged_by_the_databases_clock() -> None:
    keys = known("s1", expires_at=1000.0)
    assert keys.find(b"Bearer s1", Shown()) is BAD_KEY  # no clock yet: it counts as passed
    keys.set_clock(990.0)
    assert keys.find(b"Bearer s1", Shown()) == Key("s1", None, 1000.0)
    keys.set_clock(1000.5)
    assert keys.find(b"Bearer s1", Shown()) is BAD_KEY


def test_what_is_not_known_is_asked_for_unless_it_cannot_be_ours() -> None:
    keys = known("s1")
    assert keys.find(b"Bearer s2", Shown()) is BAD_KEY  # static mode
    keys.lazy = True
    assert keys.find(b"Bearer s2", Shown()) == digest("s2")
    keys.cache.learn_unknown([digest("s2")], monotonic())
    assert keys.find(b"Bearer s2", Shown()) is BAD_KEY
    for never in ("Bearer schlüssel".encode(), b"Bearer \xff\xfe", b"Bearer " + b"k" * 10_240):
        assert keys.find(never, Shown()) is BAD_KEY


@pytest.mark.parametrize(
    ("address", "good"),
    [
        ("10.1.2.3", True),
        ("::ffff:10.1.2.3", True),
        ("11.1.2.3", False),
        ("2001:db8::1", True),
        ("fe80::1%eth0", False),
        ("", False),
    ],
)
def test_a_key_with_networks_is_good_from_there_only(address: str, good: bool) -> None:
    networks = ip_network("10.0.0.0/8"), ip_network("2001:db8::/32")
    request = Request()
    request.method, request.target = b"POST", b"/v1/completions"
    request.authorization = b"Bearer s1"
    found = admit(known("s1", networks=networks), request, address, Shown())
    assert not isinstance(found, bytes)
    _, key, unfit = found
    assert key is not None  # so that its row tells whose it was
    assert (unfit and (unfit.status, unfit.code)) == (None if good else (403, "ip_not_allowed"))


def test_a_model_is_allowed_by_any_of_its_names() -> None:
    model = Model("m", ("short", "shorter"))
    assert Key("k").allows(model)
    assert Key("k", frozenset({"m"})).allows(model)
    assert Key("k", frozenset({"short"})).allows(model)
    assert not Key("k", frozenset({"other"})).allows(model)


def test_the_least_used_go_first_with_all_their_secrets() -> None:
    cache = KeyCache(most=4)
    for name in ("a", "b"):
        cache.learn(name, {digest(name): Key(name), digest(f"old {name}"): Key(name)})
    assert cache.get(digest("a"))
    cache.learn("c", {digest("c"): Key("c")})
    assert (len(cache), "a" in cache, "b" in cache, "c" in cache) == (2, True, False, True)
    assert cache.get(digest("old b")) is None
    assert cache.get(digest("old a")) == Key("a")
    cache.learn("a", {digest("new a"): Key("a")})
    assert cache.get(digest("a")) is None
    assert cache.take_used() == ["a"]
    assert cache.take_used() == []


def test_the_unknown_are_forgotten_and_never_many() -> None:
    cache = KeyCache(most_unknown=3)
    hashes = [bytes([n]) * 32 for n in range(5)]
    cache.learn_unknown(hashes[:4], 100.0)
    found = [cache.is_unknown(one, 100.0) for one in hashes]
    assert found == [False, True, True, True, False]
    assert not cache.is_unknown(hashes[1], 102.0)
    cache.learn_unknown([hashes[4]], 102.0)
    assert len(cache._unknown) == 1


def row(identity: str, **fields: Any) -> dict[str, Any]:
    """A row of usable_key."""
    names = ("models", "expires_at", "chain", "org_id", "team_id", "user_id", "ips", "tags",
             "old_hashes", "old_until", "fallback", "fallback_by", "weight")  # fmt: skip
    return {"id": identity, "hash": digest(identity), **dict.fromkeys(names), **fields}


def test_a_row_is_a_key_for_each_of_its_secrets() -> None:
    fields = {"chain": [3, 7], "org_id": 3, "user_id": 7, "tags": {"app": "x"},
              "ips": ["::1/128"], "weight": 2.5}  # fmt: skip
    olds = {"old_hashes": [digest("one"), digest("two")], "old_until": [50.0, 99.0]}
    found = KeyRows().secrets_of(row("k", expires_at=70.0, models=["m"], **fields, **olds))
    assert {name: key.expires_at for name, key in found.items()} == {
        digest("k"): 70.0,
        digest("one"): 50.0,
        digest("two"): 70.0,  # no secret outlives its key
    }
    key = found[digest("k")]
    assert (key.chain, key.org, key.team, key.user) == ((3, 7), 3, None, 7)
    assert (key.tenancy, key.tags, key.models) == (("scope 3", 2.5), {"app": "x"}, {"m"})
    assert key.networks == (ip_network("::1/128"),)
    assert key.fallback is None
    said = KeyRows().secrets_of(row("k", fallback=[], fallback_by="team"))[digest("k")]
    assert said.fallback == ("team", frozenset())
    bare = KeyRows().secrets_of(row("k"))[digest("k")]
    assert bare == Key("k")


def test_what_keys_have_in_common_is_there_once() -> None:
    rows = KeyRows()
    fields: dict[str, Any] = {
        "weight": 1.0,
        "chain": [3],
        "org_id": 3,
        "tags": {"a": "b"},
        "models": ["m"],
    }
    one, two = (rows.secrets_of(row(name, **fields))[digest(name)] for name in ("a", "b"))
    assert one.chain is two.chain
    assert one.tags is two.tags
    assert one.models is two.models


class Shelf:
    """A stand-in for Postgres that answers when it is let."""

    def __init__(self) -> None:
        self.asked: list[list[bytes]] = []
        self.answers = trio.Event()
        self.rows: list[dict[str, Any]] = []
        self.fails = False

    async def fetch(self, _: str, digests: Any) -> list[Any]:
        self.asked.append(digests)
        await self.answers.wait()
        if self.fails:
            raise ConnectionError("away")
        return [row for row in self.rows if row["hash"] in digests]

    async def fetchval(self, _: str, *__: object) -> Any:
        await self.answers.wait()


QUERIES = {"keys_by_hash": ""}


@pytest.fixture
async def core(nursery: trio.Nursery) -> AsyncIterator[Core]:
    made = Core(RouterConfig(), nursery)
    nursery.start_soon(made.reactor.run)
    yield made
    nursery.cancel_scope.cancel()


async def test_many_requests_with_one_key_ask_once(core: Core, nursery: trio.Nursery) -> None:
    shelf, told = Shelf(), list[Any]()
    reader = KeyReader(core, shelf, QUERIES)
    reader._begun.set()
    nursery.start_soon(reader.run)
    for _ in range(5):
        reader.ask(digest("s1"), told.append)
    await until(lambda: shelf.asked)
    reader.ask(digest("s1"), told.append)
    shelf.answers.set()
    await until(lambda: len(told) == 6)
    assert told == [BAD_KEY] * 6
    assert shelf.asked == [[digest("s1")]]
    assert core.keys.cache.is_unknown(digest("s1"), monotonic())


async def test_a_flood_of_wrong_keys_is_bounded(core: Core, nursery: trio.Nursery) -> None:
    shelf, told = Shelf(), list[Any]()
    reader = KeyReader(core, shelf, QUERIES)
    reader._begun.set()
    for number in range(MOST_ASKED + 1):
        reader.ask(digest(str(number)), told.append)
    await until(lambda: told)
    assert told == [AUTH_UNAVAILABLE]
    nursery.start_soon(reader.run)
    shelf.answers.set()
    await until(lambda: len(told) == MOST_ASKED + 1)
    assert [len(batch) for batch in shelf.asked] == [1000, 1000]
    assert told[1:] == [BAD_KEY] * MOST_ASKED


async def test_without_an_answer_nobody_is_called_unknown(
    core: Core, nursery: trio.Nursery, monkeypatch: pytest.MonkeyPatch
) -> None:
    from controller.router import key_reader

    monkeypatch.setattr(key_reader, "LOOKUP_S", 0.05)
    shelf, told = Shelf(), list[Any]()
    reader = KeyReader(core, shelf, QUERIES)
    reader._begun.set()
    nursery.start_soon(reader.run)
    reader.ask(digest("s1"), told.append)
    await until(lambda: told)
    shelf.fails = True
    shelf.answers.set()
    reader.ask(digest("s1"), told.append)
    await until(lambda: len(told) == 2)
    assert told == [AUTH_UNAVAILABLE] * 2
    assert not core.keys.cache.is_unknown(digest("s1"), monotonic())


async def test_nothing_is_looked_up_before_the_first_refresh(
    core: Core, nursery: trio.Nursery, monkeypatch: pytest.MonkeyPatch
) -> None:
    from controller.router import key_reader

    monkeypatch.setattr(key_reader, "LOOKUP_S", 0.05)
    shelf, told = Shelf(), list[Any]()
    reader = KeyReader(core, shelf, QUERIES)
    nursery.start_soon(reader.run)
    reader.ask(digest("s1"), told.append)
    await until(lambda: told)
    assert told == [AUTH_UNAVAILABLE]
    assert not shelf.asked
