"""IMEX, the service that lets cards of several nodes share memory over NVLink: state and owner.

Called by agent/probes/inventory.py. We never start it: on a rack the host's systemd, Kubernetes or
Slurm does, and two of them at once hang every job (case E17), so the owner is found and named.
"""

from __future__ import annotations

import ipaddress
import os
import re
from dataclasses import dataclass, replace
from functools import partial
from itertools import permutations
from typing import TYPE_CHECKING, Final

from agent.probes import imex_ctl, imex_owner, services
from agent.probes.imex_ctl import Answer, ImexNode
from agent.probes.imex_owner import DAEMON, Owner
from agent.probes.root import bounded

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from agent.probes.root import Root
    from agent.probes.services import Service

__all__ = ["Imex", "ImexNode", "read", "usable"]

CTL: Final = "nvidia-imex-ctl"
FOLDER: Final = "/etc/nvidia-imex"
CONFIG: Final = f"{FOLDER}/config.cfg"
NODES: Final = f"{FOLDER}/nodes_config.cfg"
CHANNELS: Final = "/dev/nvidia-caps-imex-channels"
MAJOR: Final = "nvidia-caps-imex-channels"
FORMS: Final = (("-N", "-j", "-H"), ("-N", "-H"), ("-N",))
"""Best first: JSON is plainest, -H adds host names; older releases know only the last."""
DOMAIN_TIMEOUT_S: Final = 15.0
"""The tool asks every node of the domain, and waits for those that are off."""
STATE_TIMEOUT_S: Final = 5.0
FILES_TIMEOUT_S: Final = 5.0


@dataclass(frozen=True, slots=True)
class Imex:
    """IMEX as seen from one node. `connections` are only pairs that are not connected.

    `complete` False: more of those than are kept. `owners` has more than one entry when two
    things run it; `error` says then what to disable. `members` is what nodes_config.cfg lists.
    """

    state: str | None = None
    domain_state: str | None = None
    version: str | None = None
    nodes: tuple[ImexNode, ...] = ()
    connections: tuple[tuple[int, int, str], ...] = ()
    channels: int | None = None
    has_major: bool | None = None
    owner: str | None = None
    error: str | None = None
    owners: tuple[str, ...] = ()
    members: tuple[str, ...] = ()
    complete: bool = True


@dataclass(frozen=True, slots=True)
class _Files:
    """What the kernel and the configuration tell without asking anybody."""

    installed: bool
    channels: int | None
    has_major: bool | None
    config: Mapping[str, str]
    members: tuple[str, ...]
    daemons: tuple[tuple[int, Owner], ...]
    config_path: str | None


def parse_config(text: str) -> dict[str, str]:
    """KEY=VALUE lines of config.cfg; comments and empty values are left out."""
    found: dict[str, str] = {}
    for line in text[: 2**18].splitlines():
        key, sign, value = line.split("#", 1)[0].partition("=")
        if sign and value.strip() and len(found) < 256:
            found[key.strip()[:64]] = value.strip().strip("\"'")[:256]
    return found


def parse_members(text: str) -> tuple[str, ...]:
    """Lines of nodes_config.cfg: an address or a name each, in the order all members share."""
    lines = (line.split("#", 1)[0].strip() for line in text[: 2**20].splitlines())
    return tuple(line[:255] for line in lines if line)[: imex_ctl.MAX_NODES]


def parse_major(text: str | None) -> bool | None:
    """Whether /proc/devices has the character devices of IMEX channels."""
    if text is None:
        return None
    return any(line.split()[1:] == [MAJOR] for line in text[:65536].splitlines())


def usable(imex: Imex | None, hosts: Sequence[str]) -> str | None:
    """Why nodes with these addresses can not share memory over IMEX; None when they can.

    Every pair must be ready and connected both ways. What is wrong with other nodes of the domain
    (DEGRADED) does not matter. One node alone needs no IMEX.
    """
    wanted = tuple(dict.fromkeys(hosts))
    if len(wanted) < 2:
        return None
    if imex is None:
        return "IMEX is not installed"
    if why := _unfit(imex):
        return why
    known = _by_address(imex.nodes)
    members = [(host, known.get(_canonical(host))) for host in wanted]
    for host, node in members:
        if node is None:
            return f"{host} is not in the IMEX domain: add it to {NODES} on all nodes"
        if node.state != imex_ctl.READY:
            return f"IMEX on {host} is {node.state or 'in an unknown state'}"
    broken = {(a, b): word for a, b, word in imex.connections}
    for (a, first), (b, second) in permutations(members, 2):
        if first and second and (word := broken.get((first.index, second.index))):
            return f"IMEX connection from {a} to {b} is {word}"
    return None


def _unfit(imex: Imex) -> str | None:
    """What keeps this node from sharing memory with any other."""
    if len(imex.owners) > 1:
        return imex.error or f"IMEX has {len(imex.owners)} owners"
    if imex.has_major is False:
        return f"the driver offers no IMEX channels ({MAJOR} is not in /proc/devices)"
    if imex.channels == 0:
        return f"no IMEX channel in {CHANNELS}: load the driver with NVreg_CreateImexChannel0=1"
    if not imex.nodes:
        return f"IMEX connections are unknown: {imex.error or imex.state or 'no answer'}"
    if not imex.complete:
        return f"more than {imex_ctl.MAX_PAIRS} IMEX connections are broken"
    return None


