"""What a card's state says of its health: findings, each with what to do next. Pure.

Called by agent/health_ledger.py's callers for every look at the cards; what must be remembered
between looks, and for how long, is the ledger's. Events of the kernel log are agent/xids.py's.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal

if TYPE_CHECKING:
    from agent.probes import card

Kind = Literal["passing", "reset", "hardware"]
"""How a finding goes away: by a clean re-check; by a reset of the card, a reload of the driver or a
reboot; by a new card or an operator's word."""

AT_ONCE: Final = frozenset({"lost", "probe", "fabric_in_progress"})
"""Passing findings that count after one look. The others have to be seen in two looks running."""
WORD_LIMIT: Final = 300
"""Characters kept of words that a driver or a probe chose."""

_THROTTLES: Final[dict[card.Throttle, tuple[str, bool, str]]] = {
    "hw_thermal": (
        "throttle_hw_thermal",
        True,
        "the hardware holds the clocks down because the card is too hot; check fans, airflow and "
        "coolant",
    ),
    "hw_power_brake": (
        "throttle_power_brake",
        True,
        "the machine's power supply holds the clocks down (power brake); check power supplies and "
        "rack power",
    ),
    "hw_slowdown": (
        "throttle_hw_slowdown",
        True,
        "the hardware holds the clocks down (HW slowdown); check cooling and power supplies",
    ),
    "sw_thermal": (
        "throttle_sw_thermal",
        False,
        "the driver lowers the clocks because the card is warm; check fans and airflow",
    ),
}


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that is wrong with a card. `unhealthy` keeps it out of placement.

    `code` is stable and unique per card, `text` a sentence for people that says what to do next,
    `evidence` the words or numbers that were read.
    """

    code: str
    kind: Kind
    text: str
    evidence: str
    unhealthy: bool = True


@dataclass(frozen=True, slots=True)
class Look:
    """One look at one card. `told` holds the codes that this look could judge, found or not.

    What was not told is unknown and heals nothing. `answers` is False when the driver did not
    answer for the card at all.
    """

    findings: tuple[Finding, ...] = ()
    told: frozenset[str] = frozenset()
    answers: bool = True
    pci_bus_id: str | None = None


def findings_of(gpu: card.Gpu) -> tuple[Finding, ...]:
    """What is wrong with a card by its own state, the worst first within each subject."""
    return tuple(
        finding
        for subject in (_problems, _memory, _recovery, _throttle, _pcie, _fabric, _links)
        for finding in subject(gpu)
    )


def look_at(gpu: card.Gpu) -> Look:
    """Findings of a card, together with what its state tells at all."""
    return Look(
        findings=findings_of(gpu),
        told=frozenset(_told(gpu)),
        answers=not gpu.problems,
        pci_bus_id=gpu.pci_bus_id,
    )


def _told(gpu: card.Gpu) -> Iterator[str]:
    if not gpu.problems:  # a card that does not answer now may be lost still
        yield from ("lost", "probe", "recovery_action")
    if gpu.ecc.uncorrected is not None:
        yield "ecc_uncorrected"
    if gpu.repair.pending is not None:
        yield "repair_pending"
    if gpu.repair.failed is not None:
        yield "repair_failed"
    if gpu.throttle is not None:
        yield from (code for code, _, _ in _THROTTLES.values())
    if gpu.pcie.width and gpu.pcie.width_max:
        yield "pcie_width"
    if (gpu.fabric.state, gpu.fabric.health, gpu.fabric.bandwidth) != (None, None, None):
        yield from FABRIC_CODES
    if gpu.nvlinks is not None:
        yield "nvlink_inactive"


def _problems(gpu: card.Gpu) -> Iterator[Finding]:
    lost = [problem for problem in gpu.problems if problem.startswith(("lost", "missing"))]
    others = [problem for problem in gpu.problems if problem not in lost]
    if lost:
        text = (
            "the card is lost to the driver; stop what uses it and reboot the machine, and if it "
            "is lost again have the card, its slot and its power checked"
        )
        yield Finding("lost", "reset", text, _short("; ".join(lost)))
    if others:
        text = (
            "the driver does not answer for the card; it is looked at again by itself, run "
            "`llmgw-agent doctor` on the machine if this stays"
        )
        yield Finding("probe", "passing", text, _short("; ".join(others)))


def _memory(gpu: card.Gpu) -> Iterator[Finding]:
    ecc, repair = gpu.ecc, gpu.repair
    if repair.failed:
        text = "a repair of the card's memory failed; have the card replaced"
        yield Finding("repair_failed", "hardware", text, f"failed repair; {_repairs(repair)}")
    if ecc.uncorrected:
        text = f"memory errors that ECC could not correct; {_reset_words(gpu)}"
        evidence = f"{ecc.uncorrected} uncorrected since the driver was loaded"
        if ecc.uncorrected_aggregate is not None:
            evidence += f", {ecc.uncorrected_aggregate} over the card's life"
        yield Finding("ecc_uncorrected", "reset", text, evidence)
    if repair.pending:
        text = f"a repair of the card's memory waits for a reset; {_reset_words(gpu)}"
        yield Finding("repair_pending", "reset", text, f"pending repair; {_repairs(repair)}")


def _repairs(repair: card.Repair) -> str:
    def told(count: int | None) -> str:
        return "unknown" if count is None else str(count)

    return (
        f"repaired so far: {told(repair.uncorrected)} uncorrected, {told(repair.corrected)} other"
    )


def _recovery(gpu: card.Gpu) -> Iterator[Finding]:
    if gpu.recovery_action:
        action = _short(gpu.recovery_action)
        text = f"the driver asks for recovery ({action}); stop what uses the card and do as it asks"
        yield Finding("recovery_action", "reset", text, f"recovery action: {action}")


def _throttle(gpu: card.Gpu) -> Iterator[Finding]:
    reasons = set(gpu.throttle or ())
    if reasons & {"hw_thermal", "hw_power_brake"}:
        reasons.discard("hw_slowdown")  # the general reason, always set along with these two
    for reason, (code, unhealthy, text) in _THROTTLES.items():
        if reason in reasons:
            yield Finding(code, "passing", text, _clock_evidence(gpu, reason), unhealthy)


def _clock_evidence(gpu: card.Gpu, reason: str) -> str:
    words = [f"throttle reason {reason}"]
    if gpu.temperature_c is not None:
        words.append(f"{gpu.temperature_c:g} C")
    if gpu.power_w is not None:
        words.append(f"{gpu.power_w:g} W")
    if gpu.clocks.sm is not None:
        words.append(f"SM clock {gpu.clocks.sm} of {gpu.clocks.sm_max or '?'} MHz")
    return ", ".join(words)


def _pcie(gpu: card.Gpu) -> Iterator[Finding]:
    width, best = gpu.pcie.width, gpu.pcie.width_max
    if width and best and width < best:
        text = (
            "the card's PCIe link has fewer lanes than the card could use; unless its slot is made "
            "so, reseat the card or its riser"
        )
        yield Finding("pcie_width", "passing", text, f"x{width} of x{best}", unhealthy=False)


FABRIC_CODES: Final = (
    "fabric_unhealthy",
    "fabric_route_unhealthy",
    "fabric_configuration",
    "fabric_route_recovery",
    "fabric_access_timeout",
    "fabric_in_progress",
    "fabric_not_started",
    "fabric_failed",
    "fabric_bandwidth",
    "fabric_limited",
    "fabric_fault",
)


def _fabric(gpu: card.Gpu) -> Iterator[Finding]:
    yield from _fabric_state(gpu.fabric)
    yield from _fabric_health(gpu.fabric)
    seen = set()
    for fault in gpu.fabric.faults:
        finding = _fabric_fault(fault)
        if finding.code not in seen:
            seen.add(finding.code)
            yield finding


def _fabric_state(fabric: card.Fabric) -> Iterator[Finding]:
    evidence = f"fabric state {fabric.state}, status {fabric.status or 'not told'}"
    if fabric.state == "in_progress":
        text = (
            "the card has not joined its NVLink fabric yet, CUDA cannot start on it; is the fabric "
            "manager running? (`systemctl status nvidia-fabricmanager`)"
        )
        yield Finding("fabric_in_progress", "passing", text, evidence)
    elif fabric.state == "not_started":
        text = "the card has not begun to join its NVLink fabric; is the fabric manager running?"
        yield Finding("fabric_not_started", "passing", text, evidence, unhealthy=False)
    elif fabric.state == "completed" and (fabric.status or "success").lower() != "success":
        text = (
            "joining the NVLink fabric failed; read the fabric manager's log, then reset the card "
            "or restart the fabric manager"
        )
        yield Finding("fabric_failed", "reset", text, _short(evidence))


def _fabric_health(fabric: card.Fabric) -> Iterator[Finding]:
    if fabric.health == "unhealthy":
        text = "the driver calls the card's NVLink fabric unhealthy; check links, switches and IMEX"
        yield Finding("fabric_unhealthy", "reset", text, "fabric health: unhealthy")
    if fabric.health == "limited":
        text = "the card's NVLink fabric has limited capacity; check its links and switches"
        yield Finding("fabric_limited", "passing", text, "fabric health: limited", unhealthy=False)
    if fabric.bandwidth == "degraded":
        text = "the card's NVLink bandwidth is degraded; check its links and switches"
        evidence = "fabric bandwidth: degraded"
        yield Finding("fabric_bandwidth", "passing", text, evidence, unhealthy=False)


def _fabric_fault(fault: str) -> Finding:
    """One further word of the driver. One that we do not know is shown, but keeps nothing out."""
    words = fault.lower().replace("_", " ")
    evidence = _short(f"fabric: {fault}")
    if "route unhealthy" in words:
        text = "a route of the card's NVLink fabric is broken; check the switches, then reset it"
        return Finding("fabric_route_unhealthy", "reset", text, evidence)
    if "incorrect config" in words:
        text = "the card's NVLink fabric is set up wrongly; correct the fabric manager's partition"
        return Finding("fabric_configuration", "reset", text, evidence)
    if "route recovery" in words:
        text = "a route of the card's NVLink fabric is recovering; it is looked at again by itself"
        return Finding("fabric_route_recovery", "passing", text, evidence)
    if "timeout" in words:
        text = "NVLink memory accesses of the card timed out and are recovering; wait for the end"
        return Finding("fabric_access_timeout", "passing", text, evidence)
    text = "the driver reports a fault of the card's NVLink fabric; ask the fabric manager's log"
    return Finding("fabric_fault", "passing", text, evidence, unhealthy=False)


def _links(gpu: card.Gpu) -> Iterator[Finding]:
    """Some links down among active ones. With all of them down there is simply no NVLink here."""
    links = gpu.nvlinks or ()
    down = sorted(link.link for link in links if link.active is False)
    if down and any(link.active for link in links):
        named = ", ".join(map(str, down[:40]))
        text = f"NVLinks {named} of the card are down; reseat the bridge or check the switch"
        evidence = f"inactive links: {named}; {len(links) - len(down)} of {len(links)} active"
        yield Finding("nvlink_inactive", "passing", text, _short(evidence), unhealthy=False)


def _reset_words(gpu: card.Gpu) -> str:
    index = "INDEX" if gpu.index is None else gpu.index
    tool = f"amd-smi reset --gpureset --gpu {index}"
    if gpu.vendor == "nvidia":
        tool = f"nvidia-smi --gpu-reset --id {index}"
    return f"stop what uses the card and reset it (`{tool}`) or reboot"


def _short(words: str) -> str:
    return words if len(words) <= WORD_LIMIT else words[: WORD_LIMIT - 3] + "..."
