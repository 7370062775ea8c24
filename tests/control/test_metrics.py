"""The page of metrics: it parses, every name is ours, and unknown is no sample."""

from __future__ import annotations

import math
from types import SimpleNamespace

import orjson
import pytest
import trio
from prometheus_client.parser import text_string_to_metric_families as parse

from controller.context import ControlContext
from controller.loops import Loops
from controller.metrics import page, router
from controller.reconcile.lease import Lease
from controller.reconcile.tick import Ticker
from controller.router.stats import Stats
from sql.listen import ListenState
from tests.control.duties import cards
from tests.sql.fleet import card, port


def snapshot_of(worker: int, stats: Stats, **more: object) -> dict[str, object]:
    """What a router process tells on its socket."""
    return {
        "worker": worker,
        "life": f"first-{worker}",
        "in_flight": [["m", 1]],
        "waiting": [["m", 3]],
        "queued": [["m", 2]],
        "replicas": [["5", 2]],
        "endpoints": [],
        "statics": [],
        "trips": [],
        **stats.snapshot(),
        **more,
    }


@pytest.fixture
def context(tmp_path, pool):
    listening = ListenState(connected=True)
    made = ControlContext(SimpleNamespace(), None, Loops(), listening, tmp_path, pool=pool)
    made.leases["tick"] = Lease(pool, None, "tick", listening)
    made.ticker = Ticker(pool, made.leases["tick"])
    return made


async def samples(context) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    text = (await page.render(context)).decode()
    found = {}
    for family in parse(text):
        assert family.name.startswith("llmgw_"), family
        assert family.documentation
        for sample in family.samples:
            key = (sample.name, tuple(sorted(sample.labels.items())))
            assert key not in found, f"{key} is there twice"
            assert not math.isnan(sample.value)
            found[key] = sample.value
    return found


async def test_a_page_without_anything_parses(asyncio_loop, context):
    found = await samples(context)
    assert found["llmgw_scrape_up", (("part", "router"),)] == 0
    assert found["llmgw_scrape_up", (("part", "fleet"),)] == 1
    assert found["llmgw_leader", (("duty", "tick"),)] == 0
    # Nothing was measured yet.
    for name in (
        "llmgw_tick_duration_seconds",
        "llmgw_tick_stage_duration_seconds",
        "llmgw_notify_age_seconds",
        "llmgw_lease_term",
    ):
        assert not [key for key in found if key[0] == name]


async def test_unknown_facts_of_the_fleet_give_no_sample(asyncio_loop, context, fleet):
    known = cards(fleet, "known", 1)
    used = {"uuid": "known-0", "memory_used_mib": 9, "utilization_percent": 50, "power_w": 70}
    fleet.sync(known, gpus=[used], load={"cpu_percent": 12, "load1": 0.5})
    dark = fleet.enrol("dark")
    fleet.report(dark, "gpus", [card(0, uuid="dark-0", memory_mib=None)])
    fleet.model("m")
    fleet.replica("m")
    found = await samples(context)
    of = {key[0] for key in found if ("node", "known") in key[1]}
    assert {"llmgw_gpu_utilization_percent", "llmgw_node_cpu_percent"} <= of
    of = {key[0] for key in found if ("node", "dark") in key[1]}
    assert of == {"llmgw_gpu_healthy", "llmgw_node_replicas", "llmgw_node_checks"}
    assert found["llmgw_replicas", (("model", "m"), ("state", "pending"))] == 1
    assert found["llmgw_replicas", (("model", "m"), ("state", "ready"))] == 0
    assert found["llmgw_nodes", (("state", "ready"),)] == 1
    assert not [key for key in found if key[0] == "llmgw_gpu_temperature_celsius"]


def of_name(found, name) -> dict[tuple[str, ...], float]:
    """The samples of one name by the values of their labels, in the order of the labels' names."""
    return {
        tuple(value for _, value in labels): number
        for (sample, labels), number in found.items()
        if sample == f"llmgw_{name}"
    }


CLUSTER = "b2c3d4e5-0000-4000-8000-00000000000a"
ZEROS = "00000000-0000-0000-0000-000000000000"


