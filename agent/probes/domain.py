"""Which multi-node NVLink domain a node is in, judged over all of its cards (case E16). Pure.

Called by agent/probes/inventory.py over what NVML or nvidia-smi said of each card's fabric. This
is identity only: whether links are healthy is agent/health.py's. Being in no domain is the rule,
not a fault: one machine's NVSwitch reports a finished fabric with a UUID of zeros.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from agent.probes.card import Gpu

State = Literal["joined", "none", "partial", "inconsistent", "in_progress", "unknown"]
Place = Literal["joined", "none", "failed", "in_progress", "unknown"]
"""Where one card is; `failed` has a finished fabric that is of no use."""

_UUID: Final = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")
NO_DOMAIN: Final = re.compile(r"[0-]{1,64}|n/a|not supported|none|", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Domain:
    """The verdict. `key` ("<uuid>.<clique>") is set only when every card is in that domain.

    `cliques` are all keys seen on cards. `reason` says why there is no key; `fault` tells a node
    that should be in a domain from one that is simply in none.
    """

    state: State
    key: str | None = None
    cliques: tuple[str, ...] = ()
    reason: str | None = None
    fault: bool = False


def verdict(cards: Sequence[Gpu]) -> Domain:
    """The domain of a node by all of its NVIDIA cards; a lost card counts as unknown."""
    named = {_name(card, at): card for at, card in enumerate(cards) if card.vendor == "nvidia"}
    if not named:
        return Domain("none", reason="no NVIDIA card")
    told = {name: _place(card) for name, card in named.items()}
    keys = {name: key for name, card in named.items() if (key := _key(card)) is not None}
    cliques = tuple(sorted(set(keys.values())))
    others = {name: why for name, (place, why) in told.items() if place != "joined"}
    if len(cliques) > 1:
        return Domain("inconsistent", None, cliques, _different(keys), fault=True)
    if stale := [name for name in keys if _needs_reset(named[name])]:
        why = f"{_list(stale)}: a reset is due, the NVLink domain and clique shown may be old ones"
        return Domain("inconsistent", None, cliques, why, fault=True)
    if keys and others:
        why = f"{_list(keys)} in {cliques[0]}, but {_sentences(others)}"
        return Domain("partial", None, cliques, why, fault=True)
    if keys:
        return Domain("joined", cliques[0], cliques)
    return _nowhere({place for place, _ in told.values()}, others)


def _nowhere(places: set[Place], others: Mapping[str, str]) -> Domain:
    """The verdict on a node of which no card is in a domain."""
    why = _sentences(others)
    if "in_progress" in places:
        return Domain("in_progress", reason=why, fault="failed" in places)
    if places == {"unknown"}:
        return Domain("unknown", reason=why)
    return Domain("none", reason=why, fault="failed" in places)


def _key(card: Gpu) -> str | None:
    uuid = (card.fabric.cluster_uuid or "").lower()
    if _place(card)[0] != "joined":
        return None
    return f"{uuid}.{card.fabric.clique}"


def _place(card: Gpu) -> tuple[Place, str]:
    fabric = card.fabric
    uuid = (fabric.cluster_uuid or "").strip().lower()
    if fabric.state is None:
        return "unknown", "the driver does not tell the fabric state"
    if fabric.state == "not_supported":
        return "none", "no NVLink fabric"
    if fabric.state != "completed":
        step = "has not been started" if fabric.state == "not_started" else "is in progress still"
        return "in_progress", f"joining the NVLink fabric {step}"
    if (fabric.status or "").strip().lower() != "success":
        return "failed", f"joining the NVLink fabric failed: {fabric.status or 'no status'}"
    if NO_DOMAIN.fullmatch(uuid):
        return "none", "NVLink within this machine only (no ClusterUUID)"
    if not _UUID.fullmatch(uuid):
        return "failed", f"ClusterUUID {uuid[:40]!r} is no UUID"
    if fabric.clique is None:
        return "failed", f"in {uuid}, but without a CliqueId"
    return "joined", ""


def _needs_reset(card: Gpu) -> bool:
    """After a new partitioning a card shows its old clique until it is reset."""
    return "reset" in re.split(r"[\s_]+", (card.recovery_action or "").lower())


def _different(keys: Mapping[str, str]) -> str:
    groups: dict[str, list[str]] = {}
    for name, key in keys.items():
        groups.setdefault(key, []).append(name)
    parts = [f"{_list(names)} in {key}" for key, names in groups.items()]
    return "cards of one node are in different NVLink domains: " + ", ".join(parts[:8])


def _sentences(reasons: Mapping[str, str]) -> str:
    """`cards 0, 1: why; card 3: why` with cards of one reason together."""
    groups: dict[str, list[str]] = {}
    for name, why in reasons.items():
        groups.setdefault(why, []).append(name)
    return "; ".join(f"{_list(names)}: {why}" for why, names in list(groups.items())[:8])


def _list(names: Iterable[str]) -> str:
    listed = list(names)
    word = "card" if len(listed) == 1 else "cards"
    more = f" and {len(listed) - 16} more" if len(listed) > 16 else ""
    return f"{word} {', '.join(listed[:16])}{more}"


def _name(card: Gpu, position: int) -> str:
    """The card's index; one without (lost) by its address or UUID, so that names stay apart."""
    if card.index is not None:
        return str(card.index)
    return card.pci_bus_id or card.uuid or f"at position {position}"
