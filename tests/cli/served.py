"""llmgwctl as people run it: a process of its own, or the same code within a thread."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from functools import partial
from typing import Any

import trio

from controller.cli.root import run

ENVIRONMENT = {k: v for k, v in os.environ.items() if not k.startswith("LLMGW_")}


@dataclass(frozen=True)
class Done:
    """How a command ended and what it printed."""

    code: int
    out: str
    err: str

    @property
    def document(self) -> Any:
        """stdout as the one JSON document that it must be."""
        return json.loads(self.out)


def in_thread(arguments: list[str]) -> Done:
    """Runs a command here: quick, for the bulk of the tests. One at a time."""
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        code = run(arguments)
    return Done(code, out.getvalue(), err.getvalue())


@dataclass(frozen=True)
class Ctl:
    """llmgwctl against one server."""

    url: str

    async def __call__(self, *arguments: str) -> Done:
        """Runs a command in a thread of this process."""
        return await trio.to_thread.run_sync(in_thread, ["--server", self.url, *arguments])

    async def good(self, *arguments: str) -> str:
        """stdout of a command that must succeed."""
        done = await self(*arguments)
        assert done.code == 0, (arguments, done)
        return done.out

    async def process(self, *arguments: str, **more: Any) -> Done:
        """Runs a command as a process."""
        return await trio.to_thread.run_sync(partial(as_process, self.url, *arguments, **more))


def as_process(url: str, *arguments: str, **more: Any) -> Done:
    """Runs a command as a process of its own."""
    env = ENVIRONMENT | {"LLMGW_SERVER": url} | more.pop("env", {})
    command = [sys.executable, "-m", "controller.cli", *arguments]
    given = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "timeout": 60} | more
    done = subprocess.run(command, env=env, check=False, **given)
    return Done(done.returncode, (done.stdout or b"").decode(), (done.stderr or b"").decode())


def on_terminal(url: str, *arguments: str, env: dict[str, str] | None = None) -> Done:
    """Runs a command with its stdout on a pseudo-terminal."""
    leader, follower = os.openpty()
    command = [sys.executable, "-m", "controller.cli", *arguments]
    more = {"LLMGW_SERVER": url, "TERM": "xterm", "COLUMNS": "40"} | (env or {})
    process = subprocess.Popen(
        command, env=ENVIRONMENT | more, stdin=follower, stdout=follower, stderr=subprocess.PIPE
    )
    os.close(follower)
    said = b""
    try:
        while part := os.read(leader, 65536):
            said += part
    except OSError:  # the other end is closed
        pass
    finally:
        os.close(leader)
    err = process.stderr.read().decode()
    process.stderr.close()
    return Done(process.wait(60), said.decode().replace("\r\n", "\n"), err)
