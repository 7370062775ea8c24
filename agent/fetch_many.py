"""Bring many files of one source side by side, and tell how far they are.

Runs in the child process of agent.fetch. Called by fetch_hf and fetch_s3.
"""

from __future__ import annotations

from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from typing import TYPE_CHECKING

from agent.fetch_room import folder_bytes
from agent.fetch_verify import FetchError, NoRoom, drop
from agent.source import NOTE

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

WORKERS = 4
"""One connection seldom fills a fast network, and hashing fills one core."""
WATCH_S = 0.5


def bring(
    jobs: Mapping[str, Callable[[], str]],
    folder: Path,
    total: int | None,
    progress: Callable[[int, int | None], None],
) -> dict[str, str]:
    """Run the job of each file; what each answered. The first error is raised at once.

    Jobs that run go on then: this process is about to end. What they brought stays to be resumed.
    """
    pool = ThreadPoolExecutor(WORKERS)
    try:
        named = {pool.submit(job): name for name, job in jobs.items()}
        answers: dict[str, str] = {}
        left = set(named)
        while left:
            done, left = wait(left, timeout=WATCH_S, return_when=FIRST_EXCEPTION)
            for future in done:
                answers[named[future]] = future.result()
            here = folder_bytes(folder)
            progress(here if total is None else min(here, total), total)
        return answers
    except NoRoom:
        if total is None:
            for part in folder.rglob("*.part"):
                drop(part)
        raise
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def total_of(sizes: Mapping[str, int | None]) -> int | None:
    """The sum of all sizes; None when one of them is unknown."""
    known = [size for size in sizes.values() if size is not None]
    return sum(known) if len(known) == len(sizes) else None


def place_of(folder: Path, name: str, what: str) -> Path:
    """Where a file of a source goes, its folder made; FetchError when that is not below ours."""
    parts = name.split("/")
    if any(part in ("", ".", "..") for part in parts) or "\0" in name:
        raise FetchError(f"{what}: the file {name!r} would lie outside of its folder")
    if name in (NOTE, "lock") or name.endswith((".part", ".part.json")):
        raise FetchError(f"{what}: the agent keeps the name {name!r} for itself; rename the file")
    path = folder.joinpath(*parts)
    path.parent.mkdir(parents=True, exist_ok=True)
    return path
