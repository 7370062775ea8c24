"""One download in a process of its own: `python -m agent.fetch`, job on stdin, progress on stdout.

A process because a library may block for minutes and cannot be cancelled in a thread. It dies with
its agent: when stdin ends, it ends. One writer per source on a node by a kernel lock, which no
crash can leave behind (case D22). Job: {"source", "weights_dir", "reserve_bytes"}; each line out is
{"bytes_done", "bytes_total"?}, then {"path"} or {"error"}. Started by agent.weights only.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
import sys
import threading
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agent.atomic import write_atomic
from agent.fetch_hf import fetch_hf
from agent.fetch_http import FetchError, fetch_file
from agent.source import NOTE, BadSource, Source, parse_source, read_note

if TYPE_CHECKING:
    from collections.abc import Iterator

PROGRESS_S = 0.5
LOCK_POLL_S = 0.2


def say(**document: Any) -> None:
    """One line to the agent; a closed pipe ends this process."""
    sys.stdout.write(json.dumps({k: v for k, v in document.items() if v is not None}) + "\n")
    sys.stdout.flush()


class Progress:
    """Tells the agent how far a download is, at most twice a second."""

    def __init__(self) -> None:
        self._last = 0.0

    def __call__(self, done: int, total: int | None) -> None:
        """Say it when it is time."""
        now = time.monotonic()
        if now - self._last >= PROGRESS_S:
            self._last = now
            say(bytes_done=done, bytes_total=total)


def folder_bytes(folder: Path) -> int:
    """Bytes of all files below a folder, unfinished ones included."""
    total = 0
    for base, _, names in os.walk(folder):
        for name in names:
            try:
                total += (Path(base) / name).stat().st_size
            except OSError:
                continue  # finished and renamed while we looked
    return total


@contextmanager
def only_writer(folder: Path) -> Iterator[None]:
    """Hold the source's lock; wait for another writer, showing its progress meanwhile."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as file:
        progress = Progress()
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                progress(folder_bytes(folder), None)
                time.sleep(LOCK_POLL_S)
        yield


def room_for(folder: Path, missing: int | None, reserve_bytes: int) -> None:
    """Refuse a download that the disk cannot hold (D23); unknown sizes count as none."""
    free = shutil.disk_usage(folder).free
    if free - (missing or 0) < reserve_bytes:
        need = "an unknown size" if missing is None else f"{missing / 2**30:.2f} GiB"
        raise FetchError(
            f"no space: {need} is still to come, {folder} has {free / 2**30:.2f} GiB free and "
            f"{reserve_bytes / 2**30:.2f} GiB stay reserved; free some or move weights_dir"
        )


def fetch(source: Source, weights_dir: Path, reserve_bytes: int) -> Path:
    """Bring a source's weights here, verified; the file or folder to load."""
    folder = source.folder(weights_dir)
    with only_writer(folder):
        single = source.file_name if source.kind == "http" else source.file
        path = folder / single if single else folder
        if read_note(folder).get("complete") and path.exists():
            return path
        write_note(folder, source, complete=False)

        def room(missing: int | None) -> None:
            room_for(folder, missing, reserve_bytes)

        if source.kind == "http":
            fetch_file(source.url or "", path, source.sha256, room, Progress())
        else:
            fetch_hf(source, folder, room, Progress())
        write_note(folder, source, complete=True)
        return path


def write_note(folder: Path, source: Source, *, complete: bool) -> None:
    """Record whose weights these are; `complete` only after they were verified."""
    note = {"source": source.text, "complete": complete, "bytes": folder_bytes(folder)}
    write_atomic(folder / NOTE, json.dumps(note), mode=0o644)


def _die_with_agent() -> None:
    # The agent writes one line and keeps the pipe open: its end means that the agent is gone.
    while sys.stdin.buffer.read(1):
        pass
    os._exit(1)


def main() -> None:
    """Do one job; exit 0 after {"path"}, 1 after {"error"}."""
    job = json.loads(sys.stdin.buffer.readline())
    threading.Thread(target=_die_with_agent, daemon=True).start()
    try:
        source = parse_source(job["source"])
        path = fetch(source, Path(job["weights_dir"]), job["reserve_bytes"])
    except (FetchError, BadSource) as error:
        say(error=str(error))
    except OSError as error:
        full = " (no space: free some or move weights_dir)" if error.errno == errno.ENOSPC else ""
        say(error=f"{job['source']} cannot be stored: {error}{full}")
    else:
        say(path=str(path))
        os._exit(0)
    os._exit(1)


if __name__ == "__main__":
    main()
