"""The real machine's facts for agent.facts, out of agent.probes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import structlog

from agent.probes import inventory
from agent.probes.root import Root

if TYPE_CHECKING:
    from agent.probes.host import CpuTimes

log = structlog.get_logger()


class Machine:
    """One machine under a root: the live one, or a captured one in tests."""

    def __init__(self, config: inventory.ProbeConfig, root: Root | None = None) -> None:
        self._config = config
        self._root = root or Root()
        self._cpu: CpuTimes | None = None
        self._gpu_error: str | None = None

    async def slow(self, kind: str) -> Any:
        """Facts of one kind."""
        if kind == "host":
            return await inventory.host_facts(self._root, self._config)
        if kind == "gpus":
            return await self._gpus()
        if kind == "engines":
            return await inventory.engine_facts(self._root, self._config)
        return await inventory.disk_facts(self._root, self._config)

    async def _gpus(self) -> list[dict[str, Any]] | None:
        cards, error = await inventory.gpu_facts(self._root)
        if error != self._gpu_error:
            log.warning("GPU probe", problem=error)
            self._gpu_error = error
        # No answer is not "no cards": that word would take every card of the node away.
        return None if error and not cards else cards

    async def fast(self, pids: set[int]) -> dict[str, Any]:
        """`load` and `gpus` now."""
        found = await inventory.fast_facts(self._root, pids, self._cpu)
        self._cpu = found.cpu_times or self._cpu
        return {"load": found.load, "gpus": found.gpus}
