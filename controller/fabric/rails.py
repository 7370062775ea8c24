"""Rails: when the i-th HCA of every host goes to one set of leaves, and to no other.

Pure. Called by graph.py. Nothing is taken from the names of switches. Hosts of one series (names
that differ in numbers only) vote: the i-th of the HCAs that the series has names the rail, and a
leaf belongs to the rail of most of its votes. A missing port does not shift the others, since the
order is the series', not the host's.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from controller.fabric.names import hca_label, natural, series

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from controller.fabric.model import CaPort, Host

AGREED: Final = 0.9
"""Share of the votes that must agree with their leaf; the rest are cables in a wrong place."""
USUAL: Final = 0.25
"""An HCA that fewer hosts of a series have is somebody's extra card and shifts nobody's order."""


@dataclass(frozen=True, slots=True)
class Rails:
    """The rail (1, 2 ...) of each leaf, and the one that each port's HCA ought to have."""

    of_leaf: Mapping[str, int] = field(default_factory=dict)
    of_hca: Mapping[tuple[str, int], int] = field(default_factory=dict)
    """(device GUID, port number) -> rail."""

    @property
    def leaves(self) -> tuple[tuple[str, ...], ...] | None:
        """GUIDs of the leaves, per rail."""
        numbers = sorted(set(self.of_leaf.values()))
        return (
            tuple(
                tuple(sorted(guid for guid, rail in self.of_leaf.items() if rail == number))
                for number in numbers
            )
            or None
        )


def find(hosts: Sequence[Host]) -> Rails:
    """The rails of a fabric; empty when it is not cabled by rails."""
    votes: dict[str, Counter[int]] = {}
    ranks = _ranks(hosts)
    for host in hosts:
        for port in host.ports:
            rank = ranks.get((port.device, port.number))
            if rank is not None and port.leaf is not None:
                votes.setdefault(port.leaf, Counter())[rank] += 1
    winners = {leaf: min(c, key=lambda rank: (-c[rank], rank)) for leaf, c in votes.items()}
    agreed = sum(votes[leaf][rank] for leaf, rank in winners.items())
    numbers = {rank: i for i, rank in enumerate(sorted(set(winners.values())), 1)}
    if len(numbers) < 2 or agreed < AGREED * sum(c.total() for c in votes.values()):
        return Rails()
    return Rails(
        {leaf: numbers[rank] for leaf, rank in winners.items()},
        {port: numbers[rank] for port, rank in ranks.items() if rank in numbers},
    )


def _ranks(hosts: Sequence[Host]) -> dict[tuple[str, int], int]:
    """Place of each port among the HCAs of its series, for hosts with several ports."""
    grouped: dict[str, list[Host]] = {}
    for host in hosts:
        if host.named and len(_cabled(host)) > 1:
            grouped.setdefault(series(host.name), []).append(host)
    if sum(len(members) for members in grouped.values()) < 2:
        return {}  # one host on two leaves is no pattern
    ranks: dict[tuple[str, int], int] = {}
    for members in grouped.values():
        seen = Counter(slot for host in members for slot in {_slot(p) for p in _cabled(host)})
        del seen[None]
        usual = [slot for slot in seen if slot and seen[slot] >= USUAL * len(members)]
        order = {s: i for i, s in enumerate(sorted(usual, key=lambda s: (s[0], natural(s[1]), s)))}
        for host in members:
            for port in _cabled(host):
                slot = _slot(port)
                if slot in order:
                    ranks[port.device, port.number] = order[slot]
    return ranks


def _cabled(host: Host) -> list[CaPort]:
    return [port for port in host.ports if port.leaf is not None]


def _slot(port: CaPort) -> tuple[int, str, int] | None:
    label = hca_label(port.hca)
    return label and (*label, port.number)
