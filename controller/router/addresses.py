"""Where endpoints are: their names, looked up beside the requests' way.

A new name is waited for; one that leads nowhere is looked up again apart, for a silent name server
would hold up what else is read: replicas that drain, keys that are revoked. So is the name of a
replica that fails: its machine may have come back elsewhere. (Static endpoints are followed by
those who ask for their health, too: `statics.py`.)
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import structlog
import trio

from controller.router.inquiry import Unanswered, look_up

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable, Mapping

    from controller.router.core import Core
    from controller.router.pool import Address
    from controller.router.table import Endpoint

log = structlog.get_logger(__name__)


class Addresses:
    """Of all endpoints in the routes; one per process."""

    def __init__(self, core: Core) -> None:
        self._core = core
        self._known: dict[Endpoint, Address] = {}
        self._news: dict[Endpoint, Address] = {}  # found since
        self._nowhere: set[Endpoint] = set()  # asked in vain, and told

    async def of(self, wanted: set[Endpoint]) -> Mapping[Endpoint, Address]:
        """Where these are, those left out that are nowhere. One call at a time."""
        told = {**self._known, **self._core.statics.addresses(), **self._news}
        self._news = {}
        known = {endpoint: told[endpoint] for endpoint in wanted & told.keys()}
        missing = wanted - known.keys()
        self._nowhere &= missing
        for endpoint, found in (await self._look_up(missing - self._nowhere)).items():
            known[endpoint] = found[0]
        self._known = known
        self._core.statics.take_addresses(known)
        return known

    async def run(self, install: Callable[[], Awaitable[None]]) -> None:
        """Look again for those that are nowhere, or fail; `install` then puts them in force. Runs
        for ever."""
        while True:
            await trio.sleep(self._core.config.timeouts.refresh_s)
            failing = {
                pool.endpoint for pool in self._core.fleet.pools.values() if pool.breaker.tripped
            }
            if not (self._nowhere or failing):
                continue
            found = await self._look_up(self._nowhere | failing)
            news = {end: at[0] for end, at in found.items() if self._known.get(end) not in at}
            if news:
                self._news.update(news)
                await install()

    async def _look_up(self, endpoints: Iterable[Endpoint]) -> dict[Endpoint, list[Address]]:
        found: dict[Endpoint, list[Address]] = {}
        async with trio.open_nursery() as nursery:
            for endpoint in endpoints:
                nursery.start_soon(self._ask, endpoint, found)
        return found

    async def _ask(self, endpoint: Endpoint, found: dict[Endpoint, list[Address]]) -> None:
        try:
            found[endpoint] = await look_up(endpoint)
        except Unanswered as error:
            self._core.stats.add("lookup_failures")
            if endpoint not in self._nowhere and endpoint not in self._known:
                self._nowhere.add(endpoint)
                log.warning("endpoint has no address", host=endpoint.host, error=str(error))
