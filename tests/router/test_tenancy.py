"""Budgets and limits over several routers: what passes, what is refused, what comes back."""

from __future__ import annotations

import time
from functools import partial
from typing import TYPE_CHECKING, Any

import anthropic
import pytest
import trio

from controller.router import allowance, tenancy
from controller.router.config import Timeouts
from tests.router.wire import PATIENCE_S, Answer, chat_body, until

if TYPE_CHECKING:
    from controller.router.allowance import Kind
    from tests.fake_engine import FakeEngine
    from tests.router.tenants import Routers

pytestmark = pytest.mark.slow

TRIES = 6
MINUTE = "select floor(extract(epoch from clock_timestamp()) / 60)::int"


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """What Postgres says counts, however slowly it says it."""
    monkeypatch.setattr(tenancy, "WAIT_S", PATIENCE_S)


def counts(answers: list[Answer]) -> dict[Any, int]:
    """How many of each status, or code of a refusal."""
    found: dict[Any, int] = {}
    for answer in answers:
        word = answer.status if answer.status == 200 else answer.code
        found[word] = found.get(word, 0) + 1
    return found


def billed(prompt: int, completion: int) -> dict[str, Any]:
    """A chat that comes to these tokens, and whose bound is no more."""
    usage = {"prompt_tokens": prompt, "completion_tokens": completion}
    choice = {"index": 0, "message": {"role": "assistant", "content": "x"}, "finish_reason": "stop"}
    document = {"object": "chat.completion", "choices": [choice], "usage": usage}
    # Four bytes are a token; the rest of the body is some more.
    text = "y" * (4 * prompt)
    return {
        "fake": {"body": document},
        "max_tokens": completion,
        "messages": [{"role": "user", "content": text}],
    }


async def test_b01_parallel_calls_over_two_routers_stay_within_the_budget(
    routers: Routers, engine: FakeEngine
) -> None:
    routers.prepare(engine, "budget")
    number = routers.budget("budget", 1150)
    await routers.start(2)
    engine.default["delay"] = 0.2
    answers = await routers.burst("budget", 50, **billed(100, 300))
    assert counts(answers) == {200: 2, "insufficient_quota": 48}
    assert len(engine.chats()) == 2
    await until(routers.written)
    view = "select spent, reserved from llmgw.budgets where id = %s"
    assert routers.execute(view, number)[0][0] == 800
    refused = next(a for a in answers if a.status == 429)
    assert refused.json["error"]["type"] == "insufficient_quota"
    assert "this month leaves less than this request may cost" in refused.json["error"]["message"]
    assert int(refused.headers["retry-after"]) >= 1
    # What was not used of the bounds is back: a request that fits passes on either router.
    for router in (0, 1):
        await until_passes(routers, "budget", router, **billed(10, 100))


async def test_a_spent_budget_says_so_and_a_raised_one_serves_again(
    routers: Routers, engine: FakeEngine
) -> None:
    routers.prepare(engine, "raised", "other1")
    routers.budget("raised", 7, "24h")
    await routers.start(2)
    engine.default["tokens"] = 3
    chat = {"max_tokens": 3, "messages": []}  # seven and three tokens, of which the bound knows not
    first = await routers.ask("raised", **chat)
    assert first.status in {200, 429}
    routers.budget("raised", 60, "24h")
    await until(lambda: routers.running[0].core.asking is not None)
    answers = [await routers.ask("raised", n, **chat) for n in range(12)]
    assert counts(answers)[200] >= 2
    assert answers[-1].code == "insufficient_quota"
    await until(routers.written)
    assert routers.execute("select spent <= micros + 20 from llmgw.budgets") == [(True,)]
    routers.budget("raised", 1000, "24h")
    await until_passes(routers, "raised", **chat)
    assert (await routers.ask("other1", **chat)).status == 200
    routers.budget("raised", 5, "24h")
    await until_refused(routers, "raised", **chat)


