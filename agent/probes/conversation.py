"""A child process that answers requests line by line and is started again when it dies or hangs.

nvml.py keeps one for the fast facts of every sync: starting Python and NVML each time costs 0.1 s
of CPU, asking a running child a hundredth of that. The child ends with us: its input closes.
"""

from __future__ import annotations

import subprocess
from typing import TYPE_CHECKING, Final, Self

import trio

from agent.probes.root import OUTPUT_LIMIT, ToolResult, kill, stuck_processes

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path
    from types import TracebackType


class Conversation:
    """One child, one question at a time. Use as an async context manager so that it is ended."""

    def __init__(self, argv: Sequence[str], cwd: Path) -> None:
        self.argv: Final = tuple(argv)
        self._cwd = cwd
        self._process: trio.Process | None = None
        self._turn = trio.Lock()

    @property
    def pid(self) -> int | None:
        """The process id of the child, None while there is none."""
        return self._process.pid if self._process else None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.end()

    async def ask(self, question: str, timeout_s: float, last: Callable[[str], bool]) -> ToolResult:
        """Send one line; the answer is all lines up to the first for which `last` is true.

        A child that is silent for too long or ends is gone afterwards, and the result says so;
        what it had answered is in `stdout`. Waiting for another question to end counts as well.
        """
        if self._process is None and (stuck := stuck_processes()):
            return ToolResult(error=f"{self.argv[0]}: not started: {stuck}")
        out = bytearray()
        finished, code = False, None
        with trio.move_on_after(timeout_s) as scope:
            async with self._turn:
                try:
                    finished = await self._exchange(question, out, last)
                except (OSError, trio.BrokenResourceError, trio.ClosedResourceError):
                    pass  # it died meanwhile: told below
                finally:
                    if not finished:
                        code = await self.end()
        text = out.decode("utf-8", errors="replace")
        if finished:
            return ToolResult(stdout=text, exit_code=0)
        if scope.cancelled_caught:
            why = f"{self.argv[0]}: no answer within {timeout_s:g} s; killed"
            return ToolResult(stdout=text, timed_out=True, error=why)
        return ToolResult(stdout=text, exit_code=code, error=_why(self.argv[0], code))

    async def _exchange(self, question: str, out: bytearray, last: Callable[[str], bool]) -> bool:
        if self._process is not None and self._process.poll() is not None:
            await self.end()  # it died since the last question
        process = self._process = self._process or await self._start()
        assert process.stdin is not None
        assert process.stdout is not None
        await process.stdin.send_all(question.encode() + b"\n")
        seen = 0
        while len(out) < OUTPUT_LIMIT and (chunk := await process.stdout.receive_some(65536)):
            out += chunk
            *lines, _ = out[seen:].split(b"\n")
            seen += sum(len(line) + 1 for line in lines)
            if any(last(line.decode("utf-8", errors="replace")) for line in lines):
                return True
        return False

    async def _start(self) -> trio.Process:
        return await trio.lowlevel.open_process(
            list(self.argv),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            cwd=self._cwd,
        )

    async def end(self) -> int | None:
        """Kill the child; the next question starts another one. Returns its exit status.

        Reaps it without waiting long for one that is stuck in the driver.
        """
        process, self._process = self._process, None
        if process is None:
            return None
        with trio.CancelScope(shield=True):
            for stream in (process.stdin, process.stdout):
                if stream is not None:
                    await trio.aclose_forcefully(stream)
            with trio.move_on_after(0.1):  # one that died by itself tells its own exit status
                await process.wait()
            if process.returncode is None:
                await kill(process)
        return process.returncode


def _why(program: str, code: int | None) -> str:
    if code is not None and code < 0:
        return f"{program}: ended by signal {-code}"
    return f"{program}: ended with exit status {code} in the middle of an answer"
