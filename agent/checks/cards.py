"""Checks of the cards themselves: number, health, memory errors, clocks, PCIe link. Pure."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

from agent.checks import labels, machine
from agent.checks.verdict import Verdict, failed, passed, together, warned
from agent.probes import gpus

if TYPE_CHECKING:
    from agent.health import Finding
    from agent.probes.card import Gpu
    from agent.probes.found import Found

_OWN_DRIVERS: Final = frozenset({None, "nvidia", "amdgpu"})
_WORKSTATION: Final = re.compile(r"\b(geforce|rtx|gtx|quadro|titan|radeon)\b", re.IGNORECASE)
_LOST: Final = (
    "look for Xid 79 in `dmesg`, reboot, and have the card, its slot and its power checked if it "
    "stays away"
)
_NO_PCI: Final = "let the agent read /sys/bus/pci, or install lspci (`apt install pciutils`)"


def count(found: Found) -> Verdict | None:
    """Cards that answer against cards on the PCI bus. A card cut into MIG devices counts once."""
    silent = [gpu for gpu in found.gpus.cards if not machine.answers(gpu)]
    here = machine.answering(found)
    if not machine.pci_known(found):
        return _uncounted(found, here, silent)
    present = {gpu.pci_bus_id for gpu in here if gpu.pci_bus_id}
    away = [device for device in machine.on_pci(found) if device.address not in present]
    if len(away) <= sum(gpu.pci_bus_id is None for gpu in here):
        away = []  # as many cards answer that do not tell their address
    missing = {d.address: "on the PCI bus only" for d in away if d.driver in _OWN_DRIVERS}
    missing |= {gpu.pci_bus_id or labels.card(gpu): _problem(gpu) for gpu in silent}
    total = len(present | missing.keys()) + sum(gpu.pci_bus_id is None for gpu in here)
    if missing:
        return _missing(missing, len(here), total)
    others = [device for device in away if device.driver not in _OWN_DRIVERS]
    if others:
        words = labels.listed(f"{d.address} ({d.driver})" for d in others)
        return warned(
            f"{len(here)} answer; held by other drivers: {words}",
            "bind these to their maker's driver if the node should use them",
        )
    return passed(f"{_counted(here)}, as many as on the PCI bus") if here else None


def _uncounted(found: Found, here: tuple[Gpu, ...], silent: list[Gpu]) -> Verdict | None:
    if silent:
        missing = {gpu.pci_bus_id or labels.card(gpu): _problem(gpu) for gpu in silent}
        return _missing(missing, len(here), len(here) + len(missing))
    if machine.in_wsl(found):
        return passed(f"{_counted(here)}; WSL shows no PCI bus to compare with") if here else None
    if not here and not found.signs:
        return None  # the check `driver` says that this is a CPU-only node
    why = found.pci.error or "no reason given"
    return warned(f"{_counted(here)}; the PCI bus could not be read: {why}", _NO_PCI)


def _missing(missing: dict[str, str], here: int, total: int) -> Verdict:
    """Cards out of reach together with all others are the driver's fault, not their own (E11)."""
    words = labels.per_name(missing.items())
    if not here:
        return failed(f"0 of {total} cards answer: {words}", "see to the check `driver` first")
    return failed(f"{here} of {total} cards answer; missing: {words}", _LOST)


def _problem(gpu: Gpu) -> str:
    return "; ".join(gpu.problems)[:120] or "does not answer"


def _counted(cards: tuple[Gpu, ...]) -> str:
    slices = sum(len(gpu.slices) for gpu in cards)
    cut = f" ({sum(gpu.mig is True for gpu in cards)} cut into {slices} MIG devices)"
    answer = "answers" if len(cards) == 1 else "answer"
    return f"{labels.counted(len(cards), 'card')} {answer}" + (cut if slices else "")


def health(found: Found) -> Verdict | None:
    """The findings that count against cards: those that keep a card out of use fail."""
    names = {gpus.key(gpu): labels.card(gpu) for gpu in found.gpus.cards}
    told = [(names.get(key, key), one) for key, many in found.findings.items() for one in many]
    if not told:
        cards = labels.counted(len(names), "card")
        return passed(f"{cards}, no findings") if names else None
    told.sort(key=lambda pair: not pair[1].unhealthy)
    words = labels.per_name((name, _finding(finding)) for name, finding in told)
    worst = told[0][1]
    return (failed if worst.unhealthy else warned)(words, worst.text)


def _finding(finding: Finding) -> str:
    return f"{finding.code} ({finding.evidence})"


def ecc(found: Found) -> Verdict | None:
    """Errors that ECC could not correct since the driver was loaded, and ECC that is off."""
    cards = machine.answering(found)
    bad = [gpu for gpu in cards if gpu.ecc.uncorrected]
    off = [gpu for gpu in cards if gpu.ecc.enabled is False and _datacentre(gpu)]
    if bad:
        words = labels.per_card((g, f"{g.ecc.uncorrected} uncorrected errors") for g in bad)
        return failed(words, _reset_words(bad[0], "drain the node, then reset the card"))
    if off:
        words = f"ECC is off on {labels.cards(off)}"
        return warned(words, f"`nvidia-smi -i {labels.card(off[0])} -e 1`, then reboot")
    told = [gpu for gpu in cards if gpu.ecc.enabled or gpu.ecc.uncorrected is not None]
    on = sum(gpu.ecc.enabled is True for gpu in told)
    words = f"on for {on} of {labels.counted(len(cards), 'card')}, no uncorrected errors"
    return passed(words) if told else None