async def test_E07_cards_tell_errors_and_whether_nvlink_has_joined(asyncio_loop, context, fleet):
    node = fleet.enrol("n1")
    joined = {"fabric_state": "completed", "clique": 1, "cluster_uuid": CLUSTER}
    success = {"fabric": {"status": "Success"}, "ecc": {"corrected": 7, "uncorrected": 0}}
    fleet.report(node, "gpus", [
        card(0, **joined, detail=success),
        card(1, **joined, detail={"fabric": {"status": "NVML_ERROR_UNKNOWN"}}),
        card(2, **joined | {"cluster_uuid": ZEROS}, detail=success),
        card(3, fabric_state="in_progress", detail={"ecc": {"corrected": "many"}}),
        card(4),
    ])  # fmt: skip
    fleet.sync(node, gpus=[{"uuid": "GPU-0", "memory_foreign_mib": 600}])
    found = await samples(context)
    assert of_name(found, "gpu_nvlink_joined") == {
        ("H100", "0", "n1"): 1, ("H100", "1", "n1"): 0, ("H100", "2", "n1"): 0,
        ("H100", "3", "n1"): 0,
    }  # fmt: skip
    assert of_name(found, "gpu_ecc_corrected_total") == {
        ("H100", "0", "n1"): 7, ("H100", "2", "n1"): 7,
    }  # fmt: skip
    assert set(of_name(found, "gpu_ecc_uncorrected_total").values()) == {0}
    assert of_name(found, "gpu_memory_foreign_mebibytes") == {("H100", "0", "n1"): 600}


async def test_E20_cards_that_share_an_index_are_told_apart(asyncio_loop, context, fleet):
    node = fleet.enrol("n1")
    fleet.report(node, "gpus", [card(0), card(1), card(2)])
    slices = [
        card(0, uuid=f"MIG-{i}", parent="GPU-0", mig_profile="1g.10gb", **{"class": "H100-1g.10gb"})
        for i in range(2)
    ]
    nameless = {"uuid": "PCI-0000:41:00.0", "pci_bus_id": "0000:41:00.0"}
    # Card 1 is gone and the driver counts anew.
    fleet.report(node, "gpus", [card(0), *slices, card(1, uuid="GPU-2"), nameless])
    healthy = of_name(await samples(context), "gpu_healthy")
    assert healthy == {
        ("H100", "0", "n1"): 1,
        ("H100-1g.10gb", "MIG-0", "n1"): 1,
        ("H100-1g.10gb", "MIG-1", "n1"): 1,
        ("H100", "1", "n1"): 1,
        ("H100", "GPU-1", "n1"): 0,
        ("unknown", "PCI-0000:41:00.0", "n1"): 1,
    }


async def test_E11_ports_tell_state_traffic_and_errors(asyncio_loop, context, fleet):
    node = fleet.node("n1")
    down = {"state": "DOWN", "active": False, "key": None, "sm_guid": None}
    fleet.report(node, "ports", [
        port("mlx5_0", fabric="compute"),
        port("mlx5_1", fabric="compute", **down),
        port("mlx5_2"),
        port("mlx5_3", **down | {"state": None}, errors={"link_downed": 2, "odd": "x"}),
    ])  # fmt: skip
    told = {"hca": "mlx5_0", "port": 1, "tx_bytes": 5, "rx_bytes": 0, "errors": {"symbol_error": 3}}
    fleet.sync(node, ports=[told])
    found = await samples(context)
    ports = {key: n for key, n in of_name(found, "fabric_ports").items() if n}
    assert ports == {
        ("compute", "ACTIVE"): 1, ("compute", "DOWN"): 1, ("ib:01", "ACTIVE"): 1, ("", ""): 1,
    }  # fmt: skip
    assert found["llmgw_fabric_ports", (("fabric", "ib:01"), ("state", "DOWN"))] == 0
    assert of_name(found, "ib_transmit_bytes_per_second") == {("mlx5_0", "n1", "1"): 5}
    assert of_name(found, "ib_receive_bytes_per_second") == {("mlx5_0", "n1", "1"): 0}
    assert of_name(found, "ib_errors_total") == {
        ("symbol_error", "mlx5_0", "n1", "1"): 3, ("link_downed", "mlx5_3", "n1", "1"): 2,
    }  # fmt: skip


