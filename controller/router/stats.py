"""Counters of one router process as plain integers; merged and rendered elsewhere.

No metrics library on the hot path: a labelled increment there costs more than all of this.
`snapshot` is JSON-able, and the sum of two processes' snapshots is their fleet's.
"""

from __future__ import annotations

from bisect import bisect_left
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

    from controller.router.tokens import Tokens

DURATION_BOUNDS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)


class Histogram:
    """Counts per bucket (upper bounds in seconds, one more for above), their sum and number."""

    __slots__ = ("buckets", "count", "total")

    def __init__(self) -> None:
        self.buckets = [0] * (len(DURATION_BOUNDS_S) + 1)
        self.total = 0.0
        self.count = 0

    def observe(self, seconds: float) -> None:
        self.buckets[bisect_left(DURATION_BOUNDS_S, seconds)] += 1
        self.total += seconds
        self.count += 1

    def as_json(self) -> dict[str, Any]:
        return {"buckets": self.buckets, "sum": self.total, "count": self.count}


class Stats:
    """Everything one router process counts."""

    def __init__(self) -> None:
        self.requests: dict[tuple[str, str, int], int] = {}  # model, endpoint, HTTP status
        self.outcomes: dict[tuple[str, str], int] = {}  # model, ok|error|client_closed|partial
        self.duration: dict[tuple[str, str], Histogram] = {}  # model, endpoint
        self.ttft: dict[str, Histogram] = {}
        self.tokens: dict[tuple[str, str], int] = {}  # model, in|out|cached
        self.in_flight: dict[str, int] = {}  # model
        self.refusals: dict[str, int] = {}  # error code
        self.retries: dict[str, int] = {}  # reason
        self.upstream_failures: dict[tuple[str, str], int] = {}  # replica, cause
        self.cancellations: dict[str, int] = {}  # model
        self.counts: dict[str, int] = {}  # everything without labels

    def add(self, name: str, number: int = 1) -> None:
        self.counts[name] = self.counts.get(name, 0) + number

    def enter(self, model: str) -> None:
        self.in_flight[model] = self.in_flight.get(model, 0) + 1

    def leave(self, model: str) -> None:
        self.in_flight[model] -= 1

    def refuse(self, code: str) -> None:
        self.refusals[code] = self.refusals.get(code, 0) + 1

    def retry(self, reason: str) -> None:
        self.retries[reason] = self.retries.get(reason, 0) + 1

    def fail_upstream(self, replica: str, cause: str) -> None:
        key = (replica, cause)
        self.upstream_failures[key] = self.upstream_failures.get(key, 0) + 1

    def settle(
        self, model: str, endpoint: str, http_status: int, outcome: str, seconds: float
    ) -> None:
        """One request is over; `http_status` is what the client saw (499: it saw nothing)."""
        key = (model, endpoint, http_status)
        self.requests[key] = self.requests.get(key, 0) + 1
        pair = (model, outcome)
        self.outcomes[pair] = self.outcomes.get(pair, 0) + 1
        if outcome == "client_closed":
            self.cancellations[model] = self.cancellations.get(model, 0) + 1
        timing = self.duration.get((model, endpoint))
        if timing is None:
            timing = self.duration[model, endpoint] = Histogram()
        timing.observe(seconds)

    def first_token(self, model: str, seconds: float) -> None:
        timing = self.ttft.get(model)
        if timing is None:
            timing = self.ttft[model] = Histogram()
        timing.observe(seconds)

    def count_tokens(self, model: str, tokens: Tokens) -> None:
        for word, number in (
            ("in", tokens.prompt),
            ("out", tokens.completion),
            ("cached", tokens.cached),
        ):
            if number is not None:
                key = (model, word)
                self.tokens[key] = self.tokens.get(key, 0) + number

    def snapshot(self) -> dict[str, Any]:
        """All of it as JSON: labelled counters are lists of [labels..., value]."""
        return {
            "requests": _rows(self.requests),
            "outcomes": _rows(self.outcomes),
            "duration_bounds_s": list(DURATION_BOUNDS_S),
            "duration": [[*key, value.as_json()] for key, value in self.duration.items()],
            "ttft": [[key, value.as_json()] for key, value in self.ttft.items()],
            "tokens": _rows(self.tokens),
            "in_flight": [[key, value] for key, value in self.in_flight.items()],
            "refusals": [[key, value] for key, value in self.refusals.items()],
            "retries": [[key, value] for key, value in self.retries.items()],
            "upstream_failures": _rows(self.upstream_failures),
            "cancellations": [[key, value] for key, value in self.cancellations.items()],
            "counts": dict(self.counts),
        }


def _rows(table: Mapping[tuple[Any, ...], int]) -> list[list[Any]]:
    return [[*key, value] for key, value in table.items()]
