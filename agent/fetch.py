"""One download in a process of its own: `python -m agent.fetch`, job on stdin, progress on stdout.

A process because a library may block for minutes and cannot be cancelled in a thread. It dies with
its agent: when stdin ends, it ends. One writer per source on a node by a kernel lock, which no
crash can leave behind (case D22). Job: {"source", "weights_dir", "reserve_bytes",
"hf_token_file"?}, by stdin because arguments can be read by every user; each line out is
{"bytes_done", "bytes_total"?}, then {"path"} or {"error"}. Started by agent.weights only.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import sys
import threading
import time
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agent.atomic import write_atomic
from agent.fetch_hf import fetch_hf
from agent.fetch_http import fetch_file
from agent.fetch_room import Room, folder_bytes
from agent.fetch_s3 import fetch_s3
from agent.fetch_verify import Brought, Checksum, FetchError
from agent.source import NOTE, BadSource, Source, complete_path, parse_source

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

PROGRESS_S = 0.5
LOCK_POLL_S = 0.2


def say(**document: Any) -> None:
    """One line to the agent; a closed pipe ends this process."""
    sys.stdout.write(json.dumps({k: v for k, v in document.items() if v is not None}) + "\n")
    sys.stdout.flush()


class Progress:
    """Tells the agent how far a download is, at most twice a second; `check` may end it then."""

    def __init__(self, check: Callable[[int | None], None] | None = None) -> None:
        self._last = 0.0
        self._check = check

    def __call__(self, done: int, total: int | None) -> None:
        """Say it when it is time."""
        now = time.monotonic()
        if now - self._last >= PROGRESS_S:
            self._last = now
            say(bytes_done=done, bytes_total=total)
            if self._check is not None:
                self._check(total)


@contextmanager
def only_writer(folder: Path) -> Iterator[None]:
    """Hold the source's lock; wait for another writer, showing its progress meanwhile."""
    progress = Progress()
    while True:
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / "lock").open("w") as file:
            while not _locked(file.fileno()):
                progress(folder_bytes(folder), None)
                time.sleep(LOCK_POLL_S)
            if _is_there(folder / "lock", file.fileno()):
                yield
                return
        # The weights were removed while we waited (agent.weights_collect), the lock with them.


def _locked(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _is_there(path: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(path.stat(), os.fstat(descriptor))
    except OSError:
        return False


def fetch(
    source: Source, weights_dir: Path, reserve_bytes: int, hf_token_file: Path | None = None
) -> Path:
    """Bring a source's weights here, verified; the file or folder to load."""
    folder = source.folder(weights_dir)
    with only_writer(folder):
        if (path := complete_path(source, folder)) is not None:
            return path
        write_note(folder, source, None)
        with closing(Room(weights_dir, folder, source.text, reserve_bytes)) as room:
            brought = _bring(source, folder, room, hf_token_file)
        write_note(folder, source, brought)
        path = complete_path(source, folder)
        if path is None:
            raise FetchError(f"{source.text} was changed by somebody in {folder} as it came")
        return path


def _bring(source: Source, folder: Path, room: Room, hf_token_file: Path | None) -> Brought:
    progress = Progress(room.check)
    if source.kind == "s3":
        return fetch_s3(source, folder, room.claim, progress)
    if source.kind == "hf":
        return fetch_hf(source, folder, hf_token_file, room.claim, progress)
    name = source.file_name
    checksum = Checksum("sha256", source.sha256) if source.sha256 else None
    word = fetch_file(source.url or "", folder / name, checksum, room.claim, progress)
    return Brought({name: word}, name)


def write_note(folder: Path, source: Source, brought: Brought | None) -> None:
    """Record whose weights these are; complete only when all that was `brought` is verified."""
    note: dict[str, Any] = {"source": source.text, "complete": brought is not None}
    note["bytes"] = folder_bytes(folder)
    if brought is not None:
        note["files"] = {
            name: {"bytes": (folder / name).stat().st_size, "verified": word}
            for name, word in sorted(brought.files.items())
        }
        note |= {"file": brought.single} if brought.single else {}
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
        token_file = job.get("hf_token_file")
        path = fetch(
            source,
            Path(job["weights_dir"]),
            job["reserve_bytes"],
            None if token_file is None else Path(token_file),
        )
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