async def test_who_waits_for_one_bound_keeps_what_it_has_of_the_others(
    routers: Routers, engine: FakeEngine
) -> None:
    """Else it gives up its slot while it asks for money, and then its money for a slot."""
    routers.prepare(engine, "both00")
    routers.budget("both00", 240)
    routers.limit("both00", parallel=1)
    await routers.start()
    chat = {"max_tokens": 50, "messages": []}  # of which ten tokens are used
    answers = [await routers.ask("both00", **chat) for _ in range(8)]
    assert counts(answers) == {200: 8}


@pytest.mark.parametrize("kind", ["slots", "money"])
async def test_B05_what_a_request_held_elsewhere_is_there_for_the_next_one(
    routers: Routers, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch, kind: Kind
) -> None:
    """One client, one request after the other: each may come to another router."""
    monkeypatch.setitem(allowance.GRACE_S, kind, PATIENCE_S)  # the other router tells, too
    routers.prepare(engine, "turns1")
    if kind == "slots":
        routers.limit("turns1", parallel=1)
    else:
        routers.budget("turns1", 500)
    await routers.start(2)
    hold = "select coalesce(sum(hold), 0)::int from llmgw_core.allowance where kind = %s"
    for number in range(4):
        async with trio.open_nursery() as nursery:
            told: list[Answer] = []
            chat = billed(10, 300) | {"fake": {"hold": True, "tokens": 1}}
            nursery.start_soon(ask_into, routers, "turns1", told, number, chat)
            await until(lambda: engine.held() == 1)
            await until(lambda: routers.execute(hold, kind) != [(0,)])
            engine.release()
        assert told[0].status == 200, (number, told[0].body)


async def until_passes(routers: Routers, key: str, router: int = 0, **fields: Any) -> Answer:
    """Ask until one is served, as a client does that obeys Retry-After."""
    for _ in range(100):
        answer = await routers.ask(key, router, **fields)
        if answer.status == 200:
            return answer
        await routers.pause()
    raise AssertionError(f"key {key} is wedged: {answer.body!r}")


async def until_refused(routers: Routers, key: str, **fields: Any) -> Answer:
    for _ in range(100):
        answer = await routers.ask(key, **fields)
        if answer.status == 429:
            return answer
        await routers.pause()
    raise AssertionError(f"key {key} is not refused")


async def test_b04_limits_hold_for_all_routers_together_and_over_restarts(
    routers: Routers, engine: FakeEngine
) -> None:
    routers.prepare(engine, *(f"limit{n}" for n in range(TRIES)))
    for n in range(TRIES):
        key = f"limit{n}"
        routers.limit(key, requests=9, parallel=4)
        began = routers.execute(MINUTE)
        await routers.start(3)
        engine.default["hold"] = True
        async with trio.open_nursery() as nursery:
            held: list[Answer] = []
            nursery.start_soon(collect, routers, key, 12, held)
            await until(lambda: engine.held() == 4)
            await until(lambda held=held: len(held) == 8)
            engine.release(4)
        assert counts(held) == {200: 4, "rate_limit_exceeded": 8}
        assert all(a.headers["retry-after"] == "1" for a in held if a.status == 429)
        engine.default["hold"] = False
        await routers.stop()
        await routers.start(3)
        passed = [await routers.ask(key, router) for router in range(12)]
        if routers.execute(MINUTE) == began:
            assert counts([*held, *passed])[200] == 9
            last = passed[-1]
            assert (last.code, last.json["error"]["type"]) == ("rate_limit_exceeded", "requests")
            assert 1 <= int(last.headers["retry-after"]) <= 60
            assert last.headers["x-ratelimit-remaining-requests"] == "0"
            return
        await routers.stop()
    raise AssertionError("every try ran over the end of a minute")


async def collect(routers: Routers, key: str, number: int, into: list[Answer]) -> None:
    async def one(router: int) -> None:
        into.append(await routers.ask(key, router))

    async with trio.open_nursery() as nursery:
        for router in range(number):
            nursery.start_soon(one, router)


