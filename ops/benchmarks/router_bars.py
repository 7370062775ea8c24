"""What the router promises, and whether a run of the rig kept it. Pure."""

from __future__ import annotations

from statistics import median
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

OURS, NGINX, SMG, LITELLM = "llmgw:1", "nginx:1", "smg:1", "litellm:1"
Verdict = tuple[str, str, bool]
"""The promise, what was measured, whether it holds."""


def judge(results: Sequence[dict[str, Any]]) -> Iterator[Verdict]:
    """One verdict for each promise whose scenario and peer were measured; medians over rounds."""
    yield from _rates(results)
    for scenario, path, limit, words in (
        ("ns32", "cpu_us_per_req", 60, "CPU per request at 32 connections <= 60 us"),
        ("s400", "cpu_s_per_1k_chunks", 0.035, "CPU per chunk at 400 streams <= 35 us"),
        ("s400", "relay.p99", 5000, "relay p99 at 400 streams < 5 ms"),
        ("s40", "ttft_added.p50", 500, "added time to first token p50 at 40 streams < 0.5 ms"),
        ("s1000", "relay.p99", 20_000, "relay p99 at 1,000 streams of 50 tokens/s < 20 ms"),
        ("cancel", "seen.p50", 1000, "cancel of a stream seen by the engine, p50 < 1 ms"),
        ("cancel-ns", "seen.p50", 1000, "cancel of a plain request, p50 < 1 ms"),
        ("cancel", "engine_running_after", 0, "no cancelled request left in an engine"),
        ("idle5000", "rss_mb", 1024, "memory with 5,000 streams under 1 GiB"),
    ):
        value = figure(results, OURS, scenario, path)
        if value is not None:
            yield words, f"{value:.4g}", value <= limit


def _rates(results: Sequence[dict[str, Any]]) -> Iterator[Verdict]:
    ours = figure(results, OURS, "ns32", "rps")
    nginx = figure(results, NGINX, "ns32", "rps")
    if ours is None:
        return
    share = "" if not nginx else f" = {ours / nginx:.2f} x nginx"
    enough = ours >= 20_000 or bool(nginx and ours >= 0.5 * nginx)
    yield "requests/s >= 20,000 or >= 0.5 x nginx", f"{ours:.0f}{share}", enough
    for peer, times in ((SMG, 3), (LITELLM, 100)):
        theirs = figure(results, peer, "ns32", "rps")
        if theirs:
            ratio = ours / theirs
            yield f"requests/s >= {times} x {peer}", f"{ratio:.1f} x", ratio >= times


def figure(results: Sequence[dict[str, Any]], peer: str, scenario: str, path: str) -> float | None:
    """The median over rounds of one figure; None when it was not measured."""
    found = [
        _at(result["data"], path)
        for result in results
        if result["peer"] == peer and result["scenario"] == scenario
    ]
    known = [value for value in found if value is not None]
    return median(known) if known else None


def _at(data: Any, path: str) -> float | None:
    for name in path.split("."):
        data = data.get(name) if isinstance(data, dict) else None
    return data if isinstance(data, int | float) else None
