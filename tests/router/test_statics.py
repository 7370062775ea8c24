"""Static endpoints: health, discovery of models, engines that come later."""

from __future__ import annotations

import socket
import threading
from typing import TYPE_CHECKING, Any

import pytest
import trio
from structlog.testing import capture_logs

from controller.endpoint import endpoint
from controller.router.config import StaticEndpoint, Watching
from controller.router.inquiry import Reply, Unanswered, look_up
from controller.router.statics import Static, listed
from controller.router.table import parse_endpoint
from tests.router.wire import PATIENCE_S, until

if TYPE_CHECKING:
    from tests.fake_engine import FakeEngine
    from tests.router.conftest import House

OFTEN = Watching(metrics_s=0, health_s=0.05)


async def started(house: House, *models: str, **how: Any) -> FakeEngine:
    engine = house.engine(**how)
    await house.start(endpoints=(StaticEndpoint("e0", engine.url, models),), watching=OFTEN)
    return engine


def served(house: House) -> list[str]:
    return sorted(house.core.fleet.names)


async def test_models_are_discovered_and_read_again(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("controller.router.statics.MODELS_EVERY_S", 0.05)
    engine = await started(house, models=["m", "a/b:c"])
    await until(lambda: "m" in served(house))
    assert (await house.ask()).status == 200
    engine.default = {"models": ["m", "new"]}
    await until(lambda: "new" in served(house))
    assert "a/b:c" not in served(house)


async def test_an_engine_that_returns_with_another_model_is_known_by_it(house: House) -> None:
    engine = await started(house, models=["m"])
    await until(lambda: "m" in served(house))
    engine.default = {"models": ["new"], "health": 503}
    await until(house.core.statics.unhealthy)
    engine.default = {"models": ["new"]}
    await until(lambda: served(house) == ["new"])


async def test_named_models_are_taken_as_they_are(house: House) -> None:
    engine = await started(house, "m", models=["other"])
    await until(lambda: len(engine.records) > 2)
    assert "other" not in served(house)
    assert {record.path for record in engine.records} == {"/health"}


async def test_an_engine_without_health_is_asked_for_its_models(house: House) -> None:
    engine = await started(house, "m", health=404)
    await until(lambda: len(engine.records) > 3)
    assert {record.path for record in engine.records} == {"/health", "/v1/models"}
    assert house.core.statics.all[0].healthy


@pytest.mark.parametrize(
    ("how", "why"),
    [({"health": 500}, "its /health says HTTP 500"), ({"close": "always"}, "its answer ended"),
     ({"health": 404, "models": 500}, "its /v1/models says HTTP 500"),
     ({"health": 101, "headers": "connection: upgrade\r\nupgrade: h2c\r\n"}, "is no HTTP")],
)  # fmt: skip
async def test_an_unhealthy_endpoint_leaves_the_choice_and_says_why(
    house: House, how: dict[str, Any], why: str
) -> None:
    bad, good = house.engine(), house.engine()
    await house.start(watching=OFTEN)
    with capture_logs() as lines:
        bad.default = how
        await until(lambda: "e0" in house.core.statics.unhealthy())
        await until(lambda: lines)
        await until(lambda: house.core.fleet.target("m", "e0") is None)  # a moment later
    (line,) = lines
    assert (line["event"], line["endpoint"]) == ("static endpoint is unhealthy", "e0")
    assert why in line["why"]
    for _ in range(6):
        assert (await house.ask()).status == 200
    assert (len(bad.chats()), len(good.chats())) == (0, 6)
    (shown,) = (s for s in house.core.snapshot()["statics"] if not s["healthy"])
    assert why in shown["why"]
    wire = await house.wire()
    assert (await wire.get("/readyz", key=None)).status == 200  # the other one serves
    with capture_logs() as lines:
        bad.default = {}
        await until(lambda: lines)
    assert [(line["event"], line["endpoint"]) for line in lines] == [
        ("static endpoint serves", "e0")
    ]
    assert not house.core.statics.unhealthy()


async def test_without_any_healthy_endpoint_the_router_is_not_ready(house: House) -> None:
    engine = await started(house, "m", health=503)
    wire = await house.wire()
    await until(house.core.ready_reasons)  # found unhealthy, and out of the table
    answer = await wire.get("/readyz", key=None)
    assert answer.status == 503
    assert answer.json["reasons"] == ["endpoint e0 is unhealthy: its /health says HTTP 503"]
    assert (await house.ask()).code == "no_ready_replica"
    engine.default = {}
    await until(lambda: not house.core.ready_reasons())
    assert (await house.ask()).status == 200


async def test_a_router_that_knows_no_model_yet_is_not_ready(house: House) -> None:
    """Else a load balancer sends it requests that are 404 for a moment, which nobody repeats."""
    await house.start(endpoints=(StaticEndpoint("e0", house.engine().url, ()),))  # never asked
    wire = await house.wire()
    answer = await wire.get("/readyz", key=None)
    assert answer.status == 503
    assert answer.json["reasons"] == ["endpoint e0 has not told its models yet"]


async def test_an_engine_may_come_after_the_router(house: House) -> None:
    engine = house.engine()
    engine.stop()
    await house.start(endpoints=(StaticEndpoint("late", engine.url, ()),), watching=OFTEN)
    await until(house.core.statics.unhealthy)
    assert len(house.core.ready_reasons()) == 1
    assert (await house.ask()).status == 404
    engine.start()
    await until(lambda: "m" in served(house))
    assert (await house.ask()).status == 200


async def test_an_endpoint_that_returns_is_asked_at_once(house: House) -> None:
    engine = await started(house, "m", status=500, health=500)
    await until(lambda: "e0" in house.core.fleet.pools)
    pool = house.core.fleet.pools["e0"]
    await until(lambda: house.core.fleet.target("m", "e0") is None)
    pool.breaker.resume(1e12, 30.0)  # tripped for long
    engine.default = {}
    await until(lambda: house.core.fleet.target("m", "e0"))
    with trio.fail_after(PATIENCE_S):  # less than the 30 s that a request waits
        assert (await house.ask()).status == 200


@pytest.mark.parametrize("name", ["double..dot", "x" * 64, "é" * 64])
async def test_D10_a_name_that_can_be_none_takes_nobody_elses_route_away(
    house: House, name: str
) -> None:
    bad = StaticEndpoint("bad", f"http://{name}:1", ("m",))
    await house.start(endpoints=(bad, StaticEndpoint("good", house.engine().url, ("m",))))
    assert (await house.ask()).status == 200
    assert house.core.stats.counts["lookup_failures"] == 1


NOBODY, ENGINE = "127.0.0.9", "127.0.0.1"


@pytest.mark.parametrize(
    ("first", "then"),
    [
        ((NOBODY,), (ENGINE,)),  # its container was made anew
        ((), (ENGINE,)),  # the name server had a bad moment
        ((NOBODY, ENGINE), (NOBODY, ENGINE)),  # localhost: ::1, where few engines listen
    ],
)
async def test_an_endpoint_by_name_is_followed_to_the_address_that_answers(
    house: House, leads_to: list[str], first: tuple[str, ...], then: tuple[str, ...]
) -> None:
    leads_to[:] = first
    url = house.engine().url.replace(ENGINE, "engine.test")
    await house.start(endpoints=(StaticEndpoint("e0", url, ("m",)),), watching=OFTEN)
    leads_to[:] = then
    await until(lambda: "e0" in house.core.fleet.pools)

    def follows() -> bool:
        return house.core.fleet.pools["e0"].address[1][0] == ENGINE

    await until(lambda: follows() and not house.core.ready_reasons())
    assert (await house.ask()).status == 200
    kept = house.core.fleet.pools["e0"]
    leads_to[:] = "127.0.0.8", *then  # the same address in another order is no news
    await asked_again(house)
    leads_to.clear()  # nor is it when no name server answers
    await asked_again(house)
    assert house.core.fleet.pools["e0"] is kept
    assert not house.core.statics.unhealthy()


async def asked_again(house: House) -> None:
    asked = len(house.engines[0].records)
    await until(lambda: len(house.engines[0].records) > asked + 3)


async def test_a_silent_name_server_holds_no_thread_that_others_need(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    speaks, real = threading.Event(), socket.getaddrinfo

    def found(_host: Any, *args: Any, **how: Any) -> list[Any]:
        if how["flags"]:
            raise socket.gaierror(socket.EAI_NONAME, "no number")
        speaks.wait(PATIENCE_S)
        return real(ENGINE, *args, **how)

    monkeypatch.setattr(socket, "getaddrinfo", found)
    monkeypatch.setattr("controller.router.inquiry.LOOKUP_S", 0.1)

    async def in_vain() -> None:
        with pytest.raises(Unanswered):
            await look_up(parse_endpoint("http://engine.test:80"))

    try:
        async with trio.open_nursery() as nursery:
            for _ in range(100):
                nursery.start_soon(in_vain)
        with trio.fail_after(PATIENCE_S / 2):
            await trio.to_thread.run_sync(int)  # as for a compressed body
    finally:
        speaks.set()


def test_one_miss_is_forgiven() -> None:
    static = Static(StaticEndpoint("a", "http://h:1", ("m",)))
    assert not static.missed("no answer")
    assert static.healthy
    static.answered()
    assert not static.missed("no answer")
    assert static.missed("HTTP 500")
    assert (static.healthy, static.why) == (False, "HTTP 500")
    assert not static.missed("HTTP 502")
    assert static.answered()


@pytest.mark.parametrize(
    ("reply", "why"),
    [(Reply(404, b""), "says HTTP 404"), (Reply(200, b"<html>"), "no list of models"),
     (Reply(200, b'{"data": 3}'), "no list"), (Reply(200, b'{"data": [{"x": 1}]}'), "no list"),
     (Reply(200, b'{"data": []}'), "lists no model"), (Reply(200, b'[]'), "no list"),
     (Reply(200, b'{"data": [{"id": 7}, {"id": ""}]}'), "lists no model")],
)  # fmt: skip
def test_lists_that_are_none(reply: Reply, why: str) -> None:
    with pytest.raises(Unanswered, match=why) as told:
        listed(reply)
    assert "id=URL=model" in str(told.value)


def test_a_list_is_read_once_per_name() -> None:
    body = b'{"data": [{"id": "a"}, {"id": "b", "x": 1}, {"id": "a"}]}'
    assert listed(Reply(200, body)) == ("a", "b")


@pytest.mark.parametrize(
    ("text", "entry"),
    [("a=http://h:1=m,n", StaticEndpoint("a", "http://h:1", ("m", "n"))),
     ("a=http://h:1", StaticEndpoint("a", "http://h:1", ())),
     ("a=http://h:1;weight=2;depth=9", StaticEndpoint("a", "http://h:1", (), 9, 2.0)),
     ("a=http://h:1=m;weight=2.5", StaticEndpoint("a", "http://h:1", ("m",), weight=2.5))],
)  # fmt: skip
def test_endpoints_as_they_are_written(text: str, entry: StaticEndpoint) -> None:
    assert endpoint(text) == entry


@pytest.mark.parametrize(
    "text", ["a=http://h:1=", "=http://h:1", "a=h:1=m", "a=http://h:1;weight=0", "a=http://h;weight="]
)  # fmt: skip
def test_endpoints_that_are_wrong_are_named(text: str) -> None:
    with pytest.raises(ValueError, match=text.replace("?", ".")):
        endpoint(text)


@pytest.mark.parametrize(
    ("text", "why"),
    [("a=http://h:99999=m", "no number from 1 to 65535"), ("a=http://h:0=m", "no number from 1"),
     ("a=http://h:x=m", "no number from 1"), ("a=http://me:secret@h:1=m", "only http://host:port"),
     ("a=http://h:1?x=y=m", "only http://host:port"), ("a=http://=m", "names no host"),
     ("a=https://h:1=m", "over http://, not https"),
     ("12=http://h:1=m", "no id"), ("a b=http://h:1=m", "no id"), ("ä=http://h:1=m", "no id")],
)  # fmt: skip
def test_endpoints_that_could_never_serve_are_refused_before_a_process_starts(
    text: str, why: str
) -> None:
    with pytest.raises(ValueError, match=why):
        endpoint(text)
