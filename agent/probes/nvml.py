"""GPUs through NVML, asked by a child process that may hang or crash at any card.

Called by inventory.py. A card at which the child ended is reported unhealthy with what it did
answer, and the child is started again for the cards after it: a broken card costs itself only
(case E07), a question that is not vital only itself. The deadline is for all starts together.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Final

import trio

import agent
from agent.probes import nvml_card, values
from agent.probes.card import Gpu, Gpus
from agent.probes.conversation import Conversation
from agent.probes.nvml_facts import MAX_GPUS, Answers, parse
from agent.probes.nvml_links import with_paths
from agent.probes.nvml_trouble import explain
from agent.probes.root import bounded

if TYPE_CHECKING:
    from collections.abc import Sequence

    from agent.probes.root import Root, ToolResult

CHILD: Final = (sys.executable, "-P", "-m", "agent.probes.nvml_child")
HOME: Final = Path(agent.__file__).resolve().parent.parent
TIMEOUT_S: Final = 30.0
RUN_TIMEOUT_S: Final = 10.0
"""One start of the child: waking eight cards without the persistence daemon takes seconds."""
FAST_TIMEOUT_S: Final = 8.0
FAST_RUN_TIMEOUT_S: Final = 3.0
"""A running child answers in milliseconds; time for a new one after a card has hung is in it."""
MAX_RUNS: Final = 8
LOADED: Final = "/proc/driver/nvidia/version"


def gpus(answers: Answers, *, loaded: bool) -> Gpus:
    """The cards, from whatever has been answered; `loaded`: whether the kernel has the driver."""
    why = explain(answers, loaded=loaded)
    out_of_reach = why is not None and answers.error is None
    indices = () if out_of_reach else sorted(answers.facts)
    cards = [nvml_card.card(index, answers) for index in indices]
    if cards and not answers.ended:
        cards += _not_reached(answers, why)
    return Gpus(
        cards=with_paths(cards, answers.levels),
        driver_version=values.version(answers.driver),
        cuda_version=values.version(answers.cuda),
        error="; ".join(([why] if why else []) + answers.notes) or None,
        source="nvml" if cards else None,
    )


def _not_reached(answers: Answers, why: str | None) -> list[Gpu]:
    """Cards that the driver counts and nobody came to ask: they are not lost."""
    left = set(range(min(answers.count or 0, MAX_GPUS))) - answers.facts.keys()
    problem = f"unreachable: not asked: {why or 'NVML ended before'}"
    return [Gpu(index=index, problems=(problem,)) for index in sorted(left)]


async def read(
    root: Root,
    *,
    fast: bool = False,
    child: Sequence[str] | Conversation = CHILD,
    timeout_s: float | None = None,
    run_timeout_s: float | None = None,
) -> tuple[Gpus, bool]:
    """All cards, and whether NVML is there at all (False: try nvidia-smi).

    `fast` tells UUID, address, name, memory, load, temperature, power, throttling and processes
    only. `child` is a program to start for this question, or a conversation with one that stays.
    Takes at most `timeout_s` seconds and `run_timeout_s` for each start of the child; without them
    the limits above.
    """
    timeout_s = timeout_s or (FAST_TIMEOUT_S if fast else TIMEOUT_S)
    run_timeout_s = run_timeout_s or (FAST_RUN_TIMEOUT_S if fast else RUN_TIMEOUT_S)
    answers = Answers()
    deadline = trio.current_time() + timeout_s
    for _ in range(MAX_RUNS):
        left = min(run_timeout_s, deadline - trio.current_time())
        if left <= 0:
            answers.error = answers.error or f"not all GPUs answered within {timeout_s:g} s"
            break
        result = await _ask(root, child, answers.words(fast), left)
        answers.take(result.stdout)
        if answers.ended or answers.absent or answers.error or not _blame(answers, result):
            break
    else:
        answers.error = f"not all GPUs asked: the probe ended early {MAX_RUNS} times"
    if isinstance(child, Conversation) and (answers.absent or answers.error or answers.stale):
        await child.end()  # after a driver upgrade only a new process loads the right library
    loaded = await bounded(lambda: root.exists(LOADED), key="driver version", timeout_s=2)
    found = gpus(answers, loaded=bool(loaded))
    return found, not answers.absent and (found.error is None or bool(found.cards))


async def _ask(
    root: Root, child: Sequence[str] | Conversation, words: list[str], left: float
) -> ToolResult:
    if isinstance(child, Conversation):
        return await child.ask(" ".join(words), left, _is_last)
    return await root.run([*child, *words], left, cwd=HOME)


def converse(child: Sequence[str] = CHILD) -> Conversation:
    """A child that stays for many questions; started by the first. Use with `async with`."""
    return Conversation([*child, "--serve"], HOME)


def _is_last(line: str) -> bool:
    fact = parse(line) or {}
    ends = fact.get("end") is True or "absent" in fact or "error" in fact
    return ends and "gpu" not in fact


def _blame(answers: Answers, result: ToolResult) -> bool:
    """Put the end of a child down to what it was asking; False when that was no card."""
    if result.exit_code is None and not result.timed_out:
        answers.error = str(result.error)  # it was never started
        return False
    how = "hung" if result.timed_out else f"crashed ({result.error or 'no reason given'})"
    if answers.blame(how):
        return True
    answers.error = f"the probe {how} before or between GPUs"
    return False
