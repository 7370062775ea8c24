"""Leases and ticks in process: who may write, and what if two try (F02, F04, F07, F13, D02)."""

from __future__ import annotations

import uuid
from dataclasses import replace
from functools import partial
from urllib.parse import urlsplit

import pytest
import trio

from controller.loops import Loops
from controller.reconcile import snapshot, tick
from controller.reconcile.decide import decide
from controller.reconcile.lease import Lease
from controller.reconcile.tick import Ticker
from sql import queries
from sql.errors import DatabaseAway, StaleTerm
from sql.listen import ListenState, listen
from tests.control.duties import cards, duty, until
from tests.sql.fleet import snapshot as rows_of
from tests.tcp_proxy import TcpProxy

BACKENDS = """select pid from pg_stat_activity where datname = current_database()
    and pid <> pg_backend_pid() and backend_type = 'client backend'"""
ADVISORY = """select a.pid, a.application_name from pg_locks l join pg_stat_activity a using (pid)
    where l.locktype = 'advisory' and l.classid = 7719
    and l.database = (select oid from pg_database where datname = current_database())"""
LIVE = "select count(*) from llmgw_core.replica where state <> 'gone'"
STARTING = "select count(*) from llmgw_core.replica where state = 'starting'"
GPU = {"gpu_class": "H100", "gpus": 1}


@pytest.fixture
def settings(database):
    return database.settings(command_timeout_s=20, connect_timeout_s=20)


async def test_F07_a_frozen_leaders_late_commit_changes_nothing(asyncio_loop, settings, fleet):
    cards(fleet, "a", 1)
    fleet.model("m", GPU)
    async with duty(settings) as old, duty(settings) as new:
        term = await old.leads()
        assert await new.lease.take() is None
        await old.ticker.once(term)
        seen = await snapshot.read(old.pool)
        plan = decide(seen.snapshot, seen.now, term)
        assert plan.items
        # The old leader is frozen here until its lease is over.
        fleet.admin.execute("update llmgw_core.lease set expires_at = clock_timestamp()")
        assert await new.leads() == term + 1
        before = rows_of(fleet.admin, without=("controller",))
        with pytest.raises(StaleTerm):
            await old.pool.fetch("select * from llmgw_core.commit_plan_v1($1, $2)", term, [])
        assert await old.ticker._commit(term, plan) is False
        assert rows_of(fleet.admin, without=("controller",)) == before
        assert old.lease.term is None
        await new.ticker.once(term + 1)
        await new.ticker.once(term + 1)
        assert fleet.value(STARTING) == 1


async def test_F07_attempts_of_a_stale_term_are_not_recorded(asyncio_loop, settings, fleet):
    fleet.model("m", GPU)
    async with duty(settings) as old, duty(settings) as new:
        term = await old.leads()
        await old.ticker.once(term)
        seen = await snapshot.read(old.pool)
        plan = decide(seen.snapshot, seen.now, term)
        assert plan.attempts
        await old.lease.resign()
        assert await new.leads() == term + 1
        await old.ticker._commit(term, replace(plan, items=()))
        assert fleet.value("select count(*) from llmgw_core.attempt") == 0
        assert not old.ticker.stats.rejections


async def test_a_lease_is_trusted_by_our_own_clock_until_shortly_before_its_end(
    asyncio_loop, settings, fleet
):
    fleet.admin.execute("update llmgw_core.setting set value = 3 where name = 'lease_ttl'")
    async with duty(settings) as one:
        began = trio.current_time()
        term = await one.leads()
        assert one.lease.held() == term
        assert 1.9 < one.lease._trusted_until - began < 3
        one.lease._trusted_until = trio.current_time()
        assert one.lease.held() is None
        assert one.lease.term is None


async def test_F07_a_leader_that_cannot_renew_stops_before_its_lease_ends(
    asyncio_loop, fleet, database
):
    fleet.admin.execute("update llmgw_core.setting set value = 3 where name = 'lease_ttl'")
    async with duty(database.settings(command_timeout_s=2)) as one:
        term = await one.leads()
        with database.connect() as blocker, blocker.transaction():
            blocker.execute("select * from llmgw_core.lease for update")
            await until(lambda: trio.current_time() >= one.lease._renew_at, "time to renew")
            with pytest.raises(DatabaseAway), trio.fail_after(20):
                await one.lease.take()
            assert one.lease.held() is None
        assert await one.leads() >= term


