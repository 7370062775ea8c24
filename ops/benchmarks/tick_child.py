"""The leader's process of `ops/bench tick`: ticks when told, and says what each tick took.

One JSON object a line on standard output; a line on standard input asks for the next part.
"""

from __future__ import annotations

import json
import os
import sys
import uuid
from functools import partial
from statistics import median
from time import process_time
from typing import TYPE_CHECKING, Any

import trio

from controller import log
from controller.reconcile.lease import Lease
from controller.reconcile.tick import Ticker
from ops.benchmarks import processes
from sql import queries
from sql.listen import ListenState, listen
from sql.pool import asyncio_host, open_pool
from sql.settings import DatabaseSettings

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

STAGES = ("read", "decide", "commit")


def main() -> None:
    """The database's address is in the environment: it holds a password."""
    log.configure("warning")  # to standard error
    settings = DatabaseSettings(url=os.environ["LLMGW_DATABASE_URL"])
    trio.run(_run, settings, int(sys.argv[1]), strict_exception_groups=True)


async def _run(settings: DatabaseSettings, count: int) -> None:
    async with asyncio_host(), open_pool(settings) as pool, trio.open_nursery() as nursery:
        name, state, joined = uuid.uuid4(), ListenState(), trio.Event()
        number = await pool.fetchval(queries("control")["join"], name, "control", "bench", 1, "0")
        lease = Lease(pool, name, "tick", state)
        ticker = Ticker(pool, lease)

        async def connected() -> None:
            joined.set()

        nursery.start_soon(
            partial(listen, settings, _ignore, connected, presence=number, state=state)
        )
        with trio.fail_after(20):
            await joined.wait()

        async def tick() -> dict[str, float]:
            term = await lease.take()
            assert term is not None, "another leads"
            await ticker.once(term)
            return {**ticker.stats.stages, "whole": ticker.stats.seconds or 0.0}

        await _say({"first": await tick()})
        await _say(await _idle(tick, count))
        await _say({"created": await tick()})
        await _say({"placed": await tick(), "items": dict(ticker.stats.items)})
        await _say(await _idle(tick, count) | {"rss_mib": processes.rss_mib(os.getpid())})
        nursery.cancel_scope.cancel()


def _ignore(_: object) -> None:
    """Hints do not matter here: each tick is asked for."""


async def _idle(tick: Callable[[], Awaitable[dict[str, float]]], count: int) -> dict[str, Any]:
    """Medians and the slowest of so many ticks, in seconds, and this process's CPU for each."""
    await tick()
    before = process_time()
    found = [await tick() for _ in range(count)]
    cpu_s = (process_time() - before) / count
    each = {name: median(one[name] for one in found) for name in (*STAGES, "whole")}
    return {"idle": each | {"slowest": max(one["whole"] for one in found), "cpu": cpu_s}}


async def _say(found: dict[str, Any]) -> None:
    print(json.dumps(found), flush=True)
    await trio.to_thread.run_sync(sys.stdin.readline)


if __name__ == "__main__":
    main()
