"""Asks the replicas that are in use for their own view of their load, off the hot path.

What they run and have queued beyond our own requests is other routers' (`Pool.foreign`). A page
that does not come, or is old, leaves our own counts to choose by: its replica is never shut for
it (case C07), and `stale_metrics` says so. Engines without metrics are asked now and then.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import trio

from controller.router.clock import monotonic
from controller.router.gauges import Reading, read_page
from controller.router.inquiry import Reply, Unanswered, get
from controller.router.scoring import RAMP_S

if TYPE_CHECKING:
    from controller.router.core import Core
    from controller.router.pool import Pool

TICK_S = 0.5
USED_S = 10.0  # only replicas that had a request within so long are asked
RARELY_S = 60.0  # where there are no metrics
UNTRIED_S = 30.0
"""After so long without a request nobody knows how fast it answers. Whoever was slow once would
get none any more, and so could not show that it is not."""
STALE_S = 5.0  # a reading counts for so long, or until two more should have come
WITHIN_S = 1.0
AT_ONCE = 16
PER_TICK = 32  # so a process asks at most 64 replicas a second, however many it has
MOST_BYTES = 1024 * 1024
NO_PAGE = frozenset((401, 403, 404, 405, 501))


class Signal:
    """What one replica said last. `state` is a word of the metrics."""

    __slots__ = ("error", "good_until", "kv", "next_at", "running", "state", "waiting")

    def __init__(self) -> None:
        self.state = "unknown"  # unknown, fresh, stale_metrics, no_metrics
        self.error: str | None = None  # why it is stale
        self.good_until = -math.inf  # monotonic
        self.next_at = -math.inf
        self.running: float | None = None
        self.waiting: float | None = None
        self.kv: float | None = None

    def told(self, reading: Reading, now: float, every_s: float) -> None:
        self.state, self.error = "fresh", None
        self.good_until = now + max(STALE_S, 2.5 * every_s)
        self.running, self.waiting, self.kv = reading

    def missed(self, why: str, now: float) -> None:
        """No page came: the last one counts until it is too old."""
        self.error = why
        if now > self.good_until:
            self.forget("stale_metrics")

    def forget(self, state: str) -> None:
        self.state = state
        self.running = self.waiting = self.kv = None

    def as_json(self) -> dict[str, Any]:
        """State and numbers; unknown is absent."""
        known = {"running": self.running, "waiting": self.waiting, "kv": self.kv}
        known = {name: value for name, value in known.items() if value is not None}
        return {"signal": self.state, **({"why": self.error} if self.error else {}), **known}


class Signals:
    """The loop; one per process."""

    def __init__(self, core: Core) -> None:
        self._core = core
        self._every_s = core.config.watching.metrics_s

    async def run(self) -> None:
        """Ask for ever."""
        limit = trio.CapacityLimiter(AT_ONCE)
        while True:
            now = monotonic()
            async with trio.open_nursery() as nursery:
                for pool in self._due(now):
                    nursery.start_soon(ask, pool, limit, self._every_s)
            now = monotonic()
            for pool in self._core.fleet.pools.values():
                if pool.signal.state == "fresh" or now - pool.since < RAMP_S + 2 * TICK_S:
                    refresh(pool, now)
                if pool.first_byte_s:
                    forget_speed(pool, now)
            await trio.sleep(TICK_S)

    def _due(self, now: float) -> list[Pool]:
        """Replicas to ask now, those longest unasked first."""
        if not self._every_s:
            return []
        due = [
            pool
            for pool in self._core.fleet.pools.values()
            if pool.signal.next_at <= now
            and (pool.in_flight or (pool.last_used is not None and now - pool.last_used < USED_S))
        ]
        return sorted(due, key=lambda pool: pool.signal.next_at)[:PER_TICK]


async def ask(pool: Pool, limit: trio.CapacityLimiter, every_s: float) -> None:
    """Read one replica's page and take it over; nothing that it does can raise."""
    signal = pool.signal
    async with limit:
        try:
            reply = await get(
                pool.address, pool.host_lines, pool.base + b"/metrics",
                within_s=WITHIN_S, most_bytes=MOST_BYTES,
            )  # fmt: skip
            now = monotonic()
            signal.next_at = now + every_s
            take(pool, reply, now, every_s)
        except Unanswered as error:
            now = monotonic()
            signal.next_at = now + every_s
            signal.missed(str(error), now)
    refresh(pool, now)  # what it told before weighs no more (case C07)


def take(pool: Pool, reply: Reply, now: float, every_s: float) -> None:
    """An answer came, whatever it says."""
    signal = pool.signal
    if reply.status in NO_PAGE:
        signal.error = None
        signal.forget("no_metrics")
        signal.next_at = now + RARELY_S
        return
    if reply.status != 200:
        signal.missed(f"HTTP {reply.status}", now)
        return
    try:
        reading = read_page(reply.body)
    except ValueError as error:
        signal.missed(f"unreadable: {error}", now)
        return
    if reading is None:
        signal.missed("no known name in it", now)
        return
    signal.told(reading, now, every_s)
    # What it has queued waits behind all that runs, so it counts twice.
    pool.foreign = max(0.0, reading.running + reading.waiting - pool.in_flight) + reading.waiting


def forget_speed(pool: Pool, now: float) -> None:
    """Compare it by its load alone, as a new one, when it was not tried for long."""
    if not pool.in_flight and pool.last_used is not None and now - pool.last_used > UNTRIED_S:
        pool.first_byte_s = 0.0


def refresh(pool: Pool, now: float) -> None:
    """Let old readings go, and what slows it down follow its age and cache."""
    signal = pool.signal
    if signal.state == "fresh" and now > signal.good_until:
        signal.forget("stale_metrics" if signal.error else "unknown")
    if signal.state != "fresh":
        pool.foreign = 0.0
    pool.weigh(now)
