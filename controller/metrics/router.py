"""Numbers of all router processes of this controller: read from their sockets, added up."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

import orjson
import trio
from prometheus_client.core import HistogramMetricFamily

from controller.metrics import replicas
from controller.metrics.carried import Carried
from controller.metrics.families import PREFIX, counter, gauge

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from prometheus_client.core import Metric

ANSWER_S = 1.0
MOST_BYTES = 16 * 1024 * 1024
SOCKETS = "router-*.sock"

COUNTERS = {
    "requests": ("requests", "client requests that are over", ["model", "endpoint", "status"]),
    "outcomes": ("request_outcomes", "ok, error, client_closed or partial", ["model", "outcome"]),
    "tokens": ("tokens", "in, out and cached, of the model that served", ["model", "direction"]),
    "estimated": ("usage_estimated", "requests whose tokens are partly estimated", ["model"]),
    "usage_rows": (
        "usage_rows",
        "request rows: written, of these unpriced; degraded; unspooled (only in memory); "
        "damaged on disk; refused by Postgres",
        ["what"],
    ),
    "refusals": ("refusals", "requests answered with an error of the router's own", ["reason"]),
    "admissions": (
        "admissions",
        "requests that came to an engine: at_once, queued for room, or woken: their model started",
        ["model", "how"],
    ),
    "retries": ("upstream_retries", "attempts made again", ["reason"]),
    "retries_refused": (
        "upstream_retries_refused",
        "attempts not made: retry budget exhausted",
        ["reason"],
    ),
    "fallbacks": ("fallbacks", "another model asked instead", ["model", "fallback", "reason"]),
    "upstream_failures": (
        "upstream_failures",
        "attempts that failed, by what happened or the status that the engine answered",
        ["replica", "cause"],
    ),
    "trips": ("replica_trips", "times that a replica's breaker opened", ["replica"]),
    "cancellations": ("cancellations", "requests whose client left", ["model"]),
}
GAUGES = {
    "in_flight": ("requests_in_flight", "requests running", ["model"]),
    "waiting": ("requests_waiting", "requests that wait for their model to start", ["model"]),
    "queued": ("queue_depth", "requests that wait for a place at a replica", ["model"]),
    "replicas": ("replica_in_flight", "requests running on a replica", ["replica"]),
}
PER_WORKER = {
    "compiled": ("router_compiled", "1: the router is compiled (ops/compile), 0: plain Python"),
    "connections": ("client_connections", "open client connections"),
    "table_age_s": ("route_table_age_seconds", "since routes were read"),
    "allowances_age_s": ("allowances_age_seconds", "since Postgres granted budgets and limits"),
    "allowances_waiting": ("requests_reserving", "requests that wait for budgets or limits"),
    "bounds": ("bounds_known", "budgets and limits in memory"),
    "usage_waiting": ("usage_rows_waiting", "request rows not yet in Postgres"),
    "spool_rows": ("usage_spool_rows", "request rows on disk that are not yet in Postgres"),
    "spool_bytes": ("usage_spool_bytes", "what their files take"),
    "spool_full": ("usage_spool_full", "1: no room for more of them, new ones are in memory only"),
    "usage_lag_s": ("usage_flush_lag_seconds", "age of the oldest row not yet in Postgres"),
    "keys_age_s": ("auth_age_seconds", "since the keys in memory were equal to Postgres's"),
    "keys": ("keys_known", "client keys in memory"),
}
HISTOGRAMS = {
    "duration": ("request_duration_seconds", "whole requests", ["model", "endpoint"]),
    "queue_wait": (
        "queue_wait_seconds",
        "of requests that waited for a place and got it",
        ["model"],
    ),
    "ttft": ("time_to_first_token_seconds", "until the first token of a stream", ["model"]),
    "itl": (
        "inter_token_latency_seconds",
        "of each whole stream the mean time between two of its tokens",
        ["model"],
    ),
}


async def read(runtime: Path) -> list[dict[str, Any]]:
    """The snapshot of each router process that answers in time."""
    found: list[dict[str, Any]] = []

    async def ask(path: Path) -> None:
        with trio.move_on_after(ANSWER_S):
            try:
                async with await trio.open_unix_socket(path) as stream:
                    found.append(orjson.loads(await _all(stream)))
            except (OSError, ValueError, trio.BrokenResourceError):
                return  # it is starting or gone; its absence shows in the worker gauges

    async with trio.open_nursery() as nursery:
        for path in await trio.to_thread.run_sync(lambda: sorted(runtime.glob(SOCKETS))):
            nursery.start_soon(ask, path)
    return sorted(found, key=lambda snapshot: int(snapshot["worker"]))


async def _all(stream: trio.SocketStream) -> bytes:
    data = b""
    async for part in stream:
        data += part
        if len(data) > MOST_BYTES:
            raise ValueError("a router's snapshot is over 16 MiB")
    return data


def carried() -> Carried:
    """For `families`, to be kept from one page to the next."""
    return Carried(tuple(COUNTERS), tuple(HISTOGRAMS))


def families(
    workers: list[dict[str, Any]], beside: list[dict[str, Any]] | None = None
) -> Iterator[Metric]:
    """Sums over all processes; what belongs to one process is labelled with it.

    `beside`: snapshots of which only what is counted is valid, see `carried.py`.
    """
    counted = [*workers, *(beside or [])]
    for key, (name, what, labels) in COUNTERS.items():
        yield counter(name, what, labels, _sum(counted, key).items())
    for key, (name, what, labels) in GAUGES.items():
        yield gauge(name, what, labels, _sum(workers, key).items())
    for key, (name, what) in PER_WORKER.items():
        rows = [((str(w["worker"]),), w.get(key)) for w in workers]
        yield gauge(name, what, ["worker"], rows)
    dropped = [((str(w["worker"]),), w.get("usage_dropped")) for w in workers]
    yield counter("usage_rows_dropped", "request rows lost to a full buffer", ["worker"], dropped)
    crashes = [((str(w["worker"]),), w.get("callback_crashes")) for w in workers]
    yield counter("router_callback_crashes", "bugs caught in the router", ["worker"], crashes)
    counts = Counter[tuple[str, ...]]()
    for snapshot in counted:
        counts.update({(name,): n for name, n in snapshot["counts"].items()})
    yield counter("router_events", "everything else the router counts", ["event"], counts.items())
    yield from replicas.families(workers)
    for key, (name, what, labels) in HISTOGRAMS.items():
        yield _histogram(counted, key, name, what, labels)


def _sum(workers: list[dict[str, Any]], key: str) -> Counter[tuple[str, ...]]:
    total: Counter[tuple[str, ...]] = Counter()
    for snapshot in workers:
        for *labels, number in snapshot[key]:
            total[tuple(str(label) for label in labels)] += number
    return total


def _histogram(
    workers: list[dict[str, Any]], key: str, name: str, what: str, labels: list[str]
) -> HistogramMetricFamily:
    family = HistogramMetricFamily(PREFIX + name, what, labels=labels)
    merged: dict[tuple[str, ...], tuple[list[int], float]] = {}
    bounds: list[float] = []
    for snapshot in workers:
        bounds = snapshot["bounds_s"][key]
        for *values, entry in snapshot[key]:
            labelled = tuple(str(value) for value in values)
            buckets, total = merged.get(labelled, ([0] * (len(bounds) + 1), 0.0))
            added = [a + b for a, b in zip(buckets, entry["buckets"], strict=True)]
            merged[labelled] = (added, total + entry["sum"])
    for labelled, (buckets, total) in merged.items():
        seen, cumulative = 0, []
        for bound, number in zip([*map(str, bounds), "+Inf"], buckets, strict=True):
            seen += number
            cumulative.append((bound, float(seen)))
        family.add_metric(list(labelled), cumulative, total)
    return family
