"""Numbers of the whole fleet, out of the views at scrape time: the same from every controller."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

from controller.metrics.families import gauge
from sql import queries

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from prometheus_client.core import Metric

    from sql.pool import Pool

PER_GPU = {
    "utilization_percent": ("gpu_utilization_percent", "how busy the card is"),
    "memory_used_mb": ("gpu_memory_used_mebibytes", "card memory in use"),
    "memory_mb": ("gpu_memory_mebibytes", "card memory"),
    "temperature_c": ("gpu_temperature_celsius", "card temperature"),
    "power_w": ("gpu_power_watts", "card power"),
    "healthy": ("gpu_healthy", "1 when the card may be used"),
}
NODE_STATES = ("ready", "cordoned", "draining", "unreachable", "lost")
REPLICA_STATES = ("pending", "starting", "ready", "draining", "stopping", "failed")


async def read(pool: Pool) -> list[Metric]:
    """All fleet families; raises sql.errors."""
    texts = queries("metrics")
    tables = {name: await pool.fetch(texts[name]) for name in texts}
    return list(families(tables))


def families(tables: Mapping[str, list[Any]]) -> Iterator[Metric]:
    """Families from rows by query name. Pure."""
    yield from _nodes(tables["nodes"])
    yield from _cards(tables["capacity"], tables["gpus"])
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
    ):
        yield gauge(name, what, ["node"], [((row["id"],), row[field]) for row in rows])


def _cards(capacity: list[Any], cards: list[Any]) -> Iterator[Metric]:
    for field in ("total", "used", "free", "unhealthy"):
        rows = [((row["class"],), row[field]) for row in capacity]
        yield gauge(f"gpus_{field}", f"{field} cards by class", ["class"], rows)
    labels = ["node", "gpu", "class"]
    for field, (name, what) in PER_GPU.items():
        samples = [((r["node"], str(r["index"]), r["class"]), r[field]) for r in cards]
        yield gauge(name, what, labels, samples)


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
