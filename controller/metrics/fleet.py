"""Numbers of the whole fleet, out of the views at scrape time: the same from every controller."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

from controller.metrics.families import counter, gauge
from sql import queries

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from prometheus_client.core import Metric

    from sql.pool import Pool

PER_GPU = {
    "utilization_percent": ("gpu_utilization_percent", "how busy the card is"),
    "memory_used_mb": ("gpu_memory_used_mebibytes", "card memory in use"),
    "memory_mb": ("gpu_memory_mebibytes", "card memory"),
    "memory_foreign_mb": ("gpu_memory_foreign_mebibytes", "held by processes outside llmgw"),
    "temperature_c": ("gpu_temperature_celsius", "card temperature"),
    "power_w": ("gpu_power_watts", "card power"),
    "healthy": ("gpu_healthy", "1 when the card may be used"),
    "nvlink_joined": ("gpu_nvlink_joined", "1 when the card is in a multi-node NVLink domain"),
}
ECC = {
    "ecc_uncorrected": "ECC errors that could not be corrected, since the driver was loaded",
    "ecc_corrected": "ECC errors that were corrected, since the driver was loaded",
}
TRAFFIC = {
    "tx_bytes": ("ib_transmit_bytes_per_second", "sent by a fabric port"),
    "rx_bytes": ("ib_receive_bytes_per_second", "received by a fabric port"),
}
PORT_STATES = ("ACTIVE", "ARMED", "INIT", "DOWN")
RESULTS = ("pass", "warn", "fail")
NODE_STATES = ("ready", "cordoned", "draining", "unreachable", "lost")
CATALOG_STATES = ("applied", "differs", "refused")
REPLICA_STATES = ("pending", "starting", "ready", "draining", "stopping", "failed")


async def read(pool: Pool) -> list[Metric]:
    """All fleet families; raises sql.errors."""
    texts = queries("metrics")
    tables = {name: await pool.fetch(texts[name]) for name in texts}
    return list(families(tables))


def families(tables: Mapping[str, list[Any]]) -> Iterator[Metric]:
    """Families from rows by query name. Pure."""
    yield from _nodes(tables["nodes"])
    yield from _checks(tables["checks"])
    yield from _cards(tables["capacity"], tables["gpus"])
    yield from _ports(tables["ports"])
    yield from _models(tables["models"], tables["replicas"])
    leases = tables["leases"]
    yield gauge(
        "fleet_lease_term", "term of a duty", ["duty"], [((r["name"],), r["term"]) for r in leases]
    )
    held = [((row["name"],), float(row["held"])) for row in leases]
    yield gauge("fleet_lease_held", "1 when a live controller does the duty", ["duty"], held)
    alive = Counter(row["role"] for row in tables["controllers"])
    yield gauge(
        "controllers_alive", "live processes", ["role"], [((r,), n) for r, n in alive.items()]
    )
    files = Counter(row["catalog"] for row in tables["controllers"])
    counts = [((state,), files[state]) for state in CATALOG_STATES]
    yield gauge("controllers_catalog", "controllers by state of their file", ["state"], counts)


def _nodes(rows: list[Any]) -> Iterator[Metric]:
    states = Counter(row["state"] for row in rows)
    yield gauge("nodes", "nodes by state", ["state"], [((s,), states[s]) for s in NODE_STATES])
    for field, name, what in (
        ("last_seen_ago", "node_last_seen_seconds", "since the last sync of a node's agent"),
        ("disk_free_gb", "node_disk_free_gibibytes", "free space on local filesystems"),
        ("cpu_percent", "node_cpu_percent", "processor use"),
        ("load1", "node_load1", "load average over a minute"),
        ("memory_percent", "node_memory_percent", "memory in use"),
        ("replicas", "node_replicas", "live replicas on a node"),
        ("imex_up", "imex_up", "1 when the node's IMEX service is READY"),
    ):
        yield gauge(name, what, ["node"], [((row["id"],), row[field]) for row in rows])
    waits = [
        ((row["id"], kind), _number(percent))
        for row in rows
        for kind, percent in sorted((row["pressure"] or {}).items())
    ]
    what = "time in which work waited, of the last 10 s"
    yield gauge("node_pressure_percent", what, ["node", "kind"], waits)


def _checks(rows: list[Any]) -> Iterator[Metric]:
    counts = {(row["node"], row["result"]): row["checks"] for row in rows}
    nodes = sorted({row["node"] for row in rows})
    samples = [((node, word), counts.get((node, word), 0)) for node in nodes for word in RESULTS]
    yield gauge("node_checks", "checks of a node by result", ["node", "result"], samples)


def _number(value: object) -> float | None:
    """A figure that an agent reported as JSON; anything else is unknown."""
    return value if isinstance(value, int | float) and not isinstance(value, bool) else None


def _cards(capacity: list[Any], cards: list[Any]) -> Iterator[Metric]:
    for field in ("total", "used", "free", "unhealthy"):
        rows = [((row["class"],), row[field]) for row in capacity]
        yield gauge(f"gpus_{field}", f"{field} cards by class", ["class"], rows)
    labels = ["node", "gpu", "class"]
    for field, (name, what) in PER_GPU.items():
        yield gauge(name, what, labels, [(_card(r), r[field]) for r in cards])
    for field, what in ECC.items():
        yield counter(f"gpu_{field}", what, labels, [(_card(r), _number(r[field])) for r in cards])


def _card(row: Any) -> tuple[str, str, str]:
    return row["node"], row["gpu"], row["class"]


def _ports(rows: list[Any]) -> Iterator[Metric]:
    counts = Counter((row["fabric"], row["state"]) for row in rows)
    pairs = {(fabric, state) for fabric, _ in counts for state in PORT_STATES} | set(counts)
    samples = [(pair, counts[pair]) for pair in sorted(pairs)]
    yield gauge("fabric_ports", "ports by state", ["fabric", "state"], samples)
    labels = ["node", "hca", "port"]
    for field, (name, what) in TRAFFIC.items():
        yield gauge(name, what, labels, [(_port(row), row[field]) for row in rows])
    errors = [
        ((*_port(row), name), _number(number))
        for row in rows
        for name, number in sorted((row["errors"] or {}).items())
    ]
    what = "error counters of a port that are not zero, since its card was started"
    yield counter("ib_errors", what, [*labels, "counter"], errors)


def _port(row: Any) -> tuple[str, str, str]:
    return row["node"], row["hca"], str(row["port"])


def _models(models: list[Any], replicas: list[Any]) -> Iterator[Metric]:
    states = Counter((row["model"], row["state"]) for row in replicas)
    names = [row["name"] for row in models]
    samples = [((name, state), states[name, state]) for name in names for state in REPLICA_STATES]
    yield gauge("replicas", "replicas by state", ["model", "state"], samples)
    wanted = [((row["name"],), row["min_replicas"]) for row in models]
    yield gauge("model_min_replicas", "replicas that a model should have", ["model"], wanted)
    stuck = [((row["name"],), float(row["unplaceable"])) for row in models]
    yield gauge("model_unplaceable", "1 when the latest attempt found no place", ["model"], stuck)
    # -1 means that no router reported any use: unknown, so no sample.
    idle = [
        ((r["model"], str(r["id"])), r["idle_seconds"] if r["idle_seconds"] >= 0 else None)
        for r in replicas
    ]
    yield gauge("replica_idle_seconds", "since the last use", ["model", "replica"], idle)
    restarts = [((r["model"], str(r["id"])), r["restarts"]) for r in replicas]
    yield gauge("replica_restarts", "failures since it was stable", ["model", "replica"], restarts)
