"""Chains of /v1/responses at replicas that are full: they wait, and in turn with all others."""

from __future__ import annotations

import os
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

import pytest

from controller.router.breaker import BreakerRules
from tests.router.test_admission import OTHER, Full, answered
from tests.router.wire import post_bytes, until

if TYPE_CHECKING:
    from tests.router.conftest import House
    from tests.router.wire import Wire


class Chains(Full):
    """Engines that keep answers, and hold requests from `hold` on."""

    how: ClassVar[dict[str, Any]] = {"stateful": True}

    async def begin(self) -> str:
        """The id of an answer of the first engine, which chains go on from."""
        wire = await self.house.wire()
        while not self.engine.stored:
            await wire.post("/v1/responses", {"model": "m", "input": "x", "user": "filler"})
            assert (await wire.answer()).status == 200
        await until(lambda: not self.held())
        return str(next(iter(self.engine.stored)))

    async def hold(self, engines: int = 1) -> tuple[str, Wire]:
        """What chains go on from, at an engine whose one place is taken by what the wire asked."""
        await self.start(engines=engines)
        last = await self.begin()
        for engine in self.house.engines:
            engine.default = {**self.how, "hold": True}
        wire = await self.go_on(last, "filler")
        await until(self.engine.held)
        return last, wire

    async def go_on(self, last: str, name: str = "", **more: Any) -> Wire:
        """Send a request that only the first engine can answer, and do not wait for it."""
        headers = more.pop("headers", {})
        body = {"model": "m", "input": "x", "user": name, "previous_response_id": last, **more}
        wire = await self.house.wire()
        await wire.post("/v1/responses", body, **headers)
        return wire

    async def queue_chains(self, last: str, *names: str) -> list[Wire]:
        return await self.queue(*names, ask=partial(self.go_on, last))


@pytest.fixture
def full(house: House) -> Chains:
    return Chains(house)


async def test_C08_chains_wait_for_room_at_their_replica_and_go_on_in_order(full: Chains) -> None:
    """Five follow-ups at once had the engine hold six, with a depth of one."""
    last, filler = await full.hold()
    wires = await full.queue_chains(last, "a", "b", "c", "d", "e")
    assert full.house.core.snapshot()["queued"] == [["m", 5]]
    assert full.engine.held() == 1
    await full.next(5)
    assert full.served() == ["a", "b", "c", "d", "e"]
    full.engine.release()
    assert await answered(filler, *wires) == [200] * 6
    assert full.empty()
    told = full.house.core.snapshot()
    assert sorted(told["admissions"]) == [["m", "at_once", 2], ["m", "queued", 5]]


async def test_chains_take_turns_with_other_tenants_whoever_came_first(full: Chains) -> None:
    last, _ = await full.hold()
    await full.queue_chains(last, "c1", "c2", "c3", "c4")
    await full.queue("o1", "o2", "o3", headers=OTHER)
    await full.next(6)
    assert full.served() == ["c1", "o1", "c2", "o2", "c3", "o3"]


async def test_chains_and_others_of_one_tenant_go_in_the_order_in_which_they_came(
    full: Chains,
) -> None:
    last, _ = await full.hold()
    await full.queue("o1")
    await full.queue_chains(last, "c1")
    await full.queue("o2")
    await full.queue_chains(last, "c2")
    await full.next(4)
    assert full.served() == ["o1", "c1", "o2", "c2"]


async def test_many_chains_that_wait_for_one_replica_keep_nobody_from_another(
    full: Chains,
) -> None:
    last, _ = await full.hold(engines=2)
    wires = await full.queue_chains(last, *["c"] * 30)
    other = full.house.engines[1]
    for number in range(3):  # of any tenant, at once and from the queue
        wire = await full.ask(f"at-once-{number}", headers={"x_llmgw_wait": "0"})
        await until(lambda: other.held() == 1)
        waits = await full.queue(f"waits-{number}", headers=OTHER if number else {})
        other.release()
        await until(lambda number=number: full.served(other)[-1] == f"waits-{number}")
        other.release()
        assert await answered(wire, *waits) == [200, 200]
    assert (full.waiting(), full.served()) == (30, [])
    await full.next(30)
    full.engine.release()
    assert await answered(*wires) == [200] * 30
    assert full.empty()


