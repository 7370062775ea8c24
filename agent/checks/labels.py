"""How checks name cards, ports and lists of them: short, and bounded on any machine. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from agent.probes.card import Gpu
    from agent.probes.ib import IbPort

MAX_NAMED: Final = 16


def card(gpu: Gpu) -> str:
    """The card's number; one without (lost) by its address or UUID."""
    if gpu.index is not None:
        return str(gpu.index)
    return gpu.pci_bus_id or gpu.uuid or "?"


def cards(gpus: Iterable[Gpu]) -> str:
    """`GPU 3`, `GPUs 0, 1`."""
    return _numbered([card(gpu) for gpu in gpus])


def per_card(pairs: Iterable[tuple[Gpu, str]]) -> str:
    """`GPUs 0, 1: text; GPU 3: other text`: cards with one text together."""
    return per_name((card(gpu), text) for gpu, text in pairs)


def per_name(pairs: Iterable[tuple[str, str]]) -> str:
    """The same for cards that are named already."""
    groups: dict[str, list[str]] = {}
    for name, text in pairs:
        groups.setdefault(text, []).append(name)
    return "; ".join(f"{_numbered(names)}: {text}" for text, names in groups.items())


def _numbered(names: Sequence[str]) -> str:
    return f"{'GPU' if len(names) == 1 else 'GPUs'} {listed(names)}"


def port(one: IbPort) -> str:
    """`mlx5_0/1`."""
    return f"{one.hca}/{one.port}"


def listed(words: Iterable[str]) -> str:
    """`a, b, c`, and how many more when there are many."""
    known = list(words)
    more = f" and {len(known) - MAX_NAMED} more" if len(known) > MAX_NAMED else ""
    return ", ".join(known[:MAX_NAMED]) + more


def counted(number: int, word: str) -> str:
    """`1 card`, `8 cards`."""
    return f"{number} {word}" if number == 1 else f"{number} {word}s"
