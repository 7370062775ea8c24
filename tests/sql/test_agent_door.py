"""The agents' door: joining, one round trip for beat, report and poll, and slow facts."""

from __future__ import annotations

import re
import uuid

import psycopg
import pytest
from psycopg.types.json import Jsonb

from tests.sql.fleet import HOST, card, connected, snapshot


def refused(call, *args, **more):
    """The SQLSTATE of a refused call."""
    with pytest.raises(psycopg.Error) as caught:
        call(*args, **more)
    return caught.value.sqlstate


def column(fleet, name, node="n1"):
    """One column of a node's row."""
    return fleet.value(f"select {name} from llmgw_core.node where id = %s", node)


# Joining


def test_a_bound_token_admits_its_node_once(fleet):
    token = fleet.token("n1")
    assert refused(fleet.enrol, "n2", token) == "LG004"
    node = fleet.enrol("n1", token)
    assert fleet.sync(node)["assignments"] == []
    assert refused(fleet.enrol, "n1", token) == "LG004", "used up"


def test_an_unbound_token_admits_new_nodes_as_often_as_it_says(fleet):
    token = fleet.token(None, uses=2)
    fleet.enrol("n1", token)
    fleet.enrol("n2", token)
    assert refused(fleet.enrol, "n3", token) == "LG004"


def test_an_unbound_token_never_takes_over_a_known_node_even_a_revoked_one(fleet):
    node = fleet.enrol("n1")
    token = fleet.token(None, uses=2)
    assert refused(fleet.enrol, "n1", token) == "LG004"
    fleet.controller.execute("select llmgw.node_revoke_v1('me', 'n1')")
    assert refused(fleet.enrol, "n1", token) == "LG004"
    assert refused(fleet.sync, node) == "LG004"
    assert fleet.sync(fleet.enrol("n1", fleet.token("n1")))["gen"] == 0


def test_expired_and_unknown_tokens_and_weak_secrets_admit_nobody(fleet):
    assert refused(fleet.enrol, "n1", fleet.token("n1", ttl_s=-1)) == "LG004"
    assert refused(fleet.enrol, "n1", "no such token") == "LG004"
    token = fleet.token("n1")
    for weak, code in (("short", "LG003"), (None, "LG003")):
        call = "select agent.enroll(%s, 'n1', %s)"
        assert refused(fleet.agent.execute, call, (token, weak)) == code
    for name in ("", "No Such Name", "../n1", "x" * 64, None):
        assert refused(fleet.enrol, name, fleet.token(None)).startswith("23"), name
    fleet.enrol("n1", token)


def test_enrolling_again_replaces_the_secret(fleet):
    old = fleet.node("n1")
    new = fleet.enrol("n1")
    assert refused(fleet.sync, old) == "LG004"
    fleet.sync(new)
    assert fleet.value("select count(*) from llmgw_core.node") == 1


def test_revoking_also_ends_tokens_not_yet_used(fleet):
    token = fleet.token("n1")
    fleet.controller.execute("select llmgw.node_revoke_v1('me', 'n1')")
    assert refused(fleet.enrol, "n1", token) == "LG004"


def test_D11_the_operators_word_survives_enrolment_new_facts_and_a_new_hostname(fleet):
    node = fleet.node("n1", gpus=1)
    fleet.controller.execute(
        "select llmgw.set_node_intent('n1', 'cordoned', 'new power supply', 'ann')"
    )
    fleet.sync(node)
    again = fleet.enrol("n1")
    again.boot = str(uuid.uuid4())
    fleet.report(
        again, "host", {**HOST, "hostname": "other", "agent_version": "0.2.0", "intent": "ready"}
    )
    fleet.report(again, "gpus", [card(0, uuid="n1-0")])
    fleet.sync(again)
    shown = fleet.rows("select state, state_reason, hostname from llmgw.nodes")
    assert shown == [{"state": "cordoned", "state_reason": "new power supply", "hostname": "other"}]
    fleet.controller.execute("select llmgw.uncordon('n1')")
    assert fleet.value("select state from llmgw.nodes") == "ready"


# One round trip