def _datacentre(gpu: Gpu) -> bool:
    """Cards that are run with ECC; the workstation's and the gamer's come with it off."""
    name = gpu.name or ""
    return bool(name) and ("server" in name.lower() or not _WORKSTATION.search(name))


def _reset_words(gpu: Gpu, before: str) -> str:
    tool = "nvidia-smi --gpu-reset --id" if gpu.vendor == "nvidia" else "amd-smi reset -G --gpu"
    number = "INDEX" if gpu.index is None else gpu.index
    return f"{before} (`{tool} {number}`) or reboot"


def remaps(found: Found) -> Verdict | None:
    """Repairs of memory (rows remapped, pages retired) that wait for a reset, or did not work."""
    cards = machine.answering(found)
    broken = [gpu for gpu in cards if gpu.repair.failed]
    pending = [gpu for gpu in cards if gpu.repair.pending and not gpu.repair.failed]
    verdicts = []
    if broken:
        words = f"a repair of memory failed on {labels.cards(broken)}"
        verdicts.append(failed(words, "have the card replaced: it has no spare memory left"))
    if pending:
        words = f"a repair of memory is pending on {labels.cards(pending)}"
        remedy = _reset_words(pending[0], "drain the node, then reset the card")
        verdicts.append(failed(words, remedy))
    told = sum((g.repair.pending, g.repair.failed) != (None, None) for g in cards)
    if not verdicts and told:
        done = sum((gpu.repair.uncorrected or 0) + (gpu.repair.corrected or 0) for gpu in cards)
        asked = labels.counted(told, "card")
        return passed(f"{asked} asked, {done} repairs done, none pending or failed")
    return together(verdicts)


def persistence(found: Found) -> Verdict | None:
    """Without it the driver sleeps when nobody uses a card, and takes seconds to wake up."""
    cards = [g for g in machine.answering(found, "nvidia") if g.persistence is not None]
    off = [gpu for gpu in cards if not gpu.persistence]
    if not cards or machine.in_wsl(found):
        return None
    if not off:
        return passed(f"on for {labels.counted(len(cards), 'card')}")
    service = found.services.get("nvidia-persistenced")
    state = f", nvidia-persistenced is {service.state}" if service and service.state else ""
    remedy = "`systemctl enable --now nvidia-persistenced`, or `nvidia-smi -pm 1` until a reboot"
    return warned(f"off for {labels.cards(off)}{state}", remedy)


_THROTTLES: Final = (
    ("hw_thermal", "check fans, airflow and coolant, and `nvidia-smi -q -d TEMPERATURE`"),
    ("hw_power_brake", "check power supplies and the rack's power limit"),
    ("hw_slowdown", "check cooling and power supplies"),
    ("sw_thermal", "check fans and airflow, and `nvidia-smi -q -d TEMPERATURE`"),
)


def throttling(found: Found) -> Verdict | None:
    """Clocks that heat or power hold down just now. A power cap of the driver's own is normal."""
    cards = [gpu for gpu in machine.answering(found) if gpu.throttle is not None]
    held = [
        (gpu, reason, remedy)
        for reason, remedy in _THROTTLES
        for gpu in cards
        if reason in (gpu.throttle or ())
    ]
    if held:
        words = labels.per_card((gpu, f"clocks held down ({why})") for gpu, why, _ in held)
        return warned(words, held[0][2])
    hot = max((gpu.temperature_c for gpu in cards if gpu.temperature_c is not None), default=None)
    heat = "" if hot is None else f", hottest at {hot:g} C"
    return passed(f"no clocks held down by heat or power{heat}") if cards else None


def pcie(found: Found) -> Verdict | None:
    """Lanes of the PCIe link. Its generation says nothing: a card that is idle lowers it."""
    cards = [gpu for gpu in machine.answering(found) if gpu.pcie.width and gpu.pcie.width_max]
    narrow = [gpu for gpu in cards if (gpu.pcie.width or 0) < (gpu.pcie.width_max or 0)]
    if narrow:
        words = labels.per_card((g, f"x{g.pcie.width} of x{g.pcie.width_max}") for g in narrow)
        remedy = "reseat the card or its riser, unless its slot is made so (`lspci -vv`, LnkSta)"
        return warned(words, remedy)
    widths = labels.listed(sorted({f"x{gpu.pcie.width}" for gpu in cards}))
    return (
        passed(f"full width on {labels.counted(len(cards), 'card')} ({widths})") if cards else None
    )


def xid_log(found: Found) -> Verdict | None:
    """Whether the kernel log, which tells of XIDs, can be read."""
    if not found.gpus.cards:
        return None
    if found.kernel_log_error:
        remedy = (
            "run the agent as root, add its user to the group systemd-journal, or "
            "`sysctl kernel.dmesg_restrict=0`"
        )
        return warned(found.kernel_log_error, remedy)
    return passed("the kernel log is readable: error events of cards are seen")
