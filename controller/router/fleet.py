"""The living side of the routing table: a pool of connections and a count in flight per replica.

Tables are swapped under running requests: a replica that left finishes what it has, then its
pool goes. In flight is counted here and only here (`take`, then exactly one of `take_back` and
`give_up`), which is why it returns to zero (case A04).
"""

from __future__ import annotations

import time
from functools import partial
from typing import TYPE_CHECKING, Any

from controller.router.choose import choose
from controller.router.table import Model, RouteTable
from controller.router.upstream import Cause, Failure, UpstreamConnection, begin_connecting

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from random import Random

    from controller.router.config import RouterConfig
    from controller.router.deadlines import Deadlines
    from controller.router.reactor import Reactor
    from controller.router.table import Endpoint, Replica
    from controller.router.upstream import Owner

Address = tuple[int, tuple[Any, ...]]  # family, socket address
NO_DEPTH = 1 << 30
"""Depth of a replica that nobody bounds: never reached."""
AVOID_S = 1.0  # after a failed connection others are preferred for so long


class Pool:
    """Connections to one replica: idle ones last in, first out."""

    __slots__ = (
        "_fleet", "_idle", "_open", "address", "answers", "authority", "avoid_until", "base",
        "depth", "endpoint", "failures", "gone", "id", "in_flight", "key", "last_used", "models",
        "refusals",
    )  # fmt: skip

    def __init__(self, fleet: Fleet, replica: Replica, address: Address) -> None:
        self._fleet = fleet
        self.key = replica.key
        self.id = replica.id
        self.endpoint = replica.endpoint
        self.authority = replica.endpoint.authority
        self.base = replica.endpoint.base
        self.address = address
        self.in_flight = 0
        self.depth = NO_DEPTH  # so many of ours at once; more wait in admission
        self.models: tuple[str, ...] = ()
        self.last_used: float | None = None  # monotonic end of the last request
        self.avoid_until = 0.0
        self.failures = self.answers = self.refusals = 0
        self.gone = False
        self._idle: dict[UpstreamConnection, None] = {}
        self._open: set[UpstreamConnection] = set()

    def take(
        self, owner: Owner, request: bytes, total_due: float, *, fresh: bool = False
    ) -> UpstreamConnection | None:
        """Send `request` on an idle or a new connection.

        None when no socket could be had; `owner.on_failed` then follows in the next turn.
        """
        self.in_flight += 1
        if self._idle and not fresh:
            connection = self._idle.popitem()[0]
        else:
            try:
                sock = begin_connecting(self.address[1], self.address[0])
            except OSError:
                self._fleet.reactor.call_soon(partial(self._refused, owner))
                return None
            connection = self._fleet.connection(sock, self)
            self._open.add(connection)
        connection.start(owner, request, total_due)
        return connection

    def _refused(self, owner: Owner) -> None:
        self._leave()
        owner.on_failed(Failure(Cause.CONNECT_FAILED, reused=False))

    def take_back(self, connection: UpstreamConnection, *, reusable: bool) -> bool:
        """The answer is complete; whether the connection is kept for the next one."""
        self._leave()
        self.avoid_until = 0.0
        if (
            reusable
            and not self.gone
            and len(self._idle) < self._fleet.config.limits.idle_upstreams
        ):
            self._idle[connection] = None
            return True
        self._open.discard(connection)
        return False

    def give_up(self, connection: UpstreamConnection) -> None:
        """The answer will not be complete: the connection is spent."""
        self._leave()
        self._open.discard(connection)

    def forget(self, connection: UpstreamConnection) -> None:
        """An idle connection ended."""
        self._idle.pop(connection, None)
        self._open.discard(connection)

    # -- what its replica did: the breaker's food ------------------------------------------------

    def failed(self, cause: Cause) -> None:
        """An attempt ended without a whole answer."""
        self.failures += 1

    def answered(self, status: int) -> None:
        """It answered, an error included; 500 also for an error in the middle of a stream."""
        self.answers += 1

    def busy(self, retry_after_s: int | None) -> None:
        """It has too much to do, and says for how long (None: it does not say)."""
        self.refusals += 1

    def retire(self) -> None:
        """No new requests; idle connections close now, the others when they are done."""
        self.gone = True
        for connection in self._idle:
            connection.close()
            self._open.discard(connection)
        self._idle.clear()

    def close(self) -> None:
        """Close everything (the process ends)."""
        self.retire()
        for connection in list(self._open):
            connection.close()
        self._open.clear()

    def _leave(self) -> None:
        self.in_flight -= 1
        self.last_used = time.monotonic()
        if self._fleet.room is not None:
            self._fleet.room(self)


