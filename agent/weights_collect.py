"""Removes downloads that no model needs any more: asked by an operator, judged by this node.

The database names paths; what is removed is decided here, by what this agent knows: only whole
folders of its own downloads, none that a live shard names, none that somebody fetches right now.
Called by loop.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import structlog
import trio

from agent.atomic import write_atomic
from agent.source import NOTE, BadSource, Source, parse_source, read_note

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from agent.weights import Weights

KINDS = ("http", "hf", "s3")
MAX_PATHS = 1000
log = structlog.get_logger()


class Kept(Exception):
    """A path that is not removed; the message says why."""


@dataclass(slots=True)
class Removed:
    """What became of one folder: bytes that are free now, and why something stayed."""

    freed_bytes: int = 0
    problem: str | None = None


@dataclass(slots=True)
class Collector:
    """Answers questions to remove downloads. `sources` are those of the node's live shards."""

    weights: Weights
    sources: Callable[[], Iterable[str]]
    _answers: dict[int, dict[str, Any]] = field(default_factory=dict)
    """The last answer by its question: lost on its way, it is asked for again and told again."""

    async def collect(self, ask: int, paths: Iterable[str]) -> dict[str, Any]:
        """{"freed": [{"path", "bytes"}], "kept": [{"path", "reason"}]}, one entry for each path."""
        if ask not in self._answers:
            answer: dict[str, Any] = {"freed": [], "kept": []}
            for path in list(paths)[:MAX_PATHS]:
                await self._one(path, answer)
            self._answers = {ask: answer}
        return self._answers[ask]

    async def _one(self, text: str, answer: dict[str, Any]) -> None:
        try:
            folder = await trio.to_thread.run_sync(self._ours, text)
            with self.weights.removing(folder):
                # From here on `ensure` waits: no shard can begin to use it, and those that do are
                # known. No checkpoint in between.
                self._unused(folder)
                done = await trio.to_thread.run_sync(remove, folder)
        except Kept as error:
            answer["kept"].append({"path": text, "reason": str(error)})
            return
        except (OSError, ValueError) as error:
            answer["kept"].append({"path": text, "reason": f"it cannot be read: {error}"})
            return
        log.info("download removed", path=text, bytes=done.freed_bytes, problem=done.problem)
        if done.freed_bytes or done.problem is None:
            answer["freed"].append({"path": text, "bytes": done.freed_bytes})
        if done.problem is not None:
            answer["kept"].append({"path": text, "reason": done.problem})

    def _ours(self, text: str) -> Path:
        """The folder of one of our downloads at this very path; raises Kept."""
        path, root = Path(text), self.weights.folder
        if not path.is_absolute() or ".." in path.parts or "\0" in text:
            raise Kept("it is no plain absolute path")
        inside = path.relative_to(root).parts if path.is_relative_to(root) else ()
        if len(inside) != 2 or inside[0] not in KINDS:
            raise Kept(f"it is no download below {root}, the weights directory of this agent")
        if not os.path.lexists(path):
            raise Kept("it is not there any more")
        if path.resolve() != path or os.path.ismount(path):
            raise Kept("links lead to it, or another disk is mounted there: remove it by hand")
        if not isinstance(read_note(path).get("source"), str):
            raise Kept(f"it holds no {NOTE}, so it is no download of an agent")
        return path

    def _unused(self, folder: Path) -> None:
        for text in self.sources():
            try:
                source = parse_source(text)
            except BadSource:
                continue  # its shard has failed with that said
            if _means(source, folder, self.weights.folder):
                raise Kept(f"a live shard of this node uses it, by the source {text}")


def _means(source: Source, folder: Path, root: Path) -> bool:
    """Whether a source's weights lie in the folder, or are all that is above it."""
    if source.kind != "file":
        return source.folder(root) == folder
    path = Path(os.path.realpath(source.path or Path()))
    return path.is_relative_to(folder) or folder.is_relative_to(path)


def remove(folder: Path) -> Removed:
    """Remove a download's folder while nobody fetches it; raises Kept. Blocking.

    It says of itself that it is not complete before the first file goes: whatever ends this
    half-way, no half of a model is ever served. Links are removed, not followed.
    """
    with (folder / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise Kept("it is being fetched right now") from None
        note = {**read_note(folder), "complete": False}
        write_atomic(folder / NOTE, json.dumps(note), mode=0o644)
        done = Removed()
        last = ("lock", NOTE)
        for entry in sorted(folder.iterdir(), key=lambda path: (path.name in last, path.name)):
            if entry.name in last and done.problem is not None:
                continue  # still listed, as a download that is not finished
            try:
                freed = _remove_one(entry)
                done.freed_bytes += 0 if entry.name in last else freed
            except OSError as error:
                done.problem = f"not all of it can be removed: {error}"
        if done.problem is None:
            folder.rmdir()
        return done


def _remove_one(path: Path) -> int:
    """Bytes that came free."""
    if path.is_symlink() or not path.is_dir():
        freed = _bytes(path)
        path.unlink()
        return freed
    freed = sum(_bytes(Path(base) / name) for base, _, names in os.walk(path) for name in names)
    shutil.rmtree(path)
    return freed


def _bytes(path: Path) -> int:
    """Of a file; of one that has another name elsewhere nothing comes free."""
    status = path.lstat()
    return status.st_size if status.st_nlink == 1 else 0
