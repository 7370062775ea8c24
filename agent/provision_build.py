"""One environment in a process of its own: `python -m agent.provision_build`, job on stdin.

It runs uv where there is one, else venv and pip, whose words go to a log and, line by line, to the
agent: {"text", "bytes_done"}, then {"path"} or {"error"}. It dies with its agent, and its installer
with it: when stdin ends, the whole process group ends. Started by agent.provision only.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from agent.config import engine_environment
from agent.probes.engines import scan_environment
from agent.probes.root import Root
from agent.provision_store import Store, program_in

if TYPE_CHECKING:
    from collections.abc import Callable

LOCK_POLL_S: Final = 0.2
PROGRESS_S: Final = 1.0
WEIGH_S: Final = 5.0
"""An environment of vLLM has 50,000 files: counting them is not for every line."""
LINE_BYTES: Final = 4096
TAIL_LINES: Final = 12
ERROR_CHARS: Final = 2000
_UNWANTED: Final = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "PIP_USER", "PIP_TARGET")
_PASSWORD: Final = re.compile(r"(?<=://)[^/@\s]+@")
_BLAME: Final = re.compile(r"error|no space left|killed|cannot|because", re.IGNORECASE)
_LEVEL: Final = re.compile(r"^\s*(error|cause): ", re.IGNORECASE)


class BuildError(Exception):
    """The environment cannot be built; first line for everybody, then the installer's words."""


@dataclass(frozen=True, slots=True)
class Job:
    """What the agent asks for."""

    engine: str
    version: str
    requirement: str
    folder: str
    log: str
    python: str
    min_free: int
    index_url: str | None = None
    extra_index_urls: tuple[str, ...] = ()
    wheel_dir: str | None = None

    @property
    def name(self) -> str:
        """The environment's name."""
        return f"{self.engine}-{self.version}"


def job_from(document: dict[str, Any]) -> Job:
    """Read the agent's line."""
    return Job(**{field.name: document[field.name] for field in fields(Job)})


def say(**document: Any) -> None:
    """One line to the agent; a closed pipe ends this process."""
    sys.stdout.write(json.dumps(document) + "\n")
    sys.stdout.flush()


class Progress:
    """Tells the agent how far a build is, at most once a second."""

    def __init__(self) -> None:
        self._last = self._weighed = -WEIGH_S
        self._bytes = 0

    def __call__(self, text: str, place: Path | None = None) -> None:
        """Say it when it is time; `place` is what grows."""
        now = time.monotonic()
        if now - self._last < PROGRESS_S:
            return
        self._last = now
        if place is not None and now - self._weighed >= WEIGH_S:
            self._weighed, self._bytes = now, _bytes_below(place)
        say(text=text, bytes_done=self._bytes)


def _bytes_below(place: Path) -> int:
    total = 0
    for base, _, names in os.walk(place):
        for name in names:
            try:
                total += (Path(base) / name).lstat().st_size
            except OSError:
                continue  # a temporary file of the installer
    return total


def build(job: Job, progress: Progress) -> Path:
    """The environment under its name, built here when it is not whole; raises BuildError."""
    store = Store(Path(job.folder))
    while True:
        with store.locked(job.name) as held:
            if not held:
                progress("another agent builds it")
                time.sleep(LOCK_POLL_S)
                continue
            if store.whole(job.name):
                return store.link(job.name)
            _room(job)
            place = store.begin(job.name)
            try:
                _install(job, place, progress)
                _check(job, place)
            except BaseException:
                shutil.rmtree(place, ignore_errors=True)
                raise
            return store.publish(job.name, place)


def _room(job: Job) -> None:
    free = shutil.disk_usage(job.folder).free
    if free < job.min_free:
        raise BuildError(
            f"no space: {job.folder} has {free / 2**30:.2f} GiB free and [provision] min_free is "
            f"{job.min_free / 2**30:.2f} GiB; free some or lower it"
        )


def _install(job: Job, place: Path, progress: Progress) -> None:
    scratch = place / "tmp"
    scratch.mkdir()
    env = environment(job, engine_environment()) | {"TMPDIR": str(scratch)}
    for argv in commands(job, place, shutil.which("uv", path=env.get("PATH"))):
        _run(job, argv, env, lambda text: progress(text, place))
    shutil.rmtree(scratch, ignore_errors=True)


