"""The leader's mirror: after any change, by whomever, it holds what a fresh read holds."""

from __future__ import annotations

import uuid
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from psycopg.types.json import Jsonb

from controller.placement import model
from controller.reconcile import snapshot
from controller.reconcile.mirror import FULL_S, KEPT_S, Mirror
from tests.control.duties import cards
from tests.control.looks import CLOCK, look

if TYPE_CHECKING:
    from sql.pool import Pool
    from tests.sql.fleet import Fleet

CHANGES = (Path(__file__).parent / "changes.sql").read_text().splitlines()
"""What people, agents and controllers may do to any row that decisions look at; one a line."""


@pytest.fixture
def fleet(fleet: Fleet) -> Fleet:
    """Four nodes, three models, three replicas, and a router that uses two of them."""
    for name in "abc":
        fleet.model(name)
    nodes = [cards(fleet, f"n{i}", 4) for i in range(1, 5)]
    for i, name in enumerate("aab"):
        fleet.running(name, nodes[0], i)
    router = uuid.uuid4()
    fleet.controller.execute(
        "select llmgw_core.controller_join_v1(%s, 'router', 'h', 1, '0')", (router,)
    )
    # It is alive until a change says otherwise, not for ten seconds only.
    fleet.admin.execute("select pg_advisory_lock(7719, presence) from llmgw_core.controller")
    uses = [{"replica_id": i, "in_flight": i, "last_used_age_ms": 5} for i in (1, 2)]
    asked = [{"model": "a", "waiting": 1, "in_flight": 3, "wanted_age_ms": 5}]
    fleet.controller.execute(
        "select llmgw_core.router_report_v2(%s, %s, %s)", (router, Jsonb(uses), Jsonb(asked))
    )
    return fleet


async def differ(pool: Pool, mirror: Mirror) -> list[str]:
    """What the mirror has otherwise than a fresh read.

    Looked at twice: a report of a router may have become stale between two reads, as it does for
    both. What the mirror missed it misses for ever.
    """
    return await _differ(pool, mirror) and await _differ(pool, mirror)


async def _differ(pool: Pool, mirror: Mirror) -> list[str]:
    kept, fresh = await snapshot.read(pool, mirror), await snapshot.read(pool)
    assert kept.notes == fresh.notes
    found = []
    for field in ("nodes", "models", "replicas", "settings", "unread_nodes", "unread_models"):
        ours, theirs = getattr(kept.snapshot, field), getattr(fresh.snapshot, field)
        if _timeless(ours) != _timeless(theirs):
            found.append(f"{field}: {ours} is {theirs}")
    return found


def _timeless(found: object) -> object:
    """Without "silent for 31 s", which may have become 32 between two reads."""
    if not isinstance(found, tuple):
        return found
    return [replace(x, state_reason=None) if isinstance(x, model.Node) else x for x in found]


RULES = {
    "replica_transition": "replica", "shard_transition": "shard", "shard_fits": "shard",
    "claim_fits": "gpu_claim", "setting_sane": "setting", "shard_fixed": "shard",
    "claim_fixed": "gpu_claim", "replica_over": "replica",
}  # fmt: skip
"""They refuse much of what follows; somebody may have dropped them."""


async def test_after_each_change_the_mirror_holds_what_a_fresh_read_holds(
    asyncio_loop: None, fleet: Fleet, pool: Pool
) -> None:
    for name, table in RULES.items():
        fleet.admin.execute(f"drop trigger {name} on llmgw_core.{table}")
    mirror = Mirror()
    before = (await snapshot.read(pool, mirror)).snapshot
    unseen, full_at = [], mirror._full_at
    for change in CHANGES:
        done = fleet.admin.execute(change)
        assert done.rowcount != 0, change
        assert await differ(pool, mirror) == [], change
        after = (await snapshot.read(pool, mirror)).snapshot
        if after == before:
            unseen.append(change)
        if not change.startswith("truncate"):
            assert mirror._full_at == full_at, f"everything was read again after {change}"
        before, full_at = after, mirror._full_at
    assert unseen == [], "\n".join(unseen)  # each of them is something that decisions look at


