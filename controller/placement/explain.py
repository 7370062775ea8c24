"""Refusals as people read them: a table, a sentence for each cause, one line for each model.

Works on refusals from a plan and on those read back from SQL alike: it reads their fields only.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from controller.placement.reasons import PHRASES, Code

if TYPE_CHECKING:
    from collections.abc import Sequence

    from controller.placement.model import Attempt, Refusal

HEADINGS: Final = ("PROFILE", "POOL", "NODE", "REASON")

_QUALITY: Final = {"GiB": 1024.0, "MiB": 1.0}
_AMOUNT: Final = re.compile(r"(-?\d+(?:\.\d+)?)\s*(GiB|MiB|cores?|cards?)?")
INNATE: Final = frozenset(
    {
        Code.POOL_MISMATCH,
        Code.NODE_EXCLUDED,
        Code.ARCH_MISMATCH,
        Code.CPU_FLAG_MISSING,
        Code.GPU_CLASS,
        Code.GPU_COUNT,
    }
)
"""What a node is. It is no news that a CPU machine has no H100: shown, but the main reason only
when nothing else stands in the way."""


@dataclass(frozen=True, slots=True)
class Cause:
    """One code of one profile over all nodes."""

    profile: str
    code: str
    nodes: int
    of: int
    need: str | None
    best: str | None

    @property
    def sentence(self) -> str:
        """``12 of 14 nodes lack memory (need 160 GiB, best 80 GiB)``."""
        phrase = PHRASES.get(self.code, f"are refused ({self.code})")
        if self.nodes == 0:
            return phrase
        numbers = [f"need {self.need}"] if self.need else []
        numbers += [f"best {self.best}"] if self.best else []
        noun = "1 node" if self.of == 1 else f"{self.of} nodes"
        text = f"{self.nodes} of {noun} {phrase}"
        return f"{text} ({', '.join(numbers)})" if numbers else text


def table(refusals: Sequence[Refusal]) -> list[tuple[str, str, str, str]]:
    """Rows under `HEADINGS`, in the order in which they were found; ``-`` is none."""
    return [(r.profile or "-", r.pool or "-", r.node or "-", r.reason) for r in refusals]


def causes(refusals: Sequence[Refusal]) -> list[Cause]:
    """What stood in the way, profile by profile; within one the most common first."""
    groups: dict[tuple[str, str], list[Refusal]] = {}
    nodes: dict[str, set[str]] = {}
    for refusal in refusals:
        groups.setdefault((refusal.profile, refusal.code), []).append(refusal)
        if refusal.node is not None:
            nodes.setdefault(refusal.profile, set()).add(refusal.node)
    order = {profile: place for place, profile in enumerate(dict.fromkeys(p for p, _ in groups))}
    found = [
        _cause(profile, code, members, len(nodes.get(profile, ())))
        for (profile, code), members in groups.items()
    ]
    return sorted(found, key=lambda c: (order[c.profile], -c.nodes, c.code))


def main_cause(refusals: Sequence[Refusal]) -> Cause | None:
    """The cause whose removal opens most nodes: the only obstacle of a node counts first.

    View `llmgw.placements` chooses in the same way.
    """
    per_node: dict[tuple[str, str | None], set[str]] = {}
    for refusal in refusals:
        per_node.setdefault((refusal.profile, refusal.node), set()).add(refusal.code)
    alone: dict[tuple[str, str], int] = {}
    for (profile, _), codes in per_node.items():
        if len(codes) == 1:
            key = (profile, next(iter(codes)))
            alone[key] = alone.get(key, 0) + 1
    # Where every node lacks by nature what is needed, that is the news, and not who uses it now.
    able = any(INNATE.isdisjoint(codes) for codes in per_node.values())
    return min(
        causes(refusals),
        key=lambda c: (
            able and c.code in INNATE,
            -alone.get((c.profile, c.code), 0),
            -c.nodes,
            not c.code.startswith("node_"),  # one that may not be used says more than what it lacks
            c.code.endswith("_unknown"),
        ),
        default=None,
    )


def main_reason(attempt: Attempt) -> str | None:
    """One line for the model in `llmgwctl status`; None when it has its place."""
    if attempt.placed:
        return None
    cause = main_cause(attempt.refusals)
    return cause.sentence if cause else "nothing was refused and nothing was free"


def sentence(attempt: Attempt) -> str:
    """The whole state of a model's placement in one sentence, with the next step."""
    if attempt.placed and not attempt.refusals:
        return f"replica of {attempt.model} placed, nothing rejected"
    if attempt.placed:
        count = len({r.profile for r in attempt.refusals})
        noun = "preferred profile" if count == 1 else "preferred profiles"
        return f"replica of {attempt.model} placed, {count} {noun} rejected along the way"
    return (
        f"replica of {attempt.model} not placed: {main_reason(attempt)}; "
        f"see llmgwctl explain-placement {attempt.model}"
    )


def _cause(profile: str, code: str, members: Sequence[Refusal], of: int) -> Cause:
    nodes = len({r.node for r in members if r.node is not None})
    measured = [(amount, r.have) for r in members if r.have and (amount := _amount(r)) is not None]
    best = max(measured)[1] if measured else None
    needs = {r.need for r in members}
    return Cause(profile, code, nodes, of, members[0].need if len(needs) == 1 else None, best)


def _amount(refusal: Refusal) -> float | None:
    """The number that ``have`` begins with, when ``need`` begins with one of its kind."""
    if not refusal.need or not _AMOUNT.match(refusal.need):
        return None
    found = _AMOUNT.match(refusal.have or "")
    return float(found[1]) * _QUALITY.get(found[2] or "", 1.0) if found else None
