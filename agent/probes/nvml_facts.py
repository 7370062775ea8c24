"""What NVML's child has said so far, as facts by card, whatever it prints. Pure.

Called by nvml.py, which starts the child again after a crash and adds to the same answers; read by
nvml_card.py. Lines that are none of ours are passed over.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Mapping

MAX_GPUS: Final = 256
NOT_SUPPORTED: Final = 3
NO_PERMISSION: Final = 4
TIMEOUT: Final = 10
DRIVER_NOT_LOADED: Final = 9
GPU_IS_LOST: Final = 15
RESET_REQUIRED: Final = 16
MISMATCH: Final = 18
UNKNOWN: Final = 999
_LOST: Final = frozenset({GPU_IS_LOST, RESET_REQUIRED})
_BROKEN: Final = _LOST | {UNKNOWN, TIMEOUT}
"""NVML codes that say something about the card; all others are about the question."""
_STALE: Final = frozenset({1, MISMATCH})
"""Not initialised, or another driver than the library's: only a new process gets further."""
ASIDE: Final = frozenset(
    {
        "fabric",
        "nvlinks",
        "slices",
        "recovery_action",
        "addressing",
        "c2c",
        "bus_type",
        "numa",
        "numa_memory",
        "cpu_affinity",
    }
)
"""Fields that depend on more than the card. An unknown error, a hang or a crash in one of them
costs that field; a card can serve without it (case E16)."""


@dataclass(slots=True)
class Answers:
    """Facts and failures by card, and where the last child stood when it ended."""

    facts: dict[int, dict[str, Any]] = field(default_factory=dict)
    codes: dict[int, dict[str, int]] = field(default_factory=dict)
    problems: dict[int, list[str]] = field(default_factory=dict)
    levels: dict[tuple[int, int], int] = field(default_factory=dict)
    done: set[int] = field(default_factory=set)
    broken: set[int] = field(default_factory=set)
    skip: set[str] = field(default_factory=set)
    skip_pairs: set[str] = field(default_factory=set)
    notes: list[str] = field(default_factory=list)
    driver: str | None = None
    cuda: str | None = None
    error: str | None = None
    error_code: int | None = None
    control: str | None = None
    count: int | None = None
    absent: bool = False
    stale: bool = False
    ended: bool = False
    at: tuple[int, str] | None = None
    at_pair: tuple[int, int] | None = None

    def take(self, text: str) -> None:
        """Add the lines a child printed."""
        self.at = self.at_pair = None
        for line in text.splitlines():
            if (fact := parse(line)) is not None:
                self._take(fact)

    def words(self, fast: bool) -> list[str]:
        """The question for what is not known yet."""
        sides = {
            "done": ",".join(str(index) for index in sorted(self.done)),
            "broken": ",".join(str(index) for index in sorted(self.broken)),
            "skip": ",".join(sorted(self.skip)),
            "pairs": ",".join(sorted(self.skip_pairs)),
        }
        given = [f"{name}={value}" for name, value in sides.items() if value]
        return [*(["fast"] if fast else []), *given]

    def note(self, index: int, problem: str) -> None:
        """Remember what is wrong with a card; a lost one says the same for every field: once."""
        noted = self.problems.setdefault(index, [])
        says = problem.rpartition(" for ")[0] or problem
        if not any(earlier.startswith(says) for earlier in noted):
            noted.append(problem)

    def blame(self, how: str) -> bool:
        """Put the end of a child down to what it was asking; False when it was asking nothing."""
        if self.at_pair is not None:
            first, second = self.at_pair
            self.skip_pairs.add(f"{first}:{second}")
            self.notes.append(f"driver {how} when asked for the path of GPUs {first} and {second}")
        elif self.at is None:
            return False
        elif self.at[1] in ASIDE:
            index, name = self.at
            self.skip.add(f"{index}:{name}")
            self.notes.append(f"driver {how} when asked for {name} of GPU {index}")
        else:
            index, name = self.at
            self.note(index, f"driver {how} when asked for {name}")
            self.broken.add(index)
        return True

    def _take(self, fact: Mapping[str, Any]) -> None:
        self.stale = self.stale or _code(fact) in _STALE
        if (index := card_index(fact.get("gpu"))) is not None:
            self._take_card(index, fact)
        elif "pair" in fact:
            self._take_pair(fact)
        else:
            self._take_system(fact)

    def _take_system(self, fact: Mapping[str, Any]) -> None:
        self.ended = self.ended or fact.get("end") is True
        self.absent = self.absent or "absent" in fact
        for name in ("driver", "cuda", "error", "control"):
            if isinstance(value := fact.get(name), str):
                setattr(self, name, value[:200])
        if type(count := fact.get("count")) is int:
            self.count = count
        if self.error is not None and (code := _code(fact)) is not None:
            self.error_code = code

    def _take_card(self, index: int, fact: Mapping[str, Any]) -> None:
        facts = self.facts.setdefault(index, {})
        name = str(fact.get("field"))[:40]
        if fact.get("end") is True:
            self.done.add(index)
            self.at = None
        elif fact.get("begin") is True:
            self.at = (index, name)
        elif "failed" in fact:
            self._take_failure(index, name, fact)
        else:
            facts[name] = fact.get("value")

    def _take_failure(self, index: int, name: str, fact: Mapping[str, Any]) -> None:
        code = _code(fact)
        if code is not None:
            self.codes.setdefault(index, {})[name] = code
        if name == "handle" or code in (_LOST if name in ASIDE else _BROKEN):
            lost = "lost: " if code == GPU_IS_LOST else ""
            self.note(index, f"{lost}driver says {str(fact['failed'])[:100]!r} for {name}")

    def _take_pair(self, fact: Mapping[str, Any]) -> None:
        pair = fact["pair"]
        indices = [card_index(index) for index in pair] if isinstance(pair, list) else []
        if len(indices) != 2 or indices[0] is None or indices[1] is None:
            return
        self.at = None
        self.at_pair = (indices[0], indices[1]) if fact.get("begin") is True else None
        if isinstance(level := fact.get("level"), int):
            self.levels[indices[0], indices[1]] = level


def _code(fact: Mapping[str, Any]) -> int | None:
    code = fact.get("code")
    return code if type(code) is int else None


def parse(line: str) -> dict[str, Any] | None:
    """A line as an object; None when it is none."""
    try:
        fact = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return fact if isinstance(fact, dict) else None


def card_index(value: object) -> int | None:
    """A card's number; True is an int as well, but no card."""
    return value if type(value) is int and 0 <= value < MAX_GPUS else None
