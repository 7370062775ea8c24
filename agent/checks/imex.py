"""Checks of IMEX, by which cards of several nodes share memory: service, domain, channels. Pure.

They count only in a multi-node NVLink domain; two owners of the service are wrong anywhere (E17).
A node alone serves without IMEX, so most of what is wrong here only warns.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from agent.checks import labels
from agent.checks.verdict import Verdict, failed, passed, together, warned
from agent.probes import imex_ctl

if TYPE_CHECKING:
    from agent.probes.found import Found
    from agent.probes.imex import Imex

SERVICE: Final = "nvidia-imex"
_ASK: Final = "`nvidia-imex-ctl -N -H`"
_INSTALL: Final = (
    "install nvidia-imex of the driver's version and list all nodes in "
    "/etc/nvidia-imex/nodes_config.cfg, if models are to span nodes"
)
_START: Final = (
    f"`systemctl enable --now {SERVICE}`, unless Kubernetes or Slurm starts it with each job"
)
_ON_ITS_WAY: Final = imex_ctl.STATES - {imex_ctl.READY, "UNAVAILABLE"}


def _in_domain(found: Found) -> bool:
    return found.domain.state in ("joined", "partial", "inconsistent")


def imex(found: Found) -> Verdict | None:
    """The service, its owners, the state of the domain and its connections."""
    seen = found.imex
    if seen is None:
        if not _in_domain(found):
            return None
        return warned("no sign of IMEX on a node of a multi-node NVLink domain", _INSTALL)
    if len(seen.owners) > 1:
        words = seen.error or f"IMEX has {len(seen.owners)} owners: {labels.listed(seen.owners)}"
        return failed(words, _one_owner(seen))
    if not _in_domain(found):
        return passed(f"not needed: this node is in no NVLink domain; IMEX is {_state(seen)}")
    return together([_service(found, seen), *_domain(seen)])


def _one_owner(seen: Imex) -> str:
    unit = any(owner.startswith("systemd") for owner in seen.owners)
    if unit:
        return (
            f"keep one of them: `systemctl disable --now {SERVICE}` when the cluster manager runs "
            "IMEX, else turn it off there"
        )
    return "keep one of them, and turn the other off where it is started"


def _state(seen: Imex) -> str:
    return seen.state or "in an unknown state"


def _service(found: Found, seen: Imex) -> Verdict:
    unit = found.services.get(SERVICE)
    asked = unit is None or unit.state is not None
    owner = seen.owner or ("nobody" if asked else "whom, systemd could not be asked")
    version = f", version {seen.version}" if seen.version else ""
    words = f"IMEX is {_state(seen)}, run by {owner}{version}"
    why = "; ".join(filter(None, (words, seen.error)))
    if seen.state == imex_ctl.READY:
        return warned(why, f"run {_ASK} by hand") if seen.error else passed(words)
    if unit is not None and unit.state == "failed":
        return failed(f"{why}; {unit.error or 'the unit has failed'}", f"`journalctl -u {SERVICE}`")
    if seen.owner is None:
        return warned(why, _START)
    if seen.state in _ON_ITS_WAY or seen.state is None:
        remedy = f"see with {_ASK} which nodes it waits for, and `journalctl -u {SERVICE}`"
        return warned(why, remedy)
    return failed(why, f"`systemctl restart {SERVICE}` and read `journalctl -u {SERVICE}`")


def _domain(seen: Imex) -> list[Verdict]:
    """The other nodes. One that is switched off makes the domain DEGRADED and harms only itself."""
    verdicts = []
    off = [node for node in seen.nodes if node.state != imex_ctl.READY]
    apart = _apart(seen)
    ready = f"{len(seen.nodes) - len(off)} of {len(seen.nodes)} nodes READY"
    if seen.domain_state == "DOWN":
        verdicts.append(failed(f"domain DOWN, {ready}", f"see with {_ASK} which nodes are off"))
    elif seen.domain_state not in ("UP", None) or off:
        names = labels.listed(
            f"{node.hostname or node.host or node.index} {node.state or '?'}" for node in off
        )
        words = f"domain {seen.domain_state or 'not told'}, {ready}" + (f": {names}" if off else "")
        verdicts.append(warned(words, "start IMEX on these nodes, or take them off the list"))
    elif seen.nodes:
        verdicts.append(passed(f"domain {seen.domain_state or 'not told'}, {ready}"))
    if apart:
        words = f"{'' if seen.complete else 'over '}{len(apart)} pairs not connected: "
        remedy = "the file nodes_config.cfg and the version of IMEX have to be the same everywhere"
        verdicts.append(warned(words + labels.listed(apart), remedy))
    return verdicts


def _apart(seen: Imex) -> list[str]:
    """Pairs of running nodes without a connection."""
    names = {
        node.index: node.hostname or node.host or f"node {node.index}"
        for node in seen.nodes
        if node.state == imex_ctl.READY
    }
    return [
        f"{names[a]} -> {names[b]} {word}"
        for a, b, word in seen.connections
        if a in names and b in names
    ]


def channel(found: Found) -> Verdict | None:
    """The device through which memory of other nodes is reached."""
    seen = found.imex
    if seen is None or not _in_domain(found):
        return None
    make = (
        "set `options nvidia NVreg_CreateImexChannel0=1` in /etc/modprobe.d and load the driver "
        "anew; Kubernetes makes channels for its own jobs"
    )
    if seen.has_major is False:
        words = "the driver offers no IMEX channels (none in /proc/devices)"
        return failed(words, "install a driver with IMEX (550 or later) and reload it")
    if seen.channels == 0:
        return failed("no channel in /dev/nvidia-caps-imex-channels", make)
    if seen.channels is None:
        words = "/dev/nvidia-caps-imex-channels could not be looked at"
        return warned(words, "`ls -l /dev/nvidia-caps-imex-channels`")
    return passed(labels.counted(seen.channels, "channel device"))
