"""The views that people, dashboards and programs read: words, numbers, null for unknown."""

from __future__ import annotations

import pytest
from psycopg.types.json import Jsonb

from sql import queries
from tests.sql.fleet import GIB, HOST, SICK, connected, digest, port
from tests.sql.spending import spent_some
from tests.sql.tenants import fill
from tests.sql.test_attempts_seen import attempt, refusal
from tests.sql.test_fencing import join, take
from tests.usage_columns import listed

SHOWN = ("llmgw", "llmgw_core")


def views(fleet):
    return fleet.rows(
        "select schemaname || '.' || viewname as name from pg_views"
        " where schemaname = any(%s) order by 1",
        list(SHOWN),
    )


@pytest.fixture
def lived_in(fleet):
    """A fleet with something in every table that a view reads."""
    fleet.apply(pools=[{"name": "all", "labels": {"rack": ["r1"]}}])
    fleet.model("m", {"pool": "all"}, aliases=["alias"], description="a model")
    fleet.model("other", fallbacks=["m"], prices={"prompt": 1})
    fleet.controller.execute(
        "select llmgw_core.catalog_offer_v1(gen_random_uuid(), 'h', 'me', '/c.toml', 'd', false)"
    )
    fill(fleet)
    spent_some(fleet)
    nodes = [fleet.node(name, gpus=2) for name in ("n1", "n2")]
    replica, _ = fleet.running("m", nodes[0], 0)
    for node in nodes:
        cards = [
            {"uuid": f"{node.name}-{i}", "memory_foreign_mib": 0, "power_w": 70.5} for i in range(2)
        ]
        fleet.sync(
            node, load={"cpu_percent": 5.0, "memory_used_mib": 32 * GIB}, gpus=cards, clock=0
        )
        fleet.report(
            node,
            "disks",
            [
                {
                    "mount": "/",
                    "filesystem": "ext4",
                    "kind": "local",
                    "total_mib": 10 * GIB,
                    "free_mib": 5 * GIB,
                },
                {
                    "mount": "/nfs",
                    "filesystem": "nfs4",
                    "kind": "shared",
                    "total_mib": 999 * GIB,
                    "free_mib": 1,
                },
            ],
        )
        fleet.report(node, "ports", [port(fabric="ib-a")])
        fleet.report(node, "host", {**HOST, "nvlink": {"state": "joined", "domain": "u.1"}})
        fleet.report(node, "checks", [{"name": "disk", "result": "fail", "evidence": "full"}])
        fleet.report(
            node,
            "weights",
            [
                {"source": "file:/m.gguf", "path": "/m", "complete": True, "bytes": 5},
                {"source": "hf:a/b", "path": "/w/b", "complete": True, "managed": True},
            ],
        )
    fleet.controller.execute(
        "select llmgw.key_create_v1('me', 'lived0', %s, 'k', '{m}', null)", (digest("k"),)
    )
    use(fleet, replica, 0, age_ms=120_000)
    flush(fleet, usage_row("00000000-0000-0000-0000-000000000001", attempts=1))
    measured = Jsonb({"profile": "p", "concurrency": 4})
    fleet.controller.execute("select llmgw.capacity_put_v1('me', 'm', %s)", (measured,))
    attempt(fleet, "other", placed=False, refusals=[refusal("p", "n1", "memory")])
    return nodes


ROUTER = "00000000-0000-0000-0000-00000000000a"


def use(fleet, replica, in_flight, age_ms=None, router=ROUTER):
    """What a router says of a replica."""
    join = "select llmgw_core.controller_join_v1(%s, 'router', 'h', 1, '0')"
    fleet.controller.execute(join, (router,))
    row = {"replica_id": replica, "in_flight": in_flight, "last_used_age_ms": age_ms}
    fleet.controller.execute("select llmgw_core.router_report_v1(%s, %s)", (router, Jsonb([row])))


