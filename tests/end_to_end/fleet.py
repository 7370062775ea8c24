"""Controllers and agents as real processes on one test database, for tests that kill them."""

from __future__ import annotations

import http.client
import json
import os
import signal
import subprocess
import sys
import time
from contextlib import ExitStack
from typing import IO, TYPE_CHECKING, Any, Self

from controller.up import ask
from sql.embedded import free_port

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.conftest import Database

PATIENCE_S = 60.0


class Program:
    """One `python -m ...`; what it prints goes to a file that failures quote."""

    def __init__(self, name: str, arguments: list[str], env: dict[str, str], log: Path) -> None:
        self.name, self.log = name, log
        self._file: IO[bytes] = log.open("ab")
        self.process = subprocess.Popen(
            [sys.executable, "-m", *arguments],
            stdin=subprocess.DEVNULL, stdout=self._file, stderr=self._file,
            env={**os.environ, **env}, start_new_session=True,
        )  # fmt: skip

    def kill(self) -> None:
        """No chance to say goodbye; its children in other sessions live on."""
        self.process.kill()
        self.process.wait(60)

    def stop(self) -> int:
        """SIGTERM; SIGKILL for its session when that takes too long."""
        try:
            self.process.terminate()
            return self.process.wait(PATIENCE_S)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            return self.process.wait(60)
        finally:
            self._file.close()


class Fleet:
    """Controllers and agents on one database. Use it as a context manager."""

    def __init__(self, database: Database, folder: Path) -> None:
        self.database, self.folder = database, folder
        self.key = ""
        self.ports: list[tuple[int, int]] = []
        self._running = ExitStack()
        first = 28000 + os.getpid() % 300 * 10
        self.engine_ports = f"{first}-{first + 9}"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._running.close()

    def _run(self, name: str, arguments: list[str], url: str) -> Program:
        env = {"LLMGW_DATABASE_URL": url}
        program = Program(name, arguments, env, self.folder / f"{name}.log")
        self._running.callback(program.stop)
        return program

    def controller(self) -> Program:
        """One more controller; its ports are the last of ``ports``."""
        port, admin = free_port(), free_port()
        self.ports.append((port, admin))
        arguments = ["controller", "--role", "all", "--workers", "1"]
        arguments += ["--listen", f"127.0.0.1:{port}", "--admin-listen", f"127.0.0.1:{admin}"]
        program = self._run(f"controller{len(self.ports)}", arguments, self.database.controller_url)
        self.wait(lambda: self.get(admin, "/readyz"), f"{program.name} to be ready")
        return program

    def agent(self, token: str | None = None) -> Program:
        """The node's agent; the same state directory each time."""
        arguments = ["agent", "--node", "n1", "--state-dir", str(self.folder / "agent")]
        arguments += ["--mgmt-addr", "127.0.0.1", "--ports", self.engine_ports, "--on-exit", "stop"]
        if token is not None:
            (self.folder / "token").write_text(token)
            arguments += ["--enrolment-token-file", str(self.folder / "token")]
        return self._run("agent", arguments, self.database.agent_url)

    def ctl(self, *arguments: str) -> Any:
        """`llmgwctl --json` against the first controller."""
        command = [sys.executable, "-m", "controller.cli", "--json"]
        command += ["--server", f"127.0.0.1:{self.ports[0][1]}", *arguments]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    def get(self, port: int, path: str) -> bool:
        """Whether it answers 200."""
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
        try:
            connection.request("GET", path)
            return connection.getresponse().status == 200
        except OSError:
            return False
        finally:
            connection.close()

    def answers(self, controller: int, model: str = "tiny") -> bool:
        """Whether that controller's router streams an answer."""
        try:
            ask.ask("127.0.0.1", self.ports[controller][0], self.key, model, timeout_s=30)
        except ask.NotAnswered:
            return False
        return True

    def row(self, query: str) -> tuple[Any, ...] | None:
        """One row, as psql would see it."""
        with self.database.connect() as connection:
            return connection.execute(query).fetchone()

    def wait(self, condition: Callable[[], Any], what: str, limit_s: float = PATIENCE_S) -> Any:
        """Poll until it is true; the value. A failure quotes every log."""
        end = time.monotonic() + limit_s
        while not (found := condition()):
            if time.monotonic() > end:
                logs = (
                    f"{log.name}:\n{log.read_text()[-3000:]}" for log in self.folder.glob("*.log")
                )
                raise AssertionError(f"waited {limit_s} s for {what}\n" + "\n".join(logs))
            time.sleep(0.05)
        return found
