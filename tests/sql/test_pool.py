"""The driver's wrapper: values, errors, deadlines, and what happens when Postgres goes away."""

from __future__ import annotations

from urllib.parse import urlsplit

import pytest
import trio
from asyncpg.transaction import Transaction

from sql import queries
from sql.errors import DatabaseAway, Refused, StaleTerm, Unauthorized
from sql.listen import ListenState, listen
from sql.pool import open_pool
from sql.settings import DatabaseSettings
from tests.router.wire import until
from tests.tcp_proxy import TcpProxy


async def test_jsonb_goes_both_ways(pool):
    assert await pool.fetchval("select $1::jsonb", {"a": [1, None, "x\0y"]}) == {
        "a": [1, None, "x\ufffdy"]
    }


async def fails_inside(pool):
    async with pool.transaction() as connection:
        await connection.execute("select llmgw.node_enroll_v1('me', 'n1', '\\x01', 1, 60)")
        raise ZeroDivisionError


async def test_transaction_rolls_back_on_error_and_on_dry_run(pool, database):
    await_rows = "select count(*) from llmgw_core.audit"
    async with pool.transaction(rollback=True) as connection:
        await connection.execute("select llmgw.node_enroll_v1('me', 'n1', '\\x01', 1, 60)")
    assert await pool.fetchval(await_rows) == 0
    with pytest.raises(ZeroDivisionError):
        await fails_inside(pool)
    assert await pool.fetchval(await_rows) == 0


async def test_errors_are_ours(pool, agent_pool):
    with pytest.raises(StaleTerm):
        await pool.fetch("select * from llmgw_core.commit_plan_v1(1, '[]')")
    with pytest.raises(Unauthorized, match="llmgwctl node enroll"):
        await agent_pool.fetchrow(queries("agent")["sync"], "nonsense", 0, {})
    with pytest.raises(Refused, match="no model or alias"):
        await pool.fetchval(
            "select llmgw.key_create_v1('me', 'abcdef', $1, 'k', '{nope}', null)", b"0" * 32
        )


async def test_nobody_there_is_away_and_opening_does_not_wait():
    settings = DatabaseSettings(
        url="postgresql://u:p@127.0.0.1:9/x", connect_timeout_s=1, command_timeout_s=1
    )
    async with open_pool(settings) as pool:
        with pytest.raises(DatabaseAway):
            await pool.fetchval("select 1")


async def test_deadline_ends_a_statement(database):
    async with open_pool(database.settings(command_timeout_s=1)) as pool:
        with pytest.raises(DatabaseAway):
            await pool.fetchval("select pg_sleep(60)")
        assert await pool.fetchval("select 1") == 1


@pytest.mark.parametrize("how", ["hold", "blackhole"])
async def test_H13_a_cancelled_query_ends_at_once_and_the_pool_gets_whole_again(database, how):
    """The driver's own request to cancel goes over a further connection, which hangs too."""
    with TcpProxy(urlsplit(database.url).port) as proxy:
        url = database.controller_url.replace(f":{proxy.target_port}/", f":{proxy.port}/")
        settings = database.settings(url, pool_size=2, connect_timeout_s=30, command_timeout_s=60)
        async with open_pool(settings) as pool:
            scopes = [trio.CancelScope() for _ in range(2)]

            async def ask(scope: trio.CancelScope) -> None:
                with scope:
                    await pool.fetchval("select pg_sleep(60)")

            async with trio.open_nursery() as asking:
                for scope in scopes:
                    asking.start_soon(ask, scope)
                await until(lambda: sleeping(database) == 2, 40)
                proxy.mode = how
                for scope in scopes:
                    scope.cancel()
                asking.cancel_scope.deadline = trio.current_time() + 20  # both must end before
            assert not asking.cancel_scope.cancelled_caught
            assert all(scope.cancelled_caught for scope in scopes)
            proxy.mode = "pass"
            with trio.fail_after(20):
                async with pool.transaction() as one, pool.transaction() as other:
                    assert await one.fetchval("select 1") == await other.fetchval("select 1") == 1
            assert pool.statistics()["open"] == 2


def sleeping(database) -> int:
    with database.connect() as admin:
        (count,) = admin.execute(
            "select count(*) from pg_stat_activity"
            " where query = 'select pg_sleep(60)' and state = 'active'"
            " and datname = current_database()"
        ).fetchone()
    return count


@pytest.mark.parametrize("verb", ["start", "commit"])
async def test_H13_a_transaction_given_up_at_its_border_ends_nothing_but_itself(
    pool, monkeypatch, verb
):
    """The driver tells its loop of a connection that comes back in a transaction: that ends it."""
    scope, plain = trio.CancelScope(), getattr(Transaction, verb)

    async def given_up(self):
        scope.cancel()
        await plain(self)

    monkeypatch.setattr(Transaction, verb, given_up)
    with scope:
        async with pool.transaction() as connection:
            await connection.execute("select 1")
    assert scope.cancelled_caught
    monkeypatch.undo()
    async with pool.transaction() as connection:
        assert await connection.fetchval("select 1") == 1


async def test_F01_listen_reconnects_and_reads_again(pool, database, nursery):
    hints, connects, state = [], trio.Semaphore(0), ListenState()
    heard = trio.Event()

    def hint(payload: str) -> None:
        hints.append(payload)
        heard.set()

    async def connected() -> None:
        connects.release()

    nursery.start_soon(
        lambda: listen(database.settings(), hint, connected, presence=77, state=state)
    )
    with trio.fail_after(40):
        await connects.acquire()
        with database.connect() as admin:
            admin.execute(
                "select pg_terminate_backend(pid) from pg_stat_activity"
                " where application_name = 'llmgw listen'"
            )
        await connects.acquire()
        with database.connect() as admin:
            admin.execute("select pg_notify('llmgw', 'models')")
        await heard.wait()
    assert hints == ["models"]
    assert state.connects == 2
    assert state.connected
    nursery.cancel_scope.cancel()


async def test_F02_the_listener_outlives_every_connection_of_the_pool(pool, database, nursery):
    hints, state, connected = [], ListenState(), trio.Event()

    async def on_connect() -> None:
        connected.set()

    nursery.start_soon(
        lambda: listen(database.settings(), hints.append, on_connect, presence=78, state=state)
    )
    with trio.fail_after(40):
        await connected.wait()
        await pool.fetchval("select 1")
        with database.connect() as admin:
            admin.execute(
                "select pg_terminate_backend(pid) from pg_stat_activity"
                " where application_name = 'llmgw' and datname = current_database()"
            )
            for number in range(20):
                admin.execute("select pg_notify('llmgw', %s)", (f"models {number}",))
        while len(hints) < 20:
            await trio.sleep(0.01)
    assert hints == [f"models {number}" for number in range(20)]
    assert state.connects == 1
    nursery.cancel_scope.cancel()
