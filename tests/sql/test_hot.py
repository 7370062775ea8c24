"""What the busiest writes cost: HOT beats, no NOTIFY, usage written once, partitions."""

from __future__ import annotations

import time

import pytest
from psycopg.types.json import Jsonb

from tests.sql.fleet import connected
from tests.sql.test_views import flush, usage_row

BEATS = 2000
HOT = (
    "select n_tup_upd as updates, n_tup_hot_upd as hot from pg_stat_user_tables where relname = %s"
)


def statistics(fleet, table, least):
    """The table's counters, once the server has published ``least`` updates."""
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        fleet.admin.execute("select pg_stat_force_next_flush()")
        [row] = fleet.rows(HOT, table)
        if row["updates"] >= least:
            return row
    raise AssertionError(f"{table} shows {row} and never {least} updates")


@pytest.mark.slow
def test_F17_beats_stay_hot(fleet):
    nodes = [fleet.node(f"n{i}") for i in range(8)]
    cards = [{"uuid": f"GPU-{i}", "memory_used_mib": 70000, "power_w": 300.5} for i in range(8)]
    call = "select gen from agent.sync(%s, 0, %s)"
    for beat in range(BEATS // len(nodes)):
        load = {"cpu_percent": beat % 100, "load1": beat / 7, "memory_used_mib": beat}
        # A clock and a card that jump are written at once, whatever was written just before (F16).
        fast = [{**card, "memory_foreign_mib": beat % 2 * 1000} for card in cards]
        report = {"applied_gen": 0, "clock": 100 * beat, "load": load, "gpus": fast}
        with fleet.agent.pipeline():
            for node in nodes:
                fleet.agent.execute(call, (node.token, Jsonb({"boot": node.boot, **report})))
    fleet.agent.execute("select pg_stat_force_next_flush()")
    for table in ("beat", "node_load"):
        row = statistics(fleet, table, BEATS - len(nodes))  # the first beat of each inserts
        assert row["hot"] > 0.95 * row["updates"], (table, row)


def test_F17_no_index_on_times_and_room_on_the_pages(fleet):
    for table in ("beat", "node_load"):
        keys = fleet.rows("select indexdef as d from pg_indexes where tablename = %s", table)
        assert [row["d"].partition("btree ")[2] for row in keys] == ["(node_id)"], table
        options = fleet.value(
            "select array_to_string(reloptions, ' ') from pg_class where relname = %s", table
        )
        assert "fillfactor=50" in options
        assert "autovacuum_vacuum_threshold" in options


DOCTOR = "select result, evidence, remedy from llmgw.doctor where node = 'database'"


def test_F16_an_old_snapshot_is_named_by_the_doctor_whoever_holds_it(fleet, database):
    """As Grafana or a psql left open hold it: only read, another role's, seen by a reader."""
    with (
        connected(database, database.read_url) as reader,
        connected(database, database.controller_url) as open_,
    ):
        open_.execute("set application_name = 'grafana'")
        open_.execute("begin isolation level repeatable read")
        open_.execute("select * from llmgw.nodes")
        assert reader.execute(DOCTOR).fetchall() == []
        old = "insert into llmgw_core.setting values ('snapshot_old', %s, 's', 'test')"
        fleet.admin.execute(old, (0.0,))
        for told in (reader.execute(DOCTOR), fleet.controller.execute(DOCTOR)):
            (row,) = [
                row for row in told.fetchall() if "grafana (test_controller)" in row["evidence"]
            ]
            assert row["result"] == "fail"
            assert f"pg_terminate_backend({open_.info.backend_pid})" in row["remedy"]
        trouble = "select object from llmgw.trouble where what = 'old snapshot'"
        assert any("grafana" in row["object"] for row in reader.execute(trouble).fetchall())
        open_.execute("rollback")
        open_.execute("begin")
        open_.execute("select 1")  # read committed between two statements: it holds nothing back
        assert not any("grafana" in row["evidence"] for row in reader.execute(DOCTOR).fetchall())
        open_.execute("rollback")


def test_F16_who_may_not_see_transactions_says_so(fleet):
    with fleet.admin.transaction(force_rollback=True):
        fleet.admin.execute("revoke pg_read_all_stats from llmgw_owner")
        (row,) = fleet.rows(DOCTOR)
        assert (row["result"], "cannot be seen" in row["evidence"]) == ("warn", True)


def heard(fleet, listener):
    """Payloads that came before a marker sent now."""
    fleet.admin.execute("select pg_notify('llmgw', 'marker')")
    payloads = []
    for note in listener.notifies(timeout=20):
        if note.payload == "marker":
            return payloads
        payloads.append(note.payload)
    raise AssertionError("the marker did not come back")


@pytest.fixture
def listener(database):
    with connected(database, database.controller_url) as connection:
        connection.execute("listen llmgw")
        yield connection


def test_F11_beats_reports_and_usage_notify_nobody(fleet, listener):
    fleet.model("m")
    node = fleet.node("n1", gpus=1)
    _, shard = fleet.running("m", node, 0)
    heard(fleet, listener)
    fleet.sync(node, load={"cpu_percent": 1})
    fleet.report(node, "gpus", [])
    fleet.say(node, "draining", shard=shard)
    flush(fleet, usage_row("00000000-0000-0000-0000-000000000001"))
    router = "select llmgw_core.router_report_v1(%s, '[]')"
    fleet.controller.execute(router, ("00000000-0000-0000-0000-00000000000a",))
    fleet.lead()
    fleet.commit()
    assert heard(fleet, listener) == []


def test_changes_notify_their_topic_once_per_transaction(fleet, listener):
    heard(fleet, listener)
    with fleet.controller.transaction():
        for name in ("a", "b", "c"):
            fleet.model(name)
    assert heard(fleet, listener) == ["models"]
    fleet.node("n1")
    heard(fleet, listener)
    fleet.controller.execute("select llmgw.cordon('n1')")
    create = {"kind": "create", "model": "a", "reason": "x"}
    fleet.commit(create, create)
    assert heard(fleet, listener) == ["nodes", "plan"]
    fleet.commit({"kind": "create", "model": "gone"})
    assert heard(fleet, listener) == [], "a plan of refusals changed nothing"
    document = fleet.model("d")
    heard(fleet, listener)
    assert fleet.apply([document]) == {"d": "unchanged"}
    assert heard(fleet, listener) == []


@pytest.mark.parametrize(
    ("name", "description", "labels"),
    [
        ("big", "x" * 9000, 500),
        ("漢字" * 50, "語" * 3000, 0),
        ("🦙", "\U0001f600" * 2000, 1),
    ],
)
def test_F10_large_and_unusual_text_commits_and_notifies(
    fleet, listener, name, description, labels
):
    heard(fleet, listener)
    fleet.model(name, description=description, aliases=[f"{name}-alias"])
    many = {f"label-{i}": f"{description[:20]}{i}" for i in range(labels)}
    fleet.node("n1", labels=many)
    fleet.controller.execute("select llmgw.set_node_intent('n1', 'cordoned', %s)", (description,))
    assert heard(fleet, listener) == ["models", "nodes"]
    [model] = fleet.rows("select name, description, aliases from llmgw.models")
    assert model == {"name": name, "description": description, "aliases": [f"{name}-alias"]}
    [node] = fleet.rows("select labels, state_reason from llmgw.nodes")
    assert node["labels"] == (many or None)
    assert fleet.value("select intent_reason from llmgw_core.node") == description


def test_usage_that_comes_again_is_written_once(fleet):
    now = fleet.value("select extract(epoch from clock_timestamp())::float8")
    times = [now, now - 3 * 3600, now + 30, now + 86400, now - 40 * 86400, now + 900 * 86400, 0.0]
    batch = [usage_row(f"00000000-0000-0000-0000-{n:012d}", at=at) for n, at in enumerate(times)]
    assert flush(fleet, *batch) == len(times)
    assert flush(fleet, *batch) == 0, "the answer was lost, the router sends again"
    assert flush(fleet, *batch, usage_row("00000000-0000-0000-0001-000000000000")) == 1
    kept = fleet.rows(
        "select extract(epoch from at)::float8 as at from llmgw_core.usage_event"
        " order by id limit 4"
    )
    assert [row["at"] for row in kept] == pytest.approx(times[:4], abs=1e-3), (
        "a time with a partition is kept as it is"
    )


def test_unknown_token_counts_stay_null(fleet):
    flush(
        fleet,
        usage_row("00000000-0000-0000-0000-000000000001", prompt_tokens=0, completion_tokens=None),
    )
    shown = fleet.rows(
        "select prompt_tokens, completion_tokens, cached_tokens from llmgw.usage_recent"
    )
    assert shown == [{"prompt_tokens": 0, "completion_tokens": None, "cached_tokens": None}]


def test_estimates_and_thoughts_are_kept_and_absent_ones_are_not_estimates(fleet):
    first, second = (f"00000000-0000-0000-0000-00000000000{n}" for n in (1, 2))
    flush(fleet, usage_row(first), usage_row(second, reasoning_tokens=7, estimated=True))
    shown = fleet.rows(
        "select reasoning_tokens as n, estimated from llmgw.usage_recent order by id"
    )
    assert shown == [{"n": None, "estimated": False}, {"n": 7, "estimated": True}]


def test_rows_of_routers_of_the_previous_release_are_written(fleet):
    row = usage_row("00000000-0000-0000-0000-00000000000b", key_id="k", prompt_tokens=7)
    row["at"] = fleet.value("select extract(epoch from clock_timestamp())::float8")
    for written in (1, 0):
        call = fleet.controller.execute(
            "select llmgw_core.usage_flush_v1(%s) as n", (Jsonb([row]),)
        )
        assert call.fetchone()["n"] == written
    (kept,) = fleet.rows("select prompt_tokens, estimated, attempts from llmgw_core.usage_event")
    assert kept == {"prompt_tokens": 7, "estimated": False, "attempts": 0}


def test_uses_of_replicas_that_are_gone_are_skipped(fleet):
    rows = Jsonb([{"replica_id": 999, "in_flight": 1, "last_used_age_ms": 1}])
    fleet.controller.execute("select llmgw_core.router_report_v1(gen_random_uuid(), %s)", (rows,))
    assert fleet.value("select count(*) from llmgw_core.router_use") == 0


def partitions(fleet, table):
    return [
        row["name"]
        for row in fleet.rows(
            "select c.relname as name from pg_inherits i join pg_class c on c.oid = i.inhrelid"
            " where i.inhparent = %s::regclass order by 1",
            f"llmgw_core.{table}",
        )
    ]


def day(fleet, offset):
    """A date as partitions spell it, by the database's clock in UTC."""
    return fleet.value(
        "select to_char((clock_timestamp() at time zone 'UTC')"
        " + make_interval(days => %s), 'YYYYMMDD')",
        offset,
    )


def midnights(fleet):
    """How many there were since the database was made: it is a copy of one made before the test."""
    return fleet.value(
        "select (clock_timestamp() at time zone 'UTC')::date - 1 - min(right(c.relname, 8))::date"
        " from pg_inherits i join pg_class c on c.oid = i.inhrelid"
        " where i.inhparent = 'llmgw_core.decision'::regclass"
    )


@pytest.mark.parametrize("zone", ["UTC", "Pacific/Kiritimati", "America/Los_Angeles"])
def test_partitions_are_made_ahead_and_dropped_after_retention(fleet, zone):
    fleet.admin.execute("select set_config('timezone', %s, false)", (zone,))
    fleet.admin.execute("set datestyle = 'SQL, DMY'")
    keep = "select llmgw_core.partitions_keep_v1(%s)"
    tables = ("decision", "rejection", "usage_event", "usage_minute")
    since = midnights(fleet)
    for table in tables:
        days = range(-1 - since, 8 - since)
        assert partitions(fleet, table) == [f"{table}_{day(fleet, d)}" for d in days]
    assert fleet.value(keep, 7) == since * len(tables)
    assert fleet.value(keep, 9) == 8
    kept = (("decision", 30), ("rejection", 30), ("usage_event", 400), ("usage_minute", 35))
    for table, days in kept:
        for offset in (days, days + 2):
            name = f"{table}_{day(fleet, -offset)}"
            start, end = day(fleet, -offset), day(fleet, 1 - offset)
            fleet.admin.execute(
                f"create table llmgw_core.{name} partition of llmgw_core.{table}"
                f" for values from ('{start} 00:00+00') to ('{end} 00:00+00')"
            )
            fleet.admin.execute(f"alter table llmgw_core.{name} owner to llmgw_owner")
    assert fleet.value(keep, 9) == 0
    for table, days in kept:
        left = partitions(fleet, table)
        assert f"{table}_{day(fleet, -days)}" in left
        assert f"{table}_{day(fleet, -days - 2)}" not in left


def test_partitions_are_kept_by_one_controller_at_a_time(fleet, database):
    fleet.value("select llmgw_core.partitions_keep_v1(7)")
    with connected(database, database.url) as other, other.transaction():
        other.execute("select pg_advisory_xact_lock(7720, 3)")
        assert fleet.value("select llmgw_core.partitions_keep_v1(12)") == 0
    assert fleet.value("select llmgw_core.partitions_keep_v1(8)") == 4


def test_housekeeping_removes_what_nobody_needs(fleet):
    fleet.model("m")
    old = fleet.replica("m")
    fleet.move(old, "gone")
    kept = fleet.replica("m")
    fleet.admin.execute("update llmgw_core.replica set state_at = state_at - interval '31 days'")
    join = "select llmgw_core.controller_join_v1(gen_random_uuid(), 'router', 'h', 1, '0')"
    fleet.controller.execute(join)
    fleet.admin.execute("update llmgw_core.controller set seen_at = seen_at - interval '2 hours'")
    term = fleet.lead("housekeeping")
    for _ in range(2):  # idempotent
        fleet.controller.execute("select llmgw_core.housekeep_v1(%s)", (term,))
        assert [row["id"] for row in fleet.rows("select id from llmgw_core.replica")] == [kept]
        assert fleet.value("select count(*) from llmgw_core.controller") == 0
