"""What connects cards, from NVML's facts: NVLinks, the fabric and paths between cards. Pure.

Called by nvml_card.py for one card and by nvml.py for the paths of all of them.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from agent.probes import values
from agent.probes.card import Fabric, NvLink
from agent.probes.nvml_facts import NOT_SUPPORTED
from agent.probes.nvml_values import mapping, number, truth, whole, word

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import Literal

    from agent.probes.card import FabricState, Gpu

MAX_LINKS: Final = 36
PEERS: Final[Mapping[object, Literal["gpu", "switch", "cpu"]]] = {0: "gpu", 1: "cpu", 2: "switch"}
LEVELS: Final = {0: "PIX", 10: "PIX", 20: "PXB", 30: "PHB", 40: "NODE", 50: "SYS"}
STATES: Final[Mapping[object, FabricState]] = {
    0: "not_supported",
    1: "not_started",
    2: "in_progress",
    3: "completed",
}
BANDWIDTH: Final[Mapping[int, Literal["full", "degraded"]]] = {1: "degraded", 2: "full"}
SUMMARY: Final[Mapping[object, Literal["healthy", "unhealthy", "limited"]]] = {
    1: "healthy",
    2: "unhealthy",
    3: "limited",
}
FAULTS: Final = {
    4: (0x3, {1: "route_unhealthy"}),
    2: (0x3, {1: "route_recovery"}),
    6: (0x3, {1: "access_timeout_recovery"}),
    8: (
        0xF,
        {
            2: "incorrect configuration: system GUID",
            3: "incorrect configuration: chassis serial number",
            4: "incorrect configuration: no partition",
            5: "incorrect configuration: insufficient NVLinks",
            6: "incorrect configuration: incompatible GPU firmware",
            7: "incorrect configuration: invalid location",
            8: "incorrect configuration: GPU state invalid",
        },
    ),
    12: (0x3, {2: "no partition assigned"}),
    14: (0x3, {2: "fabric manager disconnected"}),
}
"""Where in the health mask a fault stands: shift, width as a mask, and its values' names."""


def fabric(value: object, code: int | None) -> Fabric:
    """The fabric of a card. `code` is NVML's error when the question failed.

    Status, UUID and clique mean something only when the state is completed; nvidia-smi leaves them
    out as well. A card without a fabric may say so by refusing the question.
    """
    facts = mapping(value)
    state = STATES.get(facts.get("state")) if whole(facts.get("state")) is not None else None
    if state is None and code == NOT_SUPPORTED:
        state = "not_supported"
    if state != "completed":
        return Fabric(state=state)
    mask = whole(facts.get("mask")) or 0
    clique, status = facts.get("clique"), facts.get("status")
    return Fabric(
        state=state,
        status=status[:60] if isinstance(status, str) else None,  # an error's name is one as well
        cluster_uuid=word(facts.get("uuid")),
        clique=clique if type(clique) is int and 0 <= clique < 2**32 else None,
        bandwidth=BANDWIDTH.get(mask & 0x3),
        health=SUMMARY.get(whole(facts.get("summary"))),
        faults=tuple(_faults(mask)),
    )


def _faults(mask: int) -> list[str]:
    found = ((names, mask >> shift & width) for shift, (width, names) in FAULTS.items())
    return [names[value] for names, value in found if value in names]


def nvlinks(value: object, *, mig: bool) -> tuple[NvLink, ...] | None:
    """The links of a card; empty when it has none, None when it does not tell.

    With MIG the driver refuses to speak of links although the card has some.
    """
    if not isinstance(value, list) or (mig and not value):
        return None
    return tuple(_link(mapping(link), at) for at, link in enumerate(value[:MAX_LINKS]))


def _link(facts: Mapping[str, Any], position: int) -> NvLink:
    link, speed = whole(facts.get("link")), number(facts.get("mb_per_s"))
    active = truth(facts.get("active"))
    bus = values.pci_bus_id(word(facts.get("bus")))
    return NvLink(
        link=position if link is None else link,
        active=active,
        gb_per_s=speed / 1000 if speed and active else None,
        peer=PEERS.get(whole(facts.get("type"))),
        peer_bus_id=bus if bus != "0000:00:00.0" else None,
    )


def with_paths(cards: Sequence[Gpu], levels: Mapping[tuple[int, int], int]) -> tuple[Gpu, ...]:
    """The cards with their paths to each other: NVLink where there is one, else what NVML told."""
    return tuple(
        replace(
            card,
            paths={
                str(other.index): path
                for other in cards
                if other is not card
                and other.index is not None
                and (path := _path(card, other, levels)) is not None
            },
        )
        for card in cards
    )


def _path(one: Gpu, two: Gpu, levels: Mapping[tuple[int, int], int]) -> str | None:
    links = _direct(one, two) or min(_switched(one), _switched(two))
    if links:
        return f"NV{links}"
    pair = (one.index or 0, two.index or 0)
    return LEVELS.get(levels.get(pair, levels.get((pair[1], pair[0]), -1)))


def _direct(one: Gpu, two: Gpu) -> int:
    """Links that are up between two cards, whichever of them knows of more."""

    def count(card: Gpu, peer: Gpu) -> int:
        return sum(
            link.active is True and link.peer_bus_id == peer.pci_bus_id
            for link in card.nvlinks or ()
            if link.peer_bus_id is not None
        )

    return max(count(one, two), count(two, one))


def _switched(card: Gpu) -> int:
    """Links that are up into an NVSwitch, which reaches every other card of the machine.

    The switches of an NVL72 rack are outside the machine and may be no device of any kind: then
    the fabric says that the links lead to one.
    """
    fabric_known = card.fabric.state in {"in_progress", "completed"}
    return sum(
        link.active is True and (link.peer == "switch" or (link.peer is None and fabric_known))
        for link in card.nvlinks or ()
    )
