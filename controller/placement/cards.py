"""The rules for cards, and which cards a shard gets.

A card is blocked by any of `RULES`; a node is refused when fewer cards of one class than the
profile wants are free of blocks. Then every rule that blocked a card says so with numbers: two
cards taken and two unhealthy are two reasons, although neither alone would be one.
Called by `filters.py` (may it?) and `place.py` (which ones?).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from controller.placement.reasons import Code, Reason, size
from controller.placement.reasons import cards as counted

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from controller.placement.model import Gpu, Node, Profile

FOREIGN_NOISE_MIB: Final = 512
"""A display server or a monitoring agent holds this much at most. Up to here a card still counts
as free and the whole amount is set aside; above it somebody computes there: not our card."""


def foreign_mib(gpu: Gpu) -> int | None:
    """Card memory to leave to others: nothing, the whole allowance for noise, or what they hold."""
    if not gpu.memory_foreign_mib:
        return gpu.memory_foreign_mib
    return max(gpu.memory_foreign_mib, FOREIGN_NOISE_MIB)


def claimed_mib(gpu: Gpu) -> int | None:
    """What shards share of the card; None when one holds all of it."""
    total = 0
    for claim in gpu.claims:
        if claim.memory_mib is None:
            return None
        total += claim.memory_mib
    return total


def unhealthy(profile: Profile, gpu: Gpu) -> str | None:
    """An unhealthy card is neither used nor free."""
    if gpu.healthy:
        return None
    return f"gpu {gpu.index}: {', '.join(gpu.problems) or 'no cause reported'}"


def too_small(profile: Profile, gpu: Gpu) -> str | None:
    """The card's whole memory is less than a shard needs of it."""
    if profile.gpu_memory_mib is None or gpu.memory_mib is None:
        return None
    return size(gpu.memory_mib) if gpu.memory_mib < profile.gpu_memory_mib else None


def unfit(profile: Profile, gpu: Gpu) -> str | None:
    """By the estimate the engine would not start on the card; a profile's own word goes first."""
    if profile.fit_mib is None or profile.gpu_memory_mib is not None or gpu.memory_mib is None:
        return None
    return size(gpu.memory_mib) if gpu.memory_mib < profile.fit_mib else None


def memory_unknown(profile: Profile, gpu: Gpu) -> str | None:
    """Nobody measured the card, so nobody may promise that a shard fits."""
    if gpu.memory_mib is not None or (profile.gpu_memory_mib or profile.fit_mib) is None:
        return None
    return f"gpu {gpu.index}"


def foreign_unknown(profile: Profile, gpu: Gpu) -> str | None:
    """Nobody measured what others hold of the card."""
    return f"gpu {gpu.index}" if gpu.memory_foreign_mib is None else None


def foreign_use(profile: Profile, gpu: Gpu) -> str | None:
    """Others compute on the card, or hold so much that a shard would not fit (D01)."""
    foreign = foreign_mib(gpu)
    if not foreign:
        return None
    need, total = profile.gpu_memory_mib, gpu.memory_mib
    over = foreign > FOREIGN_NOISE_MIB and not (profile.share and need is not None)
    # In unified memory the operating system is one of the others: only the amount counts.
    over = over and not gpu.unified
    crowded = need is not None and total is not None and need <= total < need + foreign
    if not (over or crowded):
        return None
    held = size(gpu.memory_foreign_mib or 0)
    return (
        f"gpu {gpu.index}: {held}{f' of {size(total)}' if total is not None else ''} held by others"
    )


def taken(profile: Profile, gpu: Gpu) -> str | None:
    """Other replicas hold the card, or so much of it that a share no longer fits (D28)."""
    if not gpu.claims:
        return None
    claimed = claimed_mib(gpu)
    if claimed is None or not profile.share:
        return "no memory free" if profile.share else "taken"
    need, total = profile.gpu_memory_mib, gpu.memory_mib
    if need is None or total is None or total < need:
        return None
    free = total - claimed - (foreign_mib(gpu) or 0)
    return f"{size(max(free, 0))} of {size(total)} free" if free < need else None


def sliced(profile: Profile, gpu: Gpu) -> str | None:
    """The driver lets a process use one MIG slice, so slices only serve shards of one card."""
    alone = profile.gpus == 1 and profile.shards == 1
    return f"gpu {gpu.index}" if gpu.slice and not alone else None


def version(text: str | None) -> tuple[int, ...]:
    """Numbers of a dotted version, to compare; empty when unknown, which is older than any."""
    found = (text or "").split("-")[0].split(".")
    return tuple(int(part) for part in found) if all(p.isdecimal() for p in found) else ()


def old_driver(profile: Profile, gpu: Gpu) -> str | None:
    """The engine needs a newer driver; an unknown one is not new enough."""
    if profile.driver_min is None or version(gpu.driver) >= version(profile.driver_min):
        return None
    return gpu.driver or "unknown"


