"""Static endpoints (`--endpoint`): whether they are healthy, and which models they serve.

Nobody else watches them. Each is asked for /health, or /v1/models where it has none; one that
misses twice leaves the choice until it answers again. Requests go to the address that answered: a
name may have others where nobody listens, and gets a new one when its container is made anew.
An endpoint without named models serves
what its /v1/models lists, read again now and then. Where we have a key for it, that is read to see
whether it takes the key, too: most engines ask nobody for one at /health.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import orjson
import structlog
import trio

from controller.router.clock import monotonic
from controller.router.engine_key import host_lines, read_key
from controller.router.inquiry import Reply, Unanswered, get, look_up
from controller.router.table import from_static, parse_endpoint

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping

    from controller.router.config import RouterConfig, StaticEndpoint
    from controller.router.pool import Address
    from controller.router.table import Endpoint, RouteTable

TICK_S = 0.25
SOON_S = 1.0  # unhealthy or not known yet
WITHIN_S = 2.0
MISSES = 2  # in a row; one may be an accident
MODELS_EVERY_S = 30.0
MOST_MODELS = 1000
MOST_NAME = 256
MOST_BYTES = 4 * 1024 * 1024
MOST_ADDRESSES = 4  # of one name
AT_ONCE = 16
NO_HEALTH = frozenset((404, 405, 501))
GUARDED = frozenset((401, 403))  # it wants a key, so it is alive; ours, and it refuses that one

log = structlog.get_logger(__name__)


class Static:
    """One endpoint and what is known of it."""

    def __init__(self, entry: StaticEndpoint) -> None:
        self.entry = entry
        self.endpoint = parse_endpoint(entry.url)
        self.engine_key = b"" if entry.key_file is None else read_key(entry.key_file)
        self.models = entry.models
        self.address: Address | None = None  # where requests go; None: not known
        self.healthy = True  # until the contrary is known: its first requests need not wait
        self.why: str | None = None
        self.misses = 0
        self.next_at = -math.inf
        self.models_at = -math.inf

    def take_key(self, key: bytes) -> bool:
        """What its file holds now; whether that is another than before."""
        if key == self.engine_key:
            return False
        self.engine_key, self.next_at, self.models_at = key, -math.inf, -math.inf  # is it right?
        return True

    def missed(self, why: str) -> bool:
        """No good answer; whether that changes anything."""
        self.misses += 1
        self.models_at = -math.inf  # it may come back with others
        if self.misses < MISSES:
            return False
        changed, self.healthy, self.why = self.healthy, False, why
        return changed

    def answered(self) -> bool:
        """All is well; whether that is new."""
        changed = not self.healthy
        self.misses, self.healthy, self.why = 0, True, None
        return changed

    def as_json(self) -> dict[str, Any]:
        shown = {"endpoint": self.entry.id, "healthy": self.healthy, "models": list(self.models)}
        return shown if self.why is None else {**shown, "why": self.why}


class Statics:
    """All of them; one per process."""

    def __init__(self, config: RouterConfig) -> None:
        self._config = config
        self._every_s = config.watching.health_s
        self.all = [Static(entry) for entry in config.endpoints]

    def table(self) -> RouteTable:
        """Routes to them: models as named or found, ready unless unhealthy."""
        return from_static(
            (
                replace(static.entry, models=static.models, engine_key=static.engine_key)
                for static in self.all
            ),
            self._config.aliases,
            self._config.fallbacks,
            frozenset(static.entry.id for static in self.all if not static.healthy),
        )

    def addresses(self) -> dict[Endpoint, Address]:
        """Where they were found last."""
        return {s.endpoint: s.address for s in self.all if s.address is not None}

    def take_addresses(self, known: Mapping[Endpoint, Address]) -> None:
        """These are in force."""
        for static in self.all:
            static.address = known.get(static.endpoint)

    def unhealthy(self) -> dict[str, str]:
        """Why, by id."""
        return {s.entry.id: s.why or "unknown" for s in self.all if not s.healthy}

    def unknown(self) -> list[str]:
        """Those whose models nobody knows yet, by id; the unhealthy ones apart."""
        return [s.entry.id for s in self.all if s.healthy and not s.models]

    async def read_keys(self) -> bool:
        """Read the files of keys again; whether any is new. A bad one leaves the key as it is."""
        changed = False
        for static in self.all:
            if static.entry.key_file is None:
                continue
            try:
                key = await trio.to_thread.run_sync(read_key, static.entry.key_file)
            except (OSError, ValueError) as error:
                why = "the key of an endpoint was not taken, the old one stays"
                log.warning(why, endpoint=static.entry.id, error=str(error))
                continue
            if static.take_key(key):
                log.info("the key of an endpoint is another", endpoint=static.entry.id)
                changed = True
        return changed

    async def run(self, changed: Callable[[], Awaitable[None]]) -> None:
        """Ask for ever; `changed` is awaited whenever the table is another."""
        limit = trio.CapacityLimiter(AT_ONCE)
        while True:
            news: list[Static] = []
            async with trio.open_nursery() as nursery:
                for static in self.all:
                    if static.next_at <= monotonic():
                        nursery.start_soon(self._ask, static, limit, news)
            if news:
                await changed()
            await trio.sleep(TICK_S)

    async def _ask(self, static: Static, limit: trio.CapacityLimiter, news: list[Static]) -> None:
        async with limit:
            try:
                before = static.models, static.address
                await check(static)
                different = static.answered() or (static.models, static.address) != before
            except Unanswered as error:
                different = static.missed(str(error))
            if different:
                _tell(static)
                news.append(static)
            good = static.healthy and not static.misses
            static.next_at = monotonic() + (self._every_s if good else min(SOON_S, self._every_s))


def _tell(static: Static) -> None:
    """Say what is new: without a database, nothing else tells why an endpoint gets nothing."""
    if static.healthy:
        log.info("static endpoint serves", endpoint=static.entry.id, models=list(static.models))
    else:
        log.warning("static endpoint is unhealthy", endpoint=static.entry.id, why=static.why)


async def check(static: Static) -> None:
    """Ask one endpoint for its health and, when due, its models; Unanswered says what is wrong."""
    reply = await _get(static, b"/health")
    if reply.status in NO_HEALTH:
        reply = await _get(static, b"/v1/models")
        if reply.status != 200 and reply.status not in GUARDED:
            raise Unanswered(f"it has no /health, and its /v1/models says HTTP {reply.status}")
    elif reply.status != 200 and reply.status not in GUARDED:
        raise Unanswered(f"its /health says HTTP {reply.status}")
    asks = static.engine_key or not static.entry.models
    if asks and monotonic() - static.models_at > MODELS_EVERY_S:
        reply = await _get(static, b"/v1/models")
        if not static.entry.models:
            static.models = listed(reply)
        static.models_at = monotonic()


async def _get(static: Static, path: bytes) -> Reply:
    end, key = static.endpoint, static.engine_key
    found = await _known_addresses(static)
    first: Unanswered | None = None
    for address in found[:MOST_ADDRESSES]:
        try:
            reply = await get(
                address, host_lines(end.authority, key), end.base + path,
                within_s=WITHIN_S, most_bytes=MOST_BYTES,
            )  # fmt: skip
            break
        except Unanswered as error:
            first = first or error
    else:
        assert first is not None
        raise first
    static.address = address
    if key and reply.status in GUARDED:
        said = f"its {path.decode()} says HTTP {reply.status}"
        raise Unanswered(f"the endpoint's key was refused ({said}): see endpoint_keys")
    return reply


async def _known_addresses(static: Static) -> list[Address]:
    """Where it may be, the address in force first; that one while no name server answers."""
    now = static.address
    try:
        found = await look_up(static.endpoint)
    except Unanswered:
        if now is None:
            raise
        return [now]
    return sorted(found, key=lambda address: address != now)


def listed(reply: Reply) -> tuple[str, ...]:
    """The models in an answer of /v1/models; Unanswered when it is none."""
    if reply.status in GUARDED:
        raise Unanswered(
            f"its /v1/models says HTTP {reply.status}: give it the key that it wants, see "
            "endpoint_keys, or name its models, as id=URL=model, when only that needs one"
        )
    if reply.status != 200:
        raise Unanswered(
            f"its /v1/models says HTTP {reply.status}: name its models, as id=URL=model"
        )
    try:
        document = orjson.loads(reply.body)
        names = [entry["id"] for entry in document["data"][:MOST_MODELS]]
    except (ValueError, TypeError, KeyError):
        raise Unanswered(
            "its /v1/models is no list of models: name them, as id=URL=model"
        ) from None
    found = tuple(n for n in names if isinstance(n, str) and 0 < len(n) <= MOST_NAME)
    if not found:
        raise Unanswered("its /v1/models lists no model: name them, as id=URL=model")
    return tuple(dict.fromkeys(found))
