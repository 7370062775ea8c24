"""Memory of the processes that a benchmark starts, sampled while it runs.

Their own memory only: mapped files, as those of the spool, grow and go with what is in them.
"""

from __future__ import annotations

import threading
from statistics import median
from typing import TYPE_CHECKING, Self

from ops.benchmarks import processes

if TYPE_CHECKING:
    from collections.abc import Callable

EVERY_S = 2.0
SETTLED = 0.2
"""This share of the samples comes first and is left out: caches fill, pools are made."""
EDGE = 0.1
"""Compared are the medians of this share at the beginning and at the end of the rest."""


class Growth:
    """Samples the memory of our processes that `wanted` picks by their command, in a thread."""

    def __init__(self, wanted: Callable[[str], bool]) -> None:
        self.mib: list[float] = []
        self._wanted = wanted
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._ended.wait(EVERY_S):
            seen = [pid for path in processes.PROC.iterdir() if (pid := _number(path.name))]
            ours = [pid for pid in seen if self._wanted(processes.command(pid))]
            sizes = [processes.rss_mib(pid, "RssAnon") for pid in ours]
            known = [size for size in sizes if size is not None]
            if known:
                self.mib.append(sum(known))


def _number(name: str) -> int | None:
    return int(name) if name.isdecimal() else None


def edges(mib: list[float]) -> tuple[float, float] | None:
    """Memory at the beginning and at the end of a run, once it had settled; None: too short."""
    settled = mib[int(len(mib) * SETTLED) :]
    width = int(len(settled) * EDGE)
    if width < 1:
        return None
    return median(settled[:width]), median(settled[-width:])
