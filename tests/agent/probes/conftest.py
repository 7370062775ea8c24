"""Captured machines for the probes: small ones in tests/captures, the collection where it is."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from agent.probes.root import Root

if TYPE_CHECKING:
    from collections.abc import Callable

REPOSITORY = Path(__file__).resolve().parents[3]


@pytest.fixture
def small() -> Path:
    """Captures that travel with the repository."""
    return REPOSITORY / "tests" / "captures"


@pytest.fixture
def captures() -> Path:
    """The whole collection; the test is skipped where it is not at hand."""
    folder = Path(os.environ.get("LLMGW_CAPTURES", REPOSITORY.parent / "shared" / "captures"))
    if not folder.is_dir():
        pytest.skip(f"no captures at {folder}; set LLMGW_CAPTURES to replay them")
    return folder


@pytest.fixture
def machine(tmp_path: Path) -> Callable[..., Root]:
    """A machine made of files (`{"/proc/meminfo": text}`) and tools (`{"nvidia-smi": script}`)."""

    def make(files: dict[str, str], tools: dict[str, str] | None = None) -> Root:
        for path, text in files.items():
            place = tmp_path / "root" / path.lstrip("/")
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_text(text)
        binaries = tmp_path / "bin"
        binaries.mkdir(exist_ok=True)
        for name, script in (tools or {}).items():
            tool = binaries / name
            tool.write_text(f"#!/bin/sh\n{script}\n")
            tool.chmod(tool.stat().st_mode | stat.S_IXUSR)
        return Root(prefix=tmp_path / "root", path=str(binaries))

    return make