def old_cuda(profile: Profile, gpu: Gpu) -> str | None:
    """The engine needs a newer CUDA than the driver serves."""
    if profile.cuda_min is None or version(gpu.cuda) >= version(profile.cuda_min):
        return None
    return gpu.cuda or "unknown"


RULES: Final[tuple[tuple[Code, Callable[[Profile, Gpu], str | None]], ...]] = (
    (Code.GPU_UNHEALTHY, unhealthy),
    (Code.GPU_MEMORY, too_small),
    (Code.GPU_FIT, unfit),
    (Code.GPU_MEMORY_UNKNOWN, memory_unknown),
    (Code.GPU_FOREIGN_UNKNOWN, foreign_unknown),
    (Code.GPU_FOREIGN_USE, foreign_use),
    (Code.GPU_TAKEN, taken),
    (Code.GPU_SLICE, sliced),
    (Code.GPU_DRIVER, old_driver),
    (Code.GPU_CUDA, old_cuda),
)
"""Each says what blocks the card, or None."""


def usable(profile: Profile, node: Node) -> list[Gpu]:
    """Cards that one shard may get, all of one class: fullest shared one first, then index."""
    by_class: dict[str, list[Gpu]] = {}
    for gpu in _of_class(profile, node):
        if not any(rule(profile, gpu) for _, rule in RULES):
            by_class.setdefault(gpu.class_, []).append(gpu)
    enough = [found for found in by_class.values() if len(found) >= profile.gpus]
    if not enough:
        return []
    # Of several classes that would do, the scarcer stays for whoever names it.
    best = max(enough, key=lambda found: (len(found), found[0].class_))
    return sorted(best, key=lambda gpu: (-(claimed_mib(gpu) or 0), gpu.index))


def refusals(profile: Profile, node: Node) -> list[Reason]:
    """Why the node has too few usable cards; empty when it has enough."""
    matching = _of_class(profile, node)
    if not matching:
        return [_no_card(profile, node)]
    if usable(profile, node):
        return []
    found = [] if _enough_of_a_class(profile, matching) else [_too_few(profile, matching)]
    for code, rule in RULES:
        blocked = [text for gpu in matching if (text := rule(profile, gpu)) is not None]
        if blocked:
            found.append(Reason(code, _need(code, profile), _have(code, blocked, len(matching))))
    return found or [_too_few(profile, matching)]


def _of_class(profile: Profile, node: Node) -> list[Gpu]:
    return [gpu for gpu in node.gpus if profile.gpu_class in (None, gpu.class_)]


def _enough_of_a_class(profile: Profile, matching: Iterable[Gpu]) -> bool:
    counts: dict[str, int] = {}
    for gpu in matching:
        counts[gpu.class_] = counts.get(gpu.class_, 0) + 1
    return max(counts.values(), default=0) >= profile.gpus


def _no_card(profile: Profile, node: Node) -> Reason:
    if profile.gpu_class is None or not node.gpus:
        return Reason(Code.GPU_COUNT, _wanted(profile), "0 cards")
    return Reason(
        Code.GPU_CLASS, profile.gpu_class, ", ".join(sorted({g.class_ for g in node.gpus}))
    )


def _too_few(profile: Profile, matching: list[Gpu]) -> Reason:
    classes = sorted({gpu.class_ for gpu in matching})
    of_each = [f"{sum(g.class_ == name for g in matching)} {name}" for name in classes]
    return Reason(
        Code.GPU_COUNT, _wanted(profile), f"{counted(len(matching))} ({', '.join(of_each)})"
    )


def _wanted(profile: Profile) -> str:
    text = counted(profile.gpus)
    if profile.gpu_class is not None:
        return f"{text} of {profile.gpu_class}"
    return text if profile.gpus == 1 else f"{text} of one class"


def _need(code: Code, profile: Profile) -> str:
    per_card = None if profile.gpu_memory_mib is None else size(profile.gpu_memory_mib)
    if code in (Code.GPU_MEMORY, Code.GPU_MEMORY_UNKNOWN) and per_card is not None:
        return per_card
    if code in (Code.GPU_FIT, Code.GPU_MEMORY_UNKNOWN) and profile.fit_mib is not None:
        return size(profile.fit_mib)
    if code in (Code.GPU_DRIVER, Code.GPU_CUDA):
        floor = profile.driver_min if code is Code.GPU_DRIVER else profile.cuda_min
        return f"{floor} or later"
    return _wanted(profile) if per_card is None else f"{_wanted(profile)} with {per_card} each"


def _have(code: Code, blocked: list[str], of: int) -> str:
    """Counts where the cards are alike, else what is there card by card."""
    if code is Code.GPU_TAKEN and set(blocked) <= {"taken", "no memory free"}:
        return f"{of - len(blocked)} of {counted(of)} not taken"
    if code in (Code.GPU_DRIVER, Code.GPU_CUDA):
        return ", ".join(dict.fromkeys(blocked))
    return ", ".join(blocked)
