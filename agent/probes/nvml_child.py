"""Asks NVML about every GPU and prints facts as JSON lines: `python -m agent.probes.nvml_child`.

A process of its own because a driver call can hang or crash; nvml.py starts it, gives it a deadline
and reads what came before the end. Each fact is one flushed line, so nothing known is lost:

    {"driver": "590.48.01"}  {"cuda": "13.1"}  {"count": 8}
    {"gpu": 3, "field": "power_mw", "begin": true}           printed before each call
    {"gpu": 3, "field": "power_mw", "value": 66920}          a fact
    {"gpu": 3, "field": "power_mw", "failed": "Not Supported", "code": 3}
    {"gpu": 3, "end": true}
    {"pair": [0, 3], "begin": true}  {"pair": [0, 3], "level": 30}  {"pair": [0, 3], "failed": ...}
    {"end": true}    {"absent": "why"}    {"error": "...", "code": 9, "control": "why not"}

Words of a question: `fast` leaves out what does not change; `done=0,1` have answered; `broken=3`
must not be touched; `skip=4:fabric` and `pairs=0:1` leave out what a child died of before.
`--serve` answers such lines from standard input until that closes; a full question opens the driver
anew, so that a card more or less is seen. `--events` waits for XIDs (nvml_watch.py).
"""

from __future__ import annotations

import json
import os
import sys
from typing import TYPE_CHECKING, Any, Final

from agent.probes import nvml_watch
from agent.probes.nvml_fields import FAST, SLOW
from agent.probes.nvml_slices import text

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

LIBRARY_NOT_FOUND: Final = 12
CONTROL: Final = "/dev/nvidiactl"
"""Opened to tell a process without access from a driver in trouble; opening it wakes no card."""


def emit(**fact: object) -> None:
    """One JSON line, out at once: the next call may be the last."""
    sys.stdout.write(json.dumps(fact) + "\n")
    sys.stdout.flush()


class Question:
    """What is asked, and what to keep away from."""

    def __init__(self, words: Iterable[str]) -> None:
        sides = dict(word.split("=", 1) for word in words if "=" in word)
        self.fast: Final = "fast" in words
        self.broken: Final = frozenset(_numbers(sides.get("broken", "")))
        self.done: Final = frozenset(_numbers(sides.get("done", ""))) | self.broken
        self.skip: Final = frozenset(sides.get("skip", "").split(","))
        self.pairs: Final = frozenset(sides.get("pairs", "").split(","))

    def fields(self, index: int) -> dict[str, Callable[[Any, Any], object]]:
        """The readers for one card."""
        wanted = FAST if self.fast else {**FAST, **SLOW}
        return {name: read for name, read in wanted.items() if f"{index}:{name}" not in self.skip}


def _numbers(words: str) -> list[int]:
    return [int(word) for word in words.split(",") if word.isdecimal()]


def told(error: Exception) -> dict[str, object]:
    """An error as facts; one of the binding itself has no code."""
    return {"failed": str(error)[:200], "code": getattr(error, "value", None)}


def card(nvml: Any, index: int, fields: dict[str, Callable[[Any, Any], object]]) -> bool:
    """All fields of one card, each on its own; False without a handle, when only that is told."""
    handle: list[Any] = []
    calls = {"handle": lambda n, _: handle.append(n.nvmlDeviceGetHandleByIndex(index)), **fields}
    for field, read in calls.items():
        emit(gpu=index, field=field, begin=True)
        try:
            value = read(nvml, handle[0] if handle else None)
        except Exception as error:  # a broken binding must cost its own field only
            emit(gpu=index, field=field, **told(error))
            if field == "handle":
                break
            continue
        emit(gpu=index, field=field, value=value)
    emit(gpu=index, end=True)
    return bool(handle)


def topology(nvml: Any, indices: list[int], skip: frozenset[str]) -> None:
    """How each two cards reach each other: NVML's number of what they have in common."""
    for at, first in enumerate(indices):
        for second in indices[at + 1 :]:
            if f"{first}:{second}" in skip:
                continue
            pair = [first, second]
            emit(pair=pair, begin=True)
            try:
                one, two = (nvml.nvmlDeviceGetHandleByIndex(index) for index in pair)
                level = nvml.nvmlDeviceGetTopologyCommonAncestor(one, two)
            except Exception as error:  # a lost card costs its own pairs
                emit(pair=pair, **told(error))
                continue
            emit(pair=pair, level=level)


def cuda(nvml: Any) -> str:
    """The newest CUDA the driver serves: 13010 is 13.1."""
    number = int(nvml.nvmlSystemGetCudaDriverVersion_v2())
    return f"{number // 1000}.{number % 1000 // 10}"


SYSTEM: dict[str, Callable[[Any], str]] = {
    "driver": lambda nvml: text(nvml.nvmlSystemGetDriverVersion()),
    "cuda": cuda,
}


class Driver:
    """NVML opened once for many fast questions."""

    def __init__(self, nvml: Any) -> None:
        self.nvml = nvml
        self.count: int | None = None

    def answer(self, words: list[str]) -> None:
        """Answer one question. After an error the parent starts anew, which loads the library."""
        question = Question(words)
        try:
            count = self._open(question.fast)
        except self.nvml.NVMLError as error:
            refuse(error)
            return
        emit(count=count)
        for name, read in SYSTEM.items():
            try:
                emit(**{name: read(self.nvml)})
            except Exception as error:  # as in card()
                emit(**{f"{name}_failed": str(error)[:200], "code": getattr(error, "value", None)})
        asked = [index for index in range(count) if index not in question.done]
        reached = [card(self.nvml, index, question.fields(index)) for index in asked]
        if asked and not any(reached):
            emit(control=control())
        if not question.fast:
            whole = [index for index in range(count) if index not in question.broken]
            topology(self.nvml, whole, question.pairs)
        emit(end=True)

    def _open(self, fast: bool) -> int:
        if self.count is not None and not fast:
            self.nvml.nvmlShutdown()
            self.count = None
        if self.count is None:
            self.nvml.nvmlInit()
            self.count = int(self.nvml.nvmlDeviceGetCount())
        return self.count


def refuse(error: Any) -> None:
    """Why there is no answer, and whether this process may open the driver's control device."""
    if error.value == LIBRARY_NOT_FOUND:
        emit(absent=str(error), code=error.value)
    else:
        emit(error=str(error), code=error.value, control=control())


def control() -> str | None:
    """Why the control device cannot be opened; None when it can."""
    try:
        os.close(os.open(CONTROL, os.O_RDWR))
    except OSError as error:
        return error.strerror or str(error)
    return None


def main(arguments: list[str]) -> None:
    """Entry of the child process."""
    try:
        import pynvml
    except ImportError as error:
        emit(absent=str(error))
        return
    if "--events" in arguments:
        nvml_watch.watch(pynvml, emit, refuse)
        return
    driver = Driver(pynvml)
    if "--serve" not in arguments:
        driver.answer(arguments)
        return
    for line in sys.stdin:
        driver.answer(line.split())


if __name__ == "__main__":
    main(sys.argv[1:])
