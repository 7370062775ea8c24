"""The benchmarks run and their figures have the right shape; how fast anything is, no test asks."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

import psycopg
import pytest

from controller.router import pool
from ops.benchmarks import chaos, growth, keys, path, postgres, processes, scale, snapshot
from ops.benchmarks.discovery import PHASES, measure_fleet
from ops.simulation.fleet import uniform
from ops.simulation.node import SimMachine

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.conftest import Database

made_database = postgres.database

FAST_TABLE, SLOW_TABLES = "node_load", {"gpu", "ib_port", "node_check", "weight", "disk", "engine"}


@contextmanager
def soon_stale(connections: int) -> Iterator[postgres.Database]:
    """A benchmark's database where what moves by itself is written each second, not each tenth."""
    with made_database(connections) as made:
        with psycopg.connect(made.server.url, autocommit=True) as admin:
            admin.execute("update llmgw_core.setting set value = 3 where name = 'load_stale'")
        yield made


@pytest.mark.slow
async def test_a_small_fleet_is_measured_in_every_phase(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(postgres, "database", soon_stale)
    # On busy cores first reports take seconds, and so does the last of a phase.
    monkeypatch.setattr("ops.benchmarks.discovery.QUIET_S", 2.0)
    phases = await measure_fleet(4, 5.0, 5.0, shared=0, start_s=1.0)
    assert list(phases) == ["start", *PHASES]
    for found in phases.values():
        assert found["seconds"] >= 2.0
        assert 0 <= found["cpu_percent"] < 400
        assert found["agents_cpu_percent"] > 0
        assert found["transactions_per_s"] > 0
        assert found["calls_per_s"]["sync"] > 0
    start = phases["start"]
    assert start["tables"]["node"]["updated"] > 0
    assert start["tables"].keys() >= SLOW_TABLES
    assert start["tables"]["gpu"]["inserted"] == 4 * 8
    assert start["tables"]["weight"]["inserted"] >= 4 * 20
    assert start["wal_bytes_per_s"] > 0
    assert FAST_TABLE in phases["everything"]["tables"]
    assert FAST_TABLE in phases["no slow facts"]["tables"]
    assert FAST_TABLE not in phases["no fast facts"]["tables"]
    assert FAST_TABLE not in phases["beats only"]["tables"]
    assert phases["beats only"]["tables"]["beat"]["updated"] > 0


@pytest.mark.slow
async def test_scale_requests_are_followed_to_the_agent():
    rounds = await scale.measure(2, 2)
    for one in rounds:
        assert one.answered_ms > 0
        assert 0 < one.written_ms < one.seen_ms
        assert 1800 <= one.poll_ms <= 2200  # nodes that had nothing to do


def test_the_goal_is_the_nodes_own_interval_and_a_little():
    rounds = [scale.Round(9.0, 50.0, seen, 2000) for seen in (300.0, 2200.0, 2201.0)]
    told = scale.summary(rounds)
    assert told["goal_kept"] == 2
    assert told["stages_ms"]["agent has it"] == {"p50": 2200.0, "p99": 2201.0, "max": 2201.0}
    assert told["stages_ms"]["beside the interval"]["max"] == 201.0


async def test_scale_wants_a_card_for_each_round():
    with pytest.raises(ValueError, match="9 rounds need as many cards, 1 nodes have 8"):
        await scale.measure(1, 9)


@pytest.mark.slow
def test_F16_an_hour_of_syncs_under_an_old_snapshot_is_measured():
    found = list(snapshot.measure(nodes=2, beats=8))
    assert [one["beats"] for one in found] == [0, 2, 4, 6, 8]
    for one in found:
        assert 0 < one["p50_ms"] <= one["p99_ms"]
    assert set(found[-1]["tables"]) == set(snapshot.TABLES)
    base, *_, held = (one["tables"]["beat"] for one in found)
    # Of ten syncs of a node one writes, in three mixtures; each of the eight beats does.
    assert base["updated"] >= 2 * 3
    assert held["updated"] - base["updated"] >= 2 * 8
    assert held["dead"] >= held["updated"] - base["updated"], "none leaves while it is held"
    assert snapshot.line(found[-1], found[0]).split()[0] == "8"


def test_shares_are_of_the_period_and_name_what_was_written():
    was = postgres.Reading(10.0, 1.0, {7: ("agents", 0.5)}, {"wal_bytes": 0}, {})
    row = dict.fromkeys(postgres.COUNTED, 0) | {"dead": 3, "live": 9, "bytes": 8192}
    was.tables.update(beat=row, gpu=row)
    now = postgres.Reading(
        20.0, 3.0, {7: ("agents", 2.0), 8: ("checkpointer", 0.1)}, {"wal_bytes": 500},
        {"beat": {**row, "updated": 8, "hot": 6}, "gpu": row},
    )  # fmt: skip
    found = postgres.between(was, now)
    assert found["cpu_percent"] == 20.0
    assert found["cpu_percent_by_process"] == {
        "agents": 15.0, "checkpointer": 1.0, "postmaster and ended": 4.0,
    }  # fmt: skip
    assert found["wal_bytes_per_s"] == 50.0
    assert list(found["tables"]) == ["beat"]
    assert found["tables"]["beat"]["hot_percent"] == 75.0


def test_a_process_tree_keeps_the_time_of_children_that_ended():
    tree = {1: processes.Times(0, 1.0, 4.0), 2: processes.Times(1, 2.0, 0.0)}
    assert processes.spent_s(tree) == 7.0


async def test_a_simulated_machine_reports_all_that_a_real_one_can():
    machine = SimMachine(uniform(1, 8).nodes()[0])
    slow = await machine.slow()
    assert len(slow["gpus"]) == 8
    assert slow["gpus"][0].keys() >= {"paths", "detail", "findings", "cluster_uuid", "clique"}
    assert [port["link_layer"] for port in slow["ports"]].count("InfiniBand") == 8
    assert len(slow["ports"]) == 12
    assert slow["host"].keys() >= {"machine", "nvlink", "imex"}
    assert slow["host"]["nvlink"]["state"] == "joined"
    assert len(slow["disks"]) == 6
    assert len(slow["checks"]) == 20
    first, second = await machine.fast(set()), await machine.fast(set())
    assert first["gpus"] != second["gpus"]
    assert first["load"].keys() >= {"pressure", "cpu_percent", "memory_used_mib"}
    assert {"tx_bytes", "rx_bytes"} <= first["ports"][0].keys()


async def test_slow_facts_stay_equal_but_for_a_finding_now_and_then():
    machine = SimMachine(uniform(1, 8).nodes()[0])
    calm = [await machine.slow() for _ in range(5)]
    assert all(document == calm[0] for document in calm)
    machine.unrest = 1.0
    hot, cool = await machine.slow(), await machine.slow()
    assert [bool(card["findings"]) for card in hot["gpus"]].count(True) == 1
    assert cool == calm[0]


@pytest.mark.interpreted  # puts stand-ins for the reactor and for begin_connecting
def test_the_routers_own_part_of_a_request_is_measured(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(path, "ROUNDS", 2)
    monkeypatch.setattr(pool, "begin_connecting", lambda *_: path.Plug())
    assert min(path.plain(0), path.plain(4), path.event(), *path.kept()) > 0


def test_memory_is_compared_at_the_edges_of_what_had_settled():
    assert growth.edges([1.0] * 9) is None
    assert growth.edges([50.0] * 4 + [60.0] * 8 + [70.0] * 8) == (60.0, 70.0)


@pytest.mark.slow
def test_a_router_before_many_keys_is_measured(database: Database):
    found = keys.measure(database.url, database.controller_url, 3000, 20, 300)
    assert found["start_s"] > 0
    assert found["memory_full_mib"] >= found["memory_start_mib"] > 20
    assert 0 < found["hit_ms"]["p50"] <= found["hit_ms"]["max"]
    assert found["unknown_ms"]["p99"] > 0
    assert found["asked_at_once_per_s"] > 0


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_sums_are_right_after_a_little_chaos():
    found = chaos.measure(count=150, seed=3, lease_s=15)  # restarts take seconds on busy cores
    assert [name for name, _, holds in found if not holds] == []
    figures = {name: figure for name, figure, _ in found}
    assert figures["rows with status ok"] >= 150
    assert figures["looks at spent + held"] > 10
