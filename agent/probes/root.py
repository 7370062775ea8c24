"""Where probes read from: a prefix for /proc, /sys and /etc, a PATH for tools, and deadlines.

Every probe gets a `Root`. The live machine is `Root()`; a captured machine is
`Root(prefix=Path("captured"), path="captured/bin")`. Nothing here raises for what a machine may
do to us (missing file, hanging tool, binary output): the answer is None or a result that says why.
"""

from __future__ import annotations

import codecs
import errno
import os
import shutil
import signal
import stat
import subprocess
import threading
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final, Generic, TypeVar

import trio

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from io import FileIO

T = TypeVar("T")

READ_LIMIT: Final = 4 * 2**20
"""Bytes read from one file: /proc/cpuinfo of 1024 CPUs is about 1.6 MiB."""
OUTPUT_LIMIT: Final = 8 * 2**20
"""Bytes kept of a tool's output; `nvidia-smi -q -x` of 16 GPUs is below 1 MiB."""
STDERR_LIMIT: Final = 64 * 2**10
KILL_WAIT_S: Final = 1.0
"""A killed tool that is stuck in the driver (state D) is left behind after this many seconds."""
AFTER_EXIT_S: Final = 1.0
"""How long output is still read after a tool has ended."""
MAX_STUCK_THREADS: Final = 16
MAX_LINKS: Final = 40
"""As many as the kernel follows in one path."""
MAX_STUCK_PROCESSES: Final = 4
"""Killed tools that the kernel has not let go; with so many, asking again only adds more."""

_stuck: set[str] = set()
_stuck_lock = threading.Lock()
_unreaped: list[trio.Process] = []
_limiter: trio.lowlevel.RunVar[trio.CapacityLimiter] = trio.lowlevel.RunVar("probe_threads")


@dataclass(frozen=True, slots=True)
class ToolResult:
    """What a tool left behind. `exit_code` is None when it never ran or had to be killed.

    Output may be good although `error` is set (tools fail at the end): parse it first.
    """

    stdout: str = ""
    stderr: str = ""
    exit_code: int | None = None
    timed_out: bool = False
    error: str | None = None


@dataclass(frozen=True, slots=True)
class Root:
    """A machine to read: the live one by default, a captured one with `prefix` (and `path`).

    `path` is the PATH in which tools are looked up; None means the agent's own PATH on the live
    machine and no tools at all below a prefix. `environment` is what tools get (None: inherited).
    """

    prefix: Path = field(default_factory=lambda: Path("/"))
    path: str | None = None
    environment: Mapping[str, str] | None = None

    @property
    def live(self) -> bool:
        """True when this is the machine we run on, so that system calls describe it."""
        return self.prefix == Path("/")

    def at(self, path: str | Path) -> Path:
        """The place of an absolute path of the machine in our own file system. Blocking.

        Below a prefix, links are followed as the captured machine would: an absolute one must not
        lead to the machine we run on.
        """
        plain = self.prefix / str(path).lstrip("/")
        return plain if self.live else _inside(self.prefix, str(path))

    def link(self, path: str | Path) -> str | None:
        """Where a symbolic link points, as its text; None when the path is none. Blocking."""
        folder, _, name = str(path).rstrip("/").rpartition("/")
        try:
            return os.readlink(self.at(folder) / name)  # noqa: PTH115 - it may lead nowhere
        except (OSError, ValueError):
            return None

    def read(self, path: str | Path, limit: int = READ_LIMIT) -> str | None:
        """Text of a regular file, cut at `limit` bytes; None when it cannot be read. Blocking."""
        try:
            with open(self.at(path), "rb", buffering=0, opener=_opened) as file:
                return _text(_read_some(file, limit))
        except (OSError, ValueError):
            return None

    def exists(self, path: str | Path) -> bool:
        """Whether the path exists and may be seen. Blocking."""
        try:
            return self.at(path).exists()
        except (OSError, ValueError):
            return False

    def names(self, path: str | Path) -> list[str]:
        """Sorted names in a directory, empty when it cannot be read. Blocking."""
        try:
            return sorted(os.listdir(self.at(path)))  # noqa: PTH208 - names are wanted, not paths
        except (OSError, ValueError):
            return []

    def find(self, program: str) -> str | None:
        """Where a tool is, looked up in this root's PATH only. Blocking."""
        path = self.path if self.live or self.path is not None else ""
        try:
            return shutil.which(program, path=path)
        except (OSError, ValueError):
            return None

    async def run(
        self,
        argv: Sequence[str],
        timeout_s: float,
        *,
        cwd: Path | None = None,
        output_limit: int = OUTPUT_LIMIT,
    ) -> ToolResult:
        """Run a tool with a deadline in seconds; kills its whole process group at the end of it.

        At most `output_limit` bytes of what it prints are kept; a tool that prints more is ended.
        """
        if stuck := stuck_processes():
            return ToolResult(error=f"{argv[0]}: not started: {stuck}")
        program = await bounded(partial(self.find, argv[0]), key=f"which {argv[0]}", timeout_s=2)
        if program is None:
            return ToolResult(error=f"{argv[0]}: no such program in PATH")
        try:
            process = await trio.lowlevel.open_process(
                [program, *argv[1:]],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,
                env=self._tool_environment(),
                cwd=cwd,
            )
        except (OSError, ValueError) as error:
            return ToolResult(error=f"{program}: cannot be started: {error}")
        return await _collect(process, program, timeout_s, output_limit)

    def _tool_environment(self) -> Mapping[str, str] | None:
        if self.path is None:
            return self.environment
        # A replayed tool is often a shell script that needs `cat`; we never look there ourselves.
        base = self.environment or {"LC_ALL": "C", "HOME": "/"}
        return {**base, "PATH": f"{self.path}:/usr/bin:/bin"}


