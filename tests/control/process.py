"""Real controllers as child processes, and what tests ask of them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, Self

import httpx
import psutil

from sql.embedded import free_port

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

PATIENCE_S = 40.0
PACE_S = 0.02
MODULE = [sys.executable, "-m", "controller"]
ENVIRONMENT = {"PATH": "/usr/bin:/bin"} | {
    name: os.environ[name] for name in ("PYTHONPATH", "PYTHONSAFEPATH") if name in os.environ
}
"""Nothing of the tester's but where its packages lie: those of a compiled build lie elsewhere."""


def until(said: Callable[[], Any], what: str, limit_s: float = PATIENCE_S) -> Any:
    """The first true answer; AssertionError naming ``what`` after ``limit_s``."""
    deadline = time.monotonic() + limit_s
    while not (found := said()):
        assert time.monotonic() < deadline, f"not within {limit_s:g} s: {what}"
        time.sleep(PACE_S)
    return found


def children_of(pid: int) -> dict[str, int]:
    """Role (and worker) -> pid of the processes that a supervisor runs."""
    found: dict[str, int] = {}
    for child in psutil.Process(pid).children():
        try:
            words = child.cmdline()
        except psutil.Error:
            continue
        if "--worker" in words:
            found[f"router {words[words.index('--worker') + 1]}"] = child.pid
        elif words[-2:] == ["--role", "control"]:
            found["control"] = child.pid
    return found


def alive(pid: int) -> bool:
    """Whether a process runs; a zombie does not."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


class Controller:
    """One `llmgw-controller`; ends with the block."""

    def __init__(
        self, folder: Path, url: str | None, *flags: str, role: str = "control", **env: str
    ) -> None:
        self.admin, self.client = free_port(), free_port()
        self.log = folder / f"controller-{self.admin}.log"
        self._stack = ExitStack()
        database = {} if url is None else {"LLMGW_DATABASE_URL": url}
        # A later flag of the same name wins.
        self.command = [
            *MODULE, "--role", role, "--admin-listen", f"127.0.0.1:{self.admin}",
            "--listen", f"127.0.0.1:{self.client}", *flags,
        ]  # fmt: skip
        self._env = ENVIRONMENT | database | env
        self.process: subprocess.Popen[bytes]

    def __enter__(self) -> Self:
        log = self._stack.enter_context(self.log.open("wb"))
        self.process = subprocess.Popen(self.command, env=self._env, stdout=log, stderr=log)
        # Closed each time: hypercorn waits at its end for connections that nobody uses.
        self.http = self._stack.enter_context(
            httpx.Client(
                base_url=f"http://127.0.0.1:{self.admin}",
                headers={"Connection": "close"},
                timeout=30,
            )
        )
        return self

    def __exit__(self, *_: object) -> None:
        self.signal(signal.SIGCONT)
        self.signal(signal.SIGTERM)
        try:
            self.process.wait(PATIENCE_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait(5)
        self._stack.close()

    def signal(self, number: int) -> None:
        """To the process itself."""
        if self.process.poll() is None:
            self.process.send_signal(number)

    def words(self) -> str:
        """All that it has said."""
        return self.log.read_text()

    def events(self, event: str) -> list[dict[str, Any]]:
        """Its log lines with this event."""
        # The last line may be half written.
        whole = self.words().rpartition("\n")[0]
        lines = [line for line in whole.splitlines() if line.startswith("{")]
        return [said for line in lines if (said := json.loads(line)).get("event") == event]

    def get(self, path: str) -> tuple[int, str]:
        """Status and body; (0, why) while nobody listens."""
        try:
            answer = self.http.get(path)
        except httpx.TransportError as error:
            return 0, str(error)
        return answer.status_code, answer.text

    def ready(self, limit_s: float = PATIENCE_S) -> Self:
        """Waits until /readyz is green."""
        last = [(0, "")]

        def green() -> bool:
            assert self.process.poll() is None, self.words()
            last[0] = self.get("/readyz")
            return last[0][0] == 200

        try:
            until(green, "ready", limit_s)
        except AssertionError as error:
            raise AssertionError(f"{last[0]}\n{self.words()}") from error
        return self

    def chat(self, **more: Any) -> httpx.Response:
        """One chat completion for model m."""
        document = {"model": "m", "messages": [{"role": "user", "content": "hi"}], **more}
        return httpx.post(
            f"http://127.0.0.1:{self.client}/v1/chat/completions", json=document, timeout=20
        )

    def children(self) -> dict[str, int]:
        """Role -> pid."""
        return children_of(self.process.pid)

    def metrics(self) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
        """(name, labels) -> value of the page."""
        from prometheus_client.parser import text_string_to_metric_families as parse

        status, page = self.get("/metrics")
        assert status == 200, page
        return {
            (sample.name, tuple(sorted(sample.labels.items()))): sample.value
            for family in parse(page)
            for sample in family.samples
        }


def end(pid: int, number: int = signal.SIGKILL) -> None:
    """A signal to one process that a test started."""
    os.kill(pid, number)
