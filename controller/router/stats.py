"""Counters of one router process as plain integers; merged and rendered elsewhere.

No metrics library on the hot path: a labelled increment there costs more than all of this. A
request holds its model's counters (`ModelStats`), so counting is attributes, not label lookups.
`snapshot` is JSON-able, and the sum of two processes' snapshots is their fleet's.
"""

from __future__ import annotations

from bisect import bisect_left
from typing import TYPE_CHECKING, Any, Final, TypeVar

if TYPE_CHECKING:
    from controller.router.tokens import Tokens

DURATION_BOUNDS_S: Final = (
    0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600,
)  # fmt: skip
TOKEN_BOUNDS_S: Final = (
    0.001, 0.0025, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.025, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15,
    0.2, 0.3, 0.5, 1, 2.5,
)  # fmt: skip
"""Between two tokens: from a small model alone on a card to one in swap."""


AT_ONCE, QUEUED, WOKEN = "at_once", "queued", "woken"
"""How a request came to its first engine: it found room, it waited for room, or for its model to
start."""


MOST_COUNTERS: Final = 4096
"""Of replicas, which come and go: the one that was counted least recently is forgotten."""

Label = TypeVar("Label")


def add_bounded(counts: dict[Label, int], label: Label, number: int) -> None:
    """Count `number` more, and keep at most MOST_COUNTERS labels."""
    before = counts.pop(label, 0)
    if len(counts) >= MOST_COUNTERS:
        del counts[next(iter(counts))]
    counts[label] = before + number


class Histogram:
    """Counts per bucket (upper bounds in seconds, one more for above), their sum and number."""

    __slots__ = ("_bounds", "buckets", "count", "total")

    def __init__(self, bounds: tuple[float, ...] = DURATION_BOUNDS_S) -> None:
        self._bounds = bounds
        self.buckets = [0] * (len(bounds) + 1)
        self.total = 0.0
        self.count = 0

    def observe(self, seconds: float) -> None:
        self.buckets[bisect_left(self._bounds, seconds)] += 1
        self.total += seconds
        self.count += 1

    def as_json(self) -> dict[str, Any]:
        return {"buckets": self.buckets, "sum": self.total, "count": self.count}


class EndpointStats:
    """One model on one endpoint: answers by HTTP status, and how long they took."""

    __slots__ = ("duration", "statuses")

    def __init__(self) -> None:
        self.statuses: dict[int, int] = {}
        self.duration = Histogram()


class ModelStats:
    """Everything counted for one model; "" stands for requests refused before it was known."""

    __slots__ = (
        "admissions", "cached", "endpoints", "estimated", "in_flight", "itl", "outcomes",
        "queue_wait", "tokens_in", "tokens_out", "ttft",
    )  # fmt: skip

    def __init__(self) -> None:
        self.in_flight = 0  # those that wait included
        self.tokens_in = self.tokens_out = self.cached = 0
        self.estimated = 0  # requests whose engine did not tell all its tokens
        self.outcomes: dict[str, int] = {}  # ok, error, client_closed, partial
        self.endpoints: dict[str, EndpointStats] = {}
        self.ttft = Histogram()
        self.itl = Histogram(TOKEN_BOUNDS_S)  # of each stream the mean
        self.admissions: dict[str, int] = {}  # requests by how they came to their first engine
        self.queue_wait = Histogram()  # of waits for room that ended with it

    def admit(self, how: str) -> None:
        """A request's first engine gets it now."""
        self.admissions[how] = self.admissions.get(how, 0) + 1

    def settle(self, endpoint: str, http_status: int, outcome: str, seconds: float) -> None:
        """One request is over; `http_status`: what the client saw (499: it left before the end)."""
        entry = self.endpoints.get(endpoint)
        if entry is None:
            entry = self.endpoints[endpoint] = EndpointStats()
        entry.statuses[http_status] = entry.statuses.get(http_status, 0) + 1
        entry.duration.observe(seconds)
        self.outcomes[outcome] = self.outcomes.get(outcome, 0) + 1

    def count_tokens(self, tokens: Tokens) -> None:
        self.tokens_in += tokens.prompt or 0
        self.tokens_out += tokens.completion or 0
        self.cached += tokens.cached or 0
        self.estimated += tokens.estimated