def _text(raw: bytes | bytearray) -> str:
    """Bytes as text whatever they are. Tools of Windows, seen in WSL, begin with a mark."""
    if raw.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        return raw.decode("utf-16", errors="replace")
    return raw.decode("utf-8-sig", errors="replace")


def _opened(path: str, flags: int) -> int:
    """Open without waiting for the other end of a pipe, and refuse what is no regular file."""
    descriptor = os.open(path, flags | os.O_NONBLOCK)
    if stat.S_ISREG(os.fstat(descriptor).st_mode):
        return descriptor
    os.close(descriptor)
    raise OSError(errno.EINVAL, "not a regular file", path)


def _inside(prefix: Path, path: str) -> Path:
    """A path with its links resolved below a prefix; a loop ends as a path that is not there."""
    ahead = [part for part in reversed(path.split("/")) if part not in ("", ".")]
    here, links = prefix, 0
    while ahead:
        part = ahead.pop()
        if part == "..":
            here = here if here == prefix else here.parent
            continue
        step = here / part
        if not step.is_symlink():
            here = step
            continue
        links += 1
        if links > MAX_LINKS:
            return step
        target = os.readlink(step)  # noqa: PTH115 - its text, not a path of ours
        here = prefix if target.startswith("/") else here
        ahead += [part for part in reversed(target.split("/")) if part not in ("", ".")]
    return here


def _read_some(file: FileIO, limit: int) -> bytes:
    """Read in small pieces: /proc/sys refuses a single read of 4 MiB with ENOMEM."""
    read = bytearray()
    while len(read) < limit and (chunk := file.read(min(65536, limit - len(read)))):
        read += chunk
    return bytes(read)


async def _collect(process: trio.Process, program: str, timeout_s: float, limit: int) -> ToolResult:
    out, err = bytearray(), bytearray()
    try:
        with trio.move_on_after(timeout_s):
            async with trio.open_nursery() as nursery:
                assert process.stdout is not None
                assert process.stderr is not None
                nursery.start_soon(_read, process.stderr, err, STDERR_LIMIT, None)
                nursery.start_soon(_read, process.stdout, out, limit, nursery.cancel_scope)
                await process.wait()
                # A child of the tool may hold the pipes open for ever; what was written is there.
                nursery.cancel_scope.deadline = trio.current_time() + AFTER_EXIT_S
        overflow = len(out) >= limit
        timed_out = process.poll() is None and not overflow
    finally:
        code = await _end(process)
    return ToolResult(
        stdout=_text(out),
        stderr=_text(err),
        exit_code=None if timed_out or overflow else code,
        timed_out=timed_out,
        error=_why(program, timeout_s, timed_out, limit if overflow else None, code),
    )


