"""Who may do what: grants of every object, and one node's token against everything of another's."""

from __future__ import annotations

import uuid

import psycopg
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from psycopg.types.json import Jsonb

from sql.states import SHARD as SHARD_STATES
from tests.sql.fleet import card, digest, port, refusal_of, snapshot

ROLES = ("llmgw_agent", "llmgw_read", "llmgw_controller")
RELATIONS = """
select n.nspname as schema, c.relname as name, c.relkind as kind,
    array(select p from unnest(array['select', 'insert', 'update', 'delete', 'truncate',
                                     'references', 'trigger']) p
          where has_table_privilege(%s, c.oid, p)) as may
from pg_class c join pg_namespace n on n.oid = c.relnamespace
where n.nspname in ('llmgw_core', 'llmgw', 'agent') and c.relkind in ('r', 'p', 'v', 'm')"""
FUNCTIONS = """
select n.nspname as schema, p.proname as name, p.oid::regprocedure::text as signature,
    p.prosecdef as definer,
    coalesce(array_to_string(p.proconfig, ';'), '') as config, pg_get_userbyid(p.proowner) as owner,
    p.prorettype = 'trigger'::regtype as is_trigger,
    array(select r from unnest(%s::text[]) r
          where has_function_privilege(r, p.oid, 'execute')) as may,
    has_function_privilege('public', p.oid, 'execute') as public
from pg_proc p join pg_namespace n on n.oid = p.pronamespace
where n.nspname in ('llmgw_core', 'llmgw', 'agent')"""
AGENT_ONLY = {
    "enroll",
    "sync",
    "report_host",
    "report_gpus",
    "report_engines",
    "report_disks",
    "report_weights",
    "report_ports",
    "report_checks",
    "report_scan",
    "report_events",
    "report_log",
    "report_collect",
}


def relations(fleet, role):
    return fleet.rows(RELATIONS, role)


def functions(fleet):
    return fleet.rows(FUNCTIONS, list(ROLES))


def test_agents_may_touch_no_table_and_no_view(fleet):
    assert {row["name"]: row["may"] for row in relations(fleet, "llmgw_agent") if row["may"]} == {}


def test_readers_may_select_the_views_and_nothing_else(fleet):
    for row in relations(fleet, "llmgw_read"):
        wanted = ["select"] if row["schema"] == "llmgw" else []
        assert row["may"] == wanted, row


def test_controllers_read_everything_and_write_nothing_directly(fleet):
    for row in relations(fleet, "llmgw_controller"):
        assert set(row["may"]) <= {"select"}, row
        if (
            row["kind"] in ("r", "p", "v") and not row["name"][-8:].isdigit()
        ):  # partitions are read by their parent
            assert row["may"] == ["select"], row


def test_no_role_may_use_or_advance_a_sequence_or_make_objects(fleet):
    for role in ROLES:
        for schema in ("llmgw_core", "llmgw", "agent"):
            assert not fleet.value("select has_schema_privilege(%s, %s, 'create')", role, schema)
        changed = fleet.rows(
            "select relname from pg_class where relkind = 'S'"
            " and relnamespace = 'llmgw_core'::regnamespace"
            " and (has_sequence_privilege(%s, oid, 'update')"
            " or has_sequence_privilege(%s, oid, 'usage'))",
            role,
            role,
        )
        assert changed == []
    assert not fleet.value("select has_schema_privilege('llmgw_agent', 'llmgw_core', 'usage')")
    assert not fleet.value("select has_schema_privilege('llmgw_read', 'llmgw_core', 'usage')")


def test_functions_have_an_owner_a_fixed_path_and_are_nobodys_by_default(fleet):
    for row in functions(fleet):
        assert row["owner"] == "llmgw_owner", row
        assert not row["public"], row
        if row["definer"]:
            path = row["config"].partition("search_path=")[2].partition(";")[0]
            assert path.endswith("pg_temp"), row
            assert path.startswith("llmgw_core"), row


def test_agents_may_call_their_door_only_and_controllers_never_that(fleet):
    by_agent = {
        (row["schema"], row["name"]) for row in functions(fleet) if "llmgw_agent" in row["may"]
    }
    assert by_agent == {("agent", name) for name in AGENT_ONLY}
    for row in functions(fleet):
        if row["schema"] == "agent":
            assert row["may"] == ["llmgw_agent"], row
        if row["schema"] == "llmgw":
            reads = {"llmgw_read"} if row["name"] == "usage_by" else set()
            assert set(row["may"]) == {"llmgw_controller"} | reads, row
        if row["is_trigger"]:
            assert row["may"] == [], row


