"""The database away: at the start, for a while, in part (F01, F25, F26, H04, H11)."""

from __future__ import annotations

import contextlib
import gc
import secrets
import shutil
import signal
import tempfile
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest
import trio
import trio.testing

from controller.loops import Loops
from sql import embedded, migrate
from sql.errors import DatabaseAway
from sql.listen import PING_S
from sql.pool import open_pool
from tests.control.duties import beat, cards, duty
from tests.control.duties import until as until_async
from tests.control.process import PATIENCE_S, until
from tests.sql.fleet import digest
from tests.tcp_proxy import TcpProxy

pytestmark = pytest.mark.slow
GPU = {"gpu_class": "H100", "gpus": 1}
OURS = """select pg_terminate_backend(pid) from pg_stat_activity
    where datname = current_database() and application_name like 'llmgw%%'"""
PLACED = """select count(*) from llmgw_core.shard s join llmgw_core.replica r on r.id = s.replica_id
    where r.model = %s"""
CATALOG = """[[models]]
name = "{name}"
source = "file:/m.gguf"
min_replicas = 1
profiles = [{{name = "p", engine = "llamacpp"}}]
"""


def through(url: str, proxy: TcpProxy) -> str:
    """The same database behind a proxy."""
    return url.replace(f":{proxy.target_port}/", f":{proxy.port}/")


def test_F26_after_ten_cuts_every_kind_of_change_takes_effect(database, fleet, start, tmp_path):
    catalog = tmp_path / "catalog.toml"
    catalog.write_text(CATALOG.format(name="first"))
    cards(fleet, "a", 2)
    node = cards(fleet, "b", 2)
    one = start(database.controller_url, "--catalog", str(catalog), role="all").ready()
    until(lambda: fleet.value("select 1 from llmgw_core.model where name = 'first'"), "applied")
    for _ in range(10):
        assert until(lambda: fleet.rows(OURS), "connections to cut")
        until(lambda: one.get("/healthz")[0] == 200, "healthz")
    # tick: a model is placed, and not on a node that was cordoned.
    fleet.controller.execute("select llmgw.cordon('a', 'test')")
    beat(fleet, node, 2)
    fleet.model("m", GPU)
    until(lambda: fleet.value(PLACED, "m"), "the model is placed")
    where = "select distinct node_id from llmgw_core.gpu_claim"
    assert [row["node_id"] for row in fleet.rows(where)] == ["b"]
    # catalog: the file is read again.
    catalog.write_text(CATALOG.format(name="second"))
    one.signal(signal.SIGHUP)
    until(lambda: fleet.value("select 1 from llmgw_core.model where name = 'second'"), "reloaded")
    # router: a key is known.
    secret = secrets.token_urlsafe(24)
    fleet.controller.execute(
        "select llmgw.key_create_v1('test', 'abc123', %s, 'k', null, null)", (digest(secret),)
    )
    asked = {"url": f"http://127.0.0.1:{one.client}/v1/models"}
    head = {"Authorization": f"Bearer {secret}"}
    until(lambda: httpx.get(**asked, headers=head).status_code == 200, "the key is known")
    assert httpx.get(**asked).status_code == 401
    # housekeeping: its loop goes on.
    one.ready()
    housekeeping = ("llmgw_leader", (("duty", "housekeeping"),))
    until(lambda: one.metrics()[housekeeping] == 1, "keeps house again")
    age = "llmgw_loop_last_success_age_seconds"
    for loop in ("tick", "housekeeping"):
        until(lambda loop=loop: one.metrics()[age, (("loop", loop),)] < 5, f"{loop} goes on")
    assert one.metrics()["llmgw_notify_connects_total", ()] > 1
    assert len(one.children()) == 2


def test_F25_H11_a_database_that_comes_late_and_goes_and_comes_again(start):
    base = Path(tempfile.mkdtemp(prefix="llmgw-test-own-", dir="/var/tmp"))
    try:
        with embedded.running(base, fast_and_unsafe=True) as server:
            migrate.upgrade(server.url)
        port = urlsplit(server.url).port
        one = start(server.url)
        until(lambda: one.get("/healthz")[0] == 200, "healthz without a database")
        status, why = one.get("/readyz")
        assert status == 503
        assert "the database is away: Postgres cannot be reached" in why
        assert "not listening for changes" in why
        status, body = one.get("/api/v1/nodes")
        assert status == 503, body
        assert one.metrics()["llmgw_scrape_up", (("part", "fleet"),)] == 0
        with embedded.running(base, fast_and_unsafe=True, port=port):
            one.ready()
            assert one.get("/api/v1/nodes")[0] == 200
            until(lambda: one.metrics()["llmgw_leader", (("duty", "tick"),)] == 1, "leads")
        until(lambda: one.get("/readyz")[0] == 503, "red without its database")
        assert one.get("/healthz")[0] == 200
        with embedded.running(base, fast_and_unsafe=True, port=port):
            one.ready()
            until(lambda: one.metrics()["llmgw_leader", (("duty", "tick"),)] == 1, "leads again")
            one.signal(signal.SIGTERM)
            assert one.process.wait(PATIENCE_S) == 0
    finally:
        shutil.rmtree(base, ignore_errors=True)


