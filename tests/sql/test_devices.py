"""Devices in the database: health by findings and marks, history, ports, fabrics, scans, checks."""

from __future__ import annotations

import pytest

from tests.sql.fleet import HOST, card, port
from tests.sql.test_agent_door import refused

LOST = {"code": "xid_79", "kind": "reset", "text": "fell off the bus", "evidence": "XID 79"}
LIGHT = {"code": "pcie_width", "kind": "passing", "text": "x8 of x16", "unhealthy": False}
MARK = "select llmgw.gpu_mark_v1('me', 'n1', %s, %s, %s)"
SCAN = "select llmgw.fabric_scan_v1('me', %s)"


MISSING = "missing: its agent does not see the card any more"


def test_E20_a_card_that_vanished_without_a_word_stays_visible_and_out(fleet):
    fleet.model("m")
    node = fleet.node("n1", gpus=3)
    _, shard = fleet.running("m", node, 0)
    fleet.report(node, "gpus", [card(2, uuid="n1-2")])
    shown = fleet.rows(
        "select uuid, state, healthy, problems, shard from llmgw.gpus order by index"
    )
    gone = {
        "uuid": "n1-0",
        "state": "unhealthy",
        "healthy": False,
        "problems": [MISSING],
    }
    assert shown == [
        {**gone, "shard": shard},
        {**gone, "uuid": "n1-1", "shard": None},
        {"uuid": "n1-2", "state": "unknown", "healthy": True, "problems": None, "shard": None},
    ]
    assert fleet.value("select unhealthy_gpus from llmgw.nodes") == [
        f"gpu 0: {MISSING}",
        f"gpu 1: {MISSING}",
    ]
    fleet.say(node, "stopped", shard=shard)
    fleet.report(node, "gpus", [card(2, uuid="n1-2"), card(3, uuid="n1-3")])  # one is plugged in
    known = {row["uuid"]: row["healthy"] for row in fleet.rows("select * from llmgw.gpus")}
    assert known == {"n1-0": False, "n1-1": False, "n1-2": True, "n1-3": True}
    told = fleet.rows("select kind, object, now from llmgw.node_events order by id")
    assert ("gpu health", "n1-1", "unhealthy: missing") in [tuple(row.values()) for row in told]
    assert told[-1] == {"kind": "gpu appeared", "object": "n1-3", "now": "healthy"}


def test_a_missing_card_goes_when_another_sits_in_its_place_or_it_is_forgotten(fleet):
    node = fleet.enrol("n1")
    cards = [card(i, uuid=f"n1-{i}", pci_bus_id=f"0000:0{i}:00.0") for i in range(3)]
    fleet.report(node, "gpus", cards)
    fleet.report(node, "gpus", [card(0, uuid="new", pci_bus_id="0000:00:00.0")])
    assert {row["uuid"] for row in fleet.rows("select uuid from llmgw.gpus")} == {
        "new", "n1-1", "n1-2",
    }  # fmt: skip
    forget = "select llmgw.gpu_forget_v1('me', 'n1', %s)"
    fleet.controller.execute(forget, ("1",))
    assert refused(fleet.controller.execute, forget, ("new",)) == "LG003"
    assert refused(fleet.controller.execute, forget, ("7",)) == "LG005"
    assert {row["uuid"] for row in fleet.rows("select uuid from llmgw.gpus")} == {"new", "n1-2"}


def test_E07_a_card_that_lost_its_uuid_is_known_by_its_address(fleet):
    node = fleet.enrol("n1")
    known = card(0, uuid="GPU-a", pci_bus_id="0000:03:00.0")
    fleet.report(node, "gpus", [known])
    lost = {"uuid": "PCI-0000:03:00.0", "pci_bus_id": "0000:03:00.0", "findings": [
        {"code": "lost", "kind": "reset", "text": "lost", "unhealthy": True}]}  # fmt: skip
    fleet.report(node, "gpus", [lost])
    row = fleet.rows("select uuid, class, healthy, problems from llmgw.gpus")
    assert row == [{"uuid": "GPU-a", "class": "H100", "healthy": False, "problems": ["lost"]}]
    fleet.report(node, "gpus", [known])
    assert fleet.value("select healthy from llmgw.gpus")