async def test_E16_nodes_tell_imex_pressure_and_checks(asyncio_loop, context, fleet):
    up = fleet.node("up", imex={"state": "READY"})
    fleet.node("waits", imex={"state": "WAITING_FOR_PEERS"})
    fleet.node("without")
    fleet.sync(up, load={"pressure": {"cpu_some": 1.5, "io_full": 0}})
    checks = [
        {"name": "driver", "result": "fail", "evidence": "none"},
        {"name": "disk", "result": "warn", "evidence": "full"},
    ]
    fleet.report(up, "checks", checks)
    found = await samples(context)
    assert of_name(found, "imex_up") == {("up",): 1, ("waits",): 0}
    assert of_name(found, "node_pressure_percent") == {
        ("cpu_some", "up"): 1.5,
        ("io_full", "up"): 0,
    }
    results = of_name(found, "node_checks")
    assert {key: n for key, n in results.items() if key[0] == "up"} == {
        ("up", "pass"): 1, ("up", "warn"): 1, ("up", "fail"): 1,
    }  # fmt: skip
    assert results["without", "fail"] == 0


async def test_odd_names_are_escaped(asyncio_loop, context, fleet):
    name = 'org/mo"del\\x\U0001f600'
    fleet.model(name)
    found = await samples(context)
    assert found["llmgw_model_min_replicas", (("model", name),)] == 1


async def test_a_lost_database_leaves_the_rest_of_the_page(asyncio_loop, context, fleet):
    fleet.admin.execute("drop view llmgw.nodes cascade")
    found = await samples(context)
    assert found["llmgw_scrape_up", (("part", "fleet"),)] == 0
    assert ("llmgw_ticks_total", ()) in found
    assert not [key for key in found if key[0] == "llmgw_gpus_total"]


def told(models=("m",)) -> Stats:
    stats = Stats()
    for model in models:
        entry = stats.model(model)
        entry.settle("chat", 200, "ok", 0.2)
        entry.settle("chat", 499, "client_closed", 3.0)
        entry.ttft.observe(0.1)
        entry.queue_wait.observe(1.5)
        entry.admissions = {"at_once": 1, "queued": 1}
        entry.tokens_in, entry.tokens_out, entry.estimated = 7, 3, 2
        entry.itl.observe(0.018)
    stats.refuse("unknown_model")
    stats.retry("connect")
    stats.fail_upstream("5", "reset")
    stats.add("bytes", 10)
    return stats


def test_workers_are_summed_and_histograms_merge():
    workers = [snapshot_of(0, told(), keys=3), snapshot_of(1, told(("m", "n")), keys=4)]
    found = {
        (s.name, tuple(sorted(s.labels.items()))): s.value
        for family in router.families(workers)
        for s in family.samples
    }
    ok = (("endpoint", "chat"), ("model", "m"), ("status", "200"))
    assert found["llmgw_requests_total", ok] == 2
    assert found["llmgw_tokens_total", (("direction", "in"), ("model", "m"))] == 14
    assert found["llmgw_usage_estimated_total", (("model", "m"),)] == 4
    assert found["llmgw_cancellations_total", (("model", "m"),)] == 2
    assert found["llmgw_replica_in_flight", (("replica", "5"),)] == 4
    assert found["llmgw_queue_depth", (("model", "m"),)] == 4
    assert found["llmgw_admissions_total", (("how", "queued"), ("model", "m"))] == 2
    assert found["llmgw_admissions_total", (("how", "at_once"), ("model", "m"))] == 2
    assert found["llmgw_queue_wait_seconds_sum", (("model", "m"),)] == pytest.approx(3.0)
    pace = "llmgw_inter_token_latency_seconds"
    assert found[f"{pace}_count", (("model", "m"),)] == 2
    assert found[f"{pace}_bucket", (("le", "0.015"), ("model", "m"))] == 0
    assert found[f"{pace}_bucket", (("le", "0.02"), ("model", "m"))] == 2
    assert found["llmgw_keys_known", (("worker", "1"),)] == 4
    labels = (("endpoint", "chat"), ("model", "m"))
    assert found["llmgw_request_duration_seconds_count", labels] == 4
    assert found["llmgw_request_duration_seconds_sum", labels] == pytest.approx(6.4)
    buckets = [
        v for k, v in found.items()
        if k[0] == "llmgw_request_duration_seconds_bucket" and ("model", "m") in k[1]
    ]  # fmt: skip
    assert buckets == sorted(buckets)
    assert buckets[-1] == 4
    assert ("llmgw_client_connections", (("worker", "0"),)) not in found