def test_a_goodbye_takes_a_node_out_at_once_until_it_is_back(fleet):
    node = fleet.node("n1")
    fleet.sync(node)
    before = fleet.value("select last_value from llmgw_core.change")
    fleet.sync(node, leaving=True)
    assert fleet.value("select last_value from llmgw_core.change") > before
    shown = fleet.rows("select state, state_reason from llmgw.nodes")[0]
    assert shown["state"] == "unreachable"
    why = r"its agent ended \d+ s ago and stopped its engines"
    assert re.fullmatch(why, shown["state_reason"])
    fleet.silence(node, 121)
    assert fleet.value("select state from llmgw.nodes") == "lost"
    fleet.sync(node)
    assert fleet.value("select state from llmgw.nodes") == "ready"


def test_assignments_come_only_when_the_agent_is_behind(fleet):
    fleet.model("m", {}, description="x")
    node = fleet.node("n1", gpus=2, mgmt_addr="10.0.0.5")
    gen = fleet.sync(node, have_gen=None)["gen"]
    assert fleet.sync(node, have_gen=gen)["assignments"] is None
    replica = fleet.replica("m")
    part = fleet.part(node, 1, cpus=1.5, memory_mib=512, port=20042)
    assert fleet.commit(fleet.place(replica, part)) == ["ok"]
    answer = fleet.sync(node, have_gen=gen)
    assert answer["gen"] == gen + 1
    assert answer["assignments"] == [
        {
            "shard": 1,
            "replica": replica,
            "model": "m",
            "profile": "p",
            "rank": 0,
            "shards": 1,
            "desired": "running",
            "engine": "llamacpp",
            "source": "file:/m.gguf",
            "args": [],
            "env": {},
            "gpus": [{"uuid": "n1-1", "index": 1}],
            "port": 20042,
            "host": "10.0.0.5",
            "cpus": 1.5,
            "memory_mib": 512,
        }
    ]
    # A generation from the future (a restored backup) gets the whole truth again.
    assert fleet.sync(node, have_gen=gen + 99)["assignments"] == answer["assignments"]


def test_D28_a_shard_is_told_which_part_of_a_shared_card_is_its(fleet):
    fleet.model("m", {}, description="x")
    node = fleet.node("n1", gpus=2)
    for claim in (27_307, 1, 54_612):
        part = fleet.part(node, 0, gpu_memory_mib=claim)
        assert fleet.commit(fleet.place(fleet.replica("m"), part)) == ["ok"]
    assert fleet.value("select memory_mib from llmgw_core.gpu where index = 0") == 81_920
    assert fleet.commit(fleet.place(fleet.replica("m"), fleet.part(node, 1))) == ["ok"]
    told = [a["gpus"] for a in fleet.sync(node, have_gen=None)["assignments"]]
    # Rounded down, so that together they never take more than the card has.
    assert [cards[0].get("share") for cards in told] == [0.333, 0.001, 0.666, None]


def test_shards_that_are_over_leave_the_list(fleet):
    fleet.model("m")
    node = fleet.node("n1")
    _, shard = fleet.running("m", node)
    fleet.say(node, "failed", shard=shard, error="out of memory", exit_code=137, log_tail="bang")
    assert fleet.sync(node)["assignments"] == []
    told = fleet.rows("select state, error, exit_code, log_tail from llmgw.shards")
    assert told == [
        {"state": "failed", "error": "out of memory", "exit_code": 137, "log_tail": "bang"}
    ]


def test_a_late_report_of_the_same_agent_changes_no_shard(fleet):
    fleet.model("m")
    node = fleet.node("n1")
    _, shard = fleet.running("m", node)
    fleet.sync(node, applied_gen=7, shards=[{"shard": shard, "state": "ready", "pid": 100}])
    late = {"applied_gen": 6, "shards": [{"shard": shard, "state": "failed"}]}
    fleet.sync(node, **late)
    assert fleet.value("select state from llmgw_core.shard") == "ready"
    # Another process of the agent starts counting anew.
    node.boot = str(uuid.uuid4())
    fleet.sync(node, **late)
    assert fleet.value("select state from llmgw_core.shard") == "failed"


def test_D10_unknown_shards_and_illegal_moves_cost_only_themselves(fleet):
    fleet.model("m")
    node = fleet.node("n1")
    first, second = (fleet.running("m", node)[1] for _ in range(2))
    words = [
        {"shard": 999, "state": "failed"},
        {"shard": first, "state": "provisioning"},
        {"shard": first, "state": "gone"},
        {"shard": first},
        {"shard": "x", "state": "ready"},
        {"state": "ready"},
        None,
        7,
        [],
        {"shard": first, "state": {}},
        {"shard": first, "state": "draining", "exit_code": "many"},
        {"shard": second, "state": "draining"},
    ]
    fleet.sync(node, shards=words)
    states = fleet.rows("select id, state from llmgw_core.shard order by id")
    assert states == [{"id": first, "state": "ready"}, {"id": second, "state": "draining"}]


