"""The fleet builder, and controllers that end with their test."""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING

import pytest

from tests.control.process import Controller
from tests.sql.fleet import open_fleet

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from tests.conftest import Database
    from tests.sql.fleet import Fleet


@pytest.fixture
def fleet(database: Database) -> Iterator[Fleet]:
    """A builder on this test's database."""
    with open_fleet(database) as opened:
        yield opened


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Controller]]:
    """Starts controllers: ``start(url, *flags, role=..., **env)``."""
    with ExitStack() as stack:
        yield lambda *args, **more: stack.enter_context(Controller(tmp_path, *args, **more))