def test_sums_do_not_go_back_when_a_router_ends_or_is_silent():
    carried = router.carried()
    labels = (("endpoint", "chat"), ("model", "m"))

    def page(*workers: dict[str, object]) -> list[float]:
        given = list(workers)
        found = {
            (s.name, tuple(sorted(s.labels.items()))): s.value
            for family in router.families(given, carried.beside(given))
            for s in family.samples
        }
        return [
            found["llmgw_requests_total", (*labels, ("status", "200"))],
            found["llmgw_request_duration_seconds_count", labels],
            found["llmgw_router_events_total", (("event", "bytes"),)],
            found.get(("llmgw_replica_in_flight", (("replica", "5"),)), 0),
            sum(v for k, v in found.items() if k[0] == "llmgw_keys_known"),
        ]

    other = snapshot_of(1, told(), keys=1)
    assert page(snapshot_of(0, told(), keys=1), other) == [2, 4, 20, 4, 2]
    assert page(other) == [2, 4, 20, 2, 1]  # gone or silent: its counters stay, its gauges do not
    for n in range(1, 4):
        new = snapshot_of(0, told(), keys=1) | {"life": f"life-{n}"}
        for _ in range(2):
            assert page(new, other) == [2 + n, 4 + 2 * n, 20 + 10 * n, 4, 2]


async def test_a_router_that_hangs_dies_or_says_nonsense_costs_a_second_and_no_page(
    asyncio_loop, context, nursery
):
    async def serve(worker: int, answer: bytes | None) -> None:
        sock = trio.socket.socket(trio.socket.AF_UNIX)
        await sock.bind(str(context.runtime / f"router-{worker}.sock"))
        sock.listen()

        async def tell(stream: trio.SocketStream) -> None:
            if answer is None:
                await trio.sleep_forever()
            await stream.send_all(answer)
            await stream.aclose()

        nursery.start_soon(trio.serve_listeners, tell, [trio.SocketListener(sock)])

    await serve(0, orjson.dumps(snapshot_of(0, told())))
    await serve(1, None)
    await serve(2, b"{nonsense")
    (context.runtime / "router-3.sock").touch()
    dying = trio.socket.socket(trio.socket.AF_UNIX)
    await dying.bind(str(context.runtime / "router-4.sock"))
    dying.listen()

    async def die() -> None:
        await trio.lowlevel.wait_readable(dying.fileno())  # somebody has connected
        dying.close()

    nursery.start_soon(die)
    began = trio.current_time()
    found = await samples(context)
    assert trio.current_time() - began < 20
    assert found["llmgw_scrape_up", (("part", "router"),)] == 1
    assert found["llmgw_upstream_failures_total", (("cause", "reset"), ("replica", "5"))] == 1
    nursery.cancel_scope.cancel()


def shown(replica: str, **more: object) -> dict[str, object]:
    """One replica as one router process tells of it."""
    known = {"ready": True, "in_flight": 0, "score": 0.0, "breaker": "closed"}
    return {"replica": replica, **known, "signal": "unknown", **more}


def test_replicas_are_told_as_the_processes_see_them():
    workers = [
        snapshot_of(
            0,
            Stats(),
            endpoints=[shown("5", score=0.5, breaker="open"), shown("6", kv=0.25)],
            statics=[{"endpoint": "a", "healthy": True}, {"endpoint": "b", "healthy": False}],
            trips=[["5", 2]],
        ),
        snapshot_of(
            1,
            Stats(),
            endpoints=[shown("5", score=1.5, ready=False, signal="stale_metrics")],
            statics=[{"endpoint": "a", "healthy": True}],
            trips=[["5", 1]],
        ),
    ]
    found = {
        (s.name, *(s.labels[label] for label in sorted(s.labels))): s.value
        for family in router.families(workers)
        for s in family.samples
    }
    assert found["llmgw_replica_score", "5"] == 1.5
    assert found["llmgw_replica_ready", "5"] == 0
    assert found["llmgw_replica_ready", "6"] == 1
    assert found["llmgw_replica_breaker", "5", "open"] == 1
    assert found["llmgw_replica_breaker", "5", "closed"] == 1
    assert found["llmgw_replica_trips_total", "5"] == 3
    assert found["llmgw_replica_signal", "5", "stale_metrics"] == 1
    assert found["llmgw_replica_engine_kv_cache_usage", "6"] == 0.25
    assert ("llmgw_replica_engine_kv_cache_usage", "5") not in found  # unknown is no sample
    assert (found["llmgw_endpoint_healthy", "a"], found["llmgw_endpoint_healthy", "b"]) == (1, 0)