def test_a_shard_that_is_over_stays_over(fleet):
    fleet.model("m")
    node = fleet.node("n1")
    _, shard = fleet.running("m", node)
    fleet.say(node, "stopped", "ready", "failed", shard=shard)
    assert fleet.value("select state from llmgw_core.shard") == "stopped"


def test_an_unchanged_report_writes_no_shard_and_small_use_is_noted_once(fleet):
    fleet.model("m")
    node = fleet.node("n1")
    _, shard = fleet.running("m", node)
    use = {"cpu_cores": 0.1, "memory_bytes": 2**20, "error": "e" * 3000}
    fleet.say(node, "ready", shard=shard, pid=100, **use)
    assert fleet.rows("select cpu_cores, memory_bytes from llmgw.shards") == [
        {"cpu_cores": pytest.approx(0.1), "memory_bytes": 2**20}
    ]
    version = fleet.value("select xmin::text from llmgw_core.shard")
    fleet.say(node, "ready", shard=shard, pid=100, **use)
    fleet.say(node, "ready", shard=shard, pid=100, **{**use, "cpu_cores": 0.3})
    fleet.silence(node, 60)
    fleet.say(node, "ready", shard=shard, pid=100, **{**use, "cpu_cores": 0.3})
    assert fleet.value("select xmin::text from llmgw_core.shard") == version
    fleet.silence(node, 60)
    fleet.say(node, "ready", shard=shard, pid=100, **{**use, "cpu_cores": 2.0})
    assert fleet.value("select cpu_cores from llmgw_core.shard") == 2.0


def test_fetch_progress_is_kept_while_fetching_and_forgotten_after(fleet):
    fleet.model("m")
    node = fleet.node("n1")
    replica = fleet.replica("m")
    fleet.commit(fleet.place(replica, fleet.part(node)))
    fetch = {"source": "hf:a/b", "bytes_done": 50, "bytes_total": 200}
    fleet.say(node, "fetching", shard=1, fetch=fetch)
    shown = fleet.value("select shards from llmgw.replicas")
    assert shown[0]["fetch"] == {**fetch, "percent": 25.0}
    fleet.say(node, "fetching", shard=1, fetch={**fetch, "bytes_total": None, "bytes_done": "N/A"})
    assert fleet.value("select shards from llmgw.replicas")[0]["fetch"] == {"source": "hf:a/b"}
    fleet.say(node, "starting", shard=1)
    assert "fetch" not in fleet.value("select shards from llmgw.replicas")[0]


def pace(fleet, node):
    """The pace answered, without its tenth of jitter."""
    return fleet.sync(node)["poll_ms"]


def test_the_pace_is_fast_with_work_slow_without_and_scaled_to_the_fleet(fleet):
    fleet.model("m")
    node = fleet.node("n1")
    assert 1800 <= pace(fleet, node) <= 2200
    _, shard = fleet.running("m", node)
    assert 1800 <= pace(fleet, node) <= 2200, "a ready shard is no work"
    fleet.controller.execute("select llmgw_core.ask_log_v1('n1', null, 10, null)")
    assert 225 <= pace(fleet, node) <= 275
    ask = fleet.sync(node)["asks"][0]["id"]
    fleet.agent.execute("select agent.report_log(%s, %s, 'text', 4)", (node.token, ask))
    fleet.say(node, "draining", shard=shard)
    assert 225 <= pace(fleet, node) <= 275
    fleet.say(node, "stopped", shard=shard)
    fleet.admin.execute(
        "update pg_class set reltuples = 5000 where oid = 'llmgw_core.node'::regclass"
    )
    assert 9000 <= pace(fleet, node) <= 11000
    fleet.admin.execute(
        "update pg_class set reltuples = 1e6 where oid = 'llmgw_core.node'::regclass"
    )
    assert 27000 <= pace(fleet, node) <= 33000
    assert len({pace(fleet, node) for _ in range(20)}) > 5, "agents must not march in step"


