"""Chains of /v1/responses: they go back to the replica that holds them (case A29)."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import psycopg
import pytest
import trio
from structlog.testing import capture_logs

from controller.router import stored
from controller.router.config import Retries, RouterConfig, Timeouts
from controller.router.server import run_router
from controller.router.stored import Owner, Stored, StoredLog, response_id
from sql import queries
from sql.pool import Pool
from tests.fake_engine import FakeEngine
from tests.router.test_database import prepare
from tests.router.wire import Answer, Wire, until

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.conftest import Database
    from tests.router.conftest import House

KEYS = {"sk-one": "keyone", "sk-two": "keytwo"}


@pytest.fixture
def engines() -> Iterator[list[FakeEngine]]:
    with FakeEngine({"stateful": True}) as first, FakeEngine({"stateful": True}) as second:
        yield [first, second]


async def respond(wire: Wire, key: str = "sk-one", **more: Any) -> Answer:
    await wire.post("/v1/responses", {"model": "m", "input": "x", **more}, key=key)
    return await wire.answer()


def identity(answer: Answer) -> str:
    assert answer.status == 200, answer.body
    found = response_id(answer.body)
    assert found is not None, answer.body
    return found


@pytest.mark.slow
async def test_A29_a_chain_stays_with_its_replica_through_any_router(
    nursery: trio.Nursery,
    database: Database,
    pool: Pool,
    engines: list[FakeEngine],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(stored, "AGAIN_S", 2.0)  # however slow the other router tells
    prepare(database, *(engine.url for engine in engines), keys=KEYS)
    config = RouterConfig(
        host="127.0.0.1",
        port=0,
        handle_signals=False,
        timeouts=Timeouts(refresh_s=0.05, flush_s=0.02),
    )
    routers = [await nursery.start(run_router, config, pool, queries("router")) for _ in "ab"]
    wires = []
    for running in routers:
        await until(lambda running=running: running.core.table_loaded_at)
        wires.append(await Wire.open(running.port))
    first, second = wires

    def told() -> bool:
        return not any(running.core.stored.untold(1) for running in routers)

    for stream in (False, True):
        for number in range(4):  # whichever of the two gets it
            last = identity(await respond(first, stream=stream))
            for turn in range(5):
                if number or turn:  # once, the other router may have to look twice
                    await until(told)
                wire = second if turn % 2 == 0 else first
                last = identity(await respond(wire, previous_response_id=last, stream=stream))
    assert all(engine.stored for engine in engines)

    stranger = await respond(second, key="sk-two", previous_response_id=last)
    assert (stranger.status, stranger.json["error"]["code"]) == (404, "previous_response_not_found")
    asked = [json.loads(record.body) for engine in engines for record in engine.chats()]
    assert sum(body.get("previous_response_id") == last for body in asked) == 0

    owner = next(engine for engine in engines if last in engine.stored)
    with psycopg.connect(database.url, autocommit=True) as connection:
        connection.execute(
            "update llmgw_core.replica set state = 'failed' where endpoint = %s", (owner.url,)
        )
    for running in routers:
        await until(lambda running=running: len(running.core.fleet.pools) == 1)
    for wire in wires:
        gone = await respond(wire, previous_response_id=last)
        assert (gone.status, gone.json["error"]["code"]) == (404, "previous_response_not_found")
        assert gone.json["error"]["param"] == "previous_response_id"
        wire.close()
    for running in routers:
        running.stop()
        await until(lambda running=running: not running.core.clients)


async def test_A29_without_a_database_one_process_knows_its_own(house: House) -> None:
    for _ in range(2):
        house.engine(stateful=True)
    await house.start()
    wire = await house.wire()
    for _ in range(6):
        last = identity(await respond(wire, key="sk-test"))
        for _ in range(3):
            last = identity(await respond(wire, key="sk-test", previous_response_id=last))
    assert all(engine.stored for engine in house.engines)
    assert house.core.snapshot()["admissions"] == [["m", "at_once", 24]]
    unknown = await respond(wire, key="sk-test", previous_response_id="resp_nowhere")
    assert unknown.status == 404
    assert "resp_nowhere" in unknown.json["error"]["message"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("how", [{"byte_gap": 0.0005}, {"gzip": True}])
async def test_A29_a_chain_stays_however_its_answers_came(
    house: House, how: dict[str, Any], *, stream: bool
) -> None:
    """An engine may send the id in two pieces, or compressed."""
    for _ in range(2):
        house.engine(stateful=True)
    await house.start()
    wire = await house.wire()
    for number in range(4):
        fake = {**how, "raw": f'{{"id": "resp_{number}", "status": "completed"}}'}
        if stream:
            event = json.dumps({"type": "response.completed", "response": {"id": f"resp_{number}"}})
            fake["raw"] = f": ping\n\ndata: {event}\n\n"
        answer = await respond(wire, key="sk-test", stream=stream, fake={**fake, "stateful": False})
        assert answer.status == 200
    owners = {f"resp_{n}": house.core.stored.owner(f"resp_{n}") for n in range(4)}
    assert all(owner is not None and owner.key_id == "k" for owner in owners.values())
    assert [row["upstream_id"] for row in house.rows] == list(owners)


async def test_A29_an_owner_that_is_dead_and_not_yet_missed_has_lost_its_answers(
    house: House,
) -> None:
    owner = house.engine(stateful=True)
    await house.start(timeouts=Timeouts(connect_s=0.2))
    wire = await house.wire()
    last = identity(await respond(wire, key="sk-test"))
    owner.stop()
    gone = await respond(wire, key="sk-test", previous_response_id=last)
    assert (gone.status, gone.json["error"]["code"]) == (404, "previous_response_not_found")


async def test_A29_a_busy_replica_is_asked_once_for_a_chain_that_only_it_holds(
    house: House,
) -> None:
    for _ in range(2):
        house.engine(stateful=True)
    await house.start(retries=Retries(3, 1.0, 100), fallbacks=(("m", ("other",)),))
    wire = await house.wire()
    last = identity(await respond(wire, key="sk-test"))
    busy = {"previous_response_id": last, "fake": {"status": 503}}
    answer = await respond(wire, key="sk-test", **busy)
    assert (answer.status, answer.headers["retry-after"]) == (503, "1")
    assert sum(len(engine.chats()) for engine in house.engines) == 2


@pytest.mark.parametrize("silent", [False, True])
async def test_A29_a_lookup_that_fails_is_told(
    house: House, monkeypatch: pytest.MonkeyPatch, silent: bool
) -> None:
    monkeypatch.setattr(stored, "WITHIN_S", 0.2)
    await house.start()

    class Away(Pool):
        def __init__(self) -> None:
            pass

        async def fetch(self, *_: object) -> list[Any]:
            if silent:
                await trio.sleep_forever()
            raise OSError("the database is away")

    log = StoredLog(house.core.stored, Away(), {"response_owner": "select"})
    monkeypatch.setattr(house.core, "stored_log", log)
    wire = await house.wire()
    with capture_logs() as lines:
        for _ in range(3):
            answer = await respond(wire, key="sk-test", previous_response_id="resp_x")
            assert (answer.status, answer.headers["retry-after"]) == (503, "2")
    assert [line["event"] for line in lines] == ["previous responses cannot be looked up"]
    for never in ("resp_\0", "x" * 100_000, "resp_" + "x" * 201):  # nobody is asked about these
        answer = await respond(wire, key="sk-test", previous_response_id=never)
        assert (answer.status, answer.json["error"]["code"]) == (404, "previous_response_not_found")


def test_the_first_word_about_an_answer_counts() -> None:
    kept = Stored(kept=2)
    kept.note("resp_a", Owner("1", "mine"))
    kept.note("resp_a", Owner("2", "theirs"))
    assert kept.owner("resp_a") == Owner("1", "mine")
    assert kept.untold(10) == [{"id": "resp_a", "replica": "1", "key_id": "mine"}]
    for name in ("resp_b", "resp_c"):
        kept.note(name, Owner("1", "mine"))
    assert kept.owner("resp_a") is None
    assert len(kept) == 2
    kept.told(kept.untold(1))
    assert [row["id"] for row in kept.untold(10)] == ["resp_c"]
