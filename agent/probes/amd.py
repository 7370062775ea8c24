"""AMD cards: amd-smi, else rocm-smi, else the kernel; the kernel completes what a tool left out.

Called by agent/probes/inventory.py. A machine without AMD cards and tools has none and no reason.
`read` is for slow facts; `read_fast` reads sysfs only, because amd-smi takes a second to start.
"""

from __future__ import annotations

from dataclasses import fields, replace
from functools import partial
from typing import TYPE_CHECKING, Final

import trio

from agent.probes import amd_smi, amd_sysfs, gpus, rocm_smi
from agent.probes.card import Ecc, Gpu, Gpus
from agent.probes.root import bounded

if TYPE_CHECKING:
    from collections.abc import Callable

    from agent.probes.root import Root, ToolResult

TIMEOUT_S: Final = 20.0
LEAST_S: Final = 5.0
"""Seconds that rocm-smi has after an amd-smi that hung."""
PARSE_TIMEOUT_S: Final = 5.0
SYSFS_TIMEOUT_S: Final = 5.0
CALLS: Final = ("list", "static", "metric", "process")
ALL: Final = ("-a", "--json")
SOME: Final = (
    *("--showproductname", "--showuniqueid", "--showid", "--showbus", "--showmeminfo", "vram"),
    *("--showtemp", "--showpower", "--showmaxpower", "--showuse", "--showdriverversion", "--json"),
)
"""Where `-a` fails: one table that it prints ends some versions (ROCm 7) by an assertion."""


async def read(root: Root, timeout_s: float = TIMEOUT_S) -> Gpus:
    """All AMD cards; `source` names who told, `error` why something is missing."""
    deadline = trio.current_time() + timeout_s
    kernel = await _kernel(root)
    found = await _amd_smi(root, timeout_s)
    reasons = [found.error]
    if not found.cards:
        found = await _rocm_smi(root, max(deadline - trio.current_time(), LEAST_S))
        reasons.append(found.error)
    why = "; ".join(filter(None, (*reasons, kernel.error))) or None
    if found.cards:
        return await _completed(root, found, kernel)
    if kernel.cards:
        missing = why or "amd-smi, rocm-smi: no such program in PATH"
        cards = tuple(replace(card, index=at) for at, card in enumerate(kernel.cards))
        return replace(kernel, cards=gpus.unlike(cards), error=f"{missing}; cards read from sysfs")
    idle = all(reason is None or reason.endswith(": no cards") for reason in reasons)
    return Gpus(error=kernel.error if idle else why)


async def read_fast(root: Root) -> Gpus:
    """Cards with memory, use, temperature and power as the kernel knows them; milliseconds."""
    kernel = await _kernel(root)
    return replace(kernel, cards=gpus.unlike(kernel.cards))


async def _kernel(root: Root) -> Gpus:
    look = partial(amd_sysfs.read_cards, root)
    return await bounded(look, key="amd sysfs", timeout_s=SYSFS_TIMEOUT_S) or Gpus(
        error=f"{amd_sysfs.DRM}: not read within {SYSFS_TIMEOUT_S:g} s"
    )


async def _amd_smi(root: Root, timeout_s: float) -> Gpus:
    results: dict[str, ToolResult] = {}

    async def ask(call: str) -> None:
        results[call] = await root.run(["amd-smi", call, "--json"], timeout_s)

    await ask("static")
    if _absent(results["static"]):
        return Gpus()
    if results["static"].timed_out:
        return Gpus(error=results["static"].error)  # a hung driver would keep the others as well
    async with trio.open_nursery() as nursery:
        for call in ("list", "metric", "process"):
            nursery.start_soon(ask, call)
    documents = amd_smi.Documents(*(results[call].stdout for call in CALLS))
    found = await _parsed(partial(amd_smi.parse, documents), "amd-smi")
    return found if found.cards else replace(found, error=_why(found, results["static"]))


async def _rocm_smi(root: Root, timeout_s: float) -> Gpus:
    found = Gpus()
    for options in (ALL, SOME):
        result = await root.run(["rocm-smi", *options], timeout_s)
        if _absent(result):
            return Gpus()
        found = await _parsed(partial(rocm_smi.parse, result.stdout), "rocm-smi")
        if found.cards or result.timed_out:
            break
    return found if found.cards else replace(found, error=_why(found, result))


def _absent(result: ToolResult) -> bool:
    error = result.error
    return not result.stdout and bool(error) and str(error).endswith("no such program in PATH")


def _why(found: Gpus, result: ToolResult) -> str | None:
    said = next((line.strip() for line in result.stderr.splitlines() if line.strip()), None)
    if result.stdout.strip() or result.error is None:
        return found.error
    return f"{result.error}: {said[:200]}" if said else result.error


async def _parsed(parse: Callable[[], Gpus], tool: str) -> Gpus:
    """In a thread: a tool gone wild prints megabytes, and reading them must not hold up others."""
    found = await bounded(parse, key=f"{tool} document", timeout_s=PARSE_TIMEOUT_S)
    return found or Gpus(error=f"{tool}: output not read within {PARSE_TIMEOUT_S:g} s")


async def _completed(root: Root, found: Gpus, kernel: Gpus) -> Gpus:
    def look() -> tuple[Gpu, ...]:
        by_address = {card.pci_bus_id: card for card in kernel.cards if card.pci_bus_id}
        known = {card.pci_bus_id for card in found.cards}
        cards = [filled(card, by_address.get(card.pci_bus_id or "")) for card in found.cards]
        lost = [card for address, card in by_address.items() if address not in known]
        return (*cards, *(_lost(card, found.source) for card in lost if _ours(root, card)))

    cards = await bounded(look, key="amd cards", timeout_s=SYSFS_TIMEOUT_S) or found.cards
    version = found.driver_version or kernel.driver_version
    return replace(found, cards=gpus.unlike(cards), driver_version=version)


def _ours(root: Root, card: Gpu) -> bool:
    """Whether this card's device node is here: a container may be given only some cards.

    sysfs shows all cards of the machine in every container.
    """
    nodes = f"/sys/bus/pci/devices/{card.pci_bus_id}/drm"
    return any(root.exists(f"/dev/dri/{name}") for name in root.names(nodes))


def _lost(card: Gpu, tool: str | None) -> Gpu:
    why = f"lost: the kernel holds {card.pci_bus_id} but {tool} does not show it"
    return replace(card, problems=(*card.problems, why))


def filled(card: Gpu, kernel: Gpu | None) -> Gpu:
    """The card with the kernel's values where the tool told none.

    The kernel's UUID goes first: it is what ROCR_VISIBLE_DEVICES is compared with.
    """
    if kernel is None:
        return card
    gaps = {
        name: getattr(kernel, name)
        for name in (field.name for field in fields(Gpu))
        if getattr(card, name) is None and getattr(kernel, name) is not None
    }
    ecc = card.ecc
    if ecc.corrected is None and ecc.uncorrected is None:
        ecc = Ecc(ecc.enabled, kernel.ecc.corrected, kernel.ecc.uncorrected)
    pcie = card.pcie if card.pcie.width and card.pcie.width_max else kernel.pcie
    gaps["uuid"] = kernel.uuid or card.uuid
    return replace(card, **gaps, ecc=ecc, pcie=pcie)