def test_H04_H11_a_router_opens_its_port_without_a_database_and_says_what_it_lacks(database, start):
    with TcpProxy(urlsplit(database.url).port, mode="hold") as proxy:
        one = start(through(database.controller_url, proxy), role="router")

        def ready() -> tuple[int, str]:
            try:
                answer = httpx.get(f"http://127.0.0.1:{one.client}/readyz", timeout=5)
            except httpx.TransportError:
                return 0, ""
            return answer.status_code, answer.text

        until(lambda: ready()[0] == 503, "the port is open and readiness red")
        assert "the routing table was not read" in ready()[1]
        assert one.chat().status_code == 401  # keys are not known yet: nobody gets in
        proxy.mode = "pass"
        until(lambda: ready()[0] == 200, "ready without a restart")
        one.signal(signal.SIGTERM)
        assert one.process.wait(PATIENCE_S) == 0


def test_H11_a_database_that_does_not_answer_holds_up_nothing(database, start):
    with TcpProxy(urlsplit(database.url).port, mode="hold") as proxy:
        one = start(through(database.controller_url, proxy))
        until(lambda: one.get("/healthz")[0] == 200, "healthz")
        status, why = one.get("/readyz")
        assert (status, "the database is away: no answer in time" in why) == (503, True), why
        proxy.mode = "pass"
        one.ready()
        proxy.mode = "hold"
        until(lambda: one.get("/readyz")[0] == 503, "red")
        one.signal(signal.SIGTERM)
        assert one.process.wait(PATIENCE_S) == 0


def test_H04_an_empty_database_is_told_and_nothing_is_served(empty_database, start):
    one = start(empty_database)
    until(lambda: "run llmgwctl db upgrade" in one.get("/readyz")[1], "told what to do")
    assert one.get("/readyz")[0] == 503
    assert one.get("/api/v1/nodes")[0] == 503
    migrate.upgrade(empty_database)
    one.ready()


def test_an_empty_database_is_upgraded_when_a_login_for_that_is_given(empty_database, start):
    one = start(empty_database, LLMGW_MIGRATE_URL=empty_database).ready()
    assert one.events("schema upgraded")


async def test_F13_calls_that_were_given_up_end_nothing_later(database):
    """The driver's own clean-up fails too, with nobody waiting for it."""
    with TcpProxy(urlsplit(database.url).port) as proxy:
        url = through(database.controller_url, proxy)
        settings = database.settings(url, command_timeout_s=2, connect_timeout_s=4)
        async with open_pool(settings) as pool:
            await pool.fetchval("select 1")
            proxy.mode = "hold"
            with contextlib.suppress(DatabaseAway):
                await pool.fetchval("select 1")  # reads under way let one more exchange through
            with trio.move_on_after(0.2) as scope:
                await pool.fetchval("select 1")
            assert scope.cancelled_caught
            await until_async(lambda: pool.statistics()["open"] == 0, "the connection is cut")
            proxy.mode = "pass"
            await trio.testing.wait_all_tasks_blocked()
            gc.collect()
            await trio.testing.wait_all_tasks_blocked()
            assert await pool.fetchval("select 1") == 1


async def test_F01_a_dead_channel_is_noticed_and_read_anew(asyncio_loop, database, fleet, nursery):
    cards(fleet, "a", 4)
    with TcpProxy(urlsplit(database.url).port) as proxy:
        channel = database.settings(through(database.controller_url, proxy))
        async with duty(database.settings(), channel) as one:
            loops = Loops()
            nursery.start_soon(loops.run, loops.add("tick", 15), one.ticker.run)
            await until_async(one.lease.held, "leads")
            proxy.mode = "blackhole"
            began = trio.current_time()
            fleet.model("unheard", GPU)
            await until_async(lambda: fleet.value(PLACED, "unheard"), "polling goes on")
            await until_async(lambda: not one.listening.connected, "noticed", 40)
            noticed = trio.current_time() - began
            print(f"a dead channel is noticed after {noticed:.1f} s")
            assert PING_S + channel.command_timeout_s < 10, "so long it takes without other work"
            assert noticed < 25, "nobody else would tell for a quarter of an hour"
            assert one.lease.term is None
            proxy.mode = "pass"
            one.ticker.hint = trio.Event()
            await until_async(lambda: one.listening.connects == 2, "connected again", 40)
            await until_async(one.lease.held, "leads again")
            fleet.model("heard", GPU)
            await until_async(lambda: fleet.value(PLACED, "heard"), "placed")
            assert not loops.by_name["tick"].errors
            nursery.cancel_scope.cancel()
