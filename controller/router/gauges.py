"""What an engine's metrics page says of its load: a scan for the few names that matter. Pure.

Names: vLLM and SGLang put labels on them and may have a line per data-parallel rank; llama.cpp
has none and tells nothing of its cache. SGLang tells the same requests again by priority (with
`--enable-priority-scheduling`; their sum has the priority ""), and on each pipeline stage.
"""

from __future__ import annotations

import math
import re
from typing import NamedTuple

MOST_LINES = 1024  # of one name
_RANK = re.compile(rb'[{,]dp_rank="([^"]*)"')


class Reading(NamedTuple):
    """Requests in work and queued, all ranks together; the fullest cache, 0..1, if it is told."""

    running: float
    waiting: float
    kv: float | None


class Names(NamedTuple):
    """One engine's words; some have had two for the same."""

    running: bytes
    waiting: bytes
    kv: tuple[bytes, ...]
    apart: re.Pattern[bytes] | None = None
    """A label by which lines tell of different requests: others with the same one tell of the same
    requests again. None: all lines tell of different ones."""


ENGINES = (
    Names(
        b"vllm:num_requests_running",
        b"vllm:num_requests_waiting",
        (b"vllm:kv_cache_usage_perc", b"vllm:gpu_cache_usage_perc"),
    ),
    Names(b"sglang:num_running_reqs", b"sglang:num_queue_reqs", (b"sglang:token_usage",), _RANK),
    Names(
        b"llamacpp:requests_processing",
        b"llamacpp:requests_deferred",
        (b"llamacpp:kv_cache_usage_ratio",),
    ),
)


def read_page(page: bytes) -> Reading | None:
    """The load that a page in Prometheus' text format tells; None when it has no known name.

    Raises ValueError for a known name with a value that cannot be.
    """
    page = b"\n" + page
    for names in ENGINES:
        running = _values(page, names.running, names.apart)
        if not running:
            continue
        kv = [value for name in names.kv for value in _values(page, name)]
        if kv and max(kv) > 1.0:
            raise ValueError(f"a cache that is {max(kv)} full")
        waiting = _values(page, names.waiting, names.apart)
        return Reading(sum(running), sum(waiting), max(kv) if kv else None)
    return None


def _values(page: bytes, name: bytes, apart: re.Pattern[bytes] | None = None) -> list[float]:
    found: dict[int | bytes, float] = {}
    start = page.find(b"\n" + name)
    for number in range(MOST_LINES):
        if start < 0:
            break
        begin = start + 1 + len(name)
        end = page.find(b"\n", begin)
        line = page[begin : end if end >= 0 else len(page)]
        if line[:1] in (b"{", b" "):  # else a longer name that begins alike
            which: int | bytes = number
            if apart is not None:
                label = apart.search(line)
                which = b"" if label is None else label[1]
            found[which] = max(_value(line), found.get(which, 0.0))
        start = page.find(b"\n" + name, begin)
    return list(found.values())


def _value(line: bytes) -> float:
    words = line.rpartition(b"}")[2].split()
    value = float(words[0]) if words else math.nan
    if not 0.0 <= value < math.inf:
        raise ValueError(f"a value of {value}")
    return value
