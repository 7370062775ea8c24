"""The supervisor of one controller: its control process and routers, restarted when they die.

SIGTERM stops the routers first, so that running requests finish while control still answers, then
control. A child whose supervisor died ends by itself: its end of a pipe closes.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import structlog
import trio

from controller.config import LIFELINE, child_environment
from controller.reload import reread

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from controller.config import Settings

FIRST_PAUSE_S = 0.2
LONGEST_PAUSE_S = 10.0
STABLE_S = 30.0
UNUSABLE = 3
"""Exit code of a child that cannot work as it is told (port taken): no restart would help."""
CONTROL_END_S = 15.0
BEYOND_DRAIN_S = 10.0

log = structlog.get_logger()


@dataclass(slots=True)
class Child:
    """One process that should run."""

    name: str
    arguments: Sequence[str]
    process: trio.Process | None = None
    ended: trio.Event = field(default_factory=trio.Event)


class Supervisor:
    """All children of one controller."""

    def __init__(
        self,
        settings: Settings,
        read: Callable[[], Settings],
        arguments: Sequence[str],
        runtime: Path,
    ) -> None:
        self._settings = settings
        self._read = read  # the configuration anew, at SIGHUP
        self._env = child_environment(runtime)
        # Held open by us alone; a child that reads its end sees EOF when we are gone.
        self._lifeline, self._ours = os.pipe()
        self._env[LIFELINE] = str(self._lifeline)
        self._stopping = trio.Event()
        self._code = 0
        base = [sys.executable, "-P", "-m", "controller", *arguments]
        self._control = Child("control", [*base, "--role", "control"])
        self._routers = [
            Child(f"router {n}", [*base, "--role", "router", "--worker", str(n)])
            for n in range(settings.workers)
        ]

    async def run(self) -> int:
        """Until SIGTERM, or until a child says that it can never work; returns the exit code."""
        async with trio.open_nursery() as nursery:
            await nursery.start(self._signals)
            async with trio.open_nursery() as children:
                for child in (self._control, *self._routers):
                    children.start_soon(self._keep, child)
            nursery.cancel_scope.cancel()
        os.close(self._ours)
        os.close(self._lifeline)
        return self._code

    async def _signals(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        with trio.open_signal_receiver(signal.SIGTERM, signal.SIGINT, signal.SIGHUP) as numbers:
            task_status.started()
            async with trio.open_nursery() as nursery:
                async for number in numbers:
                    if number == signal.SIGHUP:
                        for child in (self._control, *self._routers):
                            self._send(child, signal.SIGHUP)
                        nursery.start_soon(self._reread)
                    elif not self._stopping.is_set():
                        nursery.start_soon(self._stop)

    async def _reread(self) -> None:
        self._settings = await reread(self._settings, self._read)

    async def _stop(self) -> None:
        self._stopping.set()
        for child in self._routers:
            self._send(child, signal.SIGTERM)
        with trio.move_on_after(self._settings.drain + BEYOND_DRAIN_S):
            for child in self._routers:
                await child.ended.wait()
        self._send(self._control, signal.SIGTERM)
        with trio.move_on_after(CONTROL_END_S):
            await self._control.ended.wait()
        for child in (*self._routers, self._control):
            self._send(child, signal.SIGKILL)

    def _send(self, child: Child, number: int) -> None:
        if child.process is not None and child.process.returncode is None:
            child.process.send_signal(number)

    async def _keep(self, child: Child) -> None:
        """Start it, and again when it dies, until this controller stops."""
        pause = FIRST_PAUSE_S
        while not self._stopping.is_set():
            began = trio.current_time()
            code = await self._live(child)
            if self._stopping.is_set():
                break
            if code == UNUSABLE:
                self._code = 1
                child.ended.set()
                await self._stop()
                break
            if trio.current_time() - began > STABLE_S:
                pause = FIRST_PAUSE_S
            log.error("child ended; it is started again", child=child.name, code=code, in_s=pause)
            with trio.move_on_after(pause):
                await self._stopping.wait()
            pause = min(2 * pause, LONGEST_PAUSE_S)
        child.ended.set()

    async def _live(self, child: Child) -> int | str:
        """Start it and wait for its end: its exit code, or why there was no process to be had."""
        try:
            child.process = await trio.lowlevel.open_process(
                child.arguments, env=self._env, stdin=subprocess.DEVNULL, pass_fds=[self._lifeline],
                start_new_session=True,
            )  # fmt: skip
        except OSError as error:  # of the machine, for now; the others go on
            return str(error)
        if self._stopping.is_set():  # it came to be while the others were told to end
            self._send(child, signal.SIGTERM)
        return await child.process.wait()


def ask_for_port(host: str, port: int) -> None:
    """Raises OSError when somebody listens on the client port already.

    Routers share it among themselves, so those of another controller of this user would too.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind((host, port))
        probe.listen(1)


async def die_with_parent(descriptor: int) -> None:
    """In a child: end this process when the supervisor is gone, however it went."""
    await trio.lowlevel.wait_readable(descriptor)
    log.error("the supervisor is gone; this process ends")
    os.kill(os.getpid(), signal.SIGTERM)