def test_E19_slices_of_an_old_layout_leave_and_held_ones_are_gone(fleet):
    fleet.model("m")
    node = fleet.node("n1", gpus=1)
    parent = card(0, uuid="n1-0", partitioned=True)

    def slices(*names):
        return [card(0, uuid=n, parent="n1-0", **{"class": "H100-1g.10gb"}) for n in names]

    fleet.report(node, "gpus", [parent, *slices("MIG-a", "MIG-b")])
    assert fleet.value("select gpu_total from llmgw.nodes") == 2
    replica = fleet.replica("m")
    part = fleet.part(node, 0) | {"gpus": ["MIG-a"]}
    assert fleet.commit(fleet.place(replica, part)) == ["ok"]
    fleet.report(node, "gpus", [parent, *slices("MIG-c")])
    states = {row["uuid"]: row["state"] for row in fleet.rows("select * from llmgw.gpus")}
    assert states == {"n1-0": "partitioned", "MIG-a": "unhealthy", "MIG-c": "unknown"}
    problem = fleet.value("select problems[1] from llmgw.gpus where uuid = 'MIG-a'")
    assert problem == "device gone: the MIG layout of the card has changed"


def gpu(fleet, columns="healthy, problems"):
    (row,) = fleet.rows(f"select {columns} from llmgw.gpus")
    return tuple(row.values())


def kinds(fleet, *columns):
    names = ", ".join(("kind", *columns))
    rows = fleet.rows(f"select {names} from llmgw.node_events order by id")
    return [tuple(row.values()) for row in rows]


def test_E08_findings_decide_health_and_each_change_leaves_a_row(fleet):
    node = fleet.enrol("n1")
    fleet.report(node, "gpus", [card(0, findings=[])])
    assert gpu(fleet) == (True, None)
    fleet.report(node, "gpus", [card(0, findings=[LIGHT])])
    assert gpu(fleet) == (True, ["x8 of x16"]), "degraded is told and may be placed on"
    fleet.report(node, "gpus", [card(0, findings=[LIGHT, LOST])])
    assert gpu(fleet) == (False, ["x8 of x16", "fell off the bus"])
    fleet.report(node, "gpus", [card(0, findings=[LIGHT, {**LOST, "evidence": "again"}])])
    fleet.report(node, "gpus", [card(0, findings=[])])
    assert kinds(fleet, "was", "now") == [
        ("gpu appeared", None, "healthy"),
        ("gpu health", "healthy", "healthy: pcie_width"),
        ("gpu health", "healthy: pcie_width", "unhealthy: pcie_width, xid_79"),
        ("gpu health", "unhealthy: pcie_width, xid_79", "healthy"),
    ]
    evidence = fleet.value("select evidence from llmgw.node_events where now like 'unhealthy%%'")
    assert evidence["findings"][1]["evidence"] == "XID 79"


def test_an_agent_of_the_version_before_is_still_understood(fleet):
    node = fleet.enrol("n1")
    fleet.report(node, "gpus", [card(0, healthy=False, problems=["driver says no"])])
    assert gpu(fleet) == (False, ["driver says no"])
    fleet.report(node, "gpus", [card(0, healthy=False)])
    assert gpu(fleet) == (False, ["no cause reported"])


def test_an_operators_unhealthy_holds_until_it_is_taken_back(fleet):
    node = fleet.enrol("n1")
    fleet.report(node, "gpus", [card(0, findings=[])])
    fleet.controller.execute(MARK, ("0", "unhealthy", "smells"))
    assert gpu(fleet) == (False, ["marked unhealthy by me: smells"])
    fleet.report(node, "gpus", [card(0, findings=[])])
    assert gpu(fleet) == (False, ["marked unhealthy by me: smells"])
    fleet.controller.execute(MARK, ("GPU-0", "healthy", "was the fan"))
    assert gpu(fleet, "healthy, problems, mark") == (True, None, None)


def test_an_operators_healthy_overrules_what_was_known_and_nothing_new(fleet):
    node = fleet.enrol("n1")
    fleet.report(node, "gpus", [card(0, findings=[LOST])])
    fleet.controller.execute(MARK, ("0", "healthy", "reset by hand"))
    assert gpu(fleet, "healthy, mark") == (True, "healthy")
    fleet.report(node, "gpus", [card(0, findings=[LOST, LIGHT])])
    assert gpu(fleet, "healthy, mark") == (True, "healthy")
    fleet.report(node, "gpus", [card(0, findings=[LOST, {**LOST, "code": "xid_48"}])])
    assert gpu(fleet, "healthy, mark") == (False, None)
    assert ("gpu mark", "healthy", None) in kinds(fleet, "was", "now")