def test_what_a_router_no_longer_tells_of_it_no_longer_runs(fleet):
    fleet.model("m")
    first, second = fleet.replica("m"), fleet.replica("m")
    use(fleet, first, 2, router="00000000-0000-0000-0000-00000000000b")
    use(fleet, first, 1, age_ms=60_000)
    use(fleet, second, 3)  # the first left this router's table in between
    rows = fleet.rows(
        "select replica_id, in_flight, last_used_at is null as unused from llmgw_core.router_use"
        " order by replica_id, router_id"
    )
    assert [tuple(row.values()) for row in rows] == [
        (first, 0, False),
        (first, 2, True),
        (second, 3, True),
    ]
    age = "extract(epoch from clock_timestamp() - max(last_used_at))"
    assert fleet.value(f"select {age} < 30 from llmgw_core.router_use")  # it ended just now


def usage_row(number, **more):
    return {
        "id": number,
        "at": 1e9,
        "endpoint": "/v1/chat/completions",
        "status": "ok",
        "stream": False,
        **more,
    }


def flush(fleet, *rows):
    now = fleet.value("select extract(epoch from clock_timestamp())::float8")
    timed = [{**row, "at": now if row["at"] == 1e9 else row["at"]} for row in rows]
    return fleet.controller.execute(
        "select llmgw_core.usage_flush_v2(%s) as n", (Jsonb([listed(row) for row in timed]),)
    ).fetchone()["n"]


def test_every_view_answers_on_an_empty_database_to_a_reader(fleet, database):
    with connected(database, database.read_url) as reader:
        for view in views(fleet):
            if view["name"].startswith("llmgw."):
                reader.execute(f"select * from {view['name']}")


def test_every_view_answers_on_a_filled_database_to_reader_and_controller(
    fleet, database, lived_in
):
    fleet.replica("other")
    fleet.controller.execute(
        "select llmgw_core.controller_join_v1(gen_random_uuid(), 'router', 'h', 1, '0')"
    )
    with connected(database, database.read_url) as reader:
        for view in views(fleet):
            rows = fleet.controller.execute(f"select * from {view['name']}").fetchall()
            if view["name"].startswith("llmgw."):
                shown = reader.execute(f"select * from {view['name']}").fetchall()
                assert len(shown) == len(rows) or view["name"] in ("llmgw.locks", "llmgw.trouble")
            if view["name"] not in ("llmgw.locks", "llmgw.controllers", "llmgw.engines"):
                assert rows, f"{view['name']} shows nothing of a lived-in fleet"


def test_node_states_follow_silence_by_the_databases_clock(fleet):
    node = fleet.node("n1")
    fresh = fleet.node("n2", beat=False)
    assert (
        fleet.value("select state_reason from llmgw.nodes where id = 'n2'")
        == "its agent has not been seen yet"
    )
    states = []
    for more in (0, 25, 10, 80, 10):
        fleet.silence(node, more)
        states.append(fleet.value("select state from llmgw.nodes where id = 'n1'"))
    assert states == ["ready", "ready", "unreachable", "unreachable", "lost"]
    [shown] = fleet.rows("select state_reason, last_seen_ago from llmgw.nodes where id = 'n1'")
    assert shown["state_reason"].startswith("silent for 12")
    assert 121 <= shown["last_seen_ago"] < 131
    trouble = fleet.rows(
        "select what, object from llmgw.trouble where what like 'node%%' order by 1"
    )
    assert trouble == [
        {"what": "node lost", "object": "n1"},
        {"what": "node unreachable", "object": "n2"},
    ]
    fleet.sync(node)
    fleet.sync(fresh)
    assert fleet.rows("select distinct state, state_reason from llmgw.nodes") == [
        {"state": "ready", "state_reason": None}
    ]


def test_silence_outweighs_the_operators_word_and_a_changed_setting_counts_at_once(fleet):
    node = fleet.node("n1")
    fleet.controller.execute("select llmgw.set_node_intent('n1', 'draining', 'old')")
    fleet.silence(node, 10)
    assert fleet.value("select state from llmgw.nodes") == "draining"
    fleet.admin.execute("update llmgw_core.setting set value = 5 where name = 'unreachable_after'")
    assert fleet.value("select state from llmgw.nodes") == "unreachable"


