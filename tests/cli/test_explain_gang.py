"""What llmgwctl says of a gang that a rack cannot hold: the tray that is missing, by its name."""

from __future__ import annotations

import pytest

from tests.control.duties import duty
from tests.fleets.told import fleet_of, report, report_again
from tests.sql.fleet import open_fleet

RACK = {"engine": "vllm", "gpus": 4, "shards": 18, "fabric": "nvlink-domain"}


@pytest.fixture
async def rack(bare, database):
    """An NVL72 whose tray-07 has not joined, and a real tick's answer to a model of 18 trays."""
    with open_fleet(database) as rows:
        nodes = report(rows, fleet_of("nvl72", count=18, joining=[7]))
        rows.model("whole", RACK)
        async with duty(database.settings()) as leader:
            await leader.tick()
            await leader.tick()
            yield rows, nodes, leader


async def test_D13_the_tray_that_has_not_joined_is_named(bare, rack):
    _, nodes, _ = rack
    text = (await bare.good("explain-placement", "whole")).splitlines()
    assert text[0].endswith(": could not be placed; every candidate and why:")
    (tray,) = [line for line in text if "has not joined an NVLink domain" in line]
    assert tray.split()[2] == "tray-07"
    assert "cards 2, 3: joining the NVLink fabric is in progress still" in tray
    others = [line.split()[2] for line in text if "17 in NVLink domain" in line]
    assert sorted(others) == [f"tray-{i:02}" for i in range(18) if i != 7]

    document = (await bare("explain-placement", "whole", "--json")).document
    assert {(r["node"], r["code"]) for r in document["rejections"]} == {
        (name, "nvlink_not_joined" if name == "tray-07" else "gang_too_small") for name in nodes
    }
    status = await bare.good("status")
    assert "need 18 nodes in one NVLink domain, have 17 in NVLink domain" in status
    (tray,) = [line for line in (await bare.good("nvlink")).splitlines() if "tray-07" in line]
    assert "joining the NVLink fabric is in progress still" in tray


async def test_once_it_has_joined_all_trays_are_one_replica(bare, rack):
    rows, nodes, leader = rack
    report_again(rows, fleet_of("nvl72", count=18), nodes)
    while await leader.tick():
        pass
    assert "could not be placed" not in await bare.good("explain-placement", "whole")
    (replica,) = (await bare("replicas", "--json")).document
    assert [s["node"] for s in replica["shards"]] == [f"tray-{i:02}" for i in range(18)]
    assert {len(s["gpus"]) for s in replica["shards"]} == {4}
