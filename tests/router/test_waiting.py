"""Requests for models that run on demand: they wait, go on, give up, and tell that they wait."""

from __future__ import annotations

import json
import time
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import pytest
import trio

from controller.router.config import Limits, RouterConfig, Timeouts
from controller.router.head import NOTED
from controller.router.http1 import Request
from controller.router.server import run_router
from controller.router.waiters import patience
from tests.fake_engine import FakeEngine
from tests.router.test_server import QUERIES, Shelf
from tests.router.wire import Answer, Wire, until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

FULL = {"error": {"message": "full", "code": 503}}


class House:
    """A router on a shelf whose model `m` runs on demand and has no replica yet."""

    def __init__(self, nursery: trio.Nursery, engine: FakeEngine) -> None:
        self.nursery = nursery
        self.shelf = Shelf(engine)
        self.replicas, self.shelf.replicas = self.shelf.replicas[:1], []
        self.shelf.models = [
            {"name": "m", "aliases": ["short"], "fallbacks": [], "on_demand": True},
            {"name": "always", "aliases": [], "fallbacks": [], "on_demand": False},
        ]
        self.running: Any = None
        self.hint: Any = None
        self.wires: list[Wire] = []

    async def start(self, *, limits: dict[str, int] | None = None, **times: float) -> House:
        hints: list[Any] = []

        async def listen(on_hint: Any, on_reconnect: Any) -> None:
            hints.append(on_hint)
            await trio.sleep_forever()

        config = RouterConfig(
            host="127.0.0.1", port=0, handle_signals=False, limits=Limits(**(limits or {})),
            timeouts=Timeouts(**{"refresh_s": 30.0, "flush_s": 30.0, **times}),
        )  # fmt: skip
        self.running = await self.nursery.start(run_router, config, self.shelf, QUERIES, listen)
        await until(lambda: self.running.core.table_loaded_at and hints)
        self.hint = hints[0]
        return self

    async def ask(self, *, model: str = "m", **more: Any) -> Wire:
        """Send a chat and do not wait for its answer."""
        wire = await Wire.open(self.running.port)
        self.wires.append(wire)
        headers = more.pop("headers", {})
        body = {"model": model, "messages": [], **more}
        await wire.post("/v1/chat/completions", body, **headers)
        return wire

    async def waiting(self, number: int) -> None:
        await until(lambda: self.running.core.waiting.waiting("m") == number)

    def ready(self) -> None:
        """The replica is in the table."""
        self.shelf.replicas = self.replicas
        self.hint("")

    def told(self) -> list[list[dict[str, Any]]]:
        """What was reported of demand."""
        return [demand for _, _, demand in self.shelf.reports]

    def empty(self) -> bool:
        room = self.running.core.waiting
        return room.count == room.bytes == 0 and not room.waiting("m")


@pytest.fixture
async def house(nursery: trio.Nursery, engine: FakeEngine) -> AsyncIterator[House]:
    async with opened(nursery, engine) as made:
        yield made


@asynccontextmanager
async def opened(nursery: trio.Nursery, engine: FakeEngine) -> AsyncIterator[House]:
    made = House(nursery, engine)
    yield made
    crashes = made.running.core.reactor.crashes
    assert made.empty()
    made.running.stop()
    for wire in made.wires:
        wire.close()
    assert crashes == 0


async def answers(*wires: Wire) -> list[Answer]:
    return [await wire.answer() for wire in wires]


async def test_requests_wait_and_go_on_when_a_replica_is_there(house: House) -> None:
    await house.start()
    wires = [await house.ask(model=name) for name in ("m", "short", "m")]
    wires.append(await house.ask(stream=True))
    await house.waiting(4)
    told = house.running.core.snapshot()
    assert (told["waiting"], told["in_flight"]) == ([["m", 4]], [["m", 0]])
    house.ready()
    found = await answers(*wires)
    assert house.running.core.snapshot()["admissions"] == [["m", "woken", 4]]
    assert [a.status for a in found] == [200] * 4
    assert found[3].events[-1] == "[DONE]"
    assert house.running.core.snapshot()["waiting"] in ([], [["m", 0]])


