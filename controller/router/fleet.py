"""The living side of the routing table: which replicas there are, and who gets a request.

Tables are swapped under running requests: a replica that left finishes what it has, then its
pool (`pool.py`) goes.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Final

from controller.router.choose import Group, Want, choose
from controller.router.clock import monotonic
from controller.router.pool import Pool, Target
from controller.router.scoring import PROFILES
from controller.router.stats import add_bounded
from controller.router.table import Model, RouteTable
from controller.router.upstream import UpstreamConnection

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping
    from random import Random

    from controller.router.config import RouterConfig
    from controller.router.deadlines import Deadlines
    from controller.router.pool import Address
    from controller.router.reactor import Reactor
    from controller.router.table import Endpoint, Replica

USUAL: Final = Want()
OUTDONE_S: Final = 2.0
"""A last resort that only fails is none when another one answered well so much later."""


class Fleet:
    """All pools, the names clients may use, and the choice between replicas."""

    def __init__(
        self, config: RouterConfig, reactor: Reactor, deadlines: Deadlines, random: Random
    ) -> None:
        self.config = config
        self.usual = Want(PROFILES[config.scoring])  # of requests that say nothing
        self.reactor = reactor
        self.table = RouteTable()
        self.names: dict[str, Model] = {}
        self.pools: dict[str, Pool] = {}
        self.room: Callable[[Pool], None] | None = None  # told of room, while anybody waits for it
        self._deadlines = deadlines
        self.random = random
        self._ready: dict[str, Group[Target]] = {}
        self._on_demand: frozenset[str] = frozenset()
        self._leaving: list[Pool] = []
        self._tripped: dict[str, int] = {}  # trips of replicas that left, which may return
        self._trips: dict[str, tuple[float, float]] = {}  # of places without a pool as yet

    def connection(self, sock: Any, pool: Pool) -> UpstreamConnection:
        return UpstreamConnection(self.reactor, sock, pool, self._deadlines, self.config.timeouts)

    def swap(self, table: RouteTable, addresses: Mapping[Endpoint, Address]) -> None:
        """Take over `table`. A replica whose endpoint has no address (DNS) is left out."""
        pools: dict[str, Pool] = {}
        ready: dict[str, Group[Target]] = {}
        sizes: dict[Pool, int] = {}
        now = monotonic()
        for model in table.models:
            targets: list[Target] = []
            for replica in model.replicas:
                address = addresses.get(replica.endpoint)
                if address is None:
                    continue
                pool = pools.get(replica.key) or self._kept(replica, address)
                if replica.key not in pools:
                    pools[replica.key] = pool
                    pool.models = ()
                pool.models = (*pool.models, model.name)
                pool.take_over(replica, now)
                if replica.ready:
                    targets.append(Target(pool, replica.upstream_model))
            if targets:
                _compare(targets, sizes)
                ready[model.name] = Group(targets, self._ready.get(model.name))
        for pool, size in sizes.items():
            pool.resize(size, now)
        self._retire_missing(pools)
        self.table, self.names, self.pools, self._ready = table, table.names(), pools, ready
        self._on_demand = frozenset(model.name for model in table.models if model.on_demand)

    def _kept(self, replica: Replica, address: Address) -> Pool:
        for pool in (self.pools.get(replica.key), *self._leaving):
            if pool is not None and pool.is_of(replica, address):
                if pool.gone:  # what it runs still counts
                    self._leaving.remove(pool)
                    pool.gone = False
                return pool
        pool = Pool(self, replica, address)
        self._resume(pool)
        return pool

    def _retire_missing(self, pools: dict[str, Pool]) -> None:
        for key, pool in self.pools.items():
            if pools.get(key) is not pool:
                pool.retire()
                self._leaving.append(pool)
        for pool in [pool for pool in self._leaving if not pool.in_flight]:
            if pool.breaker.trips:
                add_bounded(self._tripped, pool.key, pool.breaker.trips)
            self._leaving.remove(pool)

    def serves(self, model: str, tried: tuple[Pool, ...] = ()) -> bool:
        """Whether a replica of the model is ready that was not tried yet, with room or without."""
        group = self._ready.get(model)
        return group is not None and (
            not tried or any(target.pool not in tried for target in group.members)
        )

    def fails(self, model: str, tried: tuple[Pool, ...] = ()) -> bool:
        """Whether each ready replica that was not tried failed lately: none is only full or busy,
        so that who waits for one may wait in vain."""
        group = self._ready.get(model)
        return group is not None and _all_fail(group, tried)

    def has_last_resort(self, model: str, tried: tuple[Pool, ...] = ()) -> bool:
        """Whether a replica that was not tried failed lately and yet answers some."""
        group = self._ready.get(model)
        return group is not None and bool(_last_resorts(group, tried, monotonic()))

    def can_serve(self) -> bool:
        """Whether any model has a ready replica, or starts when it is asked for."""
        return bool(self._ready or self._on_demand)

    def wakes(self, model: str) -> bool:
        """Whether the model starts when it is asked for."""
        return model in self._on_demand

    def target(self, model: str, key: str) -> Target | None:
        """This ready replica of the model, None when it is not or no more."""
        group = self._ready.get(model)
        members = () if group is None else group.members
        return next((target for target in members if target.pool.key == key), None)

    def with_room(self, model: str, key: str) -> Target | None:
        """This ready replica of the model, if it has room and is not held. One that fails is asked
        all the same: no other could answer instead of it."""
        target = self.target(model, key)
        if target is None or target.pool.in_flight >= target.pool.depth:
            return None
        breaker = target.pool.breaker
        return target if breaker.tripped or breaker.admits(monotonic()) else None

    def choose(self, model: str, tried: tuple[Pool, ...], want: Want = USUAL) -> Target | None:
        """A ready replica of `model` with room that was not tried yet and may have a request now.

        None when there is none: `back_at` then says whether waiting helps.
        """
        group = self._ready.get(model)
        if group is None:
            return None
        bits = self.random.getrandbits(32)
        target = None
        if not tried:
            target = group.pick(bits, want)
            if target is None:
                return None
            pool = target.pool
            if pool.in_flight < pool.depth and pool.breaker.closed:
                return target
        return self._choose_with_care(group, tried, want, bits, target)

    def _choose_with_care(
        self,
        group: Group[Target],
        tried: tuple[Pool, ...],
        want: Want,
        bits: int,
        first: Target | None,
    ) -> Target | None:
        """The choice when not everybody will do: `first`, if it may be probed now, else others."""
        now = monotonic()
        left = [
            target
            for target in group.members
            if target.pool not in tried and target.pool.in_flight < target.pool.depth
        ]
        fit = [target for target in left if target.pool.breaker.admits(now)]
        if not fit and _all_fail(group, tried):
            spare = _last_resorts(group, tried, now)
            fit = [target for target in left if target in spare]
        target: Target | None = None
        if first is not None and first in fit:
            target = first
        elif want.key is not None and want.profile.near:
            target = group.nearest(want.key, fit)
        return target or choose(fit, bits, want.profile)

    def back_at(self, model: str, tried: tuple[Pool, ...] = ()) -> float:
        """The monotonic moment when the first of the model's ready replicas may be asked again.

        Past, when one may be asked now or only lacks room (case C17). Those tried are no last
        resorts for a request that they failed.
        """
        now = monotonic()
        return min(
            target.pool.breaker.back_at(now, resort=target.pool not in tried)
            for target in self._ready[model].members
        )

    def tripped(self, now: float) -> list[Pool]:
        """Those whose breaker is open, so that others come first."""
        return [
            pool
            for pool in self.pools.values()
            if pool.breaker.tripped and pool.breaker.until > now
        ]

    def trips(self) -> dict[str, int]:
        """How often each replica's breaker opened, of those that left too; absent: never."""
        found = dict(self._tripped)
        for pool in self.everyone():
            if pool.breaker.trips:
                found[pool.key] = found.get(pool.key, 0) + pool.breaker.trips
        return found

    def resume(self, trips: Iterable[Mapping[str, Any]]) -> None:
        """Take over rows of `route_trips`: breakers that were open when this process started."""
        now = monotonic()
        self._trips = {t["place"]: (now + t["left_s"], t["pause_s"]) for t in trips}
        for pool in self.pools.values():
            self._resume(pool)

    def _resume(self, pool: Pool) -> None:
        until, pause_s = self._trips.pop(pool.place, (-math.inf, 0.0))
        if pool.breaker.closed and until > monotonic():
            pool.breaker.resume(until, pause_s)

    def everyone(self) -> list[Pool]:
        """All pools, those of replicas that left the table too."""
        return [*self.pools.values(), *self._leaving]

    def close(self) -> None:
        for pool in self.everyone():
            pool.close()


