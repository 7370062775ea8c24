"""The reactor with plain socket pairs: order, bounds, and bugs that stay where they are."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import trio

from controller.router import reactor as module
from controller.router.connection import Connection
from controller.router.reactor import IN, PIECES_TO_GATHER, RDHUP, Reactor
from tests.router.wire import until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator


class Echo(Connection):
    """Sends back what it gets; fails on b"bug"."""

    def __init__(self, reactor: Reactor, sock: socket.socket) -> None:
        super().__init__(reactor, sock, IN | RDHUP)
        self.ends: list[OSError | None] = []

    def received(self, data: bytes) -> None:
        if data == b"bug":
            raise KeyError("a bug")
        if data == b"later":
            self.send_soon(b"held ")
            assert not self.all_sent
            self.send_soon(b"bytes, ")
            self.send(b"then ")
            self.send_soon(b"others")
        elif data == b"give up":
            self.send_soon(b"held")
            self.reset()
        else:
            self.send(data)

    def lost(self, error: OSError | None) -> None:
        self.ends.append(error)

    def expired(self, now: float) -> None:
        self.close()


@pytest.fixture
async def reactor(nursery: trio.Nursery) -> AsyncIterator[Reactor]:
    made = Reactor()
    nursery.start_soon(made.run)
    yield made
    nursery.cancel_scope.cancel()
    made.close()


def pair(reactor: Reactor) -> tuple[Echo, trio.SocketStream]:
    ours, theirs = socket.socketpair()
    connection = Echo(reactor, ours)
    inet = trio.socket.from_stdlib_socket(theirs)
    theirs.setblocking(False)
    return connection, trio.SocketStream(inet)


@pytest.mark.interpreted
async def test_a_bug_ends_its_own_connection_only(reactor: Reactor) -> None:
    (bad, bad_peer), (good, good_peer) = pair(reactor), pair(reactor)
    async with bad_peer, good_peer:
        await bad_peer.send_all(b"bug")
        assert await bad_peer.receive_some() == b""
        assert reactor.crashes == 1
        assert isinstance(bad.ends[0], ConnectionAbortedError)
        await good_peer.send_all(b"hello")
        assert await good_peer.receive_some() == b"hello"
        good.close()


@pytest.mark.interpreted
async def test_what_the_kernel_does_not_take_waits_in_order(reactor: Reactor) -> None:
    connection, peer = pair(reactor)
    pieces = [bytes([n]) * 100_000 for n in range(30)]
    for piece in pieces:
        connection.send(piece)
    assert connection.pending > 0
    assert not connection.all_sent
    got = b""
    async with peer:
        while len(got) < 3_000_000:
            got += await peer.receive_some(65536)
        assert got == b"".join(pieces)
        await until(lambda: connection.all_sent)
        connection.close()


@pytest.mark.interpreted
async def test_what_is_sent_soon_goes_out_in_order_and_with_the_turn(reactor: Reactor) -> None:
    connection, peer = pair(reactor)
    async with peer:
        await peer.send_all(b"later")
        got = b""
        while len(got) < len(b"held bytes, then others"):
            got += await peer.receive_some()
        assert got == b"held bytes, then others"
        connection.send_soon(b"outside of a turn")
        assert connection.all_sent
        assert await peer.receive_some() == b"outside of a turn"
        connection.close()


@pytest.mark.interpreted
async def test_a_reset_loses_nothing_of_what_was_to_be_sent_before_it(reactor: Reactor) -> None:
    connection, peer = pair(reactor)
    async with peer:
        await peer.send_all(b"give up")
        assert await peer.receive_some() == b"held"
        assert await peer.receive_some() == b""
        assert connection.fd < 0


async def test_callbacks_of_trio_tasks_run_in_the_reactor(reactor: Reactor) -> None:
    seen: list[int] = []
    reactor.call_soon(lambda: seen.append(1))

    def fail() -> None:
        raise ValueError("a bug")

    reactor.call_soon(fail)
    reactor.call_soon(lambda: seen.append(2))
    await until(lambda: seen == [1, 2])
    assert reactor.crashes == 1


@pytest.mark.interpreted
async def test_it_pauses_after_many_pieces_of_streams_and_only_then(
    reactor: Reactor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They cost less together, and where few flow nobody is to wait."""
    passed: list[int] = []
    pauses: list[int] = []
    monkeypatch.setattr(module, "sleep", lambda _: pauses.append(passed[-1]))

    def pass_on(pieces: int) -> None:
        reactor.pieces += pieces
        passed.append(pieces)

    for pieces in (PIECES_TO_GATHER - 1, PIECES_TO_GATHER, 1, 100):
        reactor.call_soon(lambda pieces=pieces: pass_on(pieces))
        await until(lambda pieces=pieces: passed[-1:] == [pieces] and not reactor.pieces)
    assert pauses == [PIECES_TO_GATHER, 100]


@pytest.mark.interpreted
async def test_descriptors_are_given_back(reactor: Reactor) -> None:
    before = len(list(Path("/proc/self/fd").iterdir()))
    for _ in range(50):
        connection, peer = pair(reactor)
        await peer.aclose()
        await until(lambda connection=connection: connection.ends)
    assert connection.ends == [None]
    assert len(list(Path("/proc/self/fd").iterdir())) <= before + 1
