"""GPUs through NVML, asked by a child process that may hang or crash at any card.

Called by inventory.py. A card at which the child ended is reported unhealthy with what it did
answer, and the child is started again for the cards after it: a broken card costs itself only
(case E07). The deadline is for all starts together.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import trio

import agent
from agent.probes import values
from agent.probes.card import Gpu, Gpus, Process
from agent.probes.conversation import Conversation
from agent.probes.smi import plannable

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from agent.probes.root import Root, ToolResult

CHILD: Final = (sys.executable, "-m", "agent.probes.nvml_child")
HOME: Final = Path(agent.__file__).resolve().parent.parent
TIMEOUT_S: Final = 30.0
RUN_TIMEOUT_S: Final = 10.0
"""One start of the child: waking eight cards without the persistence daemon takes seconds."""
FAST_TIMEOUT_S: Final = 8.0
FAST_RUN_TIMEOUT_S: Final = 3.0
"""A running child answers in milliseconds; time for a new one after a card has hung is in it."""
MAX_RUNS: Final = 8
MAX_GPUS: Final = 256
GPU_IS_LOST: Final = 15
RESET_REQUIRED: Final = 16
UNKNOWN: Final = 999
TIMEOUT: Final = 10
_BROKEN: Final = frozenset({GPU_IS_LOST, RESET_REQUIRED, UNKNOWN, TIMEOUT})
"""NVML codes that say something about the card; all others are about the question."""


@dataclass(slots=True)
class Answers:
    """What children have said so far: facts and failures by card, and where the last one stood."""

    facts: dict[int, dict[str, Any]] = field(default_factory=dict)
    problems: dict[int, list[str]] = field(default_factory=dict)
    done: set[int] = field(default_factory=set)
    driver: str | None = None
    cuda: str | None = None
    error: str | None = None
    absent: bool = False
    ended: bool = False
    at: tuple[int, str] | None = None

    def take(self, text: str) -> None:
        """Add the lines a child printed; lines that are none of ours are passed over."""
        self.at = None
        for line in text.splitlines():
            try:
                fact = json.loads(line)
            except (ValueError, RecursionError):
                continue
            if isinstance(fact, dict):
                self._take(fact)

    def _take(self, fact: Mapping[str, Any]) -> None:
        index = fact.get("gpu")
        if type(index) is int and 0 <= index < MAX_GPUS:  # True is an int as well
            self._take_card(index, fact)
            return
        self.ended = self.ended or fact.get("end") is True
        self.absent = self.absent or "absent" in fact
        for name in ("driver", "cuda", "error"):
            if isinstance(value := fact.get(name), str):
                setattr(self, name, value)

    def _take_card(self, index: int, fact: Mapping[str, Any]) -> None:
        facts = self.facts.setdefault(index, {})
        name = str(fact.get("field"))
        if fact.get("end") is True:
            self.done.add(index)
            self.at = None
        elif fact.get("begin") is True:
            self.at = (index, name)
        elif "failed" in fact:
            code = fact.get("code")
            if (isinstance(code, int) and code in _BROKEN) or name == "handle":
                self.note(index, f"driver says {str(fact['failed'])[:100]!r} for {name}")
        else:
            facts[name] = fact.get("value")

    def note(self, index: int, problem: str) -> None:
        """Remember what is wrong with a card; a lost one says the same for every field: once."""
        noted = self.problems.setdefault(index, [])
        says = problem.rpartition(" for ")[0] or problem
        if not any(earlier.startswith(says) for earlier in noted):
            noted.append(problem)


def gpus(answers: Answers) -> Gpus:
    """The cards, from whatever has been answered."""
    return Gpus(
        cards=tuple(_card(index, answers) for index in sorted(answers.facts)),
        driver_version=values.version(answers.driver),
        cuda_version=values.version(answers.cuda),
        error=answers.error,
    )


def _card(index: int, answers: Answers) -> Gpu:
    facts = answers.facts[index]
    memory = facts.get("memory")
    memory = memory if isinstance(memory, dict) else {}
    power = _number(facts.get("power_mw"))
    mig = facts.get("mig")
    return Gpu(
        uuid=_word(facts.get("uuid")),
        index=index,
        name=_word(facts.get("name")),
        pci_bus_id=values.pci_bus_id(_word(facts.get("pci_bus_id"))),
        memory_mib=plannable(_mib(memory.get("total")), _mib(memory.get("reserved"))),
        memory_used_mib=_mib(memory.get("used")),
        utilization_percent=_number(facts.get("utilization_percent")),
        temperature_c=_number(facts.get("temperature_c")),
        power_w=power / 1000 if power is not None else None,
        mig=mig if isinstance(mig, bool) else None,
        processes=_processes(facts.get("processes")),
        problems=(*answers.problems.get(index, ()), *_memory_problems(facts)),
    )


def _memory_problems(facts: Mapping[str, Any]) -> list[str]:
    remapped = facts.get("remapped")
    remapped = remapped if isinstance(remapped, dict) else {}
    errors = facts.get("uncorrectable")
    found = []
    if remapped.get("pending") is True:
        found.append("memory row remap pending: reset the GPU")
    if remapped.get("failed") is True:
        found.append("memory row remap failed: replace the GPU")
    if facts.get("retirement_pending") is True:
        found.append("memory page retirement pending: reset the GPU")
    if isinstance(errors, int) and errors > 0:
        found.append(
            f"{errors} uncorrectable ECC errors since the driver was loaded: reset the GPU"
        )
    return found


def _word(value: object) -> str | None:
    return value if isinstance(value, str) and values.reason(value) is None else None


def _number(value: object) -> float | None:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if number and 0 <= value < 1e9 else None  # type: ignore[arg-type,operator]


def _mib(value: object) -> int | None:
    """Bytes to MiB. NVML writes 2**64-1 for "not available"."""
    return value // 2**20 if isinstance(value, int) and 0 <= value < 2**60 else None


def _processes(value: object) -> tuple[Process, ...] | None:
    if not isinstance(value, list):
        return None
    pairs = [pair for pair in value if isinstance(pair, list) and len(pair) == 2]
    return tuple(Process(pid, _mib(used)) for pid, used in pairs if isinstance(pid, int))


async def read(
    root: Root,
    *,
    fast: bool = False,
    child: Sequence[str] | Conversation = CHILD,
    timeout_s: float | None = None,
    run_timeout_s: float | None = None,
) -> tuple[Gpus, bool]:
    """All cards, and whether NVML is there at all (False: try nvidia-smi).

    `fast` leaves out names and memory health. `child` is a program to start for this question, or a
    conversation with one that stays. Takes at most `timeout_s` seconds and `run_timeout_s` for each
    start of the child; without them the limits above.
    """
    timeout_s = timeout_s or (FAST_TIMEOUT_S if fast else TIMEOUT_S)
    run_timeout_s = run_timeout_s or (FAST_RUN_TIMEOUT_S if fast else RUN_TIMEOUT_S)
    answers = Answers()
    deadline = trio.current_time() + timeout_s
    for _ in range(MAX_RUNS):
        left = min(run_timeout_s, deadline - trio.current_time())
        if left <= 0:
            answers.error = answers.error or f"NVML: not all GPUs answered within {timeout_s:g} s"
            break
        skip = ",".join(str(index) for index in sorted(answers.done))
        words = [word for word in ("fast" if fast else "", skip) if word]
        if isinstance(child, Conversation):
            result = await child.ask(" ".join(words), left, _is_last)
        else:
            result = await root.run([*child, *words], left, cwd=HOME)
        answers.take(result.stdout)
        if answers.ended or answers.absent or answers.error or not _blame(answers, result):
            break
    if isinstance(child, Conversation) and (answers.absent or answers.error):
        await child.end()  # after a driver upgrade only a new process loads the right library
    return gpus(answers), not answers.absent and (answers.error is None or bool(answers.facts))


def converse(child: Sequence[str] = CHILD) -> Conversation:
    """A child that stays for many questions; started by the first. Use with `async with`."""
    return Conversation([*child, "--serve"], HOME)


def _is_last(line: str) -> bool:
    try:
        fact = json.loads(line)
    except (ValueError, RecursionError):
        return False
    ends = isinstance(fact, dict) and "gpu" not in fact
    return ends and (fact.get("end") is True or "absent" in fact or "error" in fact)


def _blame(answers: Answers, result: ToolResult) -> bool:
    """Put the end of a child down to the card it was asking; False when it was asking none."""
    if result.exit_code is None and not result.timed_out:
        answers.error = f"NVML: {result.error}"  # it was never started
        return False
    how = "hung" if result.timed_out else f"crashed ({result.error or 'no reason given'})"
    if answers.at is None:
        answers.error = f"NVML: the probe {how} before or between GPUs"
        return False
    index, name = answers.at
    answers.note(index, f"driver {how} when asked for {name}")
    answers.done.add(index)
    return True