def _all_fail(group: Group[Target], tried: tuple[Pool, ...]) -> bool:
    return all(target.pool.breaker.tripped for target in group.members if target.pool not in tried)


def _last_resorts(group: Group[Target], tried: tuple[Pool, ...], now: float) -> list[Target]:
    """Those not tried. Not who broke for good, beside one that still answers, though this one be
    full or rest: it is the last to be found out, for failing fast it looks idle."""
    found = [
        target
        for target in group.members
        if target.pool not in tried and target.pool.breaker.answers_some(now)
    ]
    latest = max([target.pool.breaker.good_at for target in found], default=0.0)
    return [
        target
        for target in found
        if target.pool.breaker.is_last_resort(now)
        and (not target.pool.breaker.failing or latest - target.pool.breaker.good_at < OUTDONE_S)
    ]


def _compare(targets: list[Target], sizes: dict[Pool, int]) -> None:
    """Note in `sizes` how large these replicas of a model are among each other.

    A default depth is large, so that it bounds nobody who was not measured. It tells nothing of a
    replica's size: beside measured ones it would draw nearly all requests. Such a one counts as
    the smallest of these, of all models that it serves.
    """
    known = [target.pool.depth for target in targets if target.pool.sized]
    for target in targets:
        pool = target.pool
        size = min(known) if known and not pool.sized else pool.depth
        sizes[pool] = min(size, sizes.get(pool, size))