@pytest.mark.parametrize(
    ("gpu_name", "mark", "reason", "state"),
    [("7", "healthy", "x", "LG005"), ("0", "broken", "x", "LG003"), ("0", "healthy", " ", "LG003")],
)
def test_marks_that_make_no_sense_are_refused(fleet, gpu_name, mark, reason, state):
    fleet.report(fleet.enrol("n1"), "gpus", [card(0, findings=[])])
    assert refused(fleet.controller.execute, MARK, (gpu_name, mark, reason)) == state


def test_E16_a_changed_clique_or_domain_is_an_event(fleet):
    node = fleet.enrol("n1")
    fabric = {"fabric_state": "completed", "cluster_uuid": "u", "clique": 1, "bandwidth": "full"}
    fleet.report(node, "gpus", [card(0, findings=[], **fabric)])
    assert gpu(fleet, "domain, clique, bandwidth") == ("u", 1, "full")
    zero = "00000000-0000-0000-0000-000000000000"
    fleet.report(node, "gpus", [card(0, findings=[], **{**fabric, "cluster_uuid": zero})])
    assert gpu(fleet, "domain, fabric_state") == (None, "completed"), "one machine's NVSwitch"
    joined = {"state": "joined", "domain": "u.1"}
    fleet.report(
        node, "host", {**HOST, "nvlink": joined, "imex": {"state": "READY", "channels": 1}}
    )
    fleet.sync(node)
    assert fleet.value("select usable from llmgw.nvlink")
    fleet.report(node, "host", {**HOST, "nvlink": joined, "imex": {"state": "UNAVAILABLE"}})
    shown = fleet.rows("select domain, usable, why_not from llmgw.nvlink")
    assert shown == [
        {"domain": "u.1", "usable": False,
         "why_not": "IMEX is UNAVAILABLE; IMEX channels unknown"},
    ]  # fmt: skip
    assert [kind for (kind,) in kinds(fleet)] == [
        "gpu appeared", "gpu fabric", "nvlink domain", "imex", "imex",
    ]  # fmt: skip


def test_the_history_of_a_port_and_its_subnet_manager(fleet):
    node = fleet.enrol("n1")
    fleet.report(node, "ports", [port(), port("mlx5_1", state="DOWN", active=False, key=None)])
    fleet.report(node, "ports", [port(sm_guid="02", key="ib:02")])
    told = kinds(fleet, "object", "was", "now")
    assert ("subnet manager", "mlx5_0/1", "01", "02") in told
    assert ("port removed", "mlx5_1/1", "DOWN", None) in told
    assert fleet.value("select physical from llmgw.ib_ports") == "SM 02 (LID 1)"


def test_traffic_and_errors_are_the_fast_facts_and_unknown_when_stale(fleet):
    node = fleet.enrol("n1")
    fleet.report(node, "ports", [port(errors={"symbol_error": 1})])
    use = {"hca": "mlx5_0", "port": 1, "tx_bytes": 10, "rx_bytes": 0, "errors": {"symbol_error": 4}}
    fleet.sync(node, ports=[use, {"hca": None}, {"hca": "x", "errors": "odd", "tx_bytes": "many"}])
    columns = "tx_bytes, rx_bytes, errors"
    (row,) = fleet.rows(f"select {columns} from llmgw.ib_ports")
    assert tuple(row.values()) == (10, 0, {"symbol_error": 4})
    fleet.admin.execute("update llmgw_core.node_load set at = at - interval '5 min'")
    (row,) = fleet.rows(f"select {columns} from llmgw.ib_ports")
    assert tuple(row.values()) == (None, None, {"symbol_error": 1})


def test_fabrics_are_what_ports_are_on_and_not_what_they_are_called(fleet):
    one, two = fleet.enrol("n1"), fleet.enrol("n2")
    fleet.report(one, "ports", [port(fabric="rail"), port("mlx5_1", key="ib:02", fabric="rail")])
    fleet.report(two, "ports", [port(fabric="other"), port("mlx5_9", key=None, active=False)])
    shown = {row["key"]: row for row in fleet.rows("select * from llmgw.fabrics")}
    assert set(shown) == {"ib:01", "ib:02"}
    assert (shown["ib:01"]["id"], shown["ib:01"]["nodes"]) == ("ib-01", 2)
    assert shown["ib:01"]["declared"] == ["other", "rail"]
    assert shown["ib:01"]["problems"] == [
        "declared under 2 names: other, rail",
        "the name rail is declared on 2 physical fabrics: ib:01, ib:02",
    ]