async def test_a_change_counts_when_its_transaction_is_over_however_long_it_took(
    asyncio_loop: None, fleet: Fleet, pool: Pool
) -> None:
    mirror = Mirror()
    await snapshot.read(pool, mirror)
    with fleet.admin.transaction():
        fleet.admin.execute("update llmgw_core.node set mgmt_addr = 'late' where id = 'n1'")
        for turn in range(3):
            fleet.controller.execute("select pg_current_xact_id()")  # others come and go
            seen = (await snapshot.read(pool, mirror)).snapshot
            assert seen.nodes[0].mgmt_addr == "10.0.0.1", turn
    seen = (await snapshot.read(pool, mirror)).snapshot
    assert seen.nodes[0].mgmt_addr == "late"


async def test_without_triggers_everything_is_read_each_time_and_told(
    asyncio_loop: None, fleet: Fleet, pool: Pool
) -> None:
    mirror = Mirror()
    await snapshot.read(pool, mirror)
    with fleet.admin.transaction():  # as replication does it
        fleet.admin.execute("set local session_replication_role = replica")
        fleet.admin.execute("update llmgw_core.node set mgmt_addr = 'x' where id = 'n1'")
    seen = await snapshot.read(pool, mirror)
    assert (seen.snapshot.nodes[0].mgmt_addr, seen.notes) == ("x", ())
    fleet.admin.execute("alter table llmgw_core.node disable trigger user")
    fleet.admin.execute("update llmgw_core.node set mgmt_addr = 'y' where id = 'n1'")
    seen = await snapshot.read(pool, mirror)
    assert seen.snapshot.nodes[0].mgmt_addr == "y"
    assert any("triggers that tell the leader" in note for note in seen.notes)


async def test_what_did_not_change_is_the_same_value(
    asyncio_loop: None, fleet: Fleet, pool: Pool
) -> None:
    mirror = Mirror()
    first = (await snapshot.read(pool, mirror)).snapshot
    fleet.admin.execute("update llmgw_core.node set mgmt_addr = 'x' where id = 'n2'")
    second = (await snapshot.read(pool, mirror)).snapshot
    same = [a is b for a, b in zip(first.nodes, second.nodes, strict=True)]
    assert same == [True, False, True, True]
    assert [a is b for a, b in zip(first.replicas, second.replicas, strict=True)] == [True] * 3


async def test_changes_are_kept_until_every_leader_has_seen_them(
    asyncio_loop: None, fleet: Fleet, pool: Pool
) -> None:
    touched = "select count(*) from llmgw_core.touched where kind = 'node' and key = 'n1'"
    fleet.admin.execute("delete from llmgw_core.touched")
    term = fleet.lead("housekeeping")
    keep = "select llmgw_core.housekeep_v1(%s)"
    later = "update llmgw_core.touched set at = at - interval '11 min'"
    with fleet.agent.transaction():  # a transaction that outlasts everything
        fleet.agent.execute("select pg_current_xact_id()")
        fleet.admin.execute("update llmgw_core.node set mgmt_addr = 'x' where id = 'n1'")
        for _ in range(3):
            fleet.controller.execute(keep, (term,))
            fleet.admin.execute(later)
        assert fleet.value(touched) == 1  # it began before: its own changes are not all there
    fleet.controller.execute(keep, (term,))
    assert fleet.value(touched) == 1  # over for not yet ten minutes
    fleet.admin.execute(later)
    fleet.controller.execute(keep, (term,))
    assert fleet.value(touched) == 0


def test_everything_is_read_after_a_restart_a_gap_and_now_and_then() -> None:
    mirror = Mirror()
    assert mirror.needs_all(CLOCK)
    mirror.take(look({}))
    assert not mirror.needs_all(replace(CLOCK, now=CLOCK.now + KEPT_S - 1))
    assert mirror.needs_all(replace(CLOCK, now=CLOCK.now + KEPT_S))
    assert mirror.needs_all(replace(CLOCK, now=CLOCK.now - 1)), "the database's clock went back"
    assert mirror.needs_all(replace(CLOCK, started_at=CLOCK.started_at + 1))
    for now in range(int(CLOCK.now), int(CLOCK.now + FULL_S), 100):
        clock = replace(CLOCK, now=float(now))
        assert not mirror.needs_all(clock)
        mirror.take(replace(look({}, clock), everything=False))
    assert mirror.needs_all(replace(CLOCK, now=CLOCK.now + FULL_S))


def test_a_look_that_was_not_taken_whole_is_no_look() -> None:
    mirror = Mirror()
    with pytest.raises(KeyError):
        mirror.take(look({"uses": [{}]}))
    assert mirror.needs_all(CLOCK)
    mirror.take(look({}))
    assert not mirror.needs_all(CLOCK)