def commands(job: Job, place: Path, uv: str | None) -> list[list[str]]:
    """What is run one after the other, as lists: nothing passes through a shell."""
    python = str(place / "bin" / "python")
    if uv is not None:
        quiet = ["--no-progress", "--no-python-downloads"]
        return [
            [uv, "venv", *quiet, "--allow-existing", "--python", job.python, str(place)],
            [uv, "pip", "install", *quiet, "--python", python, "--", job.requirement],
        ]
    pip = ["-m", "pip", "--no-input", "--disable-pip-version-check", "install"]
    return [
        [job.python, "-m", "venv", str(place)],
        [python, *pip, "--progress-bar", "off", "--", job.requirement],
    ]


def environment(job: Job, given: dict[str, str]) -> dict[str, str]:
    """The installer's environment: the agent's own settings of pip and uv, and ours over them."""
    env = {name: value for name, value in given.items() if name not in _UNWANTED}
    env |= {"PYTHONNOUSERSITE": "1", "PYTHONUNBUFFERED": "1"}
    if job.wheel_dir is not None:
        return env | {
            "PIP_NO_INDEX": "1",
            "PIP_FIND_LINKS": job.wheel_dir,
            "UV_NO_INDEX": "1",
            "UV_FIND_LINKS": job.wheel_dir,
        }
    if job.index_url is not None:
        env |= {"PIP_INDEX_URL": job.index_url, "UV_DEFAULT_INDEX": job.index_url}
    if job.extra_index_urls:
        more = " ".join(job.extra_index_urls)
        env |= {"PIP_EXTRA_INDEX_URL": more, "UV_INDEX": more}
    return env


def _run(job: Job, argv: list[str], env: dict[str, str], told: Callable[[str], None]) -> None:
    last: deque[str] = deque(maxlen=TAIL_LINES)
    try:
        # No session of its own: it ends with this process group.
        child = subprocess.Popen(
            argv,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
    except OSError as error:
        raise BuildError(f"{argv[0]} cannot be started: {error}") from error
    assert child.stdout is not None
    with Path(job.log).open("ab") as log, child:
        while raw := child.stdout.readline(LINE_BYTES):
            line = plain(raw)
            log.write(line.encode() + b"\n")
            log.flush()
            if line:
                last.append(line)
                told(line[:200])
    if child.returncode:
        raise BuildError(words(argv, child.returncode, list(last)))


def plain(raw: bytes) -> str:
    """A line of an installer without passwords of indexes and without what no database takes."""
    text = raw.decode(errors="replace").rstrip()
    return _PASSWORD.sub("****@", "".join(c for c in text if c.isprintable() or c == "\t"))


def words(argv: list[str], code: int, last: list[str]) -> str:
    """How an installer ended: the line that says why first, then its last lines."""
    blamed = [line for line in last if _BLAME.search(line) and not line.startswith("[notice]")]
    ended = f"signal {-code}" if code < 0 else f"code {code}"
    first = blamed[-1] if blamed else f"{Path(argv[0]).name} ended with {ended}"
    return "\n".join([_LEVEL.sub("", first), *last])[:ERROR_CHARS]


def _check(job: Job, place: Path) -> None:
    """Whether the environment holds the version that was asked for, whole."""
    found = {e.engine: e for e in scan_environment(Root(), str(place))}.get(job.engine)
    if found is None:
        raise BuildError(
            f"{job.requirement} was installed but brought no {job.engine}: "
            f"correct [provision.packages] {job.engine}"
        )
    if found.error is not None:
        raise BuildError(f"{job.requirement} was installed but is not whole: {found.error}")
    if found.version != job.version:
        raise BuildError(
            f"{job.requirement} was installed and is {job.engine} {found.version}, not "
            f"{job.version}: name {found.version} in the profile, or correct [provision.packages]"
        )
    program = program_in(place, job.engine)
    if not os.access(program, os.X_OK):
        raise BuildError(f"{job.requirement} was installed but brought no program {program.name}")


def _die_with_agent() -> None:
    # The agent writes one line and keeps the pipe open: its end means that the agent is gone.
    while sys.stdin.buffer.read(1):
        pass
    if os.getpgrp() == os.getpid():
        os.killpg(os.getpgrp(), signal.SIGKILL)
    os._exit(1)


def main() -> None:
    """Do one job; exit 0 after {"path"}, 1 after {"error"}."""
    job = job_from(json.loads(sys.stdin.buffer.readline()))
    threading.Thread(target=_die_with_agent, daemon=True).start()
    try:
        path = build(job, Progress())
    except BuildError as error:
        say(error=str(error))
    except OSError as error:
        say(error=f"the environment cannot be built: {error}")
    else:
        say(path=str(path))
        os._exit(0)
    os._exit(1)


if __name__ == "__main__":
    main()
