"""Engines that want a key of us: each gets its own, nobody else sees one, and refusals are told."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
from structlog.testing import capture_logs

from controller.router.config import Retries, StaticEndpoint, Watching
from controller.router.engine_key import MOST_BYTES, read_key
from controller.router.held import HELD_BYTES
from tests.router.test_breaker import NEVER_BACK
from tests.router.wire import until

if TYPE_CHECKING:
    from pathlib import Path

    from tests.fake_engine import FakeEngine
    from tests.router.conftest import House

OFTEN = Watching(metrics_s=0.05, health_s=0.05)
PLENTY = Retries(attempts=3, ratio=1.0, floor=1000)
RIGHT, OTHER, WRONG = "sk-right-0123456789", "sk-other-0123456789", "sk-wrong-0123456789"


@pytest.fixture
def keyed(house: House, tmp_path: Path) -> Any:
    """Makes an endpoint whose engine wants `wants`, and whose file holds `key`."""

    def make(
        name: str, *models: str, wants: str | None, key: str | None, **how: Any
    ) -> StaticEndpoint:
        engine = house.engine(api_key=wants, **how)
        if key is None:
            return StaticEndpoint(name, engine.url, models)
        path = tmp_path / name
        path.write_text(f"{key}\n")
        return StaticEndpoint(name, engine.url, models, key_file=path)

    return make


def seen(engine: FakeEngine) -> set[str | None]:
    """What came as Authorization in its requests."""
    return {record.headers.get("authorization") for record in engine.records}


async def test_A28_each_engine_gets_its_own_key_and_no_other(house: House, keyed: Any) -> None:
    ends = (
        keyed("a", "m", wants=RIGHT, key=RIGHT),
        keyed("b", "m", wants=OTHER, key=OTHER),
        keyed("c", "m", wants=None, key=None),
    )
    await house.start(endpoints=ends)
    for _ in range(30):
        headers = {"x_api_key": "sk-test", "connection": "authorization"}
        assert (await house.ask(headers=headers)).status == 200
    first, second, third = house.engines
    assert (seen(first), seen(second)) == ({f"Bearer {RIGHT}"}, {f"Bearer {OTHER}"})
    assert seen(third) == {None}
    assert "x-api-key" not in {name for e in house.engines for r in e.records for name in r.headers}


async def test_a_request_that_goes_elsewhere_takes_the_key_of_where_it_goes(
    house: House, keyed: Any
) -> None:
    ends = (
        keyed("a", "m", wants=RIGHT, key=RIGHT, status=503),
        keyed("b", "m", wants=OTHER, key=OTHER, status=503),
        keyed("c", "last", wants=None, key=None),
    )
    fallbacks = (("m", ("last",)),)
    await house.start(endpoints=ends, aliases=(), fallbacks=fallbacks, retries=PLENTY)
    for stream in (False, True):
        assert (await house.ask(stream=stream)).status == 200
    assert all(engine.chats() for engine in house.engines)
    assert [seen(engine) for engine in house.engines] == [
        {f"Bearer {RIGHT}"}, {f"Bearer {OTHER}"}, {None},
    ]  # fmt: skip


async def test_health_models_and_metrics_are_asked_with_the_key(house: House, keyed: Any) -> None:
    await house.start(endpoints=(keyed("a", wants=RIGHT, key=RIGHT),), watching=OFTEN)
    await until(lambda: "m" in house.core.fleet.names)
    assert (await house.ask()).status == 200
    (engine,) = house.engines
    await until(lambda: {"/health", "/v1/models", "/metrics"} <= {r.path for r in engine.records})
    assert seen(engine) == {f"Bearer {RIGHT}"}


@pytest.mark.parametrize("models", [("m",), ()])
async def test_an_engine_that_refuses_its_key_is_unhealthy_until_the_file_is_right(
    house: House, keyed: Any, models: tuple[str, ...]
) -> None:
    end = keyed("a", *models, wants=RIGHT, key=WRONG)
    with capture_logs() as lines:
        await house.start(endpoints=(end,), watching=OFTEN)
        await until(house.core.statics.unhealthy)
        why = "the endpoint's key was refused (its /v1/models says HTTP 401): see endpoint_keys"
        assert house.core.statics.unhealthy() == {"a": why}
        end.key_file.write_text("two words")
        await house.running.reload()  # refused: the old one stays
        end.key_file.write_text(RIGHT)
        await house.running.reload()
        await until(lambda: house.core.fleet.serves("m"))
        assert not house.core.statics.unhealthy()
        assert (await house.ask()).status == 200
        house.engines[0].default = {"api_key": OTHER}
        end.key_file.write_text(OTHER)
        await house.running.reload()
        assert (await house.ask()).status == 200
    told = [line["event"] for line in lines if "key of an endpoint" in line["event"]]
    assert told == [
        "the key of an endpoint was not taken, the old one stays",
        *["the key of an endpoint is another"] * 2,
    ]


async def test_a_guarded_health_without_a_key_of_ours_is_alive_and_says_nothing_of_keys(
    house: House, keyed: Any
) -> None:
    ends = (keyed("a", "m", wants=None, key=None, health=401),)
    await house.start(endpoints=ends, watching=OFTEN)
    await until(lambda: len(house.engines[0].records) > 3)
    assert not house.core.statics.unhealthy()


async def test_models_that_nobody_may_list_without_a_key_are_told_of(
    house: House, keyed: Any
) -> None:
    await house.start(endpoints=(keyed("a", wants=RIGHT, key=None),), watching=OFTEN)
    await until(house.core.statics.unhealthy)
    assert "give it the key that it wants" in house.core.statics.unhealthy()["a"]


# -- a request that is refused -------------------------------------------------------------------


@pytest.mark.parametrize("key", [WRONG, None])
@pytest.mark.parametrize("how", [{}, {"long": "x" * 2 * HELD_BYTES}])
@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_never_gets_an_engines_401(
    house: House, keyed: Any, key: str | None, how: dict[str, Any], stream: bool
) -> None:
    await house.start(endpoints=(keyed("a", "m", wants=RIGHT, key=key, **how),))
    answer = await house.ask(stream=stream)
    assert (answer.status, answer.code) == (502, "engine_refused_key")
    assert answer.headers["retry-after"] == "5"
    assert b"sk-" not in answer.body
    assert "Nothing is wrong with your key" in answer.json["error"]["message"]
    row = await house.row()
    assert (row["status"], row["http_status"], row["error_code"]) == (
        "error", 502, "engine_refused_key",
    )  # fmt: skip
    assert [why for _, _, why, _ in row["tried"]] == ["401"]
    await until(house.idle)


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/chat/completions"])
async def test_an_event_that_refuses_the_key_is_no_401_either(house: House, path: str) -> None:
    error = {"type": "authentication_error", "message": f"bad key {RIGHT}"}
    house.engine(error_first={"type": "error", "error": error})
    await house.start()
    wire = await house.wire()
    await wire.post(path, {"model": "m", "messages": [], "max_tokens": 5, "stream": True})
    answer = await wire.answer()
    assert answer.status == 502
    assert "refused the gateway's key" in answer.json["error"]["message"]
    assert RIGHT.encode() not in answer.body
    assert (await house.row())["error_code"] == "engine_refused_key"
    assert house.core.stats.upstream_failures == {("e0", "engine_refused_key"): 1}


async def test_who_refuses_our_key_is_passed_over_and_soon_not_asked(
    house: House, keyed: Any
) -> None:
    ends = (
        keyed("a", "m", wants=RIGHT, key=WRONG),
        keyed("b", "m", wants=OTHER, key=OTHER),
    )
    await house.start(endpoints=ends, retries=PLENTY, breaker=NEVER_BACK)
    for _ in range(40):
        assert (await house.ask()).status == 200
    refused = len(house.engines[0].chats())
    assert refused == house.core.stats.retries["engine_refused_key"] == 5  # then its breaker opens
    assert not house.core.fleet.pools["a"].breaker.closed
    assert house.core.stats.upstream_failures == {("a", "engine_refused_key"): 5}
    ends[0].key_file.write_text(RIGHT)
    await house.running.reload()  # and it is asked at once
    while len(house.engines[0].chats()) == refused:
        assert (await house.ask()).status == 200
    assert house.core.fleet.pools["a"].breaker.closed


async def test_another_model_answers_where_the_key_is_refused(house: House, keyed: Any) -> None:
    ends = (
        keyed("a", "m", wants=RIGHT, key=None),
        keyed("b", "last", wants=OTHER, key=OTHER),
    )
    await house.start(endpoints=ends, aliases=(), fallbacks=(("m", ("last",)),))
    answer = await house.ask(headers={"x_llmgw_explain": "1"})
    assert answer.status == 200
    assert answer.headers["x-llmgw-fallback"] == "last; on=error; by=settings"


# -- where a key is never seen -------------------------------------------------------------------


async def test_a_key_is_in_nothing_that_people_see(
    house: House, keyed: Any, tmp_path: Path
) -> None:
    ends = (
        keyed("a", "m", wants=RIGHT, key=RIGHT),
        keyed("b", "m", wants=RIGHT, key=OTHER),
    )
    path = tmp_path / "access.log"
    with capture_logs() as lines:
        await house.start(endpoints=ends, watching=OFTEN, access_log=str(path), retries=PLENTY)
        await until(house.core.statics.unhealthy)
        answers = [await house.ask(headers={"x_llmgw_explain": "1"}) for _ in range(4)]
        ends[0].key_file.write_text(OTHER)
        await house.running.reload()
        await until(lambda: path.exists() and path.read_text().count("\n") >= 4)
    table = house.core.statics.table()
    pools = house.core.fleet.pools.values()
    shown = json.dumps(house.core.snapshot()) + repr(house.rows) + path.read_text() + repr(lines)
    shown += repr(house.core.config) + repr(table) + repr([pool.place for pool in pools])
    shown += repr(answers) + repr(house.core.ready_reasons())
    assert any(replica.engine_key for model in table.models for replica in model.replicas)
    assert RIGHT not in shown
    assert OTHER not in shown


@pytest.mark.parametrize("text", ["sk-a", "sk-a\n", "  sk-a\r\n\n", "!~" * (MOST_BYTES // 2)])
def test_a_file_holds_a_key_and_blanks_around_it(tmp_path: Path, text: str) -> None:
    (tmp_path / "key").write_text(text)
    assert read_key(tmp_path / "key") == text.strip().encode()


@pytest.mark.parametrize(
    ("text", "why"),
    [("", "is empty"), (" \n\n", "is empty"), ("sk-a\nsk-b", "one line of printable ASCII"),
     ("sk-a\r\nx: y", "one line"), ("Bearer sk-a", "without the word Bearer"), ("sk-ä", "ASCII"),
     ("sk-\x00a", "printable"), ("sk-\x7f", "printable"), ("a" * 5000, "is over 4096 bytes")],
)  # fmt: skip
def test_a_file_that_holds_no_key_is_named_and_not_shown(
    tmp_path: Path, text: str, why: str
) -> None:
    (tmp_path / "file").write_text(text)
    with pytest.raises(ValueError, match=why) as told:
        read_key(tmp_path / "file")
    assert str(tmp_path / "file") in str(told.value)
    assert "sk-" not in str(told.value)
