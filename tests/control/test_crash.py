"""The database crashes, or the leader freezes, while a commit is under way (F07, F13)."""

from __future__ import annotations

import shutil
import signal
import tempfile
from contextlib import ExitStack
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from sql import embedded, migrate
from tests.conftest import Database
from tests.control.duties import beat, cards
from tests.control.process import PATIENCE_S, until
from tests.control.test_leaders import GPU, NOW, leader, others, placed
from tests.sql.fleet import open_fleet

pytestmark = pytest.mark.slow
COMMITS = """select count(*) from pg_stat_activity where query like '%%commit_plan_v1%%'
    and wait_event_type = 'Lock' and datname = current_database()"""
OF = "select count(*) from llmgw_core.replica where model = %s"
CREATED = "select count(*) from llmgw_core.decision where kind = 'create' and model = %s"
CLAIMS = "select count(*) from llmgw_core.gpu_claim"


def on(server: embedded.Server) -> Database:
    """A database whose every role is the superuser's: rights are not what this is about."""
    return Database("postgres", server.url, server.url, server.url, server.url, server)


def held_up(stack, database):
    """A connection whose open transaction every commit of a plan has to wait for."""
    blocker = database.connect(database.url)
    stack.callback(blocker.close)
    blocker.autocommit = False
    blocker.execute("lock table llmgw_core.replica in exclusive mode")
    return blocker


def test_F13_a_database_that_crashes_in_mid_commit_has_done_all_of_it_or_nothing(start):
    base = Path(tempfile.mkdtemp(prefix="llmgw-test-crash-", dir="/var/tmp"))
    with ExitStack() as stack:
        stack.callback(shutil.rmtree, base, ignore_errors=True)
        # Durable, unlike other tests' servers: what was answered must be there after the crash.
        server = embedded.start(base)
        stack.callback(embedded.stop, server.process)
        migrate.upgrade(server.url)
        pair = [start(server.url) for _ in range(2)]
        with open_fleet(on(server)) as fleet:
            node = cards(fleet, "a", 4)
            fleet.model("before", GPU, min_replicas=2)
            until(lambda: fleet.value(CLAIMS) == 2, "placed")
            _, term, _ = leader(fleet, pair)
            held_up(stack, on(server))
            fleet.model("after", GPU, min_replicas=2)
            until(lambda: fleet.value(COMMITS), "a commit waits in the server")
            server.process.send_signal(signal.SIGQUIT)
            server.process.wait(PATIENCE_S)
        again = stack.enter_context(embedded.running(base, port=urlsplit(server.url).port))
        with open_fleet(on(again)) as fleet:
            assert fleet.value("select count(*) from llmgw_core.touched") >= 0  # emptied, usable
            for one in pair:
                one.ready()
            beat(fleet, node, 4)  # what foreign processes hold is forgotten in a crash
            until(lambda: fleet.value(CLAIMS) == 4, "placed again")
            assert leader(fleet, pair)[1] >= term
            for name in ("before", "after"):
                assert (fleet.value(OF, name), fleet.value(CREATED, name)) == (2, 2)
            double = "select 1 from llmgw_core.gpu_claim group by gpu_uuid having count(*) > 1"
            assert fleet.value(double) is None


def test_F07_a_leader_frozen_in_mid_commit_wakes_to_another_term_and_repeats_nothing(
    database, fleet, start
):
    """With the lease as it is: 15 s, and the commit still counts, for its term led at that time."""
    pair = [start(database.controller_url) for _ in range(2)]
    for one in pair:
        one.ready()
    node = cards(fleet, "a", 4)
    fleet.model("before", GPU)
    placed(fleet, "before")
    first, term, _ = leader(fleet, pair)
    (second,) = others(pair, first)
    with ExitStack() as stack:
        blocker = held_up(stack, database)
        fleet.model("caught", GPU)
        until(lambda: fleet.value(COMMITS), "its commit waits in the server")
        first.signal(signal.SIGSTOP)
        frozen_at = fleet.value(NOW)
        blocker.rollback()
    until(lambda: fleet.value(OF, "caught") == 1, "the commit is through")
    until(
        lambda: fleet.value(OF, "caught") == 1 and leader(fleet, pair)[1] > term, "taken over", 60
    )
    found, new_term, at = leader(fleet, [second])
    print(f"taken over {at - frozen_at:.1f} s after the freeze")
    assert (found, new_term) == (second, term + 1)
    beat(fleet, node, 4)
    fleet.model("late", GPU)
    placed(fleet, "late")
    first.signal(signal.SIGCONT)
    until(lambda: first.events("stepped down"), "the frozen one steps down")
    first.ready()
    placed(fleet, "caught")
    for name in ("before", "caught", "late"):
        assert (fleet.value(OF, name), fleet.value(CREATED, name)) == (1, 1), name
    stale = "select count(*) from llmgw_core.decision where term = %s and at > to_timestamp(%s)"
    assert fleet.value(stale, term, at) == 0
    assert fleet.value(CLAIMS) == 3