async def test_a_wish_is_told_at_once_and_once(house: House) -> None:
    await house.start()  # its reports come every 30 s
    await until(lambda: len(house.told()) == 1)
    first = await house.ask()
    await until(lambda: len(house.told()) == 2, 20.0)
    (row,) = house.told()[1]
    assert (row["model"], row["waiting"], row["in_flight"]) == ("m", 1, 0)
    assert 0 <= row["wanted_age_ms"] < 20_000
    second = await house.ask()
    await house.waiting(2)
    assert len(house.told()) == 2
    house.ready()
    await answers(first, second)
    reporter_rows = house.running.core.waiting.wanted()
    assert reporter_rows == {}  # served: nobody was left unserved


async def test_D19_a_caller_that_leaves_frees_its_place_and_the_wish_stays(house: House) -> None:
    await house.start(flush_s=0.02)
    wire = await house.ask()
    await house.waiting(1)
    wire.close()
    await house.waiting(0)
    await until(lambda: house.shelf.written)
    assert house.shelf.written[0]["status"] == "client_closed"
    assert house.empty()
    told = len(house.told())
    await until(lambda: len(house.told()) > told + 1)
    (row,) = house.told()[-1]
    assert (row["waiting"], row["in_flight"]) == (0, 0)
    assert row["wanted_age_ms"] is not None


async def test_A34_who_waits_too_long_is_told_when_to_come_back(house: House) -> None:
    await house.start(wake_s=0.2)
    late = await (await house.ask()).answer()
    assert (late.status, late.code) == (503, "model_is_starting")
    assert late.headers["retry-after"] == "10"
    assert house.running.core.waiting.wanted()["m"] < 60  # and the start goes on
    house.ready()
    await until(lambda: house.running.core.fleet.serves("m"))
    assert (await (await house.ask()).answer()).status == 200


def held_up(state: str, why: str, failures: int = 0, retry_s: float = 0.0) -> dict[str, Any]:
    """A row of llmgw.waking."""
    return {"model": "m", "state": state, "why": why, "failures": failures, "retry_s": retry_s}


TOLD = [
    (held_up("starting", "its weights are being fetched (43 %)"), "model_is_starting", "10",
     " s: its weights are being fetched (43 %). It goes on starting"),
    (held_up("pending", "there is no place for it: cards are taken by other replicas"),
     "model_has_no_place", "30", "there is no place for it: cards are taken by other replicas. It"),
    (held_up("failed", "the engine exited with code 1: no such file", 1, 0.7),
     "model_start_failed", "1", "(failed starts in a row: 1): the engine exited with code 1: no"),
]  # fmt: skip


@pytest.mark.parametrize(("row", "code", "again", "words"), TOLD)
@pytest.mark.parametrize("stream", [False, True])
async def test_D17_who_waits_too_long_is_told_what_held_it_up(
    house: House, row: dict[str, Any], code: str, again: str, words: str, stream: bool
) -> None:
    await house.start()
    house.shelf.waking = [row]
    wire = await house.ask(stream=stream)
    await house.waiting(1)
    house.hint("")
    line = house.running.core.waiting._lines["m"]
    await until(lambda: line.delay)
    (waits,) = line.members
    waits.expired(waits.wait_until)
    answer = await wire.answer()
    assert (answer.status, answer.code) == (503, code)
    assert answer.headers["retry-after"] == again
    assert words in answer.json["error"]["message"]


async def test_D17_a_stream_that_waits_is_kept_alive_and_goes_on_under_the_same_head(
    house: House,
) -> None:
    await house.start(comment_s=0.05)
    house.shelf.waking = [held_up("starting", "its engine is starting")]
    wire = await house.ask(model="short", stream=True)
    plain = await house.ask()
    await house.waiting(2)
    house.hint("")
    status, headers = await wire.head()
    assert (status, headers["content-type"]) == (200, "text/event-stream; charset=utf-8")
    await wire.until(b": waiting for model m: its engine is starting\n\n\r\n")
    house.ready()
    (rest, second) = await wire.answer_from_chunks(), await plain.answer()
    assert b'"model":"short"' in rest.replace(b" ", b"")
    assert rest.endswith(b"data: [DONE]\n\n")
    assert b"HTTP/1.1" not in rest
    assert (second.status, b"waiting for" in second.body) == (200, False)
    # The connection is good for the next request.
    await wire.chat(stream=True)
    wire.buffer = b""
    assert (await wire.answer()).events[-1] == "[DONE]"