def test_cards_in_one_word(fleet):
    fleet.model("m")
    node = fleet.node("n1", gpus=5)
    _, shard = fleet.running("m", node, 0)
    fleet.admin.execute(f"update llmgw_core.gpu set {SICK} where uuid = 'n1-1'")
    held = {0: 70000, 1: 0, 2: 513, 3: 512, 4: None}
    fleet.sync(
        node, gpus=[{"uuid": f"n1-{i}", "memory_foreign_mib": mib} for i, mib in held.items()]
    )
    shown = {row["index"]: row for row in fleet.rows("select * from llmgw.gpus")}
    assert [shown[i]["state"] for i in range(5)] == [
        "used",
        "unhealthy",
        "foreign",
        "free",
        "unknown",
    ]
    assert shown[0]["shard"] == shard
    capacity = {"class": "H100", "total": 5, "used": 1, "free": 1, "unhealthy": 1, "unavailable": 2}
    assert fleet.rows("select * from llmgw.gpu_capacity") == [capacity]
    [row] = fleet.rows("select gpu_total, gpu_free, unhealthy_gpus, gpu_classes from llmgw.nodes")
    assert row == {
        "gpu_total": 5,
        "gpu_free": 1,
        "unhealthy_gpus": ["gpu 1: Xid 79"],
        "gpu_classes": ["H100"],
    }
    fleet.controller.execute("select llmgw.cordon('n1')")
    assert fleet.value("select free from llmgw.gpu_capacity") == 0
    assert fleet.value("select unavailable from llmgw.gpu_capacity") == 3
    assert fleet.value("select gpus from llmgw.summary") == fleet.rows(
        "select * from llmgw.gpu_capacity"
    )


def test_stale_load_is_unknown_and_not_zero(fleet):
    node = fleet.node("n1", gpus=1)
    fast = [{"uuid": "n1-0", "utilization_percent": 0, "memory_foreign_mib": 0}]
    fleet.sync(
        node, load={"cpu_percent": 0.0, "memory_used_mib": 16 * GIB, "load1": 0.5}, gpus=fast
    )
    load = fleet.value("select load from llmgw.nodes")
    assert load.pop("age_seconds") >= 0
    assert load == {
        "cpu_percent": 0,
        "cpus": 16,
        "load1": 0.5,
        "memory_used_bytes": 16 * 2**30,
        "memory_total_bytes": 64 * 2**30,
        "memory_percent": 25.0,
    }
    assert fleet.value("select utilization_percent from llmgw.gpus") == 0
    fleet.admin.execute("update llmgw_core.node_load set at = at - interval '61 s'")
    assert fleet.value("select load from llmgw.nodes") is None
    [gpu] = fleet.rows("select state, utilization_percent from llmgw.gpus")
    assert gpu == {"state": "unknown", "utilization_percent": None}


def test_disks_are_the_local_ones_and_unknown_without(fleet, lived_in):
    [row] = fleet.rows(
        "select disk_free_gb, disk_total_gb, models_on_disk from llmgw.nodes where id = 'n1'"
    )
    assert row == {
        "disk_free_gb": 5.0,
        "disk_total_gb": 10.0,
        "models_on_disk": ["file:/m.gguf", "hf:a/b"],
    }
    fleet.report(lived_in[0], "disks", [])
    assert fleet.value("select disk_free_gb from llmgw.nodes where id = 'n1'") is None


def test_idle_is_minus_one_when_no_router_said_anything(fleet):
    fleet.model("m")
    replica, _ = fleet.running("m", fleet.node("n1", gpus=1), 0)
    idle = "select idle_seconds from llmgw.replicas"
    assert fleet.value(idle) == -1
    assert fleet.value("select idle_replicas from llmgw.summary") == []
    use(fleet, replica, 0, age_ms=100_000)
    assert 100 <= fleet.value(idle) < 110
    use(fleet, replica, 0, age_ms=70_000, router="00000000-0000-0000-0000-00000000000b")
    assert 70 <= fleet.value(idle) < 80, "the latest use of any router counts"
    [entry] = fleet.value("select idle_replicas from llmgw.summary")
    assert (entry["name"], entry["replica"], entry["gpus"]) == ("m", replica, 1)
    use(fleet, replica, 3, age_ms=70_000)
    assert fleet.value(idle) == 0
    assert fleet.value("select in_flight from llmgw.replicas") == 3
    use(fleet, replica, 0, age_ms=None)
    assert fleet.value(idle) > 0, "a report without a use keeps the last known one"