def asked(fleet, node):
    return [ask for ask in fleet.sync(node)["asks"] if ask["kind"] == "scan"]


def test_one_live_node_scans_a_fabric_and_a_failed_scan_keeps_the_map(fleet):
    one, two, off = (fleet.enrol(name) for name in ("n1", "n2", "n3"))
    for node in (one, two, off):
        fleet.report(node, "ports", [port()])
    for node in (one, two):
        fleet.sync(node)
    begun = fleet.controller.execute(SCAN + " as s", ("ib-01",)).fetchone()["s"]
    assert begun["scanner"] == "n1"
    again = fleet.controller.execute(SCAN + " as s", ("ib:01",)).fetchone()["s"]
    assert (again["scanner"], again["under_way"]) == ("n1", True)
    assert asked(fleet, two) == []
    (ask,) = asked(fleet, one)
    assert (ask["hca"], ask["port"]) == ("mlx5_0", 1)
    tell = "select agent.report_scan(%s, %s, %s, %s, %s)"
    fleet.agent.execute(tell, (two.token, ask["id"], "forged", 1, None))
    fleet.agent.execute(tell, (one.token, ask["id"], "the map", 77, None))
    row = fleet.rows("select scanned_by, took_ms, error, scanning from llmgw.fabrics")
    assert row == [{"scanned_by": "n1", "took_ms": 77, "error": None, "scanning": False}]
    fleet.controller.execute(SCAN, ("ib:01",))
    (ask,) = asked(fleet, one)
    fleet.agent.execute(tell, (one.token, ask["id"], "", 5, "needs root"))
    kept = fleet.rows("select output, error from llmgw_core.fabric_scan")
    assert kept == [{"output": "the map", "error": "needs root"}]
    begun = fleet.controller.execute(SCAN + " as s", ("ib:01",)).fetchone()["s"]
    assert begun["scanner"] == "n2", "who failed last is asked last"


def test_a_scan_that_nobody_answers_ends_and_may_be_asked_again(fleet):
    node = fleet.enrol("n1")
    fleet.report(node, "ports", [port()])
    fleet.sync(node)
    fleet.controller.execute(SCAN, ("ib:01",))
    fleet.admin.execute("update llmgw_core.fabric_scan set asked_at = asked_at - interval '1 h'")
    fleet.controller.execute(SCAN, ("ib:01",))
    assert fleet.value("select scanned_at is null from llmgw_core.fabric_scan")
    fleet.admin.execute("update llmgw_core.fabric_scan set asked_at = asked_at - interval '1 h'")
    fleet.admin.execute("select llmgw_core.expire_scans()")
    assert "did not answer" in fleet.value("select error from llmgw.fabrics")


@pytest.mark.parametrize(
    ("fabric", "state"), [("ib:99", "LG005"), ("roce:10.0.0.0/16", "LG003"), ("ib:01", "LG003")]
)
def test_scans_that_cannot_be_are_refused(fleet, fabric, state):
    node = fleet.enrol("n1")  # never seen: it cannot be asked
    roce = port("mlx5_1", key="roce:10.0.0.0/16", link_layer="Ethernet", sm_guid=None)
    fleet.report(node, "ports", [port(), roce])
    assert refused(fleet.controller.execute, SCAN, (fabric,)) == state


def test_fabrics_are_scanned_by_the_clock_where_a_setting_says_so(fleet):
    node = fleet.enrol("n1")
    fleet.report(node, "ports", [port()])
    fleet.sync(node)
    keep = "select llmgw_core.scans_keep()"
    assert fleet.value(keep) == 0
    fleet.admin.execute("update llmgw_core.setting set value = 3600 where name = 'scan_every'")
    assert fleet.value(keep) == 1
    assert fleet.value(keep) == 0
    assert len(asked(fleet, node)) == 1


