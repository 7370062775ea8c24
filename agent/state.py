"""What the agent must not forget: its shards, the highest generation and the node's secret.

Everything lies below `state_dir`, written to a temporary file, synced and renamed, so that a crash
leaves the old or the new content. One agent holds the folder through a kernel lock, which ends with
its process: no stale lock can stay behind. Called by shards and loop, in worker threads.
"""

from __future__ import annotations

import fcntl
import json
import os
import secrets
import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import structlog

from agent.atomic import write_atomic
from agent.process import Identity

if TYPE_CHECKING:
    from pathlib import Path

VERSION = 1
OLD_LOGS = 50
log = structlog.get_logger()


class StateDirBusy(Exception):
    """Another agent works on this folder."""


@dataclass(slots=True)
class Record:
    """One shard as it lies on disk. `state` is what is; `known` what the database was told last."""

    shard: int
    assignment: dict[str, Any]
    state: str = "assigned"
    known: str = "assigned"
    error: str | None = None
    exit_code: int | None = None
    log_tail: str | None = None
    process: Identity | None = None
    was_running: bool = False
    """It ran when this was written, so it is started again without asking the database."""
    fetch: dict[str, Any] | None = None
    """Progress of its download; not kept on disk."""
    usage: dict[str, float] = field(default_factory=dict)
    """cpu_cores and memory_bytes as measured last; not kept on disk."""
    pids: set[int] = field(default_factory=set)
    """All its processes as seen last; not kept on disk."""
    forgotten: bool = False
    """Nothing of it may be written any more."""

    def to_json(self) -> dict[str, Any]:
        """The part that is kept."""
        p = self.process
        return {
            "version": VERSION,
            "shard": self.shard,
            "assignment": self.assignment,
            "state": self.state,
            "known": self.known,
            "error": self.error,
            "exit_code": self.exit_code,
            "log_tail": self.log_tail,
            "was_running": self.was_running,
            "process": None if p is None else [p.pid, p.start_ticks, p.boot_id],
        }


def record_from(document: dict[str, Any]) -> Record:
    """Read a kept record; raises KeyError, TypeError or ValueError when it is damaged."""
    if document["version"] != VERSION:
        raise ValueError(f"version {document['version']} is not {VERSION}")
    p = document["process"]
    return Record(
        shard=int(document["shard"]),
        assignment=dict(document["assignment"]),
        state=str(document["state"]),
        known=str(document["known"]),
        error=document["error"],
        exit_code=document["exit_code"],
        log_tail=document["log_tail"],
        was_running=bool(document["was_running"]),
        process=None if p is None else Identity(int(p[0]), int(p[1]), str(p[2])),
    )


class StateDir:
    """The agent's folder, held until `close`."""

    def __init__(self, path: Path) -> None:
        """Take the folder; raises StateDirBusy when another agent has it, OSError when not ours."""
        self.path = path.resolve()
        self._writing = threading.Lock()
        for folder in (self.path, self.shards, self.logs, self.run):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._lock = os.open(self.path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            other = os.pread(self._lock, 32, 0).decode(errors="replace").strip()
            os.close(self._lock)
            raise StateDirBusy(
                f"another agent (pid {other or 'unknown'}) works on {self.path}: "
                "stop it first, or give this one its own --state-dir"
            ) from None
        os.ftruncate(self._lock, 0)
        os.pwrite(self._lock, f"{os.getpid()}\n".encode(), 0)

    def close(self) -> None:
        """Let the folder go."""
        os.close(self._lock)

    @property
    def shards(self) -> Path:
        """One JSON file per shard."""
        return self.path / "shards"

    @property
    def logs(self) -> Path:
        """Output of engines."""
        return self.path / "logs"

    @property
    def run(self) -> Path:
        """Working directories of engines."""
        return self.path / "run"

    @property
    def agent_log(self) -> Path:
        """The agent's own log."""
        return self.path / "agent.log"

    def log_of(self, shard: int) -> Path:
        """The log of one shard."""
        return self.logs / f"shard-{shard}.log"

    def run_of(self, shard: int) -> Path:
        """The working directory of one shard."""
        return self.run / f"shard-{shard}"

    def load(self) -> tuple[list[Record], list[str]]:
        """All readable records, and what was wrong with the others, which are set aside (D10)."""
        records: list[Record] = []
        problems: list[str] = []
        for path in sorted(self.shards.glob("*.json")):
            try:
                records.append(record_from(json.loads(path.read_bytes())))
            except (OSError, ValueError, KeyError, TypeError, IndexError) as error:
                aside = path.with_suffix(".bad")
                path.replace(aside)
                problems.append(f"{path} is unreadable ({error!r}) and was moved to {aside.name}")
        return records, problems

    def save(self, record: Record) -> None:
        """Keep a record. The shard's task and the sync may both save it, from two threads."""
        with self._writing:
            if not record.forgotten:
                self._keep(f"shards/{record.shard}.json", json.dumps(record.to_json()))

    def _keep(self, name: str, content: str) -> None:
        # A full disk must not stop a shard or silence the node: what is in memory stays true, and
        # an engine that no file knows is ended as an orphan by the next agent.
        try:
            write_atomic(self.path / name, content)
        except OSError as error:
            log.warning("state not written", file=name, error=str(error))

    def forget(self, record: Record) -> None:
        """Remove a shard's record and working directory; its log stays until it ages out."""
        with self._writing:
            record.forgotten = True
            (self.shards / f"{record.shard}.json").unlink(missing_ok=True)
        folder = self.run_of(record.shard)
        if folder.is_dir() and not any(folder.iterdir()):
            folder.rmdir()

    def remove_old_logs(self) -> None:
        """Keep the newest OLD_LOGS logs of forgotten shards: the last words of what failed."""
        known = {f"shard-{path.stem}.log" for path in self.shards.glob("*.json")}
        old = [path for path in self.logs.glob("*.log") if path.name not in known]
        old.sort(key=lambda path: path.stat().st_mtime)
        for path in old[:-OLD_LOGS]:
            path.unlink(missing_ok=True)
            path.with_name(path.name + ".1").unlink(missing_ok=True)

    def highest_gen(self) -> int | None:
        """The highest generation ever applied, or None."""
        try:
            return int((self.path / "gen").read_text())
        except (FileNotFoundError, ValueError):
            return None

    def save_gen(self, gen: int | None) -> None:
        """Keep the highest generation; None after the node was enrolled anew."""
        if gen is None:
            (self.path / "gen").unlink(missing_ok=True)
        else:
            self._keep("gen", f"{gen}\n")


def node_secret(path: Path) -> str:
    """The node's secret, made at the first call (32 random bytes); Postgres keeps its hash."""
    try:
        found = path.read_text().strip()
    except FileNotFoundError:
        found = ""
    if found:
        return found
    made = secrets.token_urlsafe(32)
    write_atomic(path, made + "\n")
    return made