async def test_who_comes_when_a_chain_s_replica_has_just_room_does_not_overtake_it(
    full: Chains,
) -> None:
    last, filler = await full.hold()
    (wire,) = await full.queue_chains(last, "first")
    late = await full.house.wire()
    assert (await late.get("/v1/models")).status == 200
    core = full.house.core
    (pool,) = core.fleet.pools.values()
    pool.depth = 2  # there is room, and nobody was told of it yet: no sweep comes in between
    body = {"model": "m", "user": "late", "messages": [{"role": "user", "content": "x"}]}
    os.write(late.stream.socket.fileno(), post_bytes("/v1/chat/completions", body))
    while not (core.admission.waiting("m") == 1 and pool.in_flight == 2):
        core.reactor._turns()
    pool.depth = 1
    await until(lambda: full.engine.held() == 2)
    full.engine.release()
    await full.next()
    full.engine.release()
    assert await answered(filler, wire, late) == [200] * 3
    assert full.served() == ["first", "late"]


async def test_a_chain_whose_replica_leaves_while_it_waits_is_told_at_once(full: Chains) -> None:
    last, _ = await full.hold(engines=2)
    (wire,) = await full.queue_chains(last, "c")
    fleet = full.house.core.fleet
    (model,) = [model for model in fleet.table.models if model.name == "m"]
    addresses = {replica.endpoint: fleet.pools[replica.key].address for replica in model.replicas}
    for left in (model.replicas, model.replicas[1:]):
        fleet.swap(replace(fleet.table, models=(replace(model, replicas=left),)), addresses)
        full.house.core.admission.release()
        assert list(fleet.pools) == [replica.key for replica in left]
        assert full.waiting() == len(left) - 1
    answer = await wire.answer()
    assert (answer.status, answer.code) == (404, "previous_response_not_found")
    assert full.empty()


async def test_A34_a_chain_that_waits_in_vain_learns_for_what_and_when_to_come_back(
    full: Chains,
) -> None:
    last, _ = await full.hold(engines=2)
    wire = await full.go_on(last, headers={"x_llmgw_wait": "0.05"})
    answer = await wire.answer()
    assert (answer.status, answer.code) == (503, "queue_timeout")
    assert int(answer.headers["retry-after"]) > 0
    assert f"the replica of model 'm' that holds '{last}'" in answer.json["error"]["message"]
    assert full.empty()


async def test_A02_a_chain_whose_client_leaves_the_queue_is_gone_at_once(full: Chains) -> None:
    last, filler = await full.hold()
    gone, stays = await full.queue_chains(last, "gone", "stays")
    gone.close()
    await until(lambda: full.waiting() == 1)  # else it would stay for 30 s
    await full.next()
    full.engine.release()
    assert await answered(filler, stays) == [200, 200]
    assert full.served() == ["stays"]
    assert full.empty()


async def test_C02_a_chain_waits_for_a_replica_that_has_just_said_that_it_is_busy(
    full: Chains,
) -> None:
    """It was asked all the same, and its client got the next 503."""
    await full.start(breaker=BreakerRules(longest_hold_s=1.0))
    last = await full.begin()
    (pool,) = full.house.core.fleet.pools.values()
    pool.busy(1.0)
    wire = await full.go_on(last)
    await until(lambda: full.waiting() == 1)
    assert len(full.engine.chats()) == 1
    assert (await wire.answer()).status == 200
    assert full.empty()


async def test_C01_a_chain_asks_a_replica_that_fails_at_once_for_no_other_could_answer(
    full: Chains,
) -> None:
    await full.start(engines=2)
    last = await full.begin()
    full.house.core.fleet.pools["e0"].breaker.resume(1e12, 1.0)
    assert (await (await full.go_on(last)).answer()).status == 200
    assert all(how == "at_once" for _, how, _ in full.house.core.snapshot()["admissions"])