def synced(fleet, node, ahead):
    """Syncs with a clock that is ``ahead``; seconds from reading the database's clock to the end.

    Only a sync that was quick tells what it is to: how far the clock seems off lies within them.
    """
    for _ in range(100):
        now = fleet.value("select extract(epoch from clock_timestamp())::float8")
        fleet.sync(node, clock=now + ahead if isinstance(ahead, float) else ahead)
        took = fleet.value("select extract(epoch from clock_timestamp())::float8") - now
        if took < 1:
            return took
    raise AssertionError("no sync of a hundred took less than a second")


@pytest.mark.parametrize("ahead", [300.0, -300.0, -3600.0, 0.2, 1e300, "N/A", None])
def test_F20_the_nodes_clock_is_shown_and_never_judged_by(fleet, ahead):
    node = fleet.node("n1")
    took = synced(fleet, node, ahead)
    [shown] = fleet.rows("select state, last_seen_ago, warnings from llmgw.nodes")
    assert shown["state"] == "ready"
    beat = "select extract(epoch from clock_timestamp() - seen_at)::float8 from llmgw_core.beat"
    assert 0 <= shown["last_seen_ago"] <= fleet.value(beat) + 0.05  # shown to a tenth
    if isinstance(ahead, float) and 1 < abs(ahead) < 1e15:
        [warning] = shown["warnings"]
        told = re.fullmatch(r"clock is (-?\d+\.\d) s off the database's", warning)
        assert told is not None, warning
        assert ahead - took - 0.05 <= float(told[1]) <= ahead + 0.05
    else:
        assert shown["warnings"] is None


def test_asks_are_answered_once_by_their_own_node(fleet):
    node = fleet.node("n1")
    fleet.model("m")
    _, shard = fleet.running("m", node)
    fleet.controller.execute("select llmgw_core.ask_log_v1('n1', %s, 100, 7)", (shard,))
    fleet.controller.execute("select llmgw_core.ask_log_v1('n1', null, 10, null)")
    first, second = fleet.sync(node)["asks"]
    assert first == {"id": 1, "kind": "log", "shard": shard, "lines": 100, "from_offset": 7}
    assert second == {"id": 2, "kind": "log", "lines": 10}
    for text in ("the truth", "a second answer"):
        fleet.agent.execute("select agent.report_log(%s, 1, %s, 99)", (node.token, text))
    assert [ask["id"] for ask in fleet.sync(node)["asks"]] == [2]
    assert fleet.rows("select answer, answer_offset from llmgw_core.ask where id = 1") == [
        {"answer": "the truth", "answer_offset": 99}
    ]


def test_questions_to_an_absent_agent_are_bounded(fleet):
    fleet.node("n1")
    ask = "select llmgw_core.ask_log_v1(%s, null, 10, null)"
    for _ in range(20):
        fleet.controller.execute(ask, ("n1",))
    assert refused(fleet.controller.execute, ask, ("n1",)) == "LG003"
    assert refused(fleet.controller.execute, ask, ("nobody",)) == "LG005"


# Slow facts


def test_E01_a_fact_that_nobody_measured_is_null_and_not_zero(fleet):
    node = fleet.enrol("n1")
    fleet.report(node, "host", {"hostname": "h", "memory_effective_mib": None})
    fleet.report(
        node, "gpus", [{"uuid": "g", "index": 0, "name": "X", "class": "x", "memory_mib": None}]
    )
    fleet.report(
        node, "disks", [{"mount": "/", "filesystem": "ext4", "kind": "local", "total_mib": None}]
    )
    odd = {"cpu_percent": "N/A", "load1": None, "load5": [], "memory_used_mib": 1e30, "load15": 0}
    fast = {
        "uuid": "g",
        "memory_used_mib": "ERR!",
        "memory_foreign_mib": "[Not Supported]",
        "power_w": "12 345",
        "temperature_c": 0,
    }
    fleet.sync(node, load=odd, gpus=[fast])
    [shown] = fleet.rows("select * from llmgw.nodes")
    for name in (
        "memory_gb",
        "os",
        "agent_version",
        "disk_free_gb",
        "disk_total_gb",
        "mgmt_addr",
        "labels",
    ):
        assert shown[name] is None, name
    assert {name: value for name, value in shown["load"].items() if name != "age_seconds"} == {
        "load15": 0
    }
    [gpu] = fleet.rows("select * from llmgw.gpus")
    for name in (
        "memory_mb",
        "memory_used_mb",
        "utilization_percent",
        "power_w",
        "numa",
        "problems",
        "shard",
    ):
        assert gpu[name] is None, name
    assert gpu["temperature_c"] == 0, "a zero that was measured stays a zero"
    assert gpu["state"] == "unknown"


