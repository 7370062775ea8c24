"""What router processes had counted before they ended, so that sums over all never go back.

A sum that falls would look to Prometheus like a restart of everything, and what the other
processes had counted would be counted again. Kept in the control process: a restart of that one
begins anew with what its routers tell, which is a restart of everything.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

Snapshot = dict[str, Any]


class Carried:
    """Remembers the last snapshot of each router process, by its life."""

    def __init__(self, counters: tuple[str, ...], histograms: tuple[str, ...]) -> None:
        self._counters = counters
        self._histograms = histograms
        self._last: dict[int, Snapshot] = {}  # by worker
        self._ended: Snapshot | None = None

    def beside(self, workers: list[Snapshot]) -> list[Snapshot]:
        """Snapshots to count beside those that answered now: of processes that ended, and of those
        that did not answer this time. What one counted after its last scrape is not known."""
        for snapshot in workers:
            former = self._last.get(snapshot["worker"])
            if former is not None and former["life"] != snapshot["life"]:
                self._ended = former if self._ended is None else self._added(self._ended, former)
            self._last[snapshot["worker"]] = snapshot
        answered = {snapshot["worker"] for snapshot in workers}
        silent = [last for worker, last in self._last.items() if worker not in answered]
        return silent if self._ended is None else [*silent, self._ended]

    def _added(self, one: Snapshot, other: Snapshot) -> Snapshot:
        """The counters of both, as one snapshot."""
        found: Snapshot = {key: _sum_of([*one[key], *other[key]]) for key in self._counters}
        for key in self._histograms:
            found[key] = _histograms_of([*one[key], *other[key]])
        found["bounds_s"] = other["bounds_s"]
        found["counts"] = dict(Counter(one["counts"]) + Counter(other["counts"]))
        return found


def _sum_of(rows: list[list[Any]]) -> list[list[Any]]:
    total: Counter[tuple[Any, ...]] = Counter()
    for *labels, number in rows:
        total[tuple(labels)] += number
    return [[*labels, number] for labels, number in total.items()]


def _histograms_of(rows: list[list[Any]]) -> list[list[Any]]:
    found: dict[tuple[Any, ...], dict[str, Any]] = {}
    for *labels, entry in rows:
        known = found.get(tuple(labels))
        found[tuple(labels)] = entry if known is None else _both(known, entry)
    return [[*labels, entry] for labels, entry in found.items()]


def _both(one: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    return {
        "buckets": [a + b for a, b in zip(one["buckets"], other["buckets"], strict=True)],
        "sum": one["sum"] + other["sum"],
        "count": one["count"] + other["count"],
    }
