"""Whole nodes that are free and can work together: what a model over several nodes can have."""

from __future__ import annotations

from tests.fleets import told

CAPACITY = "select kind, name, nodes, whole_free, largest_gang, class from llmgw.gang_capacity"


def domains(fleet):
    rows = fleet.rows(f"{CAPACITY} where kind = 'nvlink-domain' order by key")
    return [(r["nodes"], r["whole_free"], r["largest_gang"], r["class"]) for r in rows]


def test_a_rack_counts_trays_that_are_whole_joined_and_free(fleet):
    whole = told.fleet_of("nvl72")
    trays = told.report(fleet, whole)
    first, second = sorted(trays)[:2]
    assert domains(fleet) == [(18, 18, 18, "GB200")] * 2
    fabrics = fleet.rows(f"{CAPACITY} where kind = 'fabric'")
    assert [(r["nodes"], r["largest_gang"]) for r in fabrics] == [(36, 36)] * 2  # InfiniBand, RoCE
    # A card that is held by a replica, or by somebody else, and a tray that may get nothing new.
    card = fleet.value("select min(uuid) from llmgw_core.gpu where node_id = %s", first)
    fleet.sync(trays[first], gpus=[{"uuid": card, "memory_foreign_mib": 9000}])
    fleet.controller.execute("select llmgw.cordon(%s, %s)", (second, "new board"))
    assert sorted(domains(fleet)) == [(17, 16, 16, "GB200"), (18, 18, 18, "GB200")]
    [row] = fleet.rows("select gangs from llmgw.summary")
    assert sorted(g["largest_gang"] for g in row["gangs"]) == [16, 18, 34, 34]


def test_cards_of_two_classes_make_two_gangs_of_one_fabric(fleet):
    told.report(fleet, told.fleet_of("mixed"))
    for row in fleet.rows(CAPACITY):
        assert row["largest_gang"] <= row["whole_free"] <= row["nodes"]
        assert (row["class"] is None) == (row["largest_gang"] == 0)
    classes = {row["class"] for row in fleet.rows("select distinct class from llmgw_core.gpu")}
    assert len(classes) > 1
    counted = sum(row["whole_free"] for row in fleet.rows(CAPACITY) if row["kind"] == "fabric")
    assert counted > 0


def test_nodes_without_cards_or_connections_are_in_no_group(fleet):
    fleet.node("plain")
    fleet.node("alone", gpus=2)
    assert fleet.rows(CAPACITY) == []
    assert fleet.value("select gangs from llmgw.summary") == []
