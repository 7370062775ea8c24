"""What a check came to: pass, warn or fail, with what was measured and what to do. Pure.

Made by the modules beside this one; agent/doctor.py gives each verdict the name of its check.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, Literal

from agent.probes import values

Result = Literal["pass", "warn", "fail"]
ORDER: Final[tuple[Result, ...]] = ("fail", "warn", "pass")
"""Worst first."""
LIMIT: Final = 500
"""Characters kept of an evidence and of a remedy."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """Result, the measured words and numbers, and one sentence of advice (None on pass)."""

    result: Result
    evidence: str
    remedy: str | None = None


def passed(evidence: str) -> Verdict:
    """Nothing to do."""
    return Verdict("pass", short(evidence))


def warned(evidence: str, remedy: str) -> Verdict:
    """It works, but worse than it could, or it cannot be known whether it works."""
    return Verdict("warn", short(evidence), short(remedy))


def failed(evidence: str, remedy: str) -> Verdict:
    """It does not work."""
    return Verdict("fail", short(evidence), short(remedy))


def together(verdicts: Iterable[Verdict]) -> Verdict | None:
    """Several verdicts on one subject as one: evidence worst first, the worst one's remedy."""
    ranked = sorted(verdicts, key=lambda verdict: ORDER.index(verdict.result))
    if not ranked:
        return None
    evidence = "; ".join(verdict.evidence for verdict in ranked)
    return Verdict(ranked[0].result, short(evidence), ranked[0].remedy)


def short(text: str) -> str:
    """One line of at most LIMIT characters that a terminal and a database can hold."""
    cut = text[: 4 * LIMIT]
    line = " ".join(values.plain(cut.encode("utf-8", "replace").decode()).split())
    return line if len(line) <= LIMIT and len(cut) == len(text) else f"{line[: LIMIT - 3]}..."
