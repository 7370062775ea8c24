"""The real machine's facts for agent.facts, out of agent.probes."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import trio

from agent.address import address_towards
from agent.probes import inventory
from agent.probes.root import Root

if TYPE_CHECKING:
    from agent.probes.host import CpuTimes


class Machine:
    """One machine under a root: the live one, or a captured one in tests."""

    def __init__(
        self, config: inventory.ProbeConfig, database_url: str, root: Root | None = None
    ) -> None:
        self._config = config
        self._database_url = database_url
        self._root = root or Root()
        self._cpu: CpuTimes | None = None

    async def slow(self) -> dict[str, Any]:
        """The documents of host, gpus, engines and disks."""
        if self._config.mgmt_addr is None:  # asked until known: name service may be away at start
            found_at = await trio.to_thread.run_sync(address_towards, self._database_url)
            self._config = replace(self._config, mgmt_addr=found_at)
        found = await inventory.slow_facts(self._root, self._config)
        return {
            "host": found.host,
            "gpus": found.gpus,
            "engines": found.engines,
            "disks": found.disks,
        }

    async def fast(self, pids: set[int]) -> dict[str, Any]:
        """`load` and `gpus` now."""
        found = await inventory.fast_facts(self._root, pids, self._cpu)
        self._cpu = found.cpu_times or self._cpu
        return {"load": found.load, "gpus": found.gpus}
