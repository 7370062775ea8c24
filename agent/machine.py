"""The real machine's facts for agent.facts: probes, and what is remembered between two looks.

The health of cards over time, the counters that traffic is measured with and the slices of cards
in MIG mode live here; the health ledger outlives the agent in its state folder.
"""

from __future__ import annotations

import json
import time
from collections import deque
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Self

import structlog
import trio

from agent import doctor, documents, health, health_changes, health_document, procfs, xids
from agent.address import address_towards
from agent.atomic import write_atomic
from agent.health_ledger import observe
from agent.probes import fast, gpus, inventory, kernel_log, nvml
from agent.probes.nvml_events import Xid, xid_events
from agent.probes.root import Root
from agent.probes.scan import scan

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path
    from types import TracebackType

    from agent.health_ledger import Ledger
    from agent.probes.card import Gpu, Gpus, MigDevice
    from agent.probes.found import Found
    from agent.probes.scan import Scan

FIRST_LOOK_S: Final = 60.0
"""How long an engine that needs the cards' numbers waits for the first look after a start."""
RELEASE_S: Final = 30.0
RELEASE_CHECK_S: Final = 0.5
MAX_XIDS: Final = 200
"""Events of the driver that wait for the next look; older ones go first."""
log = structlog.get_logger()


class Machine:
    """One machine under a root: the live one, or a captured one in tests. Use with `async with`.

    `ledger_file` is where the health ledger is kept; None keeps it for this process only.
    """

    def __init__(
        self,
        config: inventory.ProbeConfig,
        database_url: str,
        root: Root | None = None,
        ledger_file: Path | None = None,
    ) -> None:
        self.woken = trio.Event()
        """Set when something happened that the next look should not wait for."""
        self._config = config
        self._database_url = database_url
        self._root = root or Root()
        self._ledger_file = ledger_file
        self._ledger: Ledger | None = None
        self._child = nvml.converse()
        self._sample = fast.Sample()
        self._slices: dict[str, tuple[MigDevice, ...]] = {}
        self._unified: frozenset[str] = frozenset()
        self._xids: deque[Xid] = deque(maxlen=MAX_XIDS)
        self._looked = trio.Event()
        self._numbers: dict[str, int] = {}

    async def __aenter__(self) -> Self:
        await self._child.__aenter__()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self._child.__aexit__(kind, error, trace)

    def wake(self) -> None:
        """Ask for a look soon."""
        self.woken.set()

    async def slow(self) -> dict[str, Any]:
        """The documents of host, gpus, ports, engines, disks and checks, and new `events`."""
        self.woken = trio.Event()
        if self._config.mgmt_addr is None:  # asked until known: name service may be away at start
            found_at = await trio.to_thread.run_sync(address_towards, self._database_url)
            self._config = replace(self._config, mgmt_addr=found_at)
        found, events = await self.look()
        return {
            "host": documents.host_document(found, self._config),
            "gpus": documents.gpu_documents(found),
            "ports": documents.port_documents(found.ports.ports),
            "engines": documents.engine_documents(found.engines),
            "disks": documents.disk_documents(found.disks),
            "checks": doctor.to_documents(doctor.checks(found)),
            "events": events,
        }

    async def look(self) -> tuple[Found, list[dict[str, Any]]]:
        """One look with the health of cards as remembered, and the new events as documents."""
        child = self._child if self._asks_nvml else None
        found = await inventory.look(self._root, self._config, child=child)
        self._slices = {c.uuid: c.slices for c in found.gpus.cards if c.uuid and c.slices}
        self._numbers = numbers(found.gpus)
        self._looked.set()
        self._unified = frozenset(
            c.uuid for c in found.gpus.cards if c.uuid and c.memory_kind == "unified"
        )
        return await self._judge(found)

    async def numbering(self) -> Mapping[str, int]:
        """Numbers of whole cards in PCI order by UUID, after the first look; empty when unsure.

        CUDA counts the cards that it can use: with a lost one among them the numbers are off.
        """
        with trio.move_on_after(FIRST_LOOK_S):
            await self._looked.wait()
        return self._numbers

    @property
    def _asks_nvml(self) -> bool:
        return self._root.live and bool(inventory.signs(self._root))

    async def _judge(self, found: Found) -> tuple[Found, list[dict[str, Any]]]:
        before = self._ledger
        if before is None:
            before = await trio.to_thread.run_sync(self._load)
        boot_id = found.host.boot_id if found.host else None
        said = await kernel_log.read(self._root, before.read_until(boot_id))
        told = tuple(self._xids)
        self._xids.clear()
        events: Sequence[xids.Event] = said.events
        if said.source is None:  # the log has them with words; a late copy could undo a reset
            events = [xids.from_nvml(event.pci_bus_id, event.xid) for event in told]
        after = observe(
            before,
            {key: health.look_at(c) for c in found.gpus.cards if (key := gpus.key(c))},
            events,
            boot_id=boot_id,
            driver=found.gpus.driver_version,
            now=time.monotonic(),
            cursor=said.cursor,
        )
        for change in health_changes.changes(before, after):
            log.warning(
                "card health",
                card=change.card,
                code=change.code,
                what=change.what,
                evidence=change.evidence,
            )
        self._ledger = after
        if after != before and self._ledger_file is not None:
            await trio.to_thread.run_sync(self._save, after)
        reason = said.error if found.gpus.cards else None
        ordered = [key for c in found.gpus.cards if (key := gpus.key(c))]
        keys = dict.fromkeys((*ordered, *after.cards))  # as the cards come: words are in that order
        findings = {key: after.findings(key) for key in keys if key in after.cards}
        seen = replace(found, findings=findings, kernel_log_error=reason)
        uuids = {c.pci_bus_id: c.uuid for c in found.gpus.cards if c.pci_bus_id and c.uuid}
        return seen, documents.event_documents(events, uuids)

    def _load(self) -> Ledger:
        document: Any = None
        if self._ledger_file is not None:
            try:
                document = json.loads(self._ledger_file.read_text())
            except (OSError, ValueError, RecursionError):
                document = None  # none yet, or damaged: the next looks find most of it again
        return health_document.from_document(document)

    def _save(self, ledger: Ledger) -> None:
        assert self._ledger_file is not None
        try:
            write_atomic(self._ledger_file, json.dumps(health_document.to_document(ledger)))
        except OSError as error:
            log.warning("card health not kept", file=str(self._ledger_file), error=str(error))

    async def fast(self, pids: set[int]) -> dict[str, Any]:
        """`load`, `gpus` and `ports` now."""
        found = await fast.read(
            self._root,
            pids,
            self._sample,
            child=self._child if self._asks_nvml else None,
            slices=self._slices,
            unified=self._unified,
            own_mib=await self._own_mib(pids) if self._unified else None,
        )
        self._sample = found.sample
        return {"load": found.load, "gpus": found.gpus, "ports": found.ports}

    async def _own_mib(self, pids: set[int]) -> int:
        """Host memory that our engines hold, MiB."""
        processes = await trio.to_thread.run_sync(
            partial(lambda numbers: [procfs.process(pid) for pid in numbers], tuple(pids))
        )
        return sum(p.rss_bytes for p in processes if p is not None) // 2**20

    async def released(self, uuids: Sequence[str], within_s: float = RELEASE_S) -> str | None:
        """Wait until no ended process holds memory of these cards any more (case D20).

        None when it is free, or nobody can tell; else what is left after `within_s` seconds.
        """
        child = self._child if self._asks_nvml else None
        deadline = trio.current_time() + within_s
        while True:
            found = await inventory.read_gpus(self._root, fast=True, child=child)
            held = [c for c in found.cards if c.uuid in uuids and gpus.unexplained_memory(c)]
            if not held:
                return None
            if trio.current_time() >= deadline:
                return "; ".join(unreleased(card) for card in held)
            await trio.sleep(RELEASE_CHECK_S)

    async def watch(self) -> None:
        """Wait for the driver's error events, for ever; each asks for a look at once."""
        if not self._asks_nvml:
            await trio.sleep_forever()
        send, receive = trio.open_memory_channel[Xid](MAX_XIDS)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(xid_events, send)
            async for event in receive:
                self._xids.append(event)
                self.woken.set()

    async def scan_fabric(self, hca: str, port: int) -> Scan:
        """What ibnetdiscover prints through a port."""
        return await scan(self._root, hca, port)


def unreleased(card: Gpu) -> str:
    """What is left on a card that should be free, for people. Pure."""
    pids = ", ".join(str(p.pid) for p in card.processes or ()) or "none"
    return (
        f"memory not released: {gpus.unexplained_memory(card)} MiB of {card.uuid} belong to no "
        f"process (pids on the card: {pids}); reset the card if this stays"
    )


def numbers(found: Gpus) -> dict[str, int]:
    """Numbers of whole NVIDIA cards in PCI order; empty when one of them is in doubt. Pure."""
    cards = [card for card in found.cards if card.vendor == "nvidia"]
    ordered = sorted(cards, key=lambda card: card.pci_bus_id or "")
    sure = not found.error and all(
        card.uuid and card.pci_bus_id and not card.problems and not card.mig for card in cards
    )
    return {card.uuid: n for n, card in enumerate(ordered) if card.uuid} if sure else {}
