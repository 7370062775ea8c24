"""Whether an engine that has requests gets on with them: its health path cannot tell (case C14).

An engine core may hang while the process that answers /health and /v1/models is well. What shows it
are the engine's own counters: requests run, and nothing that counts their tokens or steps moves.
An engine that tells no such numbers is not judged: unknown is not frozen. Pure; supervise asks.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

STALL_S = 40.0
"""A step takes seconds even with the longest prompt, and a silent engine must be out of rotation
within a minute."""

RUNNING: Final = frozenset(
    {"vllm:num_requests_running", "llamacpp:requests_processing", "sglang:num_running_reqs"}
)
MOVING: Final = frozenset(
    {
        # Each step of the engine's loop counts, so a long prompt in chunks is seen to move.
        "vllm:iteration_tokens_total_count",
        "vllm:generation_tokens_total",
        "vllm:prompt_tokens_total",
        "llamacpp:n_decode_total",
        "llamacpp:tokens_predicted_total",
        "llamacpp:prompt_tokens_total",
        # Its totals count finished requests only; these change while one runs.
        "sglang:num_used_tokens",
        "sglang:gen_throughput",
        "sglang:generation_tokens_total",
        "sglang:prompt_tokens_total",
    }
)


def numbers(text: str) -> dict[str, tuple[float, float]]:
    """(running, a sum that changes with every step) by engine of a page of Prometheus metrics.

    Copies of an engine behind one door (`engine="1"`) are told apart; one without both is left out.
    """
    running: dict[str, float] = {}
    moving: dict[str, float] = {}
    for line in text.splitlines():
        name = line.partition("{")[0].partition(" ")[0]
        into = running if name in RUNNING else moving if name in MOVING else None
        if into is None:
            continue
        engine = line.partition('engine="')[2].partition('"')[0]
        try:
            into[engine] = into.get(engine, 0.0) + float(line.rpartition(" ")[2])
        except ValueError:
            continue
    return {
        engine: (count, count + moving[engine])
        for engine, count in running.items()
        if engine in moving
    }


@dataclass(slots=True)
class Progress:
    """What one engine's counters said, and since when they stand still."""

    _still: dict[str, tuple[float, float]] = field(default_factory=dict)
    """Engine -> the sum, and when it was first seen."""

    def stalled_because(self, text: str, now: float) -> str | None:
        """Why it counts as hanging, from a page of its metrics at `now` (seconds); else None."""
        found = numbers(text)
        before, self._still = self._still, {}
        worst: str | None = None
        for engine, (running, total) in found.items():
            known, since = before.get(engine, (total, now))
            if running <= 0 or known != total:
                since = now
            self._still[engine] = (total, since)
            if now - since >= STALL_S:
                worst = f"{running:g} requests run and none moved for {now - since:.0f} s"
        return worst
