"""Room on a disk for downloads: each claims what it will bring before it starts (case D23).

A claim is a file below `weights_dir/.claims` that its process holds by a kernel lock, so that no
crash leaves one behind. Two downloads that fit alone but not together: the second is refused.
Runs in the child process of agent.fetch.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from contextlib import contextmanager
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from agent.fetch_verify import FetchError, NoRoom

if TYPE_CHECKING:
    from collections.abc import Iterator

CLAIMS = ".claims"


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


def gib(count: int) -> str:
    """Bytes for people."""
    return f"{count / 2**30:.2f} GiB"


class Room:
    """The claim of one download into `folder`, held until `close` or the end of this process."""

    def __init__(self, weights_dir: Path, folder: Path, source: str, reserve_bytes: int) -> None:
        self._claims = weights_dir / CLAIMS
        self._folder, self._source, self._reserve = folder, source, reserve_bytes
        self._file: IO[str] | None = None

    def claim(self, missing: int | None) -> None:
        """Take room for the bytes still to come; FetchError when they do not fit.

        An unknown size claims nothing: `check` ends it before the disk is full.
        """
        with self._one_at_a_time():
            others = list(self._others())
            spoken_for = sum(size for _, size in others)
            free = shutil.disk_usage(self._folder).free
            if free - spoken_for - (missing or 0) < self._reserve:
                raise FetchError(self._refusal(missing, free, others))
            self._write(missing or 0)

    def close(self) -> None:
        """Give the room back that was not used."""
        if self._file is not None:
            self._file.close()

    def check(self, total: int | None) -> None:
        """NoRoom when others have filled the disk meanwhile; a tenth below is still no need.

        `total` is the download's size, None when nobody knows whether it would ever fit.
        """
        free = shutil.disk_usage(self._folder).free
        if free >= self._reserve * 9 // 10:
            return
        have = gib(folder_bytes(self._folder))
        kept = f"{have} of it are kept and it goes on from there"
        gone = f"the {have} that came are removed, as its server does not tell how much it is"
        raise NoRoom(
            f"no space: {self._folder} has {gib(free)} free and {gib(self._reserve)} stay "
            f"reserved, so {self._source} was stopped; {gone if total is None else kept}: "
            "free some or move weights_dir"
        )

    def _refusal(self, missing: int | None, free: int, others: list[tuple[str, int]]) -> str:
        need = "an unknown size" if missing is None else gib(missing)
        busy = ""
        if others:
            names = ", ".join(f"{gib(size)} by {source}" for source, size in others[:5])
            busy = f" of which downloads under way will take {names},"
        return (
            f"no space: {need} is still to come, {self._folder} has {gib(free)} free,{busy} and "
            f"{gib(self._reserve)} stay reserved; free some or move weights_dir"
        )

    @contextmanager
    def _one_at_a_time(self) -> Iterator[None]:
        self._claims.mkdir(parents=True, exist_ok=True)
        with (self._claims / "lock").open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)  # held for milliseconds only
            yield

    def _mine(self) -> Path:
        return self._claims / f"{self._folder.parent.name}--{self._folder.name}.json"

    def _write(self, missing: int) -> None:
        if self._file is None:
            self._file = self._mine().open("a+")
            fcntl.flock(self._file, fcntl.LOCK_EX)
        claim = {"source": self._source, "folder": str(self._folder), "missing": missing}
        self._file.seek(0)
        self._file.truncate()
        self._file.write(json.dumps({**claim, "have": folder_bytes(self._folder)}))
        self._file.flush()

    def _others(self) -> Iterator[tuple[str, int]]:
        """Source and bytes still to come of each other download under way on this disk."""
        device = self._folder.stat().st_dev
        for path in self._claims.glob("*.json"):
            if path == self._mine():
                continue
            claim = _live(path)
            folder = Path(str(claim.get("folder", "")))
            if claim and folder.is_dir() and folder.stat().st_dev == device:
                brought = folder_bytes(folder) - int(claim["have"])
                yield str(claim["source"]), max(0, int(claim["missing"]) - brought)


def _live(path: Path) -> dict[str, Any]:
    """What a claim says while somebody holds it; of a dead process nothing, and the file goes."""
    try:
        with path.open() as file:
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                found = json.load(file)
                return found if isinstance(found, dict) else {}
            path.unlink()
    except (OSError, ValueError):
        pass  # ended while we looked
    return {}
