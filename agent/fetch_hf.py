"""Download a model from a Hugging Face hub (HF_ENDPOINT and HF_TOKEN are honoured).

Runs in the child process of agent.fetch. huggingface_hub does the work: it resumes and verifies.
"""

from __future__ import annotations

import re
import threading
from typing import TYPE_CHECKING

from agent.fetch_http import FetchError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path

    from agent.source import Source

WATCH_S = 0.5
_SPLIT = re.compile(r"(.+)-\d{5}-of-\d{5}\.gguf")
DUPLICATES = ("original/*", "*.pth", "*.bin", "*.msgpack", "*.h5", "*.onnx", "onnx/*")
"""The same weights in other formats: left out when the repository has safetensors."""


def wanted_files(sizes: dict[str, int | None], file: str | None) -> dict[str, int | None]:
    """The files of a repository that are needed: the one named, or all without the duplicates."""
    from fnmatch import fnmatch

    if file is not None:
        split = _SPLIT.fullmatch(file)  # llama.cpp reads the other parts of a split file itself
        return {
            name: size
            for name, size in sizes.items()
            if name == file or (split and (m := _SPLIT.fullmatch(name)) and m[1] == split[1])
        }
    if not any(name.endswith(".safetensors") for name in sizes):
        _one_gguf(sizes)
        return sizes
    return {
        name: size
        for name, size in sizes.items()
        if not any(fnmatch(name, pattern) for pattern in DUPLICATES)
    }


def _one_gguf(names: Iterable[str]) -> None:
    """Refuse a repository of many quantisations: all of them may be a terabyte."""
    found = sorted({m[1] if (m := _SPLIT.fullmatch(n)) else n for n in names if ".gguf" in n})
    if len(found) > 1:
        raise FetchError(
            f"the repository holds {len(found)} GGUF models ({', '.join(found[:8])}): "
            "name a file in the source, as hf:org/repo/file.gguf"
        )


def fetch_hf(
    source: Source,
    folder: Path,
    room: Callable[[int | None], None],
    progress: Callable[[int, int | None], None],
) -> None:
    """Bring a repository, or one file of it, into `folder`; raises FetchError."""
    try:
        import huggingface_hub
    except ImportError:
        raise FetchError(
            f"{source.text} needs huggingface_hub in the agent's environment: "
            "pip install 'llmgw[hf]'"
        ) from None
    repo = source.repo or ""
    try:
        info = huggingface_hub.HfApi().model_info(
            repo, revision=source.revision, files_metadata=True, timeout=30
        )
        sizes = {s.rfilename: s.size for s in info.siblings or []}
        files = wanted_files(sizes, source.file)
        if not files:
            raise FetchError(f"{source.text}: the repository has no such file")
        total = _sum(files)
        room(None if total is None else max(0, total - _here(folder)))
        with _Watch(folder, total, progress):
            huggingface_hub.snapshot_download(
                repo, revision=info.sha, allow_patterns=list(files), local_dir=folder
            )
    except FetchError:
        raise
    except Exception as error:  # the library raises its own, httpx's and ours: all mean "failed"
        raise FetchError(f"{source.text} cannot be fetched: {error}") from error
    _verify(source, folder, files)


def _sum(files: dict[str, int | None]) -> int | None:
    known = [size for size in files.values() if size is not None]
    return sum(known) if len(known) == len(files) else None


def _here(folder: Path) -> int:
    return sum(p.stat().st_size for p in folder.rglob("*") if p.is_file())


def _verify(source: Source, folder: Path, files: dict[str, int | None]) -> None:
    for name, size in files.items():
        path = folder / name
        found = path.stat().st_size if path.is_file() else None
        if found is None or (size is not None and found != size):
            path.unlink(missing_ok=True)
            raise FetchError(f"{source.text}: {name} has {found} bytes and should have {size}")


class _Watch:
    """Tells the progress of a library that does not: looks at the folder twice a second."""

    def __init__(
        self, folder: Path, total: int | None, progress: Callable[[int, int | None], None]
    ) -> None:
        self._folder, self._total, self._progress = folder, total, progress
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def _run(self) -> None:
        while not self._end.wait(WATCH_S):
            try:
                self._progress(_here(self._folder), self._total)
            except OSError:
                continue  # a file was renamed while we looked

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join()