def test_what_a_killed_router_ran_runs_no_more_and_was_used_until_its_last_word(fleet):
    fleet.model("m")
    replica = fleet.replica("m")
    shown = "select in_flight, idle_seconds from llmgw.replicas"
    use(fleet, replica, 3)
    assert fleet.rows(shown) == [{"in_flight": 3, "idle_seconds": 0}], "its first ones run still"
    ago = "update llmgw_core.{} set {at} = {at} - interval '40 s'"
    for table, at in (("controller", "seen_at"), ("router_use", "reported_at")):
        fleet.admin.execute(ago.format(table, at=at))
    [row] = fleet.rows(shown)
    assert row["in_flight"] is None, "no live router says anything"
    assert 40 <= row["idle_seconds"] < 50
    assert fleet.value("select router->>'in_flight' from llmgw.summary") is None
    [known] = fleet.rows(queries("tick")["uses"].replace("$1", "0"))
    assert known["in_flight"] == 0, "the planner knows it too"
    use(fleet, replica, 1, router="00000000-0000-0000-0000-00000000000b")
    assert fleet.rows(shown) == [{"in_flight": 1, "idle_seconds": 0}]
    assert fleet.value("select router->>'in_flight' from llmgw.summary") == "1"


def test_an_edited_profile_makes_its_replicas_stale_and_nothing_else(fleet):
    document = fleet.model("m")
    fleet.running("m", fleet.node("n1"))
    stale = "select stale from llmgw.replicas"
    assert fleet.value(stale) is False
    document["description"] = "other words"
    fleet.apply([document])
    assert fleet.value(stale) is False
    document["profiles"][0]["fingerprint"] = "f2"
    fleet.apply([document])
    assert fleet.value(stale) is True
    fleet.replica("m")
    pending = fleet.rows(
        "select stale, idle_seconds, nodes, endpoint from llmgw.replicas where state = 'pending'"
    )
    assert pending == [{"stale": False, "idle_seconds": -1, "nodes": None, "endpoint": None}]
    fleet.apply([], prune=True)
    assert fleet.value("select bool_or(stale) from llmgw.replicas") is False, "m is removed"


def test_a_replica_on_a_node_that_its_pool_or_profile_leaves_out_is_trouble(fleet):
    pool = {"name": "o", "labels": {"rack": ["r1"]}}
    fleet.apply([], [pool])
    document = fleet.model("m", {"pool": "o"})
    replica, _ = fleet.running("m", fleet.node("n1"))
    told = "select object, why from llmgw.trouble where what = 'replica where it may not be'"
    assert fleet.rows(told) == []
    end = f"llmgwctl replace {replica} brings it elsewhere"
    outside = f"it runs on node n1, which is not in pool o (any more): {end}"
    for labels in ({"rack": ["r2"]}, {"zone": ["a"]}):
        fleet.apply([], [pool | {"labels": labels}])
        assert fleet.rows(told) == [{"object": f"m/{replica}", "why": outside}]
    fleet.apply([], [pool])
    assert fleet.rows(told) == []
    document["profiles"][0]["exclude_nodes"] = ["n1"]
    fleet.apply([document])
    excluded = f"it runs on node n1, which profile p excludes: {end}"
    assert fleet.rows(told) == [{"object": f"m/{replica}", "why": excluded}]
    assert fleet.move(replica, "draining") == ["ok"]
    assert fleet.rows(told) == [], "it leaves already"


def test_the_summary_counts(fleet, lived_in):
    fleet.silence(lived_in[1], 200)
    fleet.replica("other")
    [row] = fleet.rows("select * from llmgw.summary")
    assert row["nodes"] == {"ready": 1, "lost": 1}
    assert row["replicas"] == {"ready": 1, "pending": 1}
    assert row["models"] == {
        "total": 2,
        "satisfied": 1,
        "unplaceable": [{"name": "other", "reason": "because of memory (1 of 1 candidates)"}],
        "failing": [],
    }
    [gpus] = row["gpus"]
    assert (gpus["total"], gpus["used"], gpus["free"], gpus["unavailable"]) == (4, 1, 1, 2)
    assert row["router"] == {"requests_per_s": 0.02, "errors": 0, "in_flight": 0, "queue": 0}
    assert row["controllers"]["alive"] == 0
    assert row["controllers"]["term"] == 1