async def test_F04_leadership_ends_with_the_presence_connection(asyncio_loop, settings, fleet):
    async with duty(settings) as one, duty(settings) as two:
        await one.leads()
        holders = fleet.rows(ADVISORY)
        # One connection each, that no pool knows.
        assert [row["application_name"] for row in holders] == ["llmgw listen"] * 2
        await one.pool.execute("select 1")
        assert fleet.rows(ADVISORY) == holders
        mine = fleet.value(
            "select l.pid from pg_locks l join llmgw_core.controller c on c.presence::oid = l.objid"
            " where l.locktype = 'advisory' and l.classid = 7719 and c.id = %s"
            " and l.database = (select oid from pg_database where datname = current_database())",
            one.id,
        )
        connects = one.listening.connects
        fleet.value("select pg_terminate_backend(%s)", mine)
        await until(lambda: one.lease.term is None, "stepped down")
        await until(lambda: one.listening.connects > connects, "joined again")
        # Nothing locks it out, nor the other.
        terms = [await one.lease.take(), await two.lease.take()]
        assert sum(term is not None for term in terms) == 1
        assert len(fleet.rows(ADVISORY)) == 2


async def test_F04_a_former_connection_that_the_server_still_keeps_locks_nobody_out(
    asyncio_loop, settings, database, pool, nursery
):
    """After a cut network nothing tells the server that our connection is gone."""
    join = queries("control")["join"]
    number = await pool.fetchval(join, uuid.uuid4(), "control", "h", 1, "test")
    state = ListenState()
    with database.connect(database.controller_url) as former:
        former.execute("select pg_advisory_lock(7719, %s)", (number,))

        nursery.start_soon(
            partial(listen, settings, print, trio.lowlevel.checkpoint, presence=number, state=state)
        )
        await until(lambda: state.connects == 1, "joined again")
    nursery.cancel_scope.cancel()


async def test_F04_an_error_in_the_tick_keeps_no_lock(asyncio_loop, settings, fleet):
    async with duty(settings) as one, duty(settings) as two:
        await one.leads()
        fleet.admin.execute("alter table llmgw_core.model rename to elsewhere")
        with pytest.raises(Exception, match=r"llmgw_core\.model"):
            await one.tick()
        fleet.admin.execute("alter table llmgw_core.elsewhere rename to model")
        await one.tick()
        assert await two.lease.take() is None
        one.scope.cancel()
        await until(lambda: len(fleet.rows(ADVISORY)) == 1, "its lock is free")
        await two.tick()


async def test_a_resigned_duty_moves_at_once_and_does_not_come_back(asyncio_loop, settings, fleet):
    async with duty(settings) as one, duty(settings) as two:
        term = await one.leads()
        await one.lease.resign()
        assert await one.lease.take() is None
        assert await two.leads() == term + 1


async def test_D02_ten_tickers_at_one_instant_give_a_card_away_once(
    asyncio_loop, settings, fleet, database
):
    cards(fleet, "a", 1)
    for number in range(3):
        fleet.model(f"m{number}", GPU)
    async with duty(settings) as one:
        term = await one.leads()
        await one.ticker.once(term)
        tickers = [Ticker(one.pool, one.lease) for _ in range(10)]
        plans = []
        for ticker in tickers:
            seen = await snapshot.read(ticker._pool)
            plans.append(decide(seen.snapshot, seen.now, len(plans)))
        assert all(any(i.__class__.__name__ == "Place" for i in plan.items) for plan in plans)
        async with trio.open_nursery() as nursery:
            for ticker, plan in zip(tickers, plans, strict=True):
                nursery.start_soon(ticker._commit, term, plan)
        assert fleet.value("select count(*) from llmgw_core.gpu_claim") == 1
        assert fleet.value(STARTING) == 1
        assert sum(ticker.stats.items["place"] for ticker in tickers) == 1
        assert sum(ticker.stats.refused for ticker in tickers) == 9
        # Whoever lost looks again and explains.
        assert await one.ticker.once(term) is False
        told = fleet.rows(
            "select distinct model from llmgw_core.rejection where code = 'gpu_taken'"
        )
        assert len(told) == 2