async def test_D17_a_kept_alive_stream_ends_with_the_reason(house: House) -> None:
    await house.start(comment_s=0.05, flush_s=0.02)
    house.shelf.waking = [held_up("pending", "there is no place for it: no card is free")]
    wire = await house.ask(stream=True)
    await house.waiting(1)
    house.hint("")
    await wire.until(b": waiting for model m: there is no place for it")
    (waits,) = house.running.core.waiting._lines["m"].members
    waits.give_up()
    rest = await wire.answer_from_chunks()
    assert b'"code":"model_has_no_place"' in rest
    assert rest.endswith(b"data: [DONE]\n\n")
    assert await wire.closed()
    await until(lambda: house.shelf.written)
    (row,) = house.shelf.written
    assert (row["status"], row["error_code"]) == ("error", "model_has_no_place")
    assert row["http_status"] == 200  # which the client saw


@pytest.mark.parametrize(
    ("behaviour", "words", "code", "failures"),
    [({"status": 400, "body": {"error": {"message": "too long", "code": "context"}}}, b"too long",
      "upstream_400", []),
     ({"status": 400, "body": {"detail": "odd"}}, b"odd", "upstream_400", []),
     ({"status": 400, "body": {"oh": "dear"}}, b"status 400 and no event", "upstream_400", []),
     ({"status": 500, "body": {"oh": "dear"}}, b"status 500 and no event stream",
      "upstream_500", ["500"]),
     ({"die_at": 1, "die": "rst", "tokens": 5}, b"upstream_failed",
      "upstream_failed", ["closed_early"]),
     ({"error_first": {"error": {"message": "full", "code": 503}}}, b"full",
      "upstream_503", ["503"]),
     ({"plain": True, "body": {"error": {"message": "full", "code": 503}}}, b"full",
      "upstream_503", ["503"]),
     ({"plain": True, "body": {"error": "boom"}}, b"boom", "upstream_502", ["502"]),
     ({"plain": True}, b"status 200 and no event stream", "upstream_failed", ["no_answer"]),
     ({"status": 302, "body": {"error": {"message": "away"}}}, b"status 302 and no event stream",
      "upstream_failed", ["no_answer"])],
)  # fmt: skip
async def test_what_an_engine_refuses_after_the_head_is_an_event(
    house: House, behaviour: dict[str, Any], words: bytes, code: str, failures: list[str]
) -> None:
    await house.start(comment_s=0.05, flush_s=0.02)
    wire = await house.ask(stream=True, fake=behaviour)
    await wire.until(b": waiting for model m: it is being started")
    house.ready()
    rest = await wire.answer_from_chunks()
    assert words in rest
    assert b'"error"' in rest
    assert b"data: [DONE]\n\n" in rest
    await until(lambda: house.shelf.written)
    (row,) = house.shelf.written
    assert (row["http_status"], row["error_code"]) == (200, code)
    assert not row.get("prompt_tokens")
    assert [why for _, why in house.running.core.stats.upstream_failures] == failures


LONG = "The input (9000 tokens) is longer than the model's context length (8192 tokens)."


@pytest.mark.parametrize(
    "told",
    [{"error": {"message": LONG}}, {"error": LONG, "error_type": "validation"}, {"detail": LONG},
     {"object": "error", "message": LONG, "type": "BadRequestError", "param": None, "code": 400}],
    ids=["OpenAI", "TGI", "FastAPI", "SGLang"],
)  # fmt: skip
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages"])
async def test_an_engine_that_refuses_a_request_after_the_head_says_why(
    house: House, told: dict[str, Any], path: str
) -> None:
    """Else who waited for a model that starts would send again what no engine can take."""
    await house.start(comment_s=0.05)
    wire = await Wire.open(house.running.port)
    house.wires.append(wire)
    fake = {"status": 400, "body": told}
    await wire.post(path, {"model": "m", "messages": [], "stream": True, "fake": fake})
    await wire.until(b": waiting for model m: it is being started\n\n\r\n")
    house.ready()
    rest = await wire.answer_from_chunks()
    (event,) = [line[6:] for line in rest.split(b"\n") if line.startswith(b"data: {")]
    error = json.loads(event)["error"]
    assert error["message"] == LONG
    assert error["type"] in ("invalid_request_error", "BadRequestError", "validation")


