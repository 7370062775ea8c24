"""Control processes without the process: a lease, its presence connection and a ticker each."""

from __future__ import annotations

import socket
import uuid
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import trio

from controller.reconcile.lease import Lease
from controller.reconcile.tick import Ticker
from sql import queries
from sql.listen import ListenState, listen
from sql.pool import open_pool

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from sql.pool import Pool
    from sql.settings import DatabaseSettings
    from tests.sql.fleet import Fleet, Node


@dataclass(slots=True)
class Duty:
    """What one control process has for the tick."""

    id: uuid.UUID
    pool: Pool
    listening: ListenState
    lease: Lease
    ticker: Ticker
    scope: trio.CancelScope

    async def leads(self) -> int:
        """Takes the lease; AssertionError when another holds it."""
        term = await self.lease.take()
        assert term is not None
        return term

    async def tick(self) -> bool:
        """One tick."""
        return await self.ticker.once(await self.leads())


@asynccontextmanager
async def duty(
    settings: DatabaseSettings, channel: DatabaseSettings | None = None
) -> AsyncIterator[Duty]:
    """Joined and present, as control.py does it; ``channel`` when LISTEN goes another way."""
    async with open_pool(settings) as pool, trio.open_nursery() as nursery:
        name, state, joined = uuid.uuid4(), ListenState(), trio.Event()
        number = await pool.fetchval(
            queries("control")["join"], name, "control", socket.gethostname(), 1, "test"
        )
        lease = Lease(pool, name, "tick", state)
        ticker = Ticker(pool, lease)

        async def connected() -> None:
            joined.set()
            ticker.wake()

        nursery.start_soon(
            partial(
                listen, channel or settings, lambda _: ticker.wake(), connected,
                presence=number, state=state, on_lost=lambda: lease.step_down("presence lost"),
            )
        )  # fmt: skip
        with trio.fail_after(20):
            await joined.wait()
        yield Duty(name, pool, state, lease, ticker, nursery.cancel_scope)
        nursery.cancel_scope.cancel()


async def until(said, what: str, limit_s: float = 40) -> None:
    """Waits until ``said()`` is true; AssertionError naming ``what``."""
    deadline = trio.current_time() + limit_s
    while not said():
        assert trio.current_time() < deadline, f"not within {limit_s:g} s: {what}"
        await trio.sleep(0.02)


def cards(fleet: Fleet, name: str, gpus: int) -> Node:
    """A node whose cards are known to be empty."""
    node = fleet.node(name, gpus=gpus)
    beat(fleet, node, gpus)
    return node


def beat(fleet: Fleet, node: Node, gpus: int) -> None:
    """A word of its agent, that cards are empty: without any for half a minute it gets nothing."""
    used = [{"uuid": f"{node.name}-{i}", "memory_foreign_mib": 0} for i in range(gpus)]
    fleet.sync(node, gpus=used)