def test_E04_checks_are_kept_beside_what_only_the_database_knows(fleet):
    node = fleet.enrol("n1")
    checks = [
        {"name": "driver", "result": "fail", "evidence": "no NVML", "remedy": "install it"},
        {"name": "disk", "result": "pass", "evidence": "half full"},
    ]
    fleet.report(node, "checks", checks)
    clock = fleet.value("select extract(epoch from clock_timestamp())::float8")
    fleet.sync(node, clock=clock - 30)
    shown = fleet.rows('select name, result, remedy from llmgw.doctor order by "position", name')
    assert [(row["name"], row["result"]) for row in shown] == [
        ("agent", "pass"), ("clock", "fail"), ("driver", "fail"), ("disk", "pass"),
    ]  # fmt: skip
    fleet.report(node, "checks", [])
    assert [row["name"] for row in fleet.rows("select name from llmgw.doctor")] == [
        "agent",
        "clock",
    ]


def test_events_of_cards_join_the_history_and_old_ones_leave(fleet):
    node = fleet.enrol("n1")
    event = {"kind": "xid", "object": "GPU-0", "now": "xid_13", "evidence": {"text": "app"}}
    fleet.report(node, "events", [event])
    assert kinds(fleet, "object", "now") == [("xid", "GPU-0", "xid_13")]
    assert refused(fleet.report, node, "events", [{}]) == "23502"
    assert refused(fleet.report, node, "events", [event] * 201) == "LG003"


def test_D01_foreign_processes_are_shown_with_the_card(fleet):
    node = fleet.node("n1", gpus=1)
    fleet.sync(node, gpus=[{"uuid": "n1-0", "memory_foreign_mib": 900, "foreign_pids": [12, 13]}])
    (row,) = fleet.rows("select state, memory_foreign_mb, foreign_pids from llmgw.gpus")
    assert tuple(row.values()) == ("foreign", 900, [12, 13])


def test_E02_the_pool_of_a_unified_card_is_the_hosts(fleet):
    fleet.model("m")
    node = fleet.node("n1", gpus=0)
    pool = HOST["memory_effective_mib"]
    unified = card(0, uuid="n1-0", memory_kind="unified", memory_mib=pool - 4096, findings=[])
    fleet.report(node, "gpus", [unified])
    fleet.sync(node, gpus=[{"uuid": "n1-0", "memory_foreign_mib": 20000}])
    assert gpu(fleet, "state") == ("free",), "the operating system is in it too"
    first, second = fleet.replica("m"), fleet.replica("m")
    part = fleet.part(node, 0, gpu_memory_mib=10_000)
    assert fleet.commit(fleet.place(first, part)) == ["ok"]
    assert fleet.value("select llmgw_core.pool_claimed('n1')") == 10_000
    (said,) = fleet.commit(fleet.place(second, fleet.part(node, memory_mib=pool - 9_000)))
    assert "not enough memory" in said
    assert fleet.commit(fleet.place(second, fleet.part(node, memory_mib=pool - 20_000))) == ["ok"]
    third = fleet.replica("m")
    (said,) = fleet.commit(fleet.place(third, fleet.part(node, 0, gpu_memory_mib=20_000)))
    assert "the two share it" in said


def test_weights_keep_what_their_headers_say(fleet):
    node = fleet.enrol("n1")
    told = {
        "path": "/m", "name": "m", "format": "gguf", "complete": True, "shared": True,
        "filer": "nfs:srv:/x", "facts": {"layers": 32},
    }  # fmt: skip
    fleet.report(node, "weights", [told, {"path": "/n", "facts": {"x": "y" * 20_000}}])
    rows = fleet.rows("select path, source, facts, shared from llmgw.weights order by path")
    assert [tuple(row.values()) for row in rows] == [
        ("/m", None, {"layers": 32}, True), ("/n", None, None, False),
    ]  # fmt: skip
    assert fleet.value("select models_on_disk from llmgw.nodes") is None


def test_E17_two_owners_of_imex_are_in_the_history(fleet):
    node = fleet.enrol("n1")
    imex = {"state": "READY", "owner": "systemd nvidia-imex.service", "channels": 1}
    fleet.report(node, "host", {**HOST, "imex": imex})
    fleet.report(node, "host", {**HOST, "imex": {**imex, "owner": "slurm", "error": "two owners"}})
    evidence = fleet.value("select evidence from llmgw.node_events order by id desc limit 1")
    assert evidence == {"owner": "slurm", "error": "two owners"}