def test_a_missing_host_fact_becomes_unknown_again(fleet):
    node = fleet.node("n1")
    assert column(fleet, "cpu_flags") == ["avx2"]
    fleet.report(node, "host", {"hostname": "h"})
    assert column(fleet, "cpu_flags") is None
    assert column(fleet, "labels") == {}
    assert (column(fleet, "port_first"), column(fleet, "port_last")) == (20000, 20099), (
        "ports are kept"
    )


@pytest.mark.parametrize(
    "addr", ["10.0.0.1", "fd00::1", "node-1.example.com", "fe80::1%eth0", None]
)
def test_addresses_that_engines_can_have(fleet, addr):
    fleet.report(fleet.enrol("n1"), "host", {"mgmt_addr": addr})
    assert column(fleet, "mgmt_addr") == addr


@pytest.mark.parametrize("addr", ["evil@10.0.0.9", "10.0.0.1/path?", "a b", "", "x" * 300])
def test_an_address_that_would_change_the_url_is_refused(fleet, addr):
    assert refused(fleet.report, fleet.enrol("n1"), "host", {"mgmt_addr": addr}) == "LG003"


def test_a_card_that_came_back_is_healthy_again(fleet):
    fleet.model("m")
    node = fleet.node("n1", gpus=1)
    fleet.running("m", node, 0)
    fleet.report(node, "gpus", [])
    fleet.report(node, "gpus", [card(0, uuid="n1-0")])
    assert fleet.value("select state from llmgw.gpus") == "used"


def test_a_thing_listed_twice_is_kept_once(fleet):
    node = fleet.enrol("n1")
    for what, row in {
        "gpus": card(0),
        "engines": {"engine": "vllm", "version": None},
        "weights": {"source": "s", "path": "/w"},
        "disks": {"mount": "/", "filesystem": "ext4", "kind": "local"},
    }.items():
        fleet.report(node, what, [row, row])
        table = what.removesuffix("s")
        assert fleet.value(f"select count(*) from llmgw_core.{table}") == 1
        fleet.report(node, what, [])
        left = 1 if what == "gpus" else 0  # a card does not leave without a trace (E20)
        assert fleet.value(f"select count(*) from llmgw_core.{table}") == left


def test_a_refused_report_leaves_the_facts_as_they_were(fleet):
    node = fleet.node("n1", gpus=1)
    fleet.report(node, "disks", [{"mount": "/", "filesystem": "ext4", "kind": "local"}])
    before = snapshot(fleet.admin)
    for what, row in (
        ("engines", {"engine": None}),
        ("disks", {"mount": "/x", "filesystem": "ext4", "kind": "floppy"}),
        ("gpus", {"uuid": "g", "index": -1, "name": "x", "class": "x"}),
        ("weights", {"source": "hf:a/b", "path": None}),
        ("ports", {"hca": None, "port": 1}),
        ("checks", {"name": "driver", "result": "maybe", "evidence": "x"}),
    ):
        assert refused(fleet.report, node, what, [row]).startswith("23"), what
    assert snapshot(fleet.admin) == before


def test_the_leader_is_woken_by_first_words_and_moves_and_not_by_beats(fleet, database):
    def change():
        return fleet.value("select last_value from llmgw_core.change")

    fleet.model("m")
    node = fleet.node("n1")
    known = change()
    for _ in range(5):
        fleet.sync(node, load={"cpu_percent": 1.0})
    assert change() == known
    fleet.running("m", node)
    assert change() > known
    other = fleet.enrol("n2")
    known = change()
    fleet.sync(other)
    assert change() == known + 1


def test_the_door_works_through_a_pooler_that_gives_each_statement_another_session(fleet, database):
    node = fleet.node("n1")
    gens = []
    for _ in range(3):
        with connected(database, database.agent_url) as session:
            report = Jsonb({"boot": node.boot, "applied_gen": 0})
            row = session.execute(
                "select gen from agent.sync(%s, 0, %s)", (node.token, report)
            ).fetchone()
            gens.append(row["gen"])
    assert gens == [0, 0, 0]
