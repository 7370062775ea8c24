"""Checks of NVLink: the fabric manager, links and their health, peer access, the domain. Pure.

In an NVL72 rack (GB200) the NVSwitches and what manages them are in trays of their own, so that a
compute tray needs no fabric manager; a machine with its own NVSwitches (HGX, DGX) does.
"""

from __future__ import annotations

import re
from collections import Counter
from typing import TYPE_CHECKING, Final

from agent import health
from agent.checks import labels, machine
from agent.checks.verdict import Verdict, failed, passed, warned
from agent.probes.services import Service

if TYPE_CHECKING:
    from agent.probes.card import Gpu
    from agent.probes.found import Found

SERVICE: Final = "nvidia-fabricmanager"
_START: Final = (
    f"`systemctl enable --now {SERVICE}` (of the driver's own version) and read its log "
    f"(`journalctl -u {SERVICE}`)"
)
_RACK: Final = re.compile(r"\bGB[23]00\b", re.IGNORECASE)
_HGX: Final = re.compile(r"\b[ABH][123]00[- ]SXM|\bHGX\b|\bB[23]00\b", re.IGNORECASE)
_WAITING: Final = ("in_progress", "not_started")
_LINK_CODES: Final = frozenset({*health.FABRIC_CODES, "nvlink_inactive"})


def fabric_manager(found: Found) -> Verdict | None:
    """Whether the service runs that sets up the NVSwitches of this machine."""
    cards = machine.answering(found, "nvidia")
    switches = len(found.pci.nvswitches())
    service = found.services.get(SERVICE) or Service(SERVICE, error=f"{SERVICE}: not asked for")
    if not switches and _rack_tray(found):
        words = "not needed: the NVSwitches of this NVLink domain are in trays of their own"
        return passed(words)
    waiting = [gpu for gpu in cards if gpu.fabric.state in _WAITING]
    done = [gpu for gpu in cards if gpu.fabric.state == "completed"]
    if not (switches or waiting or done or _looks_hgx(found)):
        return None
    words = _manager_words(service, switches)
    if waiting and service.state != "active":
        names = labels.cards(waiting)
        return failed(f"{words}; {names} cannot join the NVLink fabric, CUDA cannot start", _START)
    if service.state == "active":
        return _running(words, waiting)
    if done:
        return _joined_without(found, words, service)
    if service.state is None:
        return warned(f"{words}; this machine has NVSwitches", f"`systemctl status {SERVICE}`")
    return failed(f"{words}; without it CUDA cannot start on cards with NVSwitches", _START)


def _rack_tray(found: Found) -> bool:
    joined = found.domain.state in ("joined", "partial", "inconsistent")
    return joined or any(_RACK.search(gpu.name or "") for gpu in found.gpus.cards)


def _looks_hgx(found: Found) -> bool:
    """By names and number of cards, where neither PCI nor the driver tell of NVSwitches."""
    cards = found.gpus.cards
    named = sum(bool(_HGX.search(gpu.name or "")) for gpu in cards)
    peers = any(link.peer == "switch" for gpu in cards for link in gpu.nvlinks or ())
    return peers or (named >= 8 and not machine.pci_known(found))


def _manager_words(service: Service, switches: int) -> str:
    count = f"{labels.counted(switches, 'NVSwitch').replace('NVSwitchs', 'NVSwitches')}, "
    state = service.state or "in an unknown state"
    why = f" ({service.error})" if service.error else ""
    return f"{count if switches else ''}{SERVICE} is {state}{why}"


def _running(words: str, waiting: list[Gpu]) -> Verdict:
    if waiting:
        names = labels.cards(waiting)
        remedy = f"wait a minute, then read `journalctl -u {SERVICE}`; it has to fit the driver"
        return warned(f"{words}, but {names} still wait to join the NVLink fabric", remedy)
    return passed(words)


def _joined_without(found: Found, words: str, service: Service) -> Verdict:
    """Cards are in the fabric, and its manager is not seen: gone since, or never of this machine.

    A virtual machine has cards without switches: there the host runs it. In a container services
    cannot be seen.
    """
    if not found.pci.nvswitches() and found.host is not None and found.host.virtual:
        return passed("run outside of this virtual machine: the cards are in their NVLink fabric")
    if service.state is None:
        return passed(f"the cards are in their NVLink fabric, so it has done its work; {words}")
    known = "the cards are in their NVLink fabric, but will not come back into it after a reset"
    result = failed if service.state == "failed" else warned
    return result(f"{words}; {known}", _START)


