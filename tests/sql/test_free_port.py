"""Ports for processes that cannot tell which one they got."""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING

from sql import embedded

if TYPE_CHECKING:
    import pytest


def test_a_free_port_is_not_one_that_is_handed_out_to_others() -> None:
    assert {embedded.free_port() in embedded.PORTS for _ in range(20)} == {True}


def test_a_port_in_use_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        monkeypatch.setattr(embedded, "PORTS", range(port, port + 1))
        monkeypatch.setattr(embedded, "TRIES", 1)
        found = embedded.free_port()
        assert found != port
        socket.create_server(("127.0.0.1", found)).close()


def test_no_port_is_told_twice_though_nobody_has_bound_it_yet(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(embedded, "PORTS", range(10_000, 10_009))
    monkeypatch.setattr(embedded, "TRIES", 9)
    told = [embedded.free_port() for _ in range(20)]
    assert len(set(told)) == len(told)
