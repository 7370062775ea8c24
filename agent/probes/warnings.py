"""Facts that make a machine slow, or will soon stop it, without making it unhealthy. Pure.

Called by agent/probes/inventory.py for the host report; the words are what an operator reads.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from agent.probes.card import Gpu
    from agent.probes.disks import Disk
    from agent.probes.host import Cpu

FREE_SHARE: Final = 0.05
FREE_MIB: Final = 10 * 1024
"""A disk for weights with less can take no model at all; others only need a share of their size."""
NO_AVX2: Final = (
    "this x86-64 CPU has no AVX2: inference runs several times slower (a VM needs CPU type host)"
)


def cpu(facts: Cpu) -> Iterator[str]:
    """Processors that engines run badly on. Unknown flags warn of nothing."""
    if facts.arch == "x86_64" and facts.flags and "avx2" not in facts.flags:
        yield NO_AVX2


def disks(facts: Iterable[Disk]) -> Iterator[str]:
    """Local filesystems that are nearly full: `/`, and those that hold weights."""
    for disk in facts:
        watched = disk.holds_weights or disk.mount == "/"
        if disk.kind != "local" or not watched or disk.free_mib is None or not disk.total_mib:
            continue
        share = disk.free_mib / disk.total_mib
        if share < FREE_SHARE or (disk.holds_weights and disk.free_mib < FREE_MIB):
            yield (
                f"disk pressure: {disk.mount} has {disk.free_mib / 1024:.1f} GiB free of "
                f"{disk.total_mib / 1024:.0f} GiB ({share:.0%}); remove weights or add space"
            )


def gpus(error: str | None, answering: bool) -> Iterator[str]:
    """GPUs out of reach, in the words of their probe; with some `answering`, what they miss."""
    if error:
        yield (
            f"GPUs, asked with trouble: {error}" if answering else f"GPUs cannot be asked: {error}"
        )


def nameless(card: Gpu) -> str:
    """A card that is too lost to have a row of its own."""
    number = "?" if card.index is None else card.index
    return f"GPU {number} has neither UUID nor address: {', '.join(card.problems)}"


def unnamed_slices(cards: Iterable[Gpu]) -> Iterator[str]:
    """MIG devices that nothing can be started on, because engines are given them by their UUID."""
    for card in cards:
        unnamed = sum(part.uuid is None for part in card.slices)
        if unnamed:
            number = "?" if card.index is None else card.index
            yield (
                f"GPU {number}: the UUIDs of {unnamed} MIG devices are not known, so they cannot "
                "be used; see that `nvidia-smi -L` lists them and that the agent may open "
                "/dev/nvidia-caps"
            )
