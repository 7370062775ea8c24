"""What the agent says of its machine, when it says it, and what it does when asked for a map."""

from __future__ import annotations

import pytest
import trio

from agent.facts import FAST_VALID_S, Facts, steady
from agent.probes.scan import Scan
from agent.probes.weights_scan import WeightsScan
from sql.errors import DatabaseAway
from tests.agent.conftest import Node, PaperProbes, until

XID = {"kind": "xid", "object": "GPU-a", "now": "xid_79"}


def told(node: Node, kind: str) -> list[object]:
    return [document for said, document in node.door.told if said == kind]


async def test_an_event_of_the_machine_is_looked_at_at_once_and_told_once(node: Node) -> None:
    async with node.running():
        await until(lambda: "host" in node.door.facts, "the first look")
        node.probes.events = [XID]
        node.probes.facts["gpus"] = [{"uuid": "GPU-a", "findings": [{"code": "xid_79"}]}]
        node.probes.woken.set()
        await until(lambda: bool(told(node, "events")), "the event is told")
        assert told(node, "gpus")[-1] == node.probes.facts["gpus"]
        looks = node.probes.looks
        node.probes.woken.set()
        await until(lambda: node.probes.looks > looks, "another look")
    assert told(node, "events") == [[XID]]
    assert len(told(node, "host")) == 1, "what did not change is not said again"


async def test_events_wait_for_a_database_that_is_away(node: Node) -> None:
    async with node.running():
        await until(lambda: "host" in node.door.facts, "the first look")
        node.door.away = DatabaseAway("gone")
        node.probes.events = [XID]
        looks = node.probes.looks
        node.probes.woken.set()
        await until(lambda: node.probes.looks > looks, "the look")
        node.door.away = None
        node.probes.woken.set()
        await until(lambda: bool(told(node, "events")), "the event is told")
    assert told(node, "events") == [[XID]]


async def test_E10_what_could_not_be_asked_is_not_said(node: Node) -> None:
    node.probes.facts["gpus"] = None
    async with node.running():
        await until(lambda: "disks" in node.door.facts, "the first look")
    assert "gpus" not in node.door.facts


async def test_a_refused_document_costs_only_itself(node: Node) -> None:
    node.door.refused = {"gpus"}
    async with node.running():
        await until(lambda: "weights" in node.door.facts, "the rest is told")
    assert "gpus" not in node.door.facts


async def test_a_fabric_scan_runs_once_beside_the_sync(node: Node) -> None:
    node.door.asks = [{"id": 5, "kind": "scan", "hca": "mlx5_0", "port": 1}]
    async with node.running():
        await until(lambda: node.probes.scans > 0, "it scans")
        syncs = len(node.door.reports)
        await until(lambda: len(node.door.reports) >= syncs + 3, "it goes on syncing meanwhile")
        assert node.probes.scans == 1, "it is asked with every sync and does it once"
        node.probes.scan_may_end.set()
        await until(lambda: 5 in node.door.scans, "it tells the map")
        node.door.asks = [{"id": 6, "kind": "scan", "hca": "mlx5_1", "port": 1}]
        await until(lambda: 6 in node.door.scans, "it can be asked again")
    assert node.door.scans[5] == Scan("map through mlx5_0/1", 12, None)
    assert node.door.scans[6].text == "map through mlx5_1/1"


async def test_a_scan_that_asks_for_nonsense_costs_only_itself(node: Node) -> None:
    node.door.asks = [{"id": 5, "kind": "scan", "hca": None, "port": "x"}]
    async with node.running():
        await until(lambda: len(node.door.reports) >= 3, "it goes on")
    assert node.probes.scans == 0


@pytest.mark.parametrize(
    ("document", "same"),
    [
        ({"disks": [{"mount": "/", "free_mib": 1}]}, {"disks": [{"mount": "/", "free_mib": 2}]}),
        ({"detail": {"clocks": {"sm": 1}}}, {"detail": {"clocks": {"sm": 2}}}),
        ({"detail": {"pcie": {"gen": 1}}}, {"detail": {"pcie": {"gen": 4}}}),
    ],
)
def test_numbers_that_always_move_are_no_news(document: object, same: object) -> None:
    assert steady(document) == steady(same)
    assert steady({"memory_mib": 1}) != steady({"memory_mib": 2})


async def test_fast_facts_are_said_once_for_each_time_they_are_taken() -> None:
    facts = Facts(PaperProbes(), WeightsScan([]), list)
    assert facts.fast() == {}
    await facts.refresh(set())
    assert facts.fast().keys() == {"load", "gpus", "ports"}
    assert facts.fast() == {}, "said again it would cost the database and tell nothing"
    await facts.refresh(set())
    assert facts.fast().keys() == {"load", "gpus", "ports"}


async def test_fast_facts_that_have_become_old_are_not_said(autojump_clock: object) -> None:
    facts = Facts(PaperProbes(), WeightsScan([]), list)
    await facts.refresh(set())
    await trio.sleep(FAST_VALID_S)
    assert facts.fast() == {}