async def test_D02_whole_ticks_race_and_no_error_escapes(asyncio_loop, settings, fleet):
    cards(fleet, "a", 2)
    for number in range(6):
        fleet.model(f"m{number}", GPU)
    async with duty(settings) as one:
        term = await one.leads()
        for _ in range(4):
            async with trio.open_nursery() as nursery:
                for _ in range(6):
                    nursery.start_soon(Ticker(one.pool, one.lease).once, term)
        assert fleet.value("select count(*) from llmgw_core.gpu_claim") == 2
        assert fleet.value(STARTING) == 2


@pytest.mark.slow
@pytest.mark.parametrize("how", ["blackhole", "reset"])
async def test_F13_a_commit_of_unknown_outcome_doubles_nothing(asyncio_loop, database, fleet, how):
    cards(fleet, "a", 4)
    fleet.model("m", GPU, min_replicas=2)
    with TcpProxy(urlsplit(database.url).port) as proxy:
        url = database.controller_url.replace(f":{proxy.target_port}/", f":{proxy.port}/")
        direct, through = (
            database.settings(),
            database.settings(url, command_timeout_s=3, connect_timeout_s=3),
        )
        async with duty(direct) as holder, duty(through) as one:
            # The lease belongs to a process whose presence goes another way.
            term = await holder.leads()
            ticker = Ticker(one.pool, holder.lease)
            with database.connect() as blocker, blocker.transaction():
                blocker.execute("lock table llmgw_core.replica in exclusive mode")
                waiting = (
                    "select count(*) from pg_stat_activity where query like '%%commit_plan_v1%%'"
                    " and wait_event_type = 'Lock' and datname = current_database()"
                )
                failed = trio.Event()

                async def commit() -> None:
                    with pytest.raises(DatabaseAway):
                        await ticker.once(term)
                    failed.set()

                async with trio.open_nursery() as nursery:
                    nursery.start_soon(commit)
                    await until(lambda: fleet.value(waiting), "the commit waits in the server")
                    proxy.mode = how
                    if how == "reset":
                        proxy.reset()
                    blocker.execute("commit")
                    await failed.wait()
            await until(lambda: fleet.value(LIVE) == 2, "the server committed")
            proxy.mode = "pass"
            proxy._resetting = False
            with trio.fail_after(40):
                while True:
                    try:
                        while await ticker.once(term):
                            pass
                        break
                    except DatabaseAway:
                        continue  # a connection of before
            assert fleet.value(LIVE) == 2
            assert fleet.value(STARTING) == 2
            assert fleet.value("select count(*) from llmgw_core.shard") == 2
            creates = "select count(*) from llmgw_core.decision where kind = 'create'"
            assert fleet.value(creates) == 2


@pytest.mark.slow
async def test_a_lease_is_kept_through_a_wait_that_outlasts_it(
    asyncio_loop, settings, fleet, nursery, monkeypatch
):
    """A large fleet's ticks take long, and the pauses between them longer."""
    fleet.admin.execute("update llmgw_core.setting set value = 4 where name = 'lease_ttl'")
    monkeypatch.setattr(tick, "FULL_S", 60)
    async with duty(settings) as one:
        loops = Loops()
        nursery.start_soon(loops.run, loops.add("tick", 15), one.ticker.run)
        await until(one.lease.held, "leads")
        term, ended = one.lease.term, trio.current_time() + 6

        def kept() -> bool:
            assert one.lease.held() == term
            expired = "select expires_at < clock_timestamp() from llmgw_core.lease"
            assert not fleet.value(expired)
            return trio.current_time() > ended

        await until(kept, "longer than a lease")
        assert one.ticker.stats.ticks <= 3
        nursery.cancel_scope.cancel()


async def test_a_stranger_without_presence_never_leads(asyncio_loop, settings, pool):
    lease = Lease(pool, None, "tick", ListenState())
    assert await lease.take() is None
    await lease.resign()
