"""llmgwctl against a real API with a small fleet."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.api.served import Context, populate, serving
from tests.cli.served import Ctl

if TYPE_CHECKING:
    from collections.abc import AsyncIterator


@pytest.fixture(autouse=True)
def no_settings_from_outside(monkeypatch):
    """The developer's own LLMGW_ variables stay out."""
    for name in ("LLMGW_SERVER", "LLMGW_TOKEN", "LLMGW_DATABASE_URL"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
async def bare(pool) -> AsyncIterator[Ctl]:
    """An empty cluster."""
    async with serving(Context(pool)) as url:
        yield Ctl(url)


@pytest.fixture
async def ctl(bare, database) -> Ctl:
    """A small fleet."""
    with database.connect() as db:
        populate(db)
    return bare
