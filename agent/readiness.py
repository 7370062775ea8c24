"""Whether a shard's engine is ready: its own process listens, is healthy and serves our model.

An old engine on the same port answers /health too (case D04), so health alone is no proof: the
listening socket must belong to the shard's own processes and the model list must name the model.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING

import trio

from agent import procfs
from agent.http_get import NoAnswer, get
from agent.process import Identity, Mark, tree

if TYPE_CHECKING:
    from agent.http_get import Answer

TIMEOUT_S = 5.0
ANY = frozenset({"0.0.0.0", "::", ""})  # noqa: S104 - compared, not bound


@dataclass(frozen=True, slots=True)
class Check:
    """What must hold. `path` None: listening is enough; `model` None: no model list is asked."""

    host: str
    port: int
    path: str | None
    model: str | None = None
    bearer: str | None = None
    lives_s: float | None = None
    """For a process that serves nobody: it need only have lived this long. None: it must listen."""

    @property
    def address(self) -> str:
        """Where to ask: an engine bound to every address is asked on loopback."""
        return "127.0.0.1" if self.host in ANY else self.host


def foreign_listener(port: int) -> str | None:
    """Who listens on a port, for people; None when it is free or nobody can tell."""
    inodes = procfs.listening_inodes(port)
    if not inodes:
        return None
    pid = procfs.holder_of(inodes)
    return "an unknown process" if pid is None else f"pid {pid} ({procfs.command_line(pid)})"


def listener_problem(port: int, leader: Identity, mark: Mark) -> str | None:
    """Why the port is not this shard's, or None when one of its own processes listens there."""
    inodes = procfs.listening_inodes(port)
    if inodes is None:
        return "who listens on the port is unknown: /proc/net/tcp cannot be read"
    if not inodes:
        return f"nothing listens on port {port} yet"
    holders = [m.pid for m in tree(leader, mark) if procfs.socket_inodes(m.pid) & inodes]
    if not holders:
        return f"port {port} is held by {foreign_listener(port) or 'an unknown process'}"
    halts = [halted_because(pid) for pid in holders]
    return halts[0] if all(halts) else None


def halted_because(pid: int) -> str | None:
    """Why a process cannot work although it lives; an engine without a health path shows nothing
    else, for the kernel accepts connections in its name."""
    found = procfs.process(pid)
    if found is None or not found.halted:
        return None
    return f"pid {pid} is stopped by a signal or a debugger (state {found.state}) and does not run"


def served_models(body: bytes) -> set[str]:
    """Names in an answer of /v1/models, aliases included; empty for anything unreadable."""
    try:
        listed = json.loads(body)["data"]
        names = [[m.get("id"), *(m.get("aliases") or [])] for m in listed]
    except (ValueError, KeyError, TypeError, AttributeError):
        return set()
    return {name for group in names for name in group if isinstance(name, str)}


async def _ask(check: Check, path: str) -> Answer | str:
    try:
        return await get(check.address, check.port, path, timeout_s=TIMEOUT_S, bearer=check.bearer)
    except NoAnswer as error:
        return str(error)


async def not_ready_because(check: Check, leader: Identity, mark: Mark) -> str | None:
    """Why the shard is not ready, or None when it is. Takes at most 2 * TIMEOUT_S."""
    if check.lives_s is not None:
        age = procfs.age_s(leader.start_ticks)
        young = None if age >= check.lives_s else f"started only {age:.1f} s ago"
        return young or halted_because(leader.pid)
    problem = await trio.to_thread.run_sync(listener_problem, check.port, leader, mark)
    if problem or check.path is None:
        return problem
    health = await _ask(check, check.path)
    if isinstance(health, str):
        return health
    if health.status != 200:
        said = bytes(health.body[:200]).decode(errors="replace")
        return f"{check.path} answers {health.status}: {said}"
    if check.model is None:
        return None
    listed = await _ask(check, "/v1/models")
    if isinstance(listed, str):
        return listed
    names = served_models(bytes(listed.body))
    if check.model in names:
        return None
    return f"/v1/models answers {listed.status} and names {sorted(names)}, not {check.model}"
