"""Identity of processes: start one, watch it, signal it and all that belongs to it.

A process is (pid, start time, boot), never a bare number: numbers are given again (case H10), so
every signal first opens a pidfd and then compares the start time. What belongs to a shard is its
session, whatever carries its mark in the environment, and the descendants of both, also after the
leader died and the rest was re-parented (case D05). Called by supervise and orphans.
"""

from __future__ import annotations

import os
import signal
import subprocess
from dataclasses import dataclass
from typing import TYPE_CHECKING

import trio

from agent import procfs

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from pathlib import Path

POLL_S = 0.1
KILL_S = 10.0
"""A process that outlives SIGKILL this long hangs in the kernel; it is reported, not waited for."""
LINGER_S = 2.0
"""Children get this long after their leader went in order; then they are leftovers."""
TRACKER = "resource_tracker import main"
"""In the command line of the process with which Python's multiprocessing removes shared memory
once all who shared it are gone. Killed with them, it leaves some 200 MiB of a vLLM in /dev/shm."""


@dataclass(frozen=True, slots=True)
class Identity:
    """One process of one boot."""

    pid: int
    start_ticks: int
    boot_id: str


@dataclass(frozen=True, slots=True)
class Mark:
    """What an agent writes into the environment of everything it starts."""

    shard: int
    replica: int
    node: str
    agent_dir: str

    def environment(self) -> dict[str, str]:
        """The variables; LLMGW_AGENT_DIR tells two agents of one machine apart.

        SPT_NOENV: workers of vLLM and SGLang give themselves a title by setproctitle, which else
        is written over the environment in /proc, and over the mark in it.
        """
        return {
            "SPT_NOENV": "1",
            "LLMGW_SHARD": str(self.shard),
            "LLMGW_REPLICA": str(self.replica),
            "LLMGW_NODE": self.node,
            "LLMGW_AGENT_DIR": self.agent_dir,
        }


def marked_shard(pid: int, node: str, agent_dir: str) -> int | None:
    """The shard whose mark of this agent the process carries, or None."""
    found = procfs.environment(pid) or {}
    ours = found.get("LLMGW_NODE") == node and found.get("LLMGW_AGENT_DIR") == agent_dir
    number = found.get("LLMGW_SHARD", "")
    return int(number) if ours and number.isdigit() else None


def identify(pid: int) -> Identity | None:
    """The identity of the process now under this number."""
    p = procfs.process(pid)
    return None if p is None or p.gone else Identity(pid, p.start_ticks, procfs.boot_id())


def alive(identity: Identity) -> bool:
    """Whether exactly this process still runs (a zombie does not)."""
    return identify(identity.pid) == identity


def open_pidfd(identity: Identity) -> int | None:
    """A descriptor of exactly this process; None when it is gone or the kernel has no pidfd."""
    try:
        descriptor = os.pidfd_open(identity.pid)
    except (OSError, AttributeError):
        return None
    # Opened first, compared afterwards: from here on the descriptor cannot mean another process.
    p = procfs.process(identity.pid)
    if p is None or p.start_ticks != identity.start_ticks:
        os.close(descriptor)
        return None
    return descriptor


def send(identity: Identity, number: signal.Signals) -> bool:
    """Signal exactly this process; False when it is gone (case H10)."""
    if identity.boot_id != procfs.boot_id():
        return False
    descriptor = open_pidfd(identity)
    try:
        if descriptor is not None:
            signal.pidfd_send_signal(descriptor, number)
            return True
        if hasattr(os, "pidfd_open") or not alive(identity):
            return False
        os.kill(identity.pid, number)  # kernels before 5.3: checked a few microseconds ago
        return True
    except ProcessLookupError:
        return False
    finally:
        if descriptor is not None:
            os.close(descriptor)


def tree(leader: Identity | None, mark: Mark) -> list[Identity]:
    """Every live process of a shard: its session, all marked, and the descendants of both."""
    boot = procfs.boot_id()
    listed = [p for p in procfs.processes() if p.pid != os.getpid()]
    inside = set() if leader is None else _session_of(leader, listed)
    inside |= {
        p.pid
        for p in listed
        if p.pid not in inside and marked_shard(p.pid, mark.node, mark.agent_dir) == mark.shard
    }
    while more := {p.pid for p in listed if p.parent in inside} - inside:
        inside |= more
    return [Identity(p.pid, p.start_ticks, boot) for p in listed if p.pid in inside]


