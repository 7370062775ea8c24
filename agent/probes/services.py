"""Whether services of the machine run: one question to systemd, and a look at the processes.

Called by agent/probes/imex.py and inventory.py. A service may run outside its unit (a driver
container of Kubernetes, a cluster manager), so one that systemd does not run is looked for among
the processes. Nothing here starts or stops anything.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Final, Literal

from agent.probes import values
from agent.probes.root import bounded

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence

    from agent.probes.root import Root

State = Literal["active", "inactive", "failed", "absent"]

TIMEOUT_S: Final = 5.0
MAX_PROCESSES: Final = 65_536
MAX_VALUE: Final = 300
PROPERTIES: Final = (
    "Id,Names,LoadState,ActiveState,SubState,UnitFileState,MainPID,Result,ActiveEnterTimestamp"
)
PROGRAMS: Final[Mapping[str, str]] = {
    "nvidia-fabricmanager": "nv-fabricmanager",
    "nvidia-dcgm": "nv-hostengine",
    "opensmd": "opensm",
}
"""Programs that are not called like their service."""
STATES: Final[Mapping[str, State]] = {
    "active": "active",
    "reloading": "active",
    "refreshing": "active",
    "inactive": "inactive",
    "deactivating": "inactive",
    "activating": "inactive",
    "failed": "failed",
    "maintenance": "failed",
}
ENABLED: Final[Mapping[str, bool]] = {
    "enabled": True,
    "enabled-runtime": True,
    "alias": True,
    "disabled": False,
    "linked": False,
    "linked-runtime": False,
    "masked": False,
    "masked-runtime": False,
}
"""Unit files that start at boot, or do not. Others (static, generated) do when something asks."""


@dataclass(frozen=True, slots=True)
class Service:
    """A service by its name without `.service`. `state` None: nobody could tell, see `error`.

    `error` also says what is wrong with a failed, masked or ever restarting one. `pid` is its main
    process; `unit` is False when that process does not belong to a unit of this name. `since` is
    systemd's own text, for people.
    """

    name: str
    state: State | None = None
    enabled: bool | None = None
    since: str | None = None
    error: str | None = None
    pid: int | None = None
    unit: bool = True
    starting: bool = False


def parse_show(text: str, names: Sequence[str]) -> dict[str, Service]:
    """Output of `systemctl show`: blocks of KEY=VALUE, in the order in which they were asked.

    A block belongs to a name by its Id or Names (an alias); left over ones are not guessed.
    """
    found: dict[str, Service] = {}
    limit = 64 + 4 * len(names)
    plain = values.plain(text[: 2**20]).strip()
    for block in re.split(r"\n[ \t\r]*\n", plain, maxsplit=limit)[:limit]:
        lines = (line.partition("=") for line in block.splitlines()[:64])
        fields = {key.strip(): value.strip()[:MAX_VALUE] for key, sign, value in lines if sign}
        units = {_plain(unit) for unit in (fields.get("Id"), *fields.get("Names", "").split())}
        for name in names:
            if name in units and name not in found:
                found[name] = _service(name, fields)
    return found


def _plain(unit: str | None) -> str:
    return (unit or "").removesuffix(".service")


def _service(name: str, fields: Mapping[str, str]) -> Service:
    load, active, sub = (fields.get(key, "") for key in ("LoadState", "ActiveState", "SubState"))
    file_state, result = fields.get("UnitFileState", ""), fields.get("Result", "")
    pid = fields.get("MainPID", "")
    state, error = STATES.get(active), None
    if load == "not-found" and state != "active":
        return Service(name, "absent")
    if state is None:
        error = f"{name}: systemd says neither active nor inactive ({active[:40] or 'nothing'})"
    elif sub == "auto-restart":
        state, error = "failed", f"{name}: ends and is restarted again and again ({result})"
    elif state == "failed":
        error = f"{name}: failed ({result}): see journalctl -u {name}"
    elif active == "activating":
        error = f"{name}: is starting ({sub})"
    elif load == "masked" or file_state.startswith("masked"):
        error = f"{name}: is masked: it can not be started before `systemctl unmask {name}`"
    elif load not in ("", "loaded"):
        error = f"{name}: its unit file is not usable ({load})"
    return Service(
        name,
        state,
        ENABLED.get(file_state),
        fields.get("ActiveEnterTimestamp") or None if state == "active" else None,
        error,
        int(pid) if pid.isascii() and pid.isdigit() and 0 < len(pid.lstrip("0")) < 10 else None,
        starting=active == "activating",
    )


def program(name: str) -> str:
    """The program that a service runs."""
    return PROGRAMS.get(name, name)


def find_processes(root: Root, programs: Collection[str]) -> dict[str, list[int]]:
    """Process ids by program name, oldest id first. Blocking: one small file a process.

    The kernel keeps 15 letters of a name; longer ones are compared with the command line.
    """
    wanted: dict[str, list[str]] = {}
    for name in programs:
        wanted.setdefault(name[:15], []).append(name)
    found: dict[str, list[int]] = {}
    pids = (int(name) for name in root.names("/proc") if name.isascii() and name.isdigit())
    for pid in sorted(pids)[:MAX_PROCESSES]:
        comm = (root.read(f"/proc/{pid}/comm", 64) or "").strip()
        for name in wanted.get(comm, ()):
            if len(name) <= 15 or _started_as(root, pid) in ("", name):
                found.setdefault(name, []).append(pid)
    return found


def _started_as(root: Root, pid: int) -> str:
    command = root.read(f"/proc/{pid}/cmdline", 4096) or ""
    return command.split("\x00", 1)[0].rsplit("/", 1)[-1]


async def read_services(root: Root, names: Iterable[str]) -> dict[str, Service]:
    """Each named service once. Names without `.service`; those systemd does not run are looked
    for among the processes.
    """
    asked = tuple(dict.fromkeys(_plain(name) for name in names))
    if not asked:
        return {}
    units = [f"{name}.service" for name in asked]
    result = await root.run(["systemctl", "show", "-p", PROPERTIES, *units], TIMEOUT_S)
    found = parse_show(result.stdout, asked)
    said = next((line.strip() for line in result.stderr.splitlines() if line.strip()), "")
    why = said[:200] or result.error or "systemctl show: no answer for it"
    for name in asked:
        found.setdefault(name, Service(name, error=why))
    missing = [name for name in asked if found[name].state != "active"]
    look = partial(find_processes, root, [program(name) for name in missing])
    running = await bounded(look, key="service processes", timeout_s=TIMEOUT_S) if missing else {}
    return {name: _with_process(found[name], running) for name in asked}


def _with_process(service: Service, running: Mapping[str, list[int]] | None) -> Service:
    pids = (running or {}).get(program(service.name))
    if service.state == "active" or not pids:
        return service
    if service.starting:
        return replace(service, pid=pids[0])
    why = service.error if service.state == "failed" else None
    return replace(service, state="active", error=why, pid=pids[0], unit=False)