def test_readers_may_call_only_what_views_need_and_reports(fleet):
    by_reader = {row["name"] for row in functions(fleet) if "llmgw_read" in row["may"]}
    views_need = {"seconds", "present", "imex_fault", "transactions", "snapshot_old_s"}
    views_need |= {"budget_spent", "budget_frees_at"}
    assert by_reader == views_need | {"usage_by"}


def test_controllers_pass_no_check_by(fleet):
    """Parts of commit_plan, sync and catalog are not for calling by themselves."""
    inner = {
        "plan_place",
        "plan_move",
        "plan_lock",
        "touch_nodes",
        "sync_shard",
        "sync_shards",
        "sync_load",
        "sync_gpus",
        "event",
        "expire_scans",
        "scans_keep",
        "model_put",
        "pool_put",
        "catalog_drop",
        "catalog_force",
        "catalog_in_force",
        "price_put",
        "price_of",
        "no_model",
        "scope_fits",
        "key_locked",
        "networks",
        "person_of",
        "login_counted",
        "keys_keep",
        "logins_keep",
        "require_term",
        "node_of",
        "notify",
        "audited",
    }
    assert {row["name"] for row in functions(fleet) if row["name"] in inner and row["may"]} == set()


@pytest.fixture
def two_nodes(fleet):
    """Node a (the attacker) and node b with everything that could be changed."""
    fleet.model("m")
    a, b = fleet.node("a", gpus=2), fleet.node("b", gpus=2)
    for node in (a, b):
        fleet.running("m", node, 0)
        fleet.report(node, "disks", [{"mount": "/", "filesystem": "ext4", "kind": "local"}])
        fleet.report(node, "weights", [{"source": "file:/m", "path": "/m", "complete": True}])
        fleet.report(node, "ports", [port()])
        fleet.report(node, "checks", [{"name": "driver", "result": "pass", "evidence": "590"}])
        fleet.controller.execute("select llmgw_core.ask_log_v1(%s, null, 10, null)", (node.name,))
    fleet.controller.execute("select llmgw.fabric_scan_v1('me', 'ib:01')")
    return a, b


OWNED = {
    "beat": "node_id",
    "node_load": "node_id",
    "gpu": "node_id",
    "engine": "node_id",
    "disk": "node_id",
    "weight": "node_id",
    "shard": "node_id",
    "gpu_claim": "node_id",
    "ask": "node_id",
    "ib_port": "node_id",
    "node_check": "node_id",
    "node_event": "node_id",
    "fabric_scan": "scanner",
    "node": "id",
}
"""Tables with rows of nodes, and the column that names the node."""


def foreign_rows(fleet, mine):
    """Every row that is not of node ``mine``, of every table."""
    found = snapshot(fleet.admin, without=tuple(OWNED))
    for table, column in OWNED.items():
        rows = fleet.rows(
            f"select t::text as row from llmgw_core.{table} t where {column} <> %s order by 1", mine
        )
        found[table] = [row["row"] for row in rows]
    return found


WORDS = st.sampled_from(["", "a", "b", "b-0", "m", "N/A", "ready", "failed", "../x", "\U0001f600"])
LEAVES = st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats(-1e300, 1e300) | WORDS
JUNK = st.recursive(
    LEAVES,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(WORDS, inner, max_size=3),
    max_leaves=8,
)


def odd(names: str):
    """Fields of these names, each absent or anything."""
    return dict.fromkeys(names.split(), JUNK)


