"""All probes together: one look at a machine as a `Found`, and the fast facts of each sync.

Every function returns, whatever the machine does: unknown parts stay unknown, and none takes
longer than the deadlines of its probes together. Run them beside the sync, never within it: a
hanging driver costs a look up to a minute. Called by agent/machine.py, which remembers things
between looks, and by the `probe` and `doctor` commands.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Final, TypeVar

import trio

from agent.probes import (
    amd,
    cgroup,
    disks,
    domain,
    engines,
    gpus,
    host,
    ib,
    imex,
    local_ports,
    nvml,
    pci,
    services,
    smi,
    sminfo,
    topo,
    wiring,
)
from agent.probes.card import Gpus
from agent.probes.found import NVIDIA_SERVICES, Found
from agent.probes.root import bounded

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping, Sequence

    from agent.probes.card import Gpu
    from agent.probes.conversation import Conversation
    from agent.probes.root import Root

    Child = Sequence[str] | Conversation

A = TypeVar("A")
B = TypeVar("B")
C = TypeVar("C")
T = TypeVar("T")

KERNEL_TIMEOUT_S: Final = 5.0
"""For files of /proc and /sys, which answer in microseconds unless the machine is stuck."""
FAST_SMI_TIMEOUT_S: Final = 5.0
NVIDIA_SIGNS: Final = (
    "/proc/driver/nvidia/version",
    "/dev/nvidiactl",
    "/dev/dxg",
    "/usr/lib/wsl/lib/libnvidia-ml.so.1",
)
"""Without any of these (the last two: WSL) there is no driver, and no child is started."""
_UNASKED: Final = "no nvidia-smi is in PATH: install the driver's own tools"
POOL_RESERVE_MIB: Final = 4096
POOL_RESERVE_SHARE: Final = 0.05
"""Of memory that host and card share, this much stays with the operating system: the larger."""


@dataclass(frozen=True, slots=True)
class ProbeConfig:
    """What probes need from the agent's settings. Paths as strings, real directories.

    `fabrics` maps globs of ports (`mlx5_*`, `mlx5_0/1`) to the names of their fabrics.
    """

    mgmt_addr: str | None = None
    labels: Mapping[str, str] = field(default_factory=dict)
    ports: tuple[int, int] | None = None
    weights: Sequence[str] = ()
    engine_venvs: Sequence[str] = ()
    environments: str | None = None
    """Folder of the environments that the agent built itself."""
    provisions: Sequence[str] = ()
    """Engines that the agent may install: said of the host."""
    fabrics: Mapping[str, str] = field(default_factory=dict)


async def look(root: Root, config: ProbeConfig, *, child: Child | None = None) -> Found:
    """One whole look: everything is asked side by side, then put together.

    `child` asks a given program instead of NVML's, or a conversation with one that stays. The
    findings of cards are the caller's to add: they need what was seen before.
    """
    parts: dict[str, object] = {}

    async def ask(name: str, call: Callable[[], Awaitable[object]]) -> None:
        parts[name] = await call()

    async with trio.open_nursery() as nursery:
        questions: dict[str, Callable[[], Awaitable[object]]] = {
            "host": partial(_kernel, partial(host.read_host, root), "host"),
            "limits": partial(_kernel, partial(cgroup.read_limits, root), "cgroup"),
            "signs": partial(_kernel, partial(signs, root), "driver"),
            "gpus": partial(read_gpus, root, child=child),
            "pci": partial(pci.read, root),
            "ports": partial(_ports, root, config),
            "services": partial(_services, root),
            "disks": partial(disks.read_disks, root, config.weights),
            "engines": partial(read_engines, root, config),
            "local_ports": partial(
                _kernel, partial(local_ports.read, root, config.ports), "local ports"
            ),
        }
        for name, call in questions.items():
            nursery.start_soon(ask, name, call)
    asked = {name: part for name, part in parts.items() if part is not None}
    found = Found(**asked)  # type: ignore[arg-type]
    return await _with_wiring(root, _with_limits(found))


async def read_engines(root: Root, config: ProbeConfig) -> tuple[engines.Engine, ...]:
    """Engines in the configured and the usual places, and those that the agent built."""
    folder = config.environments
    names: list[str] = []
    if folder is not None:
        names = await _kernel(partial(root.names, folder), "engines built") or []
    built = [f"{folder}/{name}" for name in names if not name.startswith(".")]
    return await engines.read(root, [*built, *config.engine_venvs])


def _with_limits(found: Found) -> Found:
    """What the control group leaves of the host, and the pool of unified cards (E02, E13)."""
    memory = found.host.memory if found.host else host.Memory()
    count = found.host.cpu.count if found.host else None
    usable = cgroup.effective_memory(memory, found.limits)
    cpus = cgroup.least(float(count) if count else None, found.limits.cpus)
    pooled = tuple(_pooled(card, usable.total_mib) for card in found.gpus.cards)
    return replace(found, usable=usable, cpus=cpus, gpus=replace(found.gpus, cards=pooled))


def _pooled(card: Gpu, host_mib: int | None) -> Gpu:
    if card.memory_kind != "unified":
        return card
    if host_mib is None:
        return replace(card, memory_mib=None)
    reserve = max(POOL_RESERVE_MIB, int(POOL_RESERVE_SHARE * host_mib))
    return replace(card, memory_mib=max(host_mib - reserve, 1))


async def _with_wiring(root: Root, found: Found) -> Found:
    """Cards with their paths; the domain, IMEX and the peer check that depend on them."""
    cards = found.gpus.cards
    matrix, links, seen = await _side_by_side(
        partial(_matrix, root, cards),
        partial(_links, root, cards),
        partial(imex.read, root, found.services.get("nvidia-imex")),
    )
    wired = wiring.wire(cards, found.pci, matrix, links, found.ports.ports)
    verdict = domain.verdict(wired)
    if not wired and found.gpus.error:
        verdict = domain.Domain("unknown", reason=found.gpus.error)
    ask = verdict.state == "joined" and len(cards) > 1 and not matrix.late
    p2p = await topo.read_p2p(root, "r") if ask else None
    return replace(
        found,
        gpus=replace(found.gpus, cards=wired),
        domain=verdict,
        wiring_error=matrix.error or links.error,
        imex=seen,
        p2p=p2p,
    )


def _working(cards: Sequence[Gpu]) -> list[Gpu]:
    return [card for card in cards if card.vendor == "nvidia" and not card.problems]


async def _matrix(root: Root, cards: Sequence[Gpu]) -> topo.Matrix:
    return await topo.read_matrix(root) if _working(cards) else topo.Matrix()


async def _links(root: Root, cards: Sequence[Gpu]) -> topo.NvLinks:
    untold = any(card.nvlinks is None and not card.mig for card in _working(cards))
    return await topo.read_nvlinks(root) if untold else topo.NvLinks()


async def _side_by_side(
    first: Callable[[], Awaitable[A]],
    second: Callable[[], Awaitable[B]],
    third: Callable[[], Awaitable[C]],
) -> tuple[A, B, C]:
    """Three answers in the time of the slowest: their tools may all hang."""
    answers: dict[int, object] = {}

    async def ask(number: int, call: Callable[[], Awaitable[object]]) -> None:
        answers[number] = await call()

    async with trio.open_nursery() as nursery:
        for number, call in enumerate((first, second, third)):
            nursery.start_soon(ask, number, call)
    return answers[0], answers[1], answers[2]  # type: ignore[return-value]


async def read_gpus(root: Root, *, fast: bool = False, child: Child | None = None) -> Gpus:
    """NVML first, nvidia-smi where that is missing or blind, AMD's besides; lost ones by PCI.

    Below a prefix NVML would answer for the machine we run on, so a captured machine has its tools
    only, unless `child` is given.
    """
    found, other, _ = await _side_by_side(
        partial(_nvidia, root, fast, child),
        partial(amd.read_fast if fast else amd.read, root),
        trio.lowlevel.checkpoint,
    )
    found = replace(found, cards=gpus.unlike(found.cards))
    if not fast:
        found = await _complete(root, found)
    if not other.cards and found.cards:
        return found
    both = "; ".join(reason for reason in (found.error, other.error) if reason) or None
    if not found.cards:
        return replace(other if other.cards else found, error=both)
    return replace(found, cards=(*found.cards, *other.cards), error=both)


async def _nvidia(root: Root, fast: bool, child: Child | None) -> Gpus:
    driver = await _kernel(partial(signs, root), "driver")
    found, works = Gpus(), False
    if child is not None or (root.live and driver):
        found, works = await nvml.read(root, fast=fast, child=child or nvml.CHILD)
    if works:
        return found
    other = await smi.read(root, FAST_SMI_TIMEOUT_S if fast else smi.TIMEOUT_S, fast=fast)
    if other.cards:
        return other
    silent = f"{driver[0]} says that NVIDIA's driver is here, but {_UNASKED}" if driver else None
    return replace(found, error=found.error or other.error or silent)


async def _complete(root: Root, found: Gpus) -> Gpus:
    def complete() -> Gpus:
        error = found.error if not found.cards else None
        cards = gpus.add_missing(found.cards, gpus.read_kernel_gpus(root), error)
        return replace(found, cards=tuple(gpus.placed(root, card) for card in cards))

    return await _kernel(complete, "gpus") or found


def signs(root: Root) -> tuple[str, ...]:
    """Files that say that an NVIDIA driver is here. Blocking, quick."""
    return tuple(sign for sign in NVIDIA_SIGNS if root.exists(sign))


async def _ports(root: Root, config: ProbeConfig) -> ib.Ports:
    found = await ib.read(root, config.fabrics)
    return replace(found, ports=await sminfo.identify(root, found.ports))


async def _services(root: Root) -> Mapping[str, services.Service]:
    return await services.read_services(root, NVIDIA_SERVICES)


async def _kernel(function: Callable[[], T], key: str) -> T | None:
    return await bounded(function, key=f"kernel {key}", timeout_s=KERNEL_TIMEOUT_S)
