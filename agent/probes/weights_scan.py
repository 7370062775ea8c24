"""Weights on this machine's disks: our downloads, Hugging Face caches, plain folders, GGUF files.

Called by agent/facts.py. Blocking calls are made by `read` in one thread per configured directory,
so that a dead filer costs its own directory only. An unchanged tree costs stat calls. Document:
{"source"?, "path", "name", "revision"?, "format", "bytes", "shared_bytes"?, "complete", "reason"?,
"managed"?, "shared"?, "filer"?, "filer_path"?, "facts"}. `shared_bytes` of `bytes` are counted in
an earlier document of the same cache already; `managed`: our own download; `filer` names a shared
filesystem and `filer_path` the place on it, which together are the same on every node.
"""

from __future__ import annotations

import json
import os
import threading
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Any, Final

import trio

from agent.probes import mounts
from agent.probes.root import Root, bounded
from agent.probes.weights_files import Memory
from agent.probes.weights_tree import Tree, describe_path
from agent.source import BadSource, parse_source

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from agent.probes.weights_document import Found

SCAN_TIMEOUT_S: Final = 20.0
"""Seconds for one directory each time. A first look that takes longer goes on in its thread."""
LAST_VALID_S: Final = 600.0
"""A directory that does not answer is told as it last was for this long, then left out."""
MAX_DOCUMENTS: Final = 2000
MAX_REPORT: Final = 900_000
"""Bytes of all documents: a report is refused beyond 2000 of them or 1 MiB."""


@dataclass(slots=True)
class _Place:
    """A configured directory: what its files said, and what the last whole scan found."""

    path: Path
    memory: Memory = field(default_factory=Memory)
    lock: threading.Lock = field(default_factory=threading.Lock)
    last: Found | None = None
    last_at: float = 0.0


class WeightsScan:
    """Scans directories for weights, remembering what does not change. One for each agent."""

    def __init__(self, dirs: Sequence[Path | str], root: Root | None = None) -> None:
        self._root = root or Root()
        self._places = {path: _Place(path) for path in dict.fromkeys(Path(d) for d in dirs)}
        self._local = Memory()
        self.problems: dict[str, str] = {}
        """Directory -> why it was not or not wholly scanned the last time."""

    def scan_dir(self, path: Path | str) -> Found:
        """Documents of one configured directory. Blocking, and may hang with its filer."""
        place = self._places.setdefault(Path(path), _Place(Path(path)))
        with place.lock:
            tree = Tree(self._root, place.memory)
            found = tree.scan(place.path)
            place.memory.forget_unused()
            self._mark_filers(found.documents)
            place.last, place.last_at = found, monotonic()
            return found

    def scan(self, local_sources: Iterable[str] = ()) -> list[dict[str, Any]]:
        """Documents of all directories and of the `file:` sources given. Blocking."""
        found = [self.scan_dir(place) for place in list(self._places)]
        for place, result in zip(self._places, found, strict=True):
            self._tell(place, result.problem)
        return self._join(found, self._scan_local(local_sources))

    async def read(self, local_sources: Iterable[str] = ()) -> list[dict[str, Any]]:
        """The same, each directory in a thread of its own with a deadline."""
        found: dict[Path, Found] = {}

        async def look(place: Path) -> None:
            done = await bounded(
                partial(self.scan_dir, place), key=f"weights {place}", timeout_s=SCAN_TIMEOUT_S
            )
            if done is not None:
                found[place] = done
                self._tell(place, done.problem)
                return
            last = self._places[place]
            self._tell(place, f"does not answer within {SCAN_TIMEOUT_S:g} s: is its filer alive?")
            if last.last is not None and monotonic() - last.last_at < LAST_VALID_S:
                found[place] = last.last

        async with trio.open_nursery() as nursery:
            for place in self._places:
                nursery.start_soon(look, place)
        sources = tuple(local_sources)
        local = await bounded(
            partial(self._scan_local, sources), key="weights local", timeout_s=SCAN_TIMEOUT_S
        )
        return self._join([found[p] for p in self._places if p in found], local or [])

    def _tell(self, place: Path, problem: str | None) -> None:
        if problem is None:
            self.problems.pop(str(place), None)
        else:
            self.problems[str(place)] = problem

    def _scan_local(self, sources: Iterable[str]) -> list[dict[str, Any]]:
        """Files and folders that models name themselves, as `file:/path`."""
        found = []
        for text in sorted(set(sources)):
            try:
                path = parse_source(text).path
            except BadSource:
                continue  # the catalog tells the operator; here it is just not on disk
            if path is not None and (document := describe_path(self._root, path, self._local)):
                found.append({"source": text, **document})
        self._local.forget_unused()
        self._mark_filers(found)
        return found

    def _join(self, found: Iterable[Found], local: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """One document for each path: what a model names wins over a cache's, not over ours."""
        by_path: dict[str, dict[str, Any]] = {}
        for document in [d for part in found for d in part.documents]:
            by_path.setdefault(document["path"], document)
        for document in local:
            if not by_path.get(document["path"], {}).get("managed"):
                by_path[document["path"]] = document
        documents = sorted(by_path.values(), key=_rank)
        told = _that_fit(documents)
        if len(told) < len(documents):
            self.problems["all"] = (
                f"{len(documents)} weights found, {len(told)} of them told: name fewer or deeper "
                "directories"
            )
        else:
            self.problems.pop("all", None)
        return told

    def _mark_filers(self, documents: Iterable[dict[str, Any]]) -> None:
        table = mounts.parse_mountinfo(self._root.read("/proc/self/mountinfo") or "")
        for document in documents:
            path = document["path"]
            real = os.path.realpath(path) if self._root.live else path
            mount = mounts.holding(real, table)
            if mount is not None and mounts.kind(mount) == "shared":
                below = real.removeprefix(mount.mount.rstrip("/"))
                place = f"{mount.root.rstrip('/')}{below}" or "/"
                document["shared"] = True
                document["filer"] = ":".join(mounts.identity(mount))
                document["filer_path"] = place


def _that_fit(documents: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The first documents that one report carries."""
    room = MAX_REPORT
    for position, found in enumerate(documents[:MAX_DOCUMENTS]):
        room -= len(json.dumps(found))
        if room < 0:
            return documents[:position]
    return documents[:MAX_DOCUMENTS]


def _rank(document: dict[str, Any]) -> tuple[bool, bool, str]:
    return (not document.get("managed"), "source" not in document, document["path"])