async def test_the_whole_chain_is_checked_and_a_moved_key_is_charged_where_it_began(
    routers: Routers, engine: FakeEngine
) -> None:
    routers.prepare(engine, "chain1", "chain2")
    for kind, name, parent in (
        ("org", "acme", None),
        ("team", "ml", "acme"),
        ("org", "else", None),
    ):
        made = "select llmgw.scope_create_v1('test', %s, %s, %s, null)"
        routers.execute(made, kind, name, parent)
    for key in ("chain1", "chain2"):
        routers.execute("select llmgw.key_move_v1('test', %s, 'acme/ml')", key)
    put = "select llmgw.budget_put_v1('test', %s, null, %s, 'month', null, null)"
    routers.execute(put, "acme", 600)
    routers.execute(put, "acme/ml", 10_000)
    routers.execute(put, "else", 10_000)
    await routers.start(2)
    engine.default["hold"] = True
    async with trio.open_nursery() as nursery:
        held: list[Answer] = []
        nursery.start_soon(ask_into, routers, "chain1", held, 0, billed(100, 300))
        await until(lambda: engine.held() == 1)
        refused = await routers.ask("chain2", 1, **billed(100, 300))
        assert refused.code == "insufficient_quota"
        assert "this key's org" in refused.json["error"]["message"]
        routers.execute("select llmgw.scope_move_v1('test', 'acme/ml', 'else')")
        engine.default["hold"] = False
        await until_passes(routers, "chain2", 1, **billed(100, 300))
        engine.release()
    assert held[0].status == 200
    await until(routers.written)
    spent = "select scope, spent::int from llmgw.budgets order by id"
    assert routers.execute(spent) == [("acme", 400), ("else/ml", 800), ("else", 400)]


async def ask_into(
    routers: Routers, key: str, into: list[Answer], router: int, chat: dict[str, Any]
) -> None:
    into.append(await routers.ask(key, router, **chat))


async def test_many_requests_are_few_calls(routers: Routers, engine: FakeEngine) -> None:
    routers.prepare(engine, "many01")
    routers.budget("many01", 10**9)
    routers.limit("many01", requests=10**6, tokens=10**9, parallel=1000)
    await routers.start()
    wire = await routers.open()
    for number in range(400):
        if number == 100:
            before, began = routers.pool.asked, trio.current_time()
        await wire.post("/v1/chat/completions", chat_body(max_tokens=10), key="many01")
        assert (await wire.answer()).status == 200
    assert routers.pool.asked - before <= 30 + (trio.current_time() - began)  # one a second


async def test_clients_with_limits_are_told_what_is_left(
    routers: Routers, engine: FakeEngine
) -> None:
    routers.prepare(engine, "told01", "free01")
    routers.limit("told01", requests=100, tokens=100_000)
    routers.limit("told01", model="m", requests=50)
    await routers.start()
    for stream in (False, True):
        answer = await routers.ask("told01", stream=stream, max_tokens=10)
        told = {n: v for n, v in answer.headers.items() if n.startswith("x-ratelimit")}
        assert told["x-ratelimit-limit-requests"] == "50"
        assert 40 <= int(told["x-ratelimit-remaining-requests"]) < 50
        assert told["x-ratelimit-limit-tokens"] == "100000"
        assert int(told["x-ratelimit-remaining-tokens"]) < 100_000
        assert told["x-ratelimit-reset-requests"].endswith("s")
    free = await routers.ask("free01")
    assert not [name for name in free.headers if name.startswith("x-ratelimit")]
    engine.default["headers"] = "X-RateLimit-Remaining-Requests: 9\r\nvary: accept\r\n"
    for stream in (False, True):
        wire = await routers.open()
        document = chat_body(stream=stream, max_tokens=10)
        await wire.post("/v1/chat/completions", document, key="told01")
        head = (await wire.until(b"\r\n\r\n")).lower()
        assert head.count(b"\nx-ratelimit-remaining-requests: ") == 1, "one word, and ours"
        assert b"\nx-ratelimit-remaining-requests: 9\r" not in head
        assert b"\nvary: accept\r" in head


