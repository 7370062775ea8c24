"""What all connections of one router process share. Built once by `server.py`."""

from __future__ import annotations

import math
import re
import uuid
from random import Random, SystemRandom
from typing import TYPE_CHECKING, Any, Final

import structlog

from controller.router.admission import Admission
from controller.router.auth import Keys
from controller.router.budget import RetryBudget
from controller.router.clock import monotonic
from controller.router.deadlines import Deadlines
from controller.router.errors import KEY_REVOKED
from controller.router.fleet import Fleet
from controller.router.reactor import Reactor
from controller.router.row_ids import RowIds
from controller.router.statics import Statics
from controller.router.stats import Stats
from controller.router.stored import Stored, StoredLog
from controller.router.tenancy import Tenancy
from controller.router.usage import UsageLog
from controller.router.waiting import WaitingRoom

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Collection

    import trio

    from controller.router.access_line import Lines
    from controller.router.asking import Asking
    from controller.router.client import ClientConnection
    from controller.router.config import RouterConfig
    from controller.router.errors import ApiError
    from controller.router.key_reader import KeyReader
    from controller.router.spooling import Spooling

log = structlog.get_logger(__name__)

COMPILED: Final = not __file__.endswith(".py")  # by ops/compile

_REQUEST_ID: Final = re.compile(rb"[A-Za-z0-9._:+/=@-]{1,128}")


class Core:
    """Reactor, fleet, keys, counters and usage of one process."""

    def __init__(self, config: RouterConfig, nursery: trio.Nursery) -> None:
        self.config = config
        self.router_id = config.id or str(uuid.uuid4())  # this process's life in the database
        seed = SystemRandom().getrandbits(256) if config.seed is None else config.seed
        self.row_ids = RowIds()
        self._random = Random(SystemRandom().getrandbits(256))  # noqa: S311 (no secret)
        self.reactor = Reactor()
        self.deadlines = Deadlines()
        self.fleet = Fleet(config, self.reactor, self.deadlines, Random(seed))  # noqa: S311
        self.statics = Statics(config)
        self.keys = Keys()
        self.key_reader: KeyReader | None = None  # None: no database
        self.stats = Stats()
        self.budget = RetryBudget(config.retries.ratio, config.retries.floor)
        self.access_lines: Lines | None = None  # None: there is no access log
        self.usage = UsageLog(config.limits.usage_rows, self.stats)
        self.waiting = WaitingRoom(self)
        self.stored = Stored()
        self.stored_log: StoredLog | None = None  # None: no database
        self.admission = Admission(self)
        self.tenancy = Tenancy(self)
        self.asking: Asking | None = None  # None: no database
        self.spooling: Spooling | None = None  # None: no database
        self.clients: set[ClientConnection] = set()
        self.exchanges = 0  # requests between their first check and their end
        self.draining = False
        self.table_loaded_at: float | None = None  # monotonic
        self._nursery = nursery

    def spread(self, seconds: float) -> int:
        """That much or up to half more, in whole seconds from 1: who is refused with others does
        not come back with them."""
        return max(1, math.ceil(seconds * (1 + self._random.random() / 2)))

    def request_id(self, asked: bytes, row_id: str) -> bytes:
        """The client's own id when it is harmless, else one made of the row's."""
        if asked and _REQUEST_ID.fullmatch(asked):
            return asked
        return b"req-" + row_id.encode()

    def ask_key(self, digest: bytes, then: Callable[[ApiError | None], None]) -> None:
        """Look up a key that is not known here (`Keys.find`); `then`: the error, or None."""
        assert self.key_reader is not None
        self.key_reader.ask(digest, then)

    def running_keys(self) -> set[str]:
        """Ids of keys whose running requests end when they are revoked; mostly nobody asks."""
        if self.config.revoked_streams == "finish":
            return set()
        return {client.key_id for client in self.clients if client.key_id is not None}

    def keys_ended(self, ids: Collection[str]) -> None:
        """These keys were revoked: what they run finishes, or ends now if the settings say so."""
        if self.config.revoked_streams == "finish":
            return
        for client in [client for client in self.clients if client.key_id in ids]:
            self.stats.add("revoked_requests_ended")
            client.cut(KEY_REVOKED)

    def in_background(
        self, work: Callable[..., Awaitable[Any]], *args: object, then: Callable[[Any], None]
    ) -> None:
        """Run `work(*args)` as a Trio task; `then` gets its result, or None when it failed."""
        self._nursery.start_soon(self._run, work, args, then)

    async def _run(
        self,
        work: Callable[..., Awaitable[Any]],
        args: tuple[object, ...],
        then: Callable[[Any], None],
    ) -> None:
        result = None
        try:
            result = await work(*args)
        except Exception:
            log.exception("background work of a request failed")
        self.reactor.call_soon(lambda: then(result))

    def ready_reasons(self) -> list[str]:
        """Why a load balancer should send no one here; empty means ready."""
        reasons = []
        if self.draining:
            reasons.append("shutting down")
        if self.table_loaded_at is None:
            reasons.append("the routing table was not read from the database yet")
        if self.statics.all and not self.fleet.can_serve():
            found = self.statics.unhealthy().items()
            reasons += [f"endpoint {name} is unhealthy: {why}" for name, why in found]
            reasons += [
                f"endpoint {name} has not told its models yet" for name in self.statics.unknown()
            ]
        return reasons

    def waits(self, model: str) -> int:
        """Requests for the model that wait: for it to start, or for a place."""
        return self.waiting.waiting(model) + self.admission.waiting(model)

    def _rows_as_json(self) -> dict[str, Any]:
        """Rows on their way to the database."""
        return {
            "usage_waiting": len(self.usage),
            "usage_dropped": self.usage.dropped,
            "usage_lag_s": self.usage.oldest_age_s(self.keys.database_time(0.0)),
            **self.usage.spool_as_json(),
        }

    def snapshot(self) -> dict[str, Any]:
        """Counters and gauges as JSON, for the stats socket and tests."""
        now = monotonic()
        age = self.table_loaded_at
        return {
            "worker": self.config.worker,
            "life": self.config.id,
            "compiled": COMPILED,
            "connections": len(self.clients),
            "exchanges": self.exchanges,
            "draining": self.draining,
            "ready": not self.ready_reasons(),
            "table_age_s": None if age is None else now - age,
            "keys": len(self.keys),
            "keys_age_s": None if self.keys.read_at is None else now - self.keys.read_at,
            **({} if self.spooling is None else self._rows_as_json()),
            **self.tenancy.as_json(),
            "callback_crashes": self.reactor.crashes,
            "in_flight": [
                [m, of.in_flight - self.waits(m)] for m, of in self.stats.models.items() if m
            ],
            "waiting": self.waiting.as_json(),
            "queued": self.admission.as_json(),
            "replicas": [[pool.key, pool.in_flight] for pool in self.fleet.everyone()],
            "trips": [[key, trips] for key, trips in self.fleet.trips().items()],
            "statics": [static.as_json() for static in self.statics.all],
            "endpoints": [pool.as_json() for pool in self.fleet.pools.values()],
            **self.stats.snapshot(),
        }
