"""Ports for processes that cannot tell which one they got."""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING

from sql import embedded

if TYPE_CHECKING:
    import pytest


def test_a_free_port_is_not_one_that_is_handed_out_to_others() -> None:
    assert {embedded.free_port() in embedded.PORTS for _ in range(20)} == {True}


def test_no_port_is_given_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who asks for two before binding one got the same one in 10,000 times, and could not start."""
    monkeypatch.setattr(embedded, "_given", set())
    assert len({embedded.free_port() for _ in range(300)}) == 300


def test_a_port_in_use_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        monkeypatch.setattr(embedded, "PORTS", range(port, port + 1))
        monkeypatch.setattr(embedded, "TRIES", 1)
        found = embedded.free_port()
        assert found != port
        socket.create_server(("127.0.0.1", found)).close()