async def test_A34_no_sdk_waits_in_its_call_for_the_next_month(
    routers: Routers, engine: FakeEngine
) -> None:
    """This one did: it sleeps for as long as Retry-After says."""
    routers.prepare(engine, "spent1")
    routers.budget("spent1", 5)
    await routers.start()
    await until_refused(routers, "spent1", max_tokens=100)
    refusals = routers.running[0].core.stats.refusals
    before = refusals["insufficient_quota"]
    with anthropic.Anthropic(
        base_url=f"http://127.0.0.1:{routers.running[0].port}", api_key="spent1"
    ) as client:
        ask = partial(client.messages.create, model="m", messages=[], max_tokens=100)
        with trio.fail_after(PATIENCE_S), pytest.raises(anthropic.RateLimitError):
            await trio.to_thread.run_sync(ask, abandon_on_cancel=True)
    assert refusals["insufficient_quota"] == before + 1


async def test_a_request_that_alone_passes_a_limit_says_what_to_do(
    routers: Routers, engine: FakeEngine
) -> None:
    routers.prepare(engine, "large1")
    routers.limit("large1", tokens=1000)
    await routers.start()
    answer = await routers.ask("large1", max_tokens=5000)
    assert (answer.status, answer.code) == (429, "rate_limit_exceeded")
    assert "This request alone may take 5" in answer.json["error"]["message"]
    assert "retry-after" not in answer.headers
    assert answer.headers["x-should-retry"] == "false"
    assert (await routers.ask("large1", max_tokens=500)).status == 200


ENDPOINTS = {
    "/v1/chat/completions": {"messages": []},
    "/v1/responses": {"input": "x"},
    "/v1/embeddings": {"input": "x"},
    "/v1/audio/speech": {"input": "x", "voice": "v"},
    "/v1/messages": {"messages": []},
}
ENDS: dict[str, dict[str, Any]] = {
    "abort before the first token": {"delay": 90},
    "abort in the answer": {"tokens": 500, "gap": 0.05, "byte_gap": 0.05},
    "timeout": {"delay": 90, "patient": True},
    "502": {"status": 502, "patient": True},
    "cut": {"die_at": 1, "die": "rst", "patient": True},
    "refused": {"status": 400, "patient": True},
}


@pytest.mark.parametrize("path", ENDPOINTS)
async def test_b05_no_way_out_keeps_a_slot(routers: Routers, engine: FakeEngine, path: str) -> None:
    routers.prepare(engine, "slots1")
    routers.limit("slots1", parallel=4)
    times = Timeouts(refresh_s=0.2, flush_s=0.02, headers_s=60.0)
    await routers.start(2, timeouts=times)
    for way, how in ENDS.items():
        wires = [await routers.open() for _ in range(4)]
        seen = len(engine.chats())
        for wire in wires:
            body = {"model": "m", "stream": way != "502", **ENDPOINTS[path], "fake": how}
            await wire.post(path, body, key="slots1")
        await until(lambda seen=seen: len(engine.chats()) >= seen + 4)
        if not how.get("patient"):
            for wire in wires:
                wire.reset()
        core = routers.running[0].core
        if way == "timeout":
            core.deadlines.sweep(time.monotonic() + times.headers_s + 1)
        await until(lambda core=core: not core.exchanges)
        answer = await routers.ask("slots1")
        assert answer.status == 200, (way, answer.body)
        await until_passes(routers, "slots1", 1)
    assert routers.running[0].core.tenancy.as_json()["allowances_waiting"] == 0