def _by_address(nodes: Sequence[ImexNode]) -> dict[str, ImexNode]:
    found: dict[str, ImexNode] = {}
    for names in (
        ((node.host, node) for node in nodes),
        ((node.hostname, node) for node in nodes),
    ):
        for name, node in names:
            if name:
                found.setdefault(_canonical(name), node)
    return found


def _canonical(host: str) -> str:
    try:
        return str(ipaddress.ip_address(host.strip().split("%", 1)[0]))
    except ValueError:
        return host.strip().lower()


async def read(root: Root, unit: Service | None = None) -> Imex | None:
    """IMEX on this node; None where there is no sign of it. Takes up to half a minute.

    `unit` is what services.py said of nvidia-imex, asked for here when not given.
    """
    files = await bounded(partial(_look, root), key="imex files", timeout_s=FILES_TIMEOUT_S)
    if files is None:
        return Imex(error=f"{FOLDER} or /proc did not answer within {FILES_TIMEOUT_S:g} s")
    if unit is None:
        unit = (await services.read_services(root, [DAEMON])).get(DAEMON)
    if not files.installed and (unit is None or unit.state in (None, "absent")):
        return None
    answer = await _ask(root, files.config_path)
    running = imex_owner.owners(unit, files.daemons)
    reasons = (imex_owner.conflict(running), answer.error, _deaf(files, answer))
    own = next((node for node in answer.nodes if node.index == answer.own), None)
    versions = {node.version for node in answer.nodes if node.version}
    return Imex(
        state=answer.state,
        domain_state=answer.domain_state,
        version=own.version if own else next(iter(versions)) if len(versions) == 1 else None,
        nodes=answer.nodes,
        connections=answer.connections,
        channels=files.channels,
        has_major=files.has_major,
        owner=" and ".join(owner.name for owner in running) or None,
        error="; ".join(filter(None, reasons)) or None,
        owners=tuple(owner.name for owner in running),
        members=files.members,
        complete=answer.complete,
    )


def _deaf(files: _Files, answer: Answer) -> str | None:
    if answer.state is None and files.config.get("IMEX_CMD_ENABLED") == "0":
        return f"IMEX_CMD_ENABLED=0 in {files.config_path or CONFIG}: set it to 1 and restart IMEX"
    return None


async def _ask(root: Root, config: str | None) -> Answer:
    """The domain by the best form that is answered, and the daemon's own state."""
    base = [CTL, *(("-c", config) if config else ())]
    domain = Answer()
    for form in FORMS:
        answer, over = await _run(root, [*base, *form], DOMAIN_TIMEOUT_S)
        domain = answer
        if answer.told or over:
            break
    own, _ = await _run(root, [*base, "-q"], STATE_TIMEOUT_S)
    state = own.state or domain.state
    error = domain.error or (own.error if state is None else None)
    return replace(domain, state=state, error=error)


async def _run(root: Root, argv: Sequence[str], timeout_s: float) -> tuple[Answer, bool]:
    """What one call tells, and whether asking in another form is of no use."""
    result = await root.run(argv, timeout_s)
    parse = partial(imex_ctl.parse, result.stdout)
    answer = await bounded(parse, key="imex parse", timeout_s=FILES_TIMEOUT_S)
    # Too much output (JSON of a big domain) is no reason against asking for the short form.
    over = result.timed_out or (result.exit_code is None and not result.stdout)
    if answer is None:
        return Answer(error=f"{CTL}: its output took too long to read"), over
    if answer.told or answer.state:
        return replace(answer, error=result.error if over else None), over
    said = next((line.strip() for line in result.stderr.splitlines() if line.strip()), None)
    if result.stdout.strip() and not over:
        return answer, over
    why = f"{CTL}: {said[:200]}" if said and not over else result.error
    return Answer(error=why or answer.error), over


def _look(root: Root) -> _Files:
    """Everything that is read from files. Blocking, quick."""
    pids = services.find_processes(root, [DAEMON]).get(DAEMON, [])
    channels = _channels(root)
    installed = bool(pids or channels or root.exists(FOLDER) or root.find(CTL))
    if not installed:
        return _Files(False, channels, None, {}, (), (), None)
    own = next((path for pid in pids if (path := imex_owner.own_config(root, pid))), None)
    config = parse_config(root.read(own or CONFIG) or "")
    members = root.read(config.get("IMEX_NODE_CONFIG_FILE", NODES)) or ""
    return _Files(
        True,
        channels,
        parse_major(root.read("/proc/devices")),
        config,
        parse_members(members),
        tuple((pid, imex_owner.starter(root, pid)) for pid in pids[:64]),
        own,
    )


def _channels(root: Root) -> int | None:
    """How many channel devices there are; None when that cannot be looked at."""
    try:
        names = os.listdir(root.at(CHANNELS))  # noqa: PTH208 - names are wanted, not paths
    except FileNotFoundError:
        return 0 if root.exists("/dev") else None
    except (OSError, ValueError):
        return None
    return sum(1 for name in names if re.fullmatch(r"channel[0-9]+", name))