def nvlink(found: Found) -> Verdict | None:
    """Links that are down, and what the driver says against the fabric of each card."""
    cards = [
        gpu
        for gpu in machine.answering(found, "nvidia")
        if gpu.nvlinks or gpu.fabric.state not in (None, "not_supported") or gpu.fabric.faults
    ]
    if not cards:
        return None
    told = [
        (gpu, finding)
        for gpu in cards
        for finding in health.findings_of(gpu)
        if finding.code in _LINK_CODES
    ]
    told.sort(key=lambda pair: not pair[1].unhealthy)
    if told:
        worst = told[0][1]
        words = labels.per_card((gpu, finding.evidence) for gpu, finding in told)
        return (failed if worst.unhealthy else warned)(words, worst.text)
    return _links_up(found, cards)


def _links_up(found: Found, cards: list[Gpu]) -> Verdict:
    active = [
        (gpu, sum(link.active is True for link in gpu.nvlinks)) for gpu in cards if gpu.nvlinks
    ]
    dead = [gpu for gpu, links in active if not links]
    switched = found.pci.nvswitches() or found.domain.state == "joined"
    if dead and switched and not any(gpu.mig for gpu in dead):
        words = f"no active NVLink on {labels.cards(dead)}, although it has NVSwitches"
        return failed(
            words, "read `nvidia-smi nvlink -s` and the fabric manager's log, then reboot"
        )
    if not active:
        return passed(f"{labels.counted(len(cards), 'card')}, fabric without faults")
    counts = Counter(links for _, links in active)
    words = ", ".join(f"{n} links active on {labels.counted(c, 'card')}" for n, c in counts.items())
    speeds = {link.gb_per_s for gpu in cards for link in gpu.nvlinks or () if link.active}
    known = sorted(speed for speed in speeds if speed is not None)
    each = f", {' and '.join(f'{speed:g}' for speed in known[:4])} GB/s each" if known else ""
    return passed(words + each)


def p2p(found: Found) -> Verdict | None:
    """Whether cards can read each other's memory; asked only where NVLink should work."""
    if found.p2p is None:
        return None
    words = {pair: word for pair, word in found.p2p.pairs.items() if pair[0] != pair[1]}
    ask = "`nvidia-smi topo -p2p r`"
    if not words:
        if found.p2p.error is None:
            return None
        return warned(found.p2p.error, f"run {ask} by hand")
    closed = {pair: word for pair, word in words.items() if word != "OK"}
    if not closed:
        return passed(f"all {len(words)} pairs of cards can read each other")
    named = labels.listed(f"{a}->{b} {word}" for (a, b), word in sorted(closed.items()))
    evidence = f"{len(closed)} of {len(words)} pairs of cards cannot read each other: {named}"
    remedy = f"see that links are up and IOMMU and ACS are off, then ask again: {ask}"
    works_not = len(closed) == len(words) and found.domain.state == "joined"
    return (failed if works_not else warned)(evidence, remedy)


def domain(found: Found) -> Verdict | None:
    """The multi-node NVLink domain. Being in none is no fault of a single machine."""
    state, reason = found.domain.state, found.domain.reason or "no reason given"
    rack = any(_RACK.search(gpu.name or "") for gpu in found.gpus.cards)
    if state == "joined":
        cards = labels.counted(len(machine.answering(found, "nvidia")), "card")
        return passed(f"{cards} in domain {found.domain.key}")
    if state == "unknown":
        remedy = "update the driver: only 535 and later tell of NVLink domains"
        return warned(reason, remedy) if rack else None
    if state == "none" and not found.domain.fault:
        told = any(gpu.fabric.state == "completed" for gpu in found.gpus.cards)
        if rack:
            return warned(reason, "see that the rack's NVLink domain is set up (NMX, switch trays)")
        return passed(reason) if told else None
    return _broken_domain(found, state, reason)


def _broken_domain(found: Found, state: str, reason: str) -> Verdict:
    if state == "in_progress" and not found.domain.fault:
        by = "the rack's switch trays (NMX)" if _rack_tray(found) else f"{SERVICE} here"
        return failed(
            f"in progress: {reason}", f"see to {by}, then `nvidia-smi -q | grep -A9 Fabric`"
        )
    remedy = (
        "see that the rack's partition holds all cards of this node (NMX), then reset them "
        "(`nvidia-smi --gpu-reset`) or reboot"
    )
    words = f"{state}: {reason}" + (
        f"; seen: {labels.listed(found.domain.cliques)}" if found.domain.cliques else ""
    )
    return failed(words, remedy)