def _why(
    program: str, timeout_s: float, timed_out: bool, overflow: int | None, code: int | None
) -> str | None:
    if timed_out:
        return f"{program}: no answer within {timeout_s:g} s; killed"
    if overflow is not None:
        return f"{program}: more than {overflow} bytes of output; the rest was cut off"
    if code is not None and code < 0:
        return f"{program}: ended by signal {-code}"
    return f"{program}: exit status {code}" if code else None


async def _read(
    stream: trio.abc.ReceiveStream, into: bytearray, limit: int, full: trio.CancelScope | None
) -> None:
    """Read to the end, keeping `limit` bytes; beyond them cancel `full`, or else drop the rest."""
    try:
        while chunk := await stream.receive_some(65536):
            into += chunk[: limit - len(into)]
            if full is not None and len(into) >= limit:
                full.cancel()
                return
    except (trio.BrokenResourceError, trio.ClosedResourceError):
        pass  # the tool died while writing: what came before is still good


async def _end(process: trio.Process) -> int | None:
    """Kill what is left of a tool and close our ends of its pipes."""
    code = await kill(process)
    for stream in (process.stdout, process.stderr):
        if stream is not None:
            with trio.CancelScope(shield=True):
                await trio.aclose_forcefully(stream)
    return code


async def kill(process: trio.Process) -> int | None:
    """Kill a process and its group and reap it; one stuck in the kernel is left and remembered."""
    with trio.CancelScope(shield=True):
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            pass  # all of it has ended already
        with trio.move_on_after(KILL_WAIT_S):
            await process.wait()
    if process.poll() is None:
        _unreaped.append(process)
    return process.returncode


def stuck_processes() -> str | None:
    """Why no further tool should be started: too many killed ones hang in the kernel still."""
    _unreaped[:] = [process for process in _unreaped if process.poll() is None]
    if len(_unreaped) < MAX_STUCK_PROCESSES:
        return None
    pids = ", ".join(str(process.pid) for process in _unreaped)
    return f"{len(_unreaped)} earlier ones hang in the kernel although killed (pids {pids})"


async def bounded(function: Callable[[], T], *, key: str, timeout_s: float) -> T | None:
    """Run blocking code in a thread; None when it is late, or an earlier call is stuck still.

    A thread that hangs in the kernel (dead NFS) cannot be ended. Naming it by `key` keeps the next
    round from adding another one, and all of them together stay below MAX_STUCK_THREADS.
    """
    if key in _stuck:
        return None
    work = _Work(function, key)
    with trio.move_on_after(timeout_s):
        return await trio.to_thread.run_sync(work.run, abandon_on_cancel=True, limiter=_threads())
    work.abandon()
    return None


class _Work(Generic[T]):
    """One call in a thread, which keeps its key in `_stuck` from being given up to its end."""

    def __init__(self, function: Callable[[], T], key: str) -> None:
        self.function, self.key = function, key
        self.running = self.abandoned = False

    def run(self) -> T:
        with _stuck_lock:
            if self.abandoned:  # on a busy machine: nobody would know of this thread if it hung
                raise TimeoutError(f"{self.key} was given up before its thread began")
            self.running = True
        try:
            return self.function()
        finally:
            with _stuck_lock:
                self.running = False
                _stuck.discard(self.key)

    def abandon(self) -> None:
        with _stuck_lock:
            self.abandoned = True
            if self.running:
                _stuck.add(self.key)


def _threads() -> trio.CapacityLimiter:
    try:
        return _limiter.get()
    except LookupError:
        limiter = trio.CapacityLimiter(MAX_STUCK_THREADS)
        _limiter.set(limiter)
        return limiter
