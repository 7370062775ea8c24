"""An installation under test: `llmgwctl up` as a process, with the tiny model as its catalog."""

from __future__ import annotations

import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import IO, TYPE_CHECKING

import psutil
import psycopg

from sql.embedded import free_port
from tests.tiny_model import tiny_gguf

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

READY_S = 180.0
STOP_S = 120.0
CATALOG = """
[[models]]
name = "tiny-test"
aliases = ["tiny"]
source = "file:{weights}"

[[models.profiles]]
name = "cpu"
engine = "llamacpp"
args = ["-c", "4096", "-np", "2"]
cpus = 1
memory = "256MiB"
"""


class Up:
    """`llmgwctl up` on a state directory and ports of its own."""

    def __init__(self, base: Path) -> None:
        self.base, self.state_dir = base, base / "state"
        self.port, self.admin_port = free_port(), free_port()
        self.catalog = base / "catalog.toml"
        self.catalog.write_text(CATALOG.format(weights=tiny_gguf(base / "tiny.gguf")))
        first = 24000 + self.port % 400 * 10
        self.engine_ports = f"{first}-{first + 9}"
        self.process: subprocess.Popen[str] | None = None
        self.out: list[str] = []
        self.err: list[str] = []
        self._readers: list[threading.Thread] = []

    def command(self, *more: str) -> list[str]:
        options = ["--state-dir", str(self.state_dir), "--port", str(self.port)]
        options += ["--admin-port", str(self.admin_port), "--engine-ports", self.engine_ports]
        return [sys.executable, "-m", "controller.cli", "up", *options, *more]

    def run(self, *more: str, timeout_s: float = READY_S) -> subprocess.CompletedProcess[str]:
        """To its end."""
        return subprocess.run(
            self.command(*more), capture_output=True, text=True, timeout=timeout_s, check=False
        )

    def start(self, *more: str, ready_s: float = READY_S) -> None:
        """In the background, until it says that all runs."""
        self.out, self.err = [], []
        self.process = subprocess.Popen(
            self.command(*more), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        for stream, lines in ((self.process.stdout, self.out), (self.process.stderr, self.err)):
            reader = threading.Thread(target=_collect, args=(stream, lines), daemon=True)
            reader.start()
            self._readers.append(reader)
        self.wait_for(lambda: any("curl -N" in line for line in self.out), ready_s)

    def wait_for(self, condition: Callable[[], bool], limit_s: float) -> None:
        """Poll with a deadline; a dead process ends the wait with its words."""
        end = time.monotonic() + limit_s
        while not condition():
            assert self.process is not None
            assert self.process.poll() is None, "".join(self.err)
            assert time.monotonic() < end, "".join(self.out + self.err)
            time.sleep(0.05)

    def stop(self, number: signal.Signals = signal.SIGINT) -> int:
        """One signal, as Ctrl-C; the exit status."""
        assert self.process is not None
        self.process.send_signal(number)
        status = self.process.wait(STOP_S)
        for reader in self._readers:
            reader.join(STOP_S)
        return status

    @property
    def key(self) -> str:
        return (self.state_dir / "api_key").read_text().strip()

    def postgres(self) -> psycopg.Connection:
        """As psql with the read-only login."""
        lines = (self.state_dir / "postgres" / "data" / "postmaster.pid").read_text().splitlines()
        secret = {
            name: (self.state_dir / name).read_text().strip()
            for name in ("installation", "password_read")
        }
        return psycopg.connect(
            host="127.0.0.1",
            port=int(lines[3]),
            dbname="postgres",
            user=f"llmgw_{secret['installation']}_read",
            password=secret["password_read"],
        )

    def processes(self) -> list[psutil.Process]:
        """Everything that works on this state directory or these ports."""
        marks = (str(self.state_dir), str(self.port), str(self.base))
        found = []
        for process in psutil.process_iter():
            try:
                line = " ".join(process.cmdline())
            except psutil.Error:
                continue
            if any(re.search(rf"(?<!\d){re.escape(mark)}(?!\d)", line) for mark in marks):
                found.append(process)
        return found

    def clear(self) -> None:
        """Whatever a failed test left."""
        if self.process is not None and self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                self.process.kill()
        for process in self.processes():
            with suppress(psutil.NoSuchProcess):  # it ended with another of them
                process.kill()


def _collect(stream: IO[str], lines: list[str]) -> None:
    with stream:
        lines.extend(stream)


def installations() -> Iterator[Up]:
    """One installation in a folder that Postgres's user can reach, cleared afterwards."""
    base = Path(tempfile.mkdtemp(prefix="llmgw-test-up-", dir="/var/tmp"))
    base.chmod(0o755)
    up = Up(base)
    try:
        yield up
    finally:
        up.clear()
        shutil.rmtree(base, ignore_errors=True)