def test_who_is_alive_and_who_leads(fleet, database):
    with connected(database, database.controller_url) as connection:
        me = join(connection)
        take(connection, me)
        [row] = fleet.rows("select id, alive, leads from llmgw.controllers")
        assert row == {"id": me, "alive": True, "leads": ["tick"]}
        assert fleet.value("select held from llmgw.leases")
        assert fleet.value("select controllers->>'leader' from llmgw.summary") == str(me)
        locks = fleet.rows("select lock, pid from llmgw.locks")
        assert locks == [
            {"lock": "presence of a controller process", "pid": connection.info.backend_pid}
        ]
        with connection.transaction():
            connection.execute("select pg_advisory_xact_lock(7720, 2)")
            assert "catalog apply" in {
                row["lock"] for row in fleet.rows("select lock from llmgw.locks")
            }


def test_trouble_is_empty_on_a_healthy_fleet_and_names_what_is_not(fleet, lived_in, database):
    fleet.apply(
        [{**fleet.model("m", {"pool": "all"}, aliases=["alias"])}],
        pools=[{"name": "all", "labels": {}}],
    )
    with connected(database, database.controller_url) as connection:
        fleet.holder = join(connection)
        fleet.lead()
        fleet.admin.execute("delete from llmgw_core.attempt")
        told = {row["what"] for row in fleet.rows("select what from llmgw.trouble")}
        assert {"check failed", "nvlink domain"} <= told
        for node in lived_in:
            fleet.sync(node)
            fleet.report(node, "checks", [])
            fleet.report(node, "host", HOST)
        assert fleet.rows("select * from llmgw.trouble") == []
    fleet.controller.execute("select llmgw.cordon('n1')")
    fleet.sync(lived_in[0], applied_gen=0)
    replica = fleet.value("select id from llmgw_core.replica")
    fleet.admin.execute(f"update llmgw_core.gpu set {SICK} where uuid = 'n2-1'")
    fleet.admin.execute("update llmgw_core.replica set state = 'failed', error = 'it broke'")
    found = {(row["what"], row["object"]) for row in fleet.rows("select * from llmgw.trouble")}
    assert {
        ("node behind its assignments", "n1"),
        ("gpu unhealthy", "n2 gpu 1"),
        ("replica failed", f"m/{replica}"),
    } <= found


def test_pools_hold_the_nodes_whose_labels_match(fleet):
    for name, labels in (("n1", {"rack": "r1", "zone": "a"}), ("n2", {"rack": "r2"}), ("n3", {})):
        fleet.node(name, labels=labels)
    wanted = {
        "any": {},
        "racks": {"rack": ["r1", "r2"]},
        "both": {"rack": ["r1"], "zone": ["a", "b"]},
        "none": {"rack": []},
    }
    fleet.apply(pools=[{"name": name, "labels": labels} for name, labels in wanted.items()])
    shown = {row["name"]: row["nodes"] for row in fleet.rows("select name, nodes from llmgw.pools")}
    assert shown == {"any": ["n1", "n2", "n3"], "racks": ["n1", "n2"], "both": ["n1"], "none": None}


def test_G04_rows_of_one_transaction_page_without_loss(fleet):
    rows = [
        usage_row(
            f"00000000-0000-0000-0000-{n:012d}",
            at=fleet.value("select extract(epoch from now())::float8"),
        )
        for n in range(25)
    ]
    assert flush(fleet, *rows) == 25
    seen, after = [], None
    page = (
        "select at, id from llmgw.usage_recent"
        " where %s::uuid is null or (at, id) < (%s::timestamptz, %s::uuid)"
        " order by at desc, id desc limit 10"
    )
    while True:
        found = fleet.rows(
            page, after and after["id"], after and after["at"], after and after["id"]
        )
        if not found:
            break
        seen += [row["id"] for row in found]
        after = found[-1]
        flush(
            fleet, usage_row(f"00000000-0000-0000-0001-{len(seen):012d}", at=1e9)
        )  # newer rows come meanwhile
    assert len(seen) == len(set(seen)) == 25