async def test_nobody_waits_for_a_model_whose_starts_fail_again_and_again(house: House) -> None:
    await house.start()
    house.shelf.waking = [held_up("failed", "the engine exited with code 1", 2, 3.2)]
    wires = [await house.ask(), await house.ask(stream=True)]
    await house.waiting(2)
    house.hint("")
    for answer in await answers(*wires):
        assert (answer.status, answer.code) == (503, "model_start_failed")
        assert answer.headers["retry-after"] == "4"
    # It is still wanted: the next start goes on, and who comes meanwhile waits for it.
    assert "m" in house.running.core.waiting.wanted()
    house.shelf.waking = [held_up("starting", "its engine is starting", 2)]
    wire = await house.ask()
    await house.waiting(1)
    house.hint("")
    await until(lambda: house.running.core.waiting._lines["m"].delay)
    house.ready()
    assert (await wire.answer()).status == 200


async def test_the_client_may_wait_for_less(house: House) -> None:
    await house.start()  # else it waits for two minutes
    answer = await (await house.ask(headers={"x_llmgw_wait": "0.1"})).answer()
    assert (answer.status, answer.code) == (503, "model_is_starting")


@pytest.mark.parametrize(
    ("value", "seconds", "rest"),
    [(b"3", 3, 1), (b"0", 0, 0), (b"900", 120, 120), (b" 2.5 ", 2.5, 0.5), (b"inf", 120, 120)],
)
def test_patience(value: bytes, seconds: float, rest: float) -> None:
    request = Request()
    assert patience(request, 120.0) == 120.0
    NOTED[b"x-llmgw-wait"](request, value)
    assert patience(request, 120.0) == seconds
    assert patience(request, 120.0, waited_s=2.0) == rest
    assert patience(request, 120.0, waited_s=1e3) == (120 if value == b"inf" else 0)


@pytest.mark.parametrize("value", ["soon", "-1", "nan", "", "5s", "-inf"])
async def test_a_wait_that_is_no_number_is_refused_whether_or_not_there_is_a_wait(
    house: House, value: str
) -> None:
    await house.start()
    wire = await house.ask(headers={"x_llmgw_wait": value})  # it would have to wait
    answer = await wire.answer()
    assert (answer.status, answer.code) == (400, "invalid_wait")
    house.ready()
    await until(lambda: house.running.core.fleet.serves("m"))
    for wait, status in ((value, 400), ("5", 200)):
        answer = await (await house.ask(headers={"x_llmgw_wait": wait})).answer()
        assert answer.status == status


@pytest.mark.parametrize("limits", [{"waiting": 2}, {"waiting_bytes": 80}])
async def test_the_room_is_bounded(house: House, limits: dict[str, int]) -> None:
    await house.start(limits=limits)
    wires = [await house.ask(), await house.ask()]
    await house.waiting(2)
    full = await (await house.ask()).answer()
    assert (full.status, full.code) == (503, "waiting_room_full")
    assert full.headers["retry-after"] == "5"
    wires[0].close()
    await house.waiting(1)
    wires[0] = await house.ask()
    await house.waiting(2)
    house.ready()
    assert [a.status for a in await answers(*wires)] == [200, 200]


async def test_a_model_that_always_runs_is_refused_at_once(house: House) -> None:
    await house.start()
    answer = await (await house.ask(model="always")).answer()
    assert (answer.status, answer.code) == (503, "no_ready_replica")


async def test_a_model_that_leaves_the_catalog_lets_nobody_wait(house: House) -> None:
    await house.start()
    wire = await house.ask()
    await house.waiting(1)
    house.shelf.models = house.shelf.models[1:]
    house.hint("")
    assert (await wire.answer()).code == "no_ready_replica"


