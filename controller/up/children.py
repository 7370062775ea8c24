"""The programs that `up` runs: started in sessions of their own, watched, stopped in order.

Ctrl-C on a terminal must reach `up` alone, hence the sessions; what each prints goes to a file.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from typing import TYPE_CHECKING

import psutil
import trio

from controller.up import CannotStart

if TYPE_CHECKING:
    from pathlib import Path

    from controller.up.folder import Folder

LOG_MOST = 8 << 20
KILL_WAIT_S = 5.0


class Child:
    """One running program and its log."""

    def __init__(self, name: str, process: trio.Process, log: Path, folder: Folder) -> None:
        self.name, self.log = name, log
        self._process, self._folder = process, folder

    async def ended(self) -> int:
        """Wait for its end; its exit status."""
        return await self._process.wait()

    @property
    def running(self) -> bool:
        """Whether it has not ended yet."""
        return self._process.poll() is None

    def last_words(self, most: int = 2000) -> str:
        """The end of its log."""
        return tail(self.log, most)

    async def stop(self, grace_s: float) -> bool:
        """SIGTERM, and SIGKILL after the grace. Whether it ended by itself."""
        gentle = True
        if self.running:
            self._process.send_signal(signal.SIGTERM)
            with trio.move_on_after(grace_s):
                await self._process.wait()
            if self.running:
                gentle = False
                self.kill()
                with trio.move_on_after(KILL_WAIT_S):
                    await self._process.wait()
        self._folder.forget_process(self.name)
        return gentle

    def kill(self) -> None:
        """End its whole session at once."""
        try:
            os.killpg(self._process.pid, signal.SIGKILL)
        except ProcessLookupError:
            return


def tail(log: Path, most: int) -> str:
    """The last ``most`` bytes of a log, from a line's start."""
    try:
        with log.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - most))
            text = file.read().decode(errors="replace")
    except OSError:
        return ""
    return text if size <= most else text.partition("\n")[2]


async def start(folder: Folder, name: str, arguments: list[str], env: dict[str, str]) -> Child:
    """Start `python -m <arguments>` with ``env`` added to ours; what it prints goes to a log."""
    log = folder.path / "logs" / f"{name}.log"
    if log.exists() and log.stat().st_size > LOG_MOST:
        log.replace(log.with_suffix(".log.1"))
    with log.open("ab") as file:
        try:
            process = await trio.lowlevel.open_process(
                [sys.executable, "-P", "-m", *arguments],
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                env={**os.environ, **env},  # noqa: TID251 - children inherit what we were given
                start_new_session=True,
            )
        except OSError as error:
            raise CannotStart(f"the {name} cannot be started: {error}") from error
    folder.remember_process(name, process.pid)
    return Child(name, process, log, folder)


def stop_left_over(
    folder: Folder, names: dict[str, signal.Signals], wait_s: float = 20.0
) -> list[str]:
    """End what a killed run left behind, in this order; the names of those found. Blocks."""
    found = []
    for name, gentle in names.items():
        process = folder.left_over(name)
        if process is None:
            continue
        found.append(name)
        try:
            process.send_signal(gentle)
            if not _gone(process, wait_s):
                process.kill()
                _gone(process, KILL_WAIT_S)
        except psutil.NoSuchProcess:
            pass  # it ended in between
        folder.forget_process(name)
    return found


def _gone(process: psutil.Process, wait_s: float) -> bool:
    """Wait for the end of a process that is not our child; one that nobody reaps has ended too."""
    end = time.monotonic() + wait_s
    while process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
        if time.monotonic() > end:
            return False
        time.sleep(0.02)
    return True