def _session_of(leader: Identity, listed: Iterable[procfs.Process]) -> set[int]:
    """Members of the session that the leader began, as far as they are surely of it.

    While the leader exists, also as a zombie, its number is its own. After that the kernel keeps
    the number only until its session is empty, so a stranger may lead one of that number by then
    (H10). Who is of ours carries the mark, or has written over its environment: setproctitle does
    (vLLM's workers), and takes the mark along.
    """
    root = procfs.process(leader.pid)
    if leader.boot_id != procfs.boot_id() or (root and root.start_ticks != leader.start_ticks):
        return set()
    members = {p.pid for p in listed if p.session == leader.pid}
    return members if root else {pid for pid in members if procfs.written_over(pid)}


def spawn(argv: Sequence[str], env: Mapping[str, str], folder: Path, log: Path) -> Identity:
    """Start a program in a session of its own that needs nothing of this agent to live on.

    Its output goes straight to a file: a pipe would break when the agent is killed. Blocks until
    the program is loaded; raises OSError when it cannot be.
    """
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    try:
        child = subprocess.Popen(
            list(argv),
            env=dict(env),
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
    finally:
        os.close(output)
    child.returncode = 0  # waited for by exit_code(); Popen would warn about a child left running
    p = procfs.process(child.pid)  # it cannot be another: nobody has reaped it yet
    if p is None or p.session != child.pid:
        raise OSError(f"{argv[0]} (pid {child.pid}) is not the leader of its own session")
    return Identity(child.pid, p.start_ticks, procfs.boot_id())


def exit_code(identity: Identity, *, reap: bool = False) -> int | None:
    """The exit code of an ended child, or minus the signal; None if it is not our child.

    Until it is reaped its number means its session and nothing else: that is for end_tree's caller.
    """
    p = procfs.process(identity.pid)
    if p is None or p.start_ticks != identity.start_ticks:
        return None  # reaped already; the number may be another child's by now
    how = os.WEXITED | os.WNOHANG | (0 if reap else os.WNOWAIT)
    try:
        result = os.waitid(os.P_PID, identity.pid, how)
    except ChildProcessError:
        return None  # adopted from an earlier agent: only its real parent learns the code
    if result is None:
        return None
    return result.si_status if result.si_code == os.CLD_EXITED else -result.si_status


async def ended(identity: Identity) -> int | None:
    """Wait until this process has ended; its exit code, None when unknown."""
    descriptor = await trio.to_thread.run_sync(open_pidfd, identity)
    try:
        if descriptor is not None:
            await trio.lowlevel.wait_readable(descriptor)
        else:
            while await trio.to_thread.run_sync(alive, identity):  # noqa: ASYNC110 - no event for it
                await trio.sleep(POLL_S)
    finally:
        if descriptor is not None:
            os.close(descriptor)
    return exit_code(identity)


def _send_all(members: Iterable[Identity], number: signal.Signals) -> None:
    for member in members:
        try:
            send(member, number)
        except PermissionError:
            continue  # it changed its user; the leftover report names it


async def _wait_empty(leader: Identity | None, mark: Mark, timeout_s: float) -> list[Identity]:
    """Wait until nothing of the shard runs; what still does after the time."""
    deadline = trio.current_time() + timeout_s
    while True:
        left = await trio.to_thread.run_sync(tree, leader, mark)
        if not left or trio.current_time() >= deadline:
            return left
        await trio.sleep(POLL_S)


async def end_tree(leader: Identity | None, mark: Mark, grace_s: float) -> list[int]:
    """End everything of a shard: SIGTERM to its session, grace, SIGKILL to all. Pids that remain.

    The leader's exit ends the grace early: what outlives it has lost its master (case D05). Those
    who remove shared memory (TRACKER) get LINGER_S more than the rest.
    """
    members = await trio.to_thread.run_sync(tree, leader, mark)
    if leader is not None and grace_s > 0 and leader in members:
        _send_all([m for m in members if _session(m) == leader.pid], signal.SIGTERM)
        with trio.move_on_after(grace_s):
            while await trio.to_thread.run_sync(alive, leader):  # noqa: ASYNC110 - no event
                await trio.sleep(POLL_S / 2)
            await _wait_empty(leader, mark, LINGER_S)
    begun = trio.current_time()
    while True:
        left = await trio.to_thread.run_sync(tree, leader, mark)
        waited_s = trio.current_time() - begun
        if not left or waited_s >= KILL_S:
            return [member.pid for member in left]
        # Again each round: a dying parent may have forked once more.
        spared = [m for m in left if waited_s < LINGER_S and _removes_shared_memory(m)]
        _send_all([m for m in left if m not in spared], signal.SIGKILL)
        await trio.sleep(POLL_S / 2)


def _removes_shared_memory(member: Identity) -> bool:
    return TRACKER in procfs.command_line(member.pid)


def _session(member: Identity) -> int | None:
    p = procfs.process(member.pid)
    return None if p is None else p.session
