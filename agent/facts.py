"""What the agent says of its machine: slow facts when they change, fast facts with each sync.

Probing runs beside the sync, never within it: a hanging driver must not silence a node. Called by
loop; the machine's real probes are behind `Probes` (agent.machine).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import structlog
import trio

from agent.weights import weights_on_disk
from sql.errors import Refused

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path

    from agent.door import Door

RESEND_AFTER_S = 600.0
"""Unchanged facts are said again after this time, so that a restored database learns them."""
FAST_VALID_S = 30.0
"""Older fast facts are left out: unknown is better than stale."""
DRIFTING = frozenset({"memory_available_mib", "free_mib", "bytes"})
"""Numbers that always move: they alone are no reason to write."""
log = structlog.get_logger()


class Probes(Protocol):
    """The machine's facts. Each call has its own deadline and leaves out what it cannot learn."""

    async def slow(self) -> dict[str, Any]:
        """Documents by kind: host, gpus, engines, disks."""
        ...

    async def fast(self, pids: set[int]) -> dict[str, Any]:
        """`load` and `gpus`; card memory held by other than these processes is foreign."""
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
        self, probes: Probes, weights_dir: Path, sources: Callable[[], Iterable[str]]
    ) -> None:
        self._probes = probes
        self._weights_dir = weights_dir
        self._sources = sources
        self._said: dict[str, tuple[Any, float]] = {}
        self._fast: dict[str, Any] = {}
        self._fast_at = 0.0

    def forget(self) -> None:
        """The database may know nothing: say everything again."""
        self._said.clear()

    async def refresh(self, pids: set[int]) -> None:
        """Take the fast facts anew."""
        self._fast = await self._probes.fast(pids)
        self._fast_at = trio.current_time()

    def fast(self) -> dict[str, Any]:
        """The fast facts taken last; empty when that is too long ago."""
        return self._fast if trio.current_time() - self._fast_at < FAST_VALID_S else {}

    async def report(self, door: Door, secret: str) -> None:
        """Probe all slow facts and send those that changed. A bad document costs only itself."""
        found = await self._probes.slow()
        local = [s for s in self._sources() if s.startswith("file:")]
        found["weights"] = await trio.to_thread.run_sync(weights_on_disk, self._weights_dir, local)
        for kind, document in found.items():
            try:
                await self._send(door, secret, kind, document)
            except Refused as error:
                log.warning("facts refused", kind=kind, error=str(error))

    async def _send(self, door: Door, secret: str, kind: str, document: Any) -> None:
        now, shape = trio.current_time(), steady(document)
        said, at = self._said.get(kind, (None, 0.0))
        if kind in self._said and said == shape and now - at < RESEND_AFTER_S:
            return
        await door.report(secret, kind, document)
        self._said[kind] = (shape, now)