class Stats:
    """Everything one router process counts."""

    def __init__(self) -> None:
        self.models: dict[str, ModelStats] = {}
        self.refusals: dict[str, int] = {}  # error code
        self.retries: dict[str, int] = {}  # reason
        self.retries_refused: dict[str, int] = {}  # reason; the budget was exhausted
        self.fallbacks: dict[tuple[str, str, str], int] = {}  # model, the one instead, reason
        self.upstream_failures: dict[tuple[str, str], int] = {}  # replica, cause or status
        self.usage_rows: dict[str, int] = {}  # what became of rows
        self.counts: dict[str, int] = {}  # everything without labels

    def model(self, name: str) -> ModelStats:
        found = self.models.get(name)
        if found is None:
            found = self.models[name] = ModelStats()
        return found

    def add(self, name: str, number: int = 1) -> None:
        self.counts[name] = self.counts.get(name, 0) + number

    def refuse(self, code: str) -> None:
        self.refusals[code] = self.refusals.get(code, 0) + 1

    def retry(self, reason: str) -> None:
        self.retries[reason] = self.retries.get(reason, 0) + 1

    def unaffordable(self, reason: str) -> None:
        """A retry was not made: the budget was exhausted."""
        self.retries_refused[reason] = self.retries_refused.get(reason, 0) + 1

    def fall_back(self, model: str, other: str, reason: str) -> None:
        key = (model, other, reason)
        self.fallbacks[key] = self.fallbacks.get(key, 0) + 1

    def move_in_flight(self, model: str, other: str) -> None:
        """A running request counts for the model that serves it, which is kept awake by it."""
        self.model(model).in_flight -= 1
        self.model(other).in_flight += 1

    def usage_row(self, word: str, number: int = 1) -> None:
        """written, unpriced, degraded, unspooled or refused"""
        self.usage_rows[word] = self.usage_rows.get(word, 0) + number

    def fail_upstream(self, replica: str, cause: str) -> None:
        add_bounded(self.upstream_failures, (replica, cause), 1)

    def snapshot(self) -> dict[str, Any]:
        """All of it as JSON: labelled counters are lists of [labels..., value]."""
        models = self.models.items()
        endpoints = [(m, e, entry) for m, of in models for e, entry in of.endpoints.items()]
        return {
            "requests": [
                [m, e, status, n]
                for m, e, entry in endpoints
                for status, n in entry.statuses.items()
            ],
            "outcomes": [[m, word, n] for m, of in models for word, n in of.outcomes.items()],
            "bounds_s": {
                "duration": DURATION_BOUNDS_S,
                "queue_wait": DURATION_BOUNDS_S,
                "ttft": DURATION_BOUNDS_S,
                "itl": TOKEN_BOUNDS_S,
            },
            "duration": [[m, e, entry.duration.as_json()] for m, e, entry in endpoints],
            "ttft": [[m, of.ttft.as_json()] for m, of in models if of.ttft.count],
            "itl": [[m, of.itl.as_json()] for m, of in models if of.itl.count],
            "queue_wait": [[m, of.queue_wait.as_json()] for m, of in models if of.queue_wait.count],
            "admissions": [[m, how, n] for m, of in models for how, n in of.admissions.items()],
            "tokens": [
                [m, word, n]
                for m, of in models
                for word, n in (("in", of.tokens_in), ("out", of.tokens_out), ("cached", of.cached))
                if n
            ],
            "estimated": [[m, of.estimated] for m, of in models if of.estimated],
            "refusals": [[code, n] for code, n in self.refusals.items()],
            "retries": [[reason, n] for reason, n in self.retries.items()],
            "retries_refused": [[reason, n] for reason, n in self.retries_refused.items()],
            "fallbacks": [[*key, n] for key, n in self.fallbacks.items()],
            "upstream_failures": [[*key, n] for key, n in self.upstream_failures.items()],
            "usage_rows": [[word, n] for word, n in self.usage_rows.items()],
            "cancellations": [
                [m, n] for m, of in models if (n := of.outcomes.get("client_closed", 0))
            ],
            "counts": dict(self.counts),
        }
