"""An admin API over a fresh database."""

from __future__ import annotations

from typing import TYPE_CHECKING

import httpx
import pytest

from tests.api.served import Api, Context, populate, serving

if TYPE_CHECKING:
    from collections.abc import AsyncIterator


@pytest.fixture
async def url(pool) -> AsyncIterator[str]:
    """Address of a real app on a real socket."""
    async with serving(Context(pool)) as address:
        yield address


@pytest.fixture
async def api(url) -> AsyncIterator[Api]:
    """A client of it."""
    async with httpx.AsyncClient(base_url=url, timeout=60) as client:
        yield Api(client)


@pytest.fixture
def fleet(database) -> None:
    """A small fleet in the database."""
    with database.connect() as db:
        populate(db)
