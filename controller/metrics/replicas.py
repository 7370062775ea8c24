"""Replicas as the router processes see them: state, score, breaker, and what engines tell of load.

Each process has its own view. States are counted (how many processes see it so), numbers are the
worst that any process sees; what none of them knows has no sample.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

from controller.metrics.families import gauge

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from prometheus_client.core import Metric

WORST: dict[str, tuple[str, str, Callable[[Any, Any], Any]]] = {
    "ready": ("replica_ready", "1: gets requests; 0: draining or unhealthy", min),
    "score": ("replica_score", "requests over its share; the lower of two gets the next", max),
    "running": ("replica_engine_running", "requests that its engine says it runs", max),
    "waiting": ("replica_engine_waiting", "requests that its engine says it has queued", max),
    "kv": ("replica_engine_kv_cache_usage", "share of its cache in use, 0 to 1", max),
    "first_byte_s": ("replica_first_byte_seconds", "moving average to an answer's start", max),
}
STATES = {
    "breaker": (
        "replica_breaker",
        "router processes by what their breaker is: closed, held, open, half_open",
    ),
    "signal": ("replica_signal", "router processes by what they know of its engine's metrics"),
}


def families(workers: list[dict[str, Any]]) -> Iterator[Metric]:
    """All of them, from the processes' snapshots."""
    seen = [shown for worker in workers for shown in worker["endpoints"]]
    for key, (name, what, worst) in WORST.items():
        yield gauge(name, what, ["replica"], _worst(seen, "replica", key, worst).items())
    for key, (name, what) in STATES.items():
        states = Counter((str(shown["replica"]), str(shown[key])) for shown in seen)
        yield gauge(name, what, ["replica", "state"], states.items())
    static = [shown for worker in workers for shown in worker["statics"]]
    healthy = _worst(static, "endpoint", "healthy", min)
    yield gauge("endpoint_healthy", "static endpoints that answer", ["endpoint"], healthy.items())


def _worst(
    seen: list[dict[str, Any]], name: str, key: str, worst: Callable[[Any, Any], Any]
) -> dict[tuple[str, ...], float]:
    found: dict[tuple[str, ...], float] = {}
    for shown in seen:
        value = shown.get(key)
        if value is not None:
            label = (str(shown[name]),)
            found[label] = worst(found.get(label, value), value)
    return found
