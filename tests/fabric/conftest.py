"""Captured scans: read where the collection is at hand, skipped with a message elsewhere."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="session")
def captures() -> Path:
    """Folder of InfiniBand captures."""
    root = Path(os.environ.get("LLMGW_CAPTURES", REPOSITORY.parent / "shared" / "captures"))
    if not root.is_dir():
        pytest.skip(f"no captures at {root}; set LLMGW_CAPTURES to replay them")
    return root / "infiniband"
