"""Ten models, one free card, a hundred times: one gets it, the others are told why, all ends."""

from __future__ import annotations

from dataclasses import replace

import pytest
import trio

from controller.placement.model import Create, Place
from controller.reconcile import snapshot
from controller.reconcile.decide import decide
from sql import queries
from tests.control.duties import cards, duty

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

ROUNDS = 100
NAMES = [f"m{number}" for number in range(10)]
MODEL = {
    "source": "file:/m.gguf", "min_replicas": 1, "max_replicas": 1, "aliases": [], "fallbacks": [],
    "profiles": [{"name": "p", "engine": "llamacpp", "fingerprint": "f", "gpu_class": "H100",
                  "gpus": 1}],
}  # fmt: skip
MODELS = [MODEL | {"name": name} for name in NAMES]
CLAIMS = "select count(*) from llmgw_core.gpu_claim"
STATES = "select state, count(*) as n from llmgw_core.replica where state <> 'gone' group by state"
LIVE = "select id from llmgw_core.shard where state not in ('stopped', 'failed')"
WHY = "select model, code, candidates from llmgw.why_not order by model"


@pytest.fixture
def settings(database):
    return database.settings(command_timeout_s=10)


def states(fleet):
    return {row["state"]: row["n"] for row in fleet.rows(STATES)}


async def rest(one):
    """Tick until nothing is left to do: never more than a few times."""
    for _ in range(4):
        if not await one.tick():
            return
    raise AssertionError("it ticks on and on")


async def race(one, two, term):
    """Both commit a place on the one card for each of the ten, made from what both saw before."""
    seen = await snapshot.read(one.pool)
    plan = decide(seen.snapshot, seen.now, term)
    (place,) = [item for item in plan.items if isinstance(item, Place)]
    pending = [r for r in seen.snapshot.replicas if r.state == "pending"]
    assert len(pending) == len(NAMES)
    items = [
        {"kind": "place", **vars_of(replace(place, replica_id=r.id, model=r.model))}
        for r in pending
    ]
    outcomes: list[str] = []

    async def commit(pool, mine):
        rows = await pool.fetch(queries("tick")["commit_plan"], term, mine)
        outcomes.extend(row["outcome"] for row in rows)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(commit, one.pool, items)
        nursery.start_soon(commit, two.pool, items[::-1])
    assert outcomes.count("ok") == 1, outcomes
    assert len(outcomes) == 2 * len(NAMES)


def vars_of(place):
    return {name: getattr(place, name) for name in place.__dataclass_fields__}


async def test_ten_models_want_one_free_card_at_once_for_100_rounds(asyncio_loop, settings, fleet):
    node = cards(fleet, "a", 1)
    async with duty(settings) as one, duty(settings) as two:
        for number in range(ROUNDS):
            # On a busy machine a hundred rounds take longer than such facts are believed.
            fleet.sync(node, gpus=[{"uuid": "a-0", "memory_foreign_mib": 0}])
            fleet.apply(MODELS)
            term = await one.leads()
            if number % 2:
                seen = await snapshot.read(one.pool)
                creates = [i for i in decide(seen.snapshot, seen.now, term).items
                           if isinstance(i, Create)]  # fmt: skip
                made = [{"kind": "create", **vars_of(item)} for item in creates]
                await one.pool.fetch(queries("tick")["commit_plan"], term, made)
                await race(one, two, term)
            await rest(one)
            assert states(fleet) == {"starting": 1, "pending": 9}
            assert fleet.value(CLAIMS) == 1
            (live,) = fleet.rows(LIVE)
            told = fleet.rows(WHY)
            assert len(told) == 9
            assert {(row["code"], row["candidates"]) for row in told} == {("gpu_taken", 1)}
            # Nothing more is decided while nothing changes.
            decided = fleet.value("select count(*) from llmgw_core.decision")
            await one.tick()
            assert fleet.value("select count(*) from llmgw_core.decision") == decided
            fleet.apply([], prune=True)
            await rest(one)
            fleet.say(node, "stopped", shard=live["id"])
            await rest(one)
            assert states(fleet) == {}
            assert fleet.value(CLAIMS) == 0