STATES = st.sampled_from([*SHARD_STATES, "gone", None])
FETCH = st.fixed_dictionaries({}, optional=odd("source bytes_done bytes_total"))
SHARD = st.fixed_dictionaries(
    {"shard": st.integers(0, 3) | JUNK, "state": STATES | JUNK, "fetch": FETCH | JUNK},
    optional=odd("error exit_code log_tail pid cpu_cores memory_bytes node_id"),
)
UUIDS = st.sampled_from(["a-0", "a-1", "b-0"])
USE = st.fixed_dictionaries(
    {"uuid": UUIDS | JUNK},
    optional=odd("memory_used_mib memory_foreign_mib utilization_percent power_w node_id"),
)
CARD = st.fixed_dictionaries(
    {"uuid": UUIDS, "index": st.integers(0, 3), "name": WORDS, "class": WORDS},
    optional=odd(
        "memory_mib healthy problems numa node_id pci_bus_id parent partitioned memory_kind paths"
        " detail clique findings"
    ),
)
PORT = st.fixed_dictionaries(
    {"hca": WORDS, "port": st.integers(-1, 3)},
    optional=odd("state rate_gbps active lid numa vlan key sm_guid errors node_id"),
)
CHECK = st.fixed_dictionaries(
    {"name": WORDS, "result": st.sampled_from(["pass", "fail", "x"]), "evidence": WORDS},
    optional=odd("remedy position node_id"),
)
REPORT = st.fixed_dictionaries(
    {"shards": st.lists(SHARD, max_size=3), "gpus": st.lists(USE, max_size=3)},
    optional={
        "ports": JUNK
        | st.lists(
            st.fixed_dictionaries({"hca": WORDS}, optional=odd("port tx_bytes rx_bytes errors")),
            max_size=3,
        ),
        **odd("clock node id"),
        "boot": st.none() | st.uuids().map(str) | WORDS,
        "applied_gen": st.integers(-5, 50) | LEAVES,
        "load": JUNK
        | st.fixed_dictionaries({}, optional=odd("cpu_percent load1 memory_used_mib pressure")),
    },
)
ROW = st.fixed_dictionaries(
    {"engine": WORDS, "mount": WORDS, "filesystem": WORDS, "kind": st.sampled_from(["local", "x"])},
    optional=odd("version path state source bytes complete total_mib free_mib holds_weights"),
)
HOST = st.fixed_dictionaries(
    {},
    optional=odd(
        "hostname mgmt_addr arch cpu_flags cpus_effective memory_effective_mib labels ports"
        " warnings intent id alloc_gen secret_hash machine nvlink imex"
    ),
)
LISTS = st.sampled_from(
    [
        f"select agent.report_{what}(%s, %s)"
        for what in ("engines", "disks", "weights", "ports", "events")
    ]
)
CALLS = st.one_of(
    st.tuples(st.just("select agent.sync(%s, %s, %s)"), st.none() | st.integers(-5, 50), REPORT),
    st.tuples(st.just("select agent.sync(%s, %s, %s)"), st.none(), JUNK),
    st.tuples(st.just("select agent.report_host(%s, %s)"), HOST | JUNK),
    st.tuples(st.just("select agent.report_gpus(%s, %s)"), st.lists(CARD, max_size=3) | JUNK),
    st.tuples(LISTS, st.lists(ROW, max_size=3) | JUNK),
    st.tuples(st.just("select agent.report_ports(%s, %s)"), st.lists(PORT, max_size=3) | JUNK),
    st.tuples(st.just("select agent.report_checks(%s, %s)"), st.lists(CHECK, max_size=3) | JUNK),
    st.tuples(
        st.just("select agent.report_scan(%s, %s, %s, %s, %s)"),
        st.integers(-1, 5),
        WORDS,
        st.integers(-9, 9),
        WORDS,
    ),
    st.tuples(
        st.just("select agent.report_log(%s, %s, %s, %s)"),
        st.integers(-1, 5),
        WORDS,
        st.integers(-9, 9),
    ),
)
EXPECTED = ("22", "23", "LG003")
"""What a hostile document may raise: data errors, constraints, and our own refusals."""


def arguments(call):
    statement, *rest = call
    if "report_log" in statement or "report_scan" in statement:
        return statement, rest
    *plain, document = rest
    return statement, [*plain, Jsonb(document)]


@pytest.mark.slow
def test_no_word_of_one_node_changes_a_row_of_another_or_breaks_a_view(fleet, two_nodes):
    a, _ = two_nodes
    views = [
        row["name"]
        for row in fleet.rows("select viewname as name from pg_views where schemaname = 'llmgw'")
    ]

    passed: list[bool] = []

    @settings(max_examples=80, deadline=None, suppress_health_check=list(HealthCheck))
    @given(st.lists(CALLS, min_size=1, max_size=6))
    def attack(calls):
        before = foreign_rows(fleet, "a")
        for call in calls:
            statement, rest = arguments(call)
            state = refusal_of(fleet.agent, statement, (a.token, *rest))
            assert state is None or state.startswith(EXPECTED), f"{statement} {rest}: {state}"
            passed.append(state is None)
        assert foreign_rows(fleet, "a") == before
        for view in views:  # one poisoned row must not take a view from everybody (D10)
            fleet.admin.execute(f"select * from llmgw.{view}")

    attack()
    assert 0.2 < sum(passed) / len(passed) < 0.9, "hostile words must be near enough to be heard"


