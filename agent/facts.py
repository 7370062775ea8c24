"""What the agent says of its machine: slow facts when they change, fast facts with each sync.

Probing runs beside the sync, never within it: a hanging driver must not silence a node. Called by
loop; the machine's real probes are behind `Probes` (agent.machine).
"""

from __future__ import annotations

from collections import deque
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import structlog
import trio

from agent.probes.engines import MAX_ENGINES
from sql.errors import Refused

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable

    from agent.door import Door
    from agent.probes.scan import Scan
    from agent.probes.weights_scan import WeightsScan

MAX_EVENTS = 200
"""Events that wait for a database that is away; older ones go first."""
RESEND_AFTER_S = 600.0
"""Unchanged facts are said again after this time, so that a restored database learns them."""
FAST_VALID_S = 30.0
"""Older fast facts are left out: unknown is better than stale."""
DRIFTING = frozenset(
    {
        "memory_available_mib",
        "free_mib",
        "bytes",
        "errors",
        "evidence",
        "clocks",
        "throttle",
        "gen",
        "booted_at",
    }
)
"""What always moves: it alone is no reason to write. Clocks and PCIe generation follow the load,
the time of the boot is computed anew from two clocks."""
log = structlog.get_logger()


class Probes(Protocol):
    """The machine's facts. Each call has its own deadline and leaves out what it cannot learn."""

    woken: trio.Event
    """Set when something happened that the next look should not wait for; a look makes it anew."""

    async def slow(self) -> dict[str, Any]:
        """Documents by kind: host, gpus, ports, engines, disks, checks; None is not known now.

        `events` are what happened since the last call: they are told once.
        """
        ...

    async def fast(self, pids: set[int]) -> dict[str, Any]:
        """`load`, `gpus` and `ports`; card memory held by other than these processes is foreign."""
        ...

    async def watch(self) -> None:
        """Wait for events of the machine, for ever."""
        ...

    async def scan_fabric(self, hca: str, port: int) -> Scan:
        """The map of the InfiniBand fabric behind a port."""
        ...


def steady(document: Any) -> Any:
    """A document without its drifting numbers, to compare with."""
    if isinstance(document, dict):
        return {k: steady(v) for k, v in document.items() if k not in DRIFTING}
    if isinstance(document, list):
        return [steady(item) for item in document]
    return document


class Facts:
    """Facts of one node, remembered so that only changes are sent."""

    def __init__(
        self,
        probes: Probes,
        weights: WeightsScan,
        sources: Callable[[], Iterable[str]],
        provision: Callable[[], Awaitable[list[dict[str, Any]]]] | None = None,
    ) -> None:
        """`provision` tells of engines that are being installed or could not be."""
        self.probes = probes
        self._provision = provision
        self._weights = weights
        self._sources = sources
        self._events: deque[dict[str, Any]] = deque(maxlen=MAX_EVENTS)
        self._said: dict[str, tuple[Any, float]] = {}
        self._fast: dict[str, Any] = {}
        self._fast_at = 0.0

    def forget(self) -> None:
        """The database may know nothing: say everything again."""
        self._said.clear()

    async def refresh(self, pids: set[int]) -> None:
        """Take the fast facts anew."""
        self._fast = await self.probes.fast(pids)
        self._fast_at = trio.current_time()

    def fast(self) -> dict[str, Any]:
        """The fast facts taken last, once; empty until new ones are taken, or when too old.

        An idle agent comes more often than facts are taken: saying them again would more than
        double what a fleet costs the database. Lost on the way, they are missed for one sample.
        """
        taken, self._fast = self._fast, {}
        return taken if trio.current_time() - self._fast_at < FAST_VALID_S else {}

    async def report(self, door: Door, secret: str) -> None:
        """Probe all slow facts and send those that changed. A bad document costs only itself."""
        found = await self.probes.slow()
        self._events.extend(found.pop("events", ()))
        if self._provision is not None and found.get("engines") is not None:
            rows = await self._provision()
            found["engines"] = [*found["engines"][: MAX_ENGINES - len(rows)], *rows]
        local = [s for s in self._sources() if s.startswith("file:")]
        listed = await self._weights.read(local)
        found["weights"] = [{"managed": False, **document} for document in listed]
        for kind, document in found.items():
            if document is not None:
                await self._try(kind, partial(self._send, door, secret, kind, document))
        if self._events:
            await self._try("events", partial(self._tell, door, secret))

    async def _try(self, kind: str, say: Callable[[], Awaitable[None]]) -> None:
        try:
            await say()
        except Refused as error:
            log.warning("facts refused", kind=kind, error=str(error))

    async def _tell(self, door: Door, secret: str) -> None:
        """Events stay until they have been taken."""
        events = list(self._events)
        await door.report(secret, "events", events)
        self._events.clear()

    async def _send(self, door: Door, secret: str, kind: str, document: Any) -> None:
        now, shape = trio.current_time(), steady(document)
        said, at = self._said.get(kind, (None, 0.0))
        if kind in self._said and said == shape and now - at < RESEND_AFTER_S:
            return
        await door.report(secret, kind, document)
        self._said[kind] = (shape, now)
