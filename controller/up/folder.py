"""The state directory of one installation: data, logs, and secrets that only its owner can read."""

from __future__ import annotations

import fcntl
import os
import secrets
import shutil
import stat
from pathlib import Path
from typing import TYPE_CHECKING

import orjson
import psutil

from controller.up import CannotStart

if TYPE_CHECKING:
    from typing import IO

SYSTEM_STATE = Path("/var/lib/llmgw")
ROOM_MIB = 300
"""A fresh Postgres takes 60 MiB; its log of changes and ours grow from there."""


def default_state_dir() -> Path:
    """/var/lib/llmgw for root, else below the user's XDG data directory."""
    if os.geteuid() == 0:
        return SYSTEM_STATE
    base = os.environ.get("XDG_DATA_HOME")  # noqa: TID251 - where data lies is the user's word
    try:
        return Path(base or Path.home() / ".local/share") / "llmgw"
    except RuntimeError:
        raise CannotStart("there is no home folder: name one with --state-dir") from None


class Folder:
    """One state directory, held by a lock as long as this object is open."""

    def __init__(self, path: Path) -> None:
        self.path = path.absolute()
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            for name in ("logs", "run"):
                (self.path / name).mkdir(mode=0o700, exist_ok=True)
            self._lock: IO[str] = (self.path / "run" / "lock").open("a")
        except OSError as error:
            raise CannotStart(
                f"the state directory {self.path} cannot be used: {error.strerror}; "
                "name another one with --state-dir"
            ) from error
        self._alone()
        self._has_room()
        if os.geteuid() == 0:
            # Postgres runs as nobody and must reach its own folder; the secrets are 0600.
            self.path.chmod(0o711)
        else:
            self.path.chmod(0o700)

    def _alone(self) -> None:
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self._lock.close()
            raise CannotStart(
                f"another llmgwctl up runs on {self.path}: stop it first, or name another "
                "--state-dir (and --port, --admin-port)"
            ) from None

    def _has_room(self) -> None:
        free = shutil.disk_usage(self.path).free >> 20
        if free < ROOM_MIB:
            raise CannotStart(
                f"{free} MiB are free where {self.path} lies; at least {ROOM_MIB} MiB are needed. "
                "Free some, or name another place with --state-dir"
            )

    def close(self) -> None:
        """Let others use it."""
        self._lock.close()

    def reachable_for_nobody(self) -> None:
        """As root, Postgres runs as nobody: every folder on the way must let it pass."""
        if os.geteuid() != 0:
            return
        for parent in self.path.parents:
            if not parent.stat().st_mode & stat.S_IXOTH:
                raise CannotStart(
                    f"as root, Postgres runs as the user nobody, who cannot pass {parent}: name "
                    f"another --state-dir (the default is {SYSTEM_STATE}), or a --database-url"
                )

    def read_secret(self, name: str) -> str | None:
        """A secret kept here, or None."""
        try:
            return (self.path / name).read_text().strip() or None
        except FileNotFoundError:
            return None

    def keep_secret(self, name: str, value: str) -> Path:
        """Write a secret readable by its owner only, whole or not at all."""
        path = self.path / name
        part = path.with_name(f".{name}.part")
        with os.fdopen(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
            file.write(value + "\n")
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
        return path

    def installation(self) -> str:
        """Eight hex digits that tell this installation's roles from others' in one Postgres."""
        known = self.read_secret("installation")
        if known is None:
            known = secrets.token_hex(4)
            self.keep_secret("installation", known)
        return known

    def remember_process(self, name: str, pid: int) -> None:
        """Note a child, so that a next run finds it when this one is killed."""
        note = {"pid": pid, "created": psutil.Process(pid).create_time()}
        (self.path / "run" / f"{name}.json").write_bytes(orjson.dumps(note))

    def forget_process(self, name: str) -> None:
        """The child has ended."""
        (self.path / "run" / f"{name}.json").unlink(missing_ok=True)

    def left_over(self, name: str) -> psutil.Process | None:
        """A child that a killed run left behind, or None. The start time guards against reuse."""
        try:
            note = orjson.loads((self.path / "run" / f"{name}.json").read_bytes())
            process = psutil.Process(note["pid"])
            same = abs(process.create_time() - note["created"]) < 1
        except (OSError, ValueError, KeyError, psutil.Error):
            return None
        return process if same else None
