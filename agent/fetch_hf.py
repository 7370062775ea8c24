"""Download a model from a Hugging Face hub (HF_ENDPOINT and HF_TOKEN are honoured).

Runs in the child process of agent.fetch. huggingface_hub knows the hub: revisions, files, sizes,
checksums and the token. The bytes come by fetch_http: the library starts a file over after a kill
and leaves the old part lying, and it compares no checksum.
"""

from __future__ import annotations

import re
from functools import partial
from typing import TYPE_CHECKING, Any

from agent.fetch_http import fetch_file
from agent.fetch_many import bring, place_of, total_of
from agent.fetch_room import folder_bytes
from agent.fetch_verify import Brought, Checksum, FetchError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path

    from agent.source import Source

INFO_TIMEOUT_S = 30
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
    token_file: Path | None,
    room: Callable[[int | None], None],
    progress: Callable[[int, int | None], None],
) -> Brought:
    """Bring a repository, or one file of it, into `folder`; raises FetchError.

    The token is that of `token_file`, else the library's own: HF_TOKEN or HF_TOKEN_PATH.
    """
    try:
        import huggingface_hub
    except ImportError:
        raise FetchError(
            f"{source.text} needs huggingface_hub in the agent's environment: "
            "pip install 'llmgw[hf]'"
        ) from None
    repo = source.repo or ""
    try:
        token = _token(token_file) or huggingface_hub.get_token()
        info = huggingface_hub.HfApi(token=token or False).model_info(
            repo, revision=source.revision, files_metadata=True, timeout=INFO_TIMEOUT_S
        )
    except FetchError:
        raise
    except Exception as error:  # the library raises its own, httpx's and ours: all mean "failed"
        raise FetchError(f"{source.text} cannot be fetched: {error}") from error
    listed = {s.rfilename: s for s in info.siblings or []}
    files = wanted_files({name: s.size for name, s in listed.items()}, source.file)
    if not files:
        raise FetchError(f"{source.text}: the repository has no such file")
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    jobs: dict[str, Callable[[], str]] = {}
    for name, size in files.items():
        path = place_of(folder, name, source.text)
        url = huggingface_hub.hf_hub_url(repo, name, revision=info.sha)
        jobs[name] = partial(_bring, url, path, size, _checksum(listed[name]), headers)
    total = total_of(files)
    room(None if total is None else max(0, total - folder_bytes(folder)))
    return Brought(bring(jobs, folder, total, progress), source.file)


def _token(path: Path | None) -> str | None:
    try:
        return None if path is None else path.read_text().strip() or None
    except (OSError, ValueError) as error:
        raise FetchError(f"hf_token_file {path} cannot be read: {error}") from error


def _checksum(sibling: Any) -> Checksum | None:
    """Large files have a sha256, small ones are blobs of git."""
    if sibling.lfs is not None:
        return Checksum("sha256", sibling.lfs.sha256)
    return Checksum("git", sibling.blob_id) if sibling.blob_id else None


def _bring(
    url: str, path: Path, size: int | None, checksum: Checksum | None, headers: dict[str, str]
) -> str:
    """One file; one that is there with its size was verified before it got its name."""
    if path.is_file() and size is not None and path.stat().st_size == size:
        return "size" if checksum is None else checksum.kind
    return fetch_file(url, path, checksum, _any, _any, headers, size)


def _any(*_: object) -> None:
    """Room and progress are those of the whole source."""
