"""The document of one model on disk, and the listing of a directory that it is made from.

Pure. Called by weights_tree.py and hf_cache.py.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agent.probes.weights_files import File, Model

if TYPE_CHECKING:
    from collections.abc import Iterable


@dataclass(frozen=True, slots=True)
class Found:
    """What a directory holds; `problem` says why that may not be all."""

    documents: list[dict[str, Any]]
    problem: str | None = None


@dataclass(slots=True)
class Listing:
    """One directory: its files with links followed, folders, and links that lead nowhere."""

    files: list[File] = field(default_factory=list)
    folders: list[Path] = field(default_factory=list)
    dead: list[str] = field(default_factory=list)


def readable(path: Path) -> str:
    r"""A path as text: bytes that are none are written as `\xff`, which JSON can carry."""
    return os.fsencode(path).decode("utf-8", errors="backslashreplace")


def unfinished(model: Model, reason: str) -> Model:
    """The same model, not complete."""
    return Model(model.format, False, model.facts, reason, cut=True)


def document(*, path: str, name: str, model: Model, files: Iterable[File]) -> dict[str, Any]:
    """What is reported of a model. A file that has two names is counted once."""
    held = {file.inode: file.size for file in files}
    found: dict[str, Any] = {
        "path": path,
        "name": name,
        "format": model.format,
        "bytes": sum(held.values()),
        "complete": model.complete,
        "facts": model.facts,
    }
    if model.reason is not None:
        found["reason"] = readable(Path(model.reason))[:500]
    return found