class Target:
    """A model on one replica: what `choose` compares."""

    __slots__ = ("pool", "upstream_model")

    def __init__(self, pool: Pool, upstream_model: str) -> None:
        self.pool = pool
        self.upstream_model = upstream_model

    @property
    def in_flight(self) -> int:
        return self.pool.in_flight


class Fleet:
    """All pools, the names clients may use, and the choice between replicas."""

    def __init__(
        self, config: RouterConfig, reactor: Reactor, deadlines: Deadlines, random: Random
    ) -> None:
        self.config = config
        self.reactor = reactor
        self.table = RouteTable()
        self.names: dict[str, Model] = {}
        self.pools: dict[str, Pool] = {}
        self.room: Callable[[Pool], None] | None = None  # told of room, while anybody waits for it
        self._deadlines = deadlines
        self._random = random
        self._ready: dict[str, list[Target]] = {}
        self._on_demand: frozenset[str] = frozenset()
        self._leaving: list[Pool] = []

    def connection(self, sock: Any, pool: Pool) -> UpstreamConnection:
        return UpstreamConnection(self.reactor, sock, pool, self._deadlines, self.config.timeouts)

    def swap(self, table: RouteTable, addresses: Mapping[Endpoint, Address]) -> None:
        """Take over `table`. A replica whose endpoint has no address (DNS) is left out."""
        pools: dict[str, Pool] = {}
        ready: dict[str, list[Target]] = {}
        for model in table.models:
            ready[model.name] = targets = []
            for replica in model.replicas:
                address = addresses.get(replica.endpoint)
                if address is None:
                    continue
                pool = pools.get(replica.key) or self._kept(replica, address)
                if replica.key not in pools:
                    pools[replica.key] = pool
                    pool.models = ()
                pool.models = (*pool.models, model.name)
                pool.depth = NO_DEPTH if replica.depth is None else max(1, replica.depth)
                if replica.ready:
                    targets.append(Target(pool, replica.upstream_model))
        self._retire_missing(pools)
        self.table, self.names, self.pools, self._ready = table, table.names(), pools, ready
        self._on_demand = frozenset(model.name for model in table.models if model.on_demand)

    def _kept(self, replica: Replica, address: Address) -> Pool:
        pool = self.pools.get(replica.key)
        if pool is not None and pool.endpoint == replica.endpoint and pool.address == address:
            return pool
        return Pool(self, replica, address)

    def _retire_missing(self, pools: dict[str, Pool]) -> None:
        for key, pool in self.pools.items():
            if pools.get(key) is not pool:
                pool.retire()
                self._leaving.append(pool)
        self._leaving = [pool for pool in self._leaving if pool.in_flight]

    def serves(self, model: str, tried: tuple[Pool, ...] = ()) -> bool:
        """Whether a replica of the model is ready that was not tried yet, with room or without."""
        return any(target.pool not in tried for target in self._ready.get(model, ()))

    def wakes(self, model: str) -> bool:
        """Whether the model starts when it is asked for."""
        return model in self._on_demand

    def target(self, model: str, key: str) -> Target | None:
        """This ready replica of the model, None when it is not or no more."""
        return next((t for t in self._ready.get(model, ()) if t.pool.key == key), None)

    def choose(self, model: str, tried: tuple[Pool, ...]) -> Target | None:
        """A ready replica of `model` with room that was not tried yet, None when there is none."""
        ready = self._ready.get(model, [])
        bits = self._random.getrandbits(32)
        if not tried:
            target = choose(ready, bits)
            if target is None:
                return None
            if not target.pool.avoid_until and target.pool.in_flight < target.pool.depth:
                return target
        now = time.monotonic()
        untried = [t for t in ready if t.pool not in tried and t.pool.in_flight < t.pool.depth]
        return choose([t for t in untried if t.pool.avoid_until <= now] or untried, bits)

    def avoid(self, pool: Pool) -> None:
        """A connection to it failed: prefer others for a moment."""
        pool.avoid_until = time.monotonic() + AVOID_S

    def everyone(self) -> list[Pool]:
        """All pools, those of replicas that left the table too."""
        return [*self.pools.values(), *self._leaving]

    def close(self) -> None:
        for pool in self.everyone():
            pool.close()