async def test_b05_the_slots_of_a_killed_router_come_back(
    routers: Routers, engine: FakeEngine
) -> None:
    routers.prepare(engine, "killed")
    routers.limit("killed", parallel=4)
    await routers.start(2)
    for _ in range(4):
        wire = await routers.open(0)
        body = {"model": "m", "messages": [], "fake": {"hold": True}}
        await wire.post("/v1/chat/completions", body, key="killed")
    await until(lambda: engine.held() == 4)
    assert (await routers.ask("killed", 1)).code == "rate_limit_exceeded"
    routers.kill(0)
    await until_passes(routers, "killed")


async def test_what_was_given_back_at_the_end_is_not_taken_again(
    routers: Routers, engine: FakeEngine
) -> None:
    routers.prepare(engine, "gone01")
    routers.budget("gone01", 1_000_000)
    await routers.start()
    assert (await routers.ask("gone01")).status == 200
    await until(routers.written)
    core = routers.running[0].core
    asking, every = core.asking, list(core.tenancy.bounds.allowances.values())
    lock = asking._one_at_a_time
    held = "select coalesce(sum(amount), 0) from llmgw_core.allowance"
    assert routers.execute(held) != [(0,)]
    async with trio.open_nursery() as nursery, lock:  # both wait, in this order
        for waiter in (asking.leave, lambda: asking._ask(every)):
            waiting = lock.statistics().tasks_waiting
            nursery.start_soon(waiter)
            await until(lambda least=waiting + 1: lock.statistics().tasks_waiting >= least)
    assert routers.execute(held) == [(0,)]


async def test_with_postgres_away_what_is_held_goes_on_and_then_it_is_said(
    routers: Routers, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    routers.prepare(engine, "away01")
    routers.budget("away01", 1_000_000)
    await routers.start(without_database=429)
    assert (await routers.ask("away01", max_tokens=10)).status == 200
    core = routers.running[0].core
    (allowance,) = core.tenancy.bounds.allowances.values()
    await until(lambda: allowance.left(0.0) >= allowance.unit)
    routers.pool.away = True
    await until(lambda: core.tenancy.away)
    assert (await routers.ask("away01", max_tokens=10)).status == 200
    allowance.until = 0.0
    monkeypatch.setattr(tenancy, "WAIT_S", 0.5)
    refused = await routers.ask("away01", max_tokens=10)
    assert (refused.status, refused.code) == (429, "allowance_unavailable")
    monkeypatch.setattr(tenancy, "WAIT_S", PATIENCE_S)
    routers.pool.away = False
    assert (await until_passes(routers, "away01", max_tokens=10)).status == 200


@pytest.mark.parametrize(("kind", "ends"), [("slots", False), ("slots", True), ("money", False)])
async def test_with_postgres_silent_nobody_is_told_that_nothing_is_left(
    routers: Routers, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch, kind: Kind, *, ends: bool
) -> None:
    """It had been 429 with a Retry-After of weeks, for a budget of which nearly all was left."""
    monkeypatch.setattr(tenancy, "WAIT_S", 1.0)
    routers.prepare(engine, "quiet1")
    if kind == "slots":
        routers.limit("quiet1", parallel=1)
    else:
        routers.budget("quiet1", 1_000_000)
    await routers.start()
    chat = chat_body(fake={"hold": ends})
    first, second = await routers.open(), await routers.open()
    await first.post("/v1/chat/completions", chat, key="quiet1")
    if ends:
        await until(engine.held)
    else:
        assert (await first.answer()).status == 200
    tenants = routers.running[0].core.tenancy
    (one,) = tenants.bounds.allowances.values()
    routers.pool.speaks = trio.Event()
    await until(lambda: one.asked is not None)
    await second.post("/v1/chat/completions", {**chat, "max_tokens": 5000}, key="quiet1")
    await until(lambda: len(tenants) == 1)
    if ends:
        engine.release(2)
        assert (await first.answer()).status == 200
    answer = await second.answer()
    routers.pool.speaks.set()
    if ends:
        assert answer.status == 200
    else:
        assert (answer.status, answer.code) == (503, "allowance_unavailable")