def test_shards_asks_and_cards_of_others_are_out_of_reach(fleet, two_nodes):
    a, _b = two_nodes
    theirs = fleet.value("select id from llmgw_core.shard where node_id = 'b'")
    ask = fleet.value("select id from llmgw_core.ask where node_id = 'b'")
    fleet.report(a, "gpus", [card(0, uuid="b-0"), card(1, uuid="b-1")])  # rows of its own
    before = foreign_rows(fleet, "a")
    fleet.sync(a, shards=[{"shard": theirs, "state": "failed", "error": "mine now"}])
    fleet.report(a, "gpus", [card(0, uuid="b-0"), card(1, uuid="b-1", healthy=False)])
    scan = fleet.value("select id from llmgw_core.ask where kind = 'scan'")
    scanner = fleet.value("select scanner from llmgw_core.fabric_scan")
    assert scanner == "a"
    forged = "select agent.report_scan(%s, %s, 'forged', 1, null)"
    fleet.agent.execute(forged, (_b.token, scan))
    assert fleet.value("select output from llmgw_core.fabric_scan") is None
    fleet.agent.execute("select agent.report_log(%s, %s, 'forged', 0)", (a.token, ask))
    assert foreign_rows(fleet, "a") == before
    answer = fleet.sync(a)
    assert all(entry["id"] != ask for entry in answer["asks"])
    assert all(entry["shard"] != theirs for entry in answer["assignments"])


@pytest.mark.parametrize("token", ["", "nonsense", None, "x" * 10_000])
def test_unknown_tokens_are_refused_everywhere_and_change_nothing(fleet, two_nodes, token):
    refused_everywhere(fleet, token)


def test_revoked_tokens_are_refused_everywhere_and_change_nothing(fleet, two_nodes):
    a, _ = two_nodes
    fleet.controller.execute("select llmgw.node_revoke_v1('me', 'a')")
    refused_everywhere(fleet, a.token)


def refused_everywhere(fleet, token):
    before = snapshot(fleet.admin)
    empty = Jsonb({}), Jsonb([])
    calls = [
        ("agent.sync(%s, 0, %s)", empty[0]),
        ("agent.report_host(%s, %s)", empty[0]),
        ("agent.report_log(%s, 1, %s, 0)", "x"),
    ]
    calls += [
        (f"agent.report_{what}(%s, %s)", empty[1])
        for what in ("gpus", "engines", "disks", "weights", "ports", "checks")
    ]
    calls.append(("agent.report_scan(%s, 1, %s, 1, null)", "x"))
    for call, document in calls:
        with pytest.raises(psycopg.Error) as caught:
            fleet.agent.execute(f"select {call}", (token, document))
        assert caught.value.sqlstate == "LG004", call
    assert snapshot(fleet.admin) == before


def test_oversized_reports_are_refused_and_change_nothing(fleet, two_nodes):
    a, _ = two_nodes
    noise = [str(uuid.uuid4()) for _ in range(40_000)]
    before = snapshot(fleet.admin)
    calls = [
        ("sync", {"shards": [], "noise": noise}),
        ("sync", {"shards": [{"shard": i} for i in range(257)]}),
        ("report_host", {"warnings": noise}),
        ("report_gpus", [card(i) for i in range(129)]),
        ("report_ports", [{"hca": f"mlx5_{i}", "port": 1} for i in range(129)]),
        ("report_checks", [{"name": str(i), "result": "pass"} for i in range(101)]),
        ("report_engines", [{"engine": "e", "path": str(i)} for i in range(201)]),
        ("report_disks", [{"mount": str(i)} for i in range(501)]),
        ("report_weights", [{"path": w, "source": w} for w in noise]),
        *(
            (f"report_{what}", {"not": "a list"})
            for what in ("gpus", "engines", "disks", "weights", "ports", "checks")
        ),
        ("report_host", []),
    ]
    for name, document in calls:
        middle = "0, " if name == "sync" else ""
        with pytest.raises(psycopg.Error) as caught:
            fleet.agent.execute(f"select agent.{name}(%s, {middle}%s)", (a.token, Jsonb(document)))
        assert caught.value.sqlstate == "LG003", (name, caught.value)
    assert snapshot(fleet.admin) == before


def test_secrets_are_nowhere_in_plain_text(fleet):
    token = fleet.token("n1")
    node = fleet.enrol("n1", token)
    key = "sk-llmgw-secret-of-a-client"
    fleet.controller.execute(
        "select llmgw.key_create_v1('me', 'abcdef', %s, 'k', null, null)", (digest(key),)
    )
    everything = str(snapshot(fleet.admin))
    for secret in (token, node.token, key):
        assert secret not in everything
        assert secret.encode().hex() not in everything
    shown = str(fleet.rows("select * from llmgw.keys"))
    assert "abcdef" in shown
    assert digest(key).hex() not in shown
    columns = fleet.rows(
        "select table_name as t, column_name as c from information_schema.columns"
        " where table_schema = 'llmgw'"
    )
    assert [
        row for row in columns if "hash" in row["c"] or "secret" in row["c"] or row["c"] == "value"
    ] == [{"t": "settings", "c": "value"}]
