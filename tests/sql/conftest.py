"""The fleet builder as a fixture."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.sql.fleet import open_fleet

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.conftest import Database
    from tests.sql.fleet import Fleet


@pytest.fixture
def fleet(database: Database) -> Iterator[Fleet]:
    """A builder on this test's database."""
    with open_fleet(database) as opened:
        yield opened
