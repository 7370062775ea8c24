"""Where built environments lie: `state_dir/engines/NAME-VERSION`, and what is still being built.

The name is a link to `.builds/NAME-VERSION/env-*`, where an environment is built under the path
that it keeps: scripts hold that path. The link is set by a rename when all is whole, so a killed
build leaves nothing that counts; the link's own time is that of its last use. Whoever builds or
removes holds `.builds/NAME-VERSION/lock`, a kernel lock. Called by provision and provision_build.
"""

from __future__ import annotations

import fcntl
import json
import os
import secrets
import shutil
import time
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from agent import procfs
from agent.atomic import write_atomic

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator
    from pathlib import Path

RETRY_S: Final = 600.0
"""A build that failed is not tried again for so long, unless version or settings change."""

_PROGRAMS: Final = {"vllm": "bin/vllm"}


def program_in(prefix: Path, engine: str) -> Path:
    """What starts an engine in an environment; most engines are modules of the interpreter."""
    return prefix / _PROGRAMS.get(engine, "bin/python")


@dataclass(frozen=True, slots=True)
class Failure:
    """A build that failed, for as long as it is not tried again."""

    engine: str
    version: str
    error: str
    again_in_s: float


class Store:
    """The folder `engines` of a node. Every call may block on the disk."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._builds = folder / ".builds"

    def link(self, name: str) -> Path:
        """The path under which an environment is used."""
        return self.folder / name

    def whole(self, name: str) -> bool:
        """Whether the environment is there and its interpreter can be started."""
        return os.access(self.link(name) / "bin" / "python", os.X_OK)

    def names(self) -> list[str]:
        """Environments, the longest unused first."""
        try:
            links = [path for path in self.folder.iterdir() if path.is_symlink()]
        except FileNotFoundError:
            return []
        return [path.name for path in sorted(links, key=_used_at) if not path.name.startswith(".")]

    def used(self, name: str) -> None:
        """Note that it is used now."""
        try:
            os.utime(self.link(name), follow_symlinks=False)
        except OSError:
            pass  # only the order of removal is lost

    @contextmanager
    def locked(self, name: str) -> Iterator[bool]:
        """Hold the lock of an environment if nobody does; tells whether it is held now."""
        place = self._builds / name
        place.mkdir(mode=0o700, parents=True, exist_ok=True)
        with (place / "lock").open("a") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                yield False
            else:
                yield True

    def begin(self, name: str) -> Path:
        """A place to build in, after what killed builds left is removed. The lock is held."""
        self._clean(name)
        place = self._builds / name / f"env-{secrets.token_hex(4)}"
        place.mkdir(mode=0o700)
        return place

    def publish(self, name: str, place: Path) -> Path:
        """Give a whole environment its name. The lock is held."""
        fresh = self._builds / name / "link"
        fresh.unlink(missing_ok=True)
        fresh.symlink_to(os.path.relpath(place, self.folder))
        fresh.replace(self.link(name))
        self.forgive(name)
        return self.link(name)

    def unname(self, name: str) -> bool:
        """Take an environment's name away; `sweep` removes it. False while somebody builds it."""
        with self.locked(name) as held:
            if held:
                self.link(name).unlink(missing_ok=True)
            return held

    def sweep(self) -> None:
        """Remove environments without a name and what killed builds left."""
        if not self._builds.is_dir():
            return
        for place in self._builds.iterdir():
            with self.locked(place.name) as held:
                if held:
                    self._clean(place.name)

    def _clean(self, name: str) -> None:
        used = os.path.realpath(self.link(name))
        for place in (self._builds / name).glob("env-*"):
            if str(place.resolve()) != used:
                # What somebody still writes into it goes with the next sweep.
                shutil.rmtree(place, ignore_errors=True)

    def surplus(self, most: int, in_use: Collection[str]) -> list[str]:
        """Environments beyond the number kept that nobody uses, the longest unused first."""
        found = self.names()
        idle = [name for name in found if name not in in_use]
        return idle[: max(0, len(found) - most)]

    def blame(self, name: str, engine: str, version: str, error: str, digest: str) -> None:
        """Note a failed build. OSError when not even that can be written."""
        place = self._builds / name
        place.mkdir(mode=0o700, parents=True, exist_ok=True)
        note = {"engine": engine, "version": version, "error": error, "digest": digest}
        # Seconds since the boot: no step of a clock makes a failure last for ever.
        note |= {"boot_id": procfs.boot_id(), "at": str(_since_boot_s())}
        write_atomic(place / "failed.json", json.dumps(note))

    def forgive(self, name: str) -> None:
        """Forget a failed build."""
        (self._builds / name / "failed.json").unlink(missing_ok=True)

    def failure(self, name: str, digest: str) -> Failure | None:
        """The failed build that forbids another one now, made with these settings."""
        note = self._note(name)
        if note.get("digest") != digest or note.get("boot_id") != procfs.boot_id():
            return None
        try:
            left_s = float(note["at"]) + RETRY_S - _since_boot_s()
            found = Failure(str(note["engine"]), str(note["version"]), str(note["error"]), left_s)
        except (KeyError, TypeError, ValueError):
            return None
        return found if 0 < left_s <= RETRY_S else None

    def blamed(self) -> list[tuple[str, str, str]]:
        """Name, engine and version of builds that have failed some time."""
        if not self._builds.is_dir():
            return []
        notes = [(place.name, self._note(place.name)) for place in sorted(self._builds.iterdir())]
        return [
            (name, str(note["engine"]), str(note["version"]))
            for name, note in notes
            if "engine" in note and "version" in note
        ]

    def _note(self, name: str) -> dict[str, Any]:
        try:
            note = json.loads((self._builds / name / "failed.json").read_bytes())
        except (OSError, ValueError):
            return {}
        return note if isinstance(note, dict) else {}


def _used_at(link: Path) -> float:
    try:
        return link.lstat().st_mtime
    except OSError:
        return 0.0


def _since_boot_s() -> float:
    return time.clock_gettime(time.CLOCK_BOOTTIME)