async def test_D16_a_request_that_finds_its_replica_draining_waits_for_the_next(
    house: House,
) -> None:
    await house.start()
    house.ready()
    await until(lambda: house.running.core.fleet.serves("m"))
    house.shelf.replicas = [{**house.replicas[0], "state": "draining"}]
    house.hint("")
    await until(lambda: not house.running.core.fleet.serves("m"))
    wire = await house.ask()
    await house.waiting(1)
    house.ready()
    assert (await wire.answer()).status == 200


async def test_D16_requests_that_land_at_the_stop_decision_are_served_100_times(
    house: House,
) -> None:
    await house.start()
    for number in range(100):
        house.ready()
        await until(lambda: house.running.core.fleet.serves("m"))
        # The decision and the request cross: one of them comes first, now this and now that.
        house.shelf.replicas = [{**house.replicas[0], "state": "draining"}]
        house.hint("")
        for _ in range(number % 5):
            await trio.lowlevel.checkpoint()
        wire = await house.ask(stream=bool(number % 2))
        await until(lambda: not house.running.core.fleet.serves("m"))
        house.ready()
        assert (await wire.answer()).status == 200
        wire.close()


async def test_the_end_of_the_router_is_told_to_who_waits(house: House) -> None:
    await house.start(drain_s=0.1)
    wire = await house.ask()
    await house.waiting(1)
    house.running.stop()
    answer = await wire.answer()
    assert (answer.status, answer.code) == (503, "shutting_down")


@pytest.mark.parametrize("stream", [False, True])
async def test_C10_who_waited_in_vain_is_served_by_a_fallback(house: House, stream: bool) -> None:
    house.shelf.models[0]["fallbacks"] = ["always"]
    house.shelf.replicas = [{**house.replicas[0], "model": "always"}]
    await house.start()
    headers = {"x_llmgw_wait": "0.2", "x_llmgw_explain": "1"}
    (answer,) = await answers(await house.ask(headers=headers, stream=stream))
    assert answer.status == 200
    assert answer.headers["x-llmgw-fallback"] == "always; on=unavailable; by=settings"
    assert answer.headers["x-llmgw-attempts"] == "1"
    assert int(answer.headers["x-llmgw-queue-ms"]) >= 190
    wished = await until(lambda: [row["model"] for rows in house.told() for row in rows])
    assert wished[0] == "m"  # it is wanted all the same
    stats = house.running.core.stats
    assert stats.retries_refused == {}
    assert [stats.models[name].in_flight for name in ("m", "always")] == [0, 0]


@pytest.mark.parametrize(
    "how",
    [{"status": 503}, {"error_first": FULL}, {"raw": ": ping\n\n", "end_delay": 0.05},
     {"plain": True, "body": FULL}, {"plain": True}, {"status": 302, "body": FULL}],
)  # fmt: skip
async def test_a_stream_that_was_told_to_wait_is_answered_elsewhere_where_one_fails(
    house: House, how: dict[str, Any]
) -> None:
    with FakeEngine(how) as failing:
        house.shelf.models[0]["fallbacks"] = ["always"]
        rest = {**house.replicas[0], "replica_id": 8, "model": "always"}
        house.replicas = [{**house.replicas[0], "replica_id": 7, "endpoint": failing.url}, rest]
        await house.start(comment_s=5.0)
        wire = await house.ask(stream=True, headers={"x_llmgw_explain": "1"})
        await house.waiting(1)
        house.running.core.deadlines.sweep(time.monotonic() + 6)
        _, headers = await wire.head()
        told = [name for name in headers if name.startswith("x-llmgw")]
        assert told == ["x-llmgw-fallback-on"], "no attempt and no wait is over yet"
        await wire.until(b": waiting for model m")
        house.ready()
        answer = (await wire.until(b"0\r\n\r\n")).decode()
    assert len(failing.chats()) == 1
    assert "error" not in answer
    assert "ping" not in answer
    assert "[DONE]" in answer


async def test_a_stream_that_was_told_to_wait_gets_a_lone_replicas_error(house: House) -> None:
    await house.start(comment_s=0.1)
    wire = await house.ask(stream=True, fake={"error_first": FULL})
    await wire.until(b": waiting for model m")
    house.ready()
    answer = (await wire.until(b"0\r\n\r\n")).decode()
    assert answer.count('"error"') == 1
