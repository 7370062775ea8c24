"""`ops/bench keys`: a router before a database with many keys of which it keeps some in memory.

Start, a key that is not in memory, memory when as many are in it as may be, and a flood of keys
that are nobody's. The router is a process of its own; requests ask for the list of models, which
needs a key and no engine. Keys are in 10,000 scopes on three levels.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median, quantiles
from time import monotonic, perf_counter
from typing import TYPE_CHECKING, Any

import click
import psycopg
import trio

from controller.router.keycache import MOST_KEYS
from ops.benchmarks import postgres, processes, report
from sql.embedded import free_port

if TYPE_CHECKING:
    from collections.abc import Sequence

SCOPES = """insert into llmgw_core.scope (kind, name, created_by)
    select 'org', 'org' || i, 'bench' from generate_series(1, 10) i;
insert into llmgw_core.scope (kind, name, parent, created_by)
    select 'team', 'team' || i, 1 + i % 10, 'bench' from generate_series(1, 100) i;
insert into llmgw_core.scope (kind, name, parent, created_by)
    select 'user', 'user' || i, 11 + i % 100, 'bench' from generate_series(1, 9890) i"""
KEYS = """insert into llmgw_core.api_key (id, hash, name, created_by, scope_id, tags)
    select 'key' || lpad(i::text, 9, '0'), sha256(convert_to('sk-bench-' || i, 'utf8')), 'bench',
        'bench', 1 + mod(i, 10000), jsonb_build_object('app', 'a' || mod(i, 50))
    from generate_series(1, %s::int) i"""
USES = """insert into llmgw_core.api_key_use (key_id, used_at)
    select id, now() - interval '1 s' * (hashtext(id) & 1048575) from llmgw_core.api_key
    where mod(hashtext(id), 3) = 0"""
REVOKED = "update llmgw_core.api_key set revoked_at = now() where id = any (%s)"
IN_MEMORY = "select key_id from llmgw_core.api_key_use order by used_at desc limit 1"
START_S = 120.0
CONNECTIONS = 100


@click.command()
@click.option("--keys", "count", default=1_000_000, show_default=True)
@click.option("--misses", default=1000, show_default=True, help="Keys asked for one by one.")
@click.option("--fill", default=MOST_KEYS, show_default=True, help="Keys asked for at once.")
@click.option("--json", "file", type=click.Path(path_type=Path), help="Write all figures here.")
def keys(count: int, misses: int, fill: int, file: Path | None) -> None:
    """Start, a miss, and memory of a router before many keys."""
    machine = processes.machine()
    with postgres.database(30) as base:
        found = measure(base.server.url, base.controller_url, count, misses, fill)
    command = f"ops/bench keys --keys {count} --misses {misses} --fill {fill}"
    report.heading(command, machine)
    print("goals with 1,000,000 keys: start under 5 s, a miss under 5 ms, under 300 MiB")
    for name, value in found.items():
        print(f"{name:28} {value}")
    if file is not None:
        file.write_text(json.dumps({"command": command, "machine": machine} | found, indent=1))


def measure(owner_url: str, url: str, count: int, misses: int, fill: int) -> dict[str, Any]:
    """All figures, by what they are of. Fills the database; the router uses the second URL."""
    with psycopg.connect(owner_url, autocommit=True) as connection:
        for statement in SCOPES.split(";\n"):
            connection.execute(statement.encode())
        connection.execute(KEYS, (count,))
        connection.execute(USES)
        revoked = [f"key{number:09}" for number in _revoked(count, misses)]
        connection.execute(REVOKED, (revoked,))
        connection.execute("vacuum (analyze)")
        [warm] = connection.execute(IN_MEMORY).fetchone() or ("",)
    port = free_port()
    with tempfile.TemporaryDirectory() as folder:
        began = monotonic()
        router = _start(url, port, Path(folder))
        try:
            _until_ready(port)
            found = {"start_s": round(monotonic() - began, 2), "memory_start_mib": _rss(router.pid)}
            return found | _asked(port, router.pid, int(warm[3:]), count, misses, fill)
        finally:
            router.terminate()
            router.wait(30)


def _asked(port: int, pid: int, warm: int, count: int, misses: int, fill: int) -> dict[str, Any]:
    with socket.create_connection(("127.0.0.1", port)) as sock:
        hits = _each(sock, [warm] * misses)
        # Some of them were used lately and are in memory: the median is of those that are not.
        missed = _each(sock, [1 + n * count // misses for n in range(misses)])
    with socket.create_connection(("127.0.0.1", port)) as sock:
        unknown = _each(sock, [count + 1 + n for n in range(misses)], good=b" 401 ")
    gone = _revoked(count, misses)
    with socket.create_connection(("127.0.0.1", port)) as sock:
        revoked = _each(sock, gone, good=b" 401 ")
    numbers = sorted({1 + n * count // fill for n in range(fill)}.difference(gone))
    spent = processes.spent_s(processes.tree(pid))
    began = perf_counter()
    trio.run(_all, port, numbers)
    took = perf_counter() - began
    cpu = processes.spent_s(processes.tree(pid)) - spent
    return {
        "hit_ms": _spread(hits),
        "miss_ms": _spread(missed),
        "unknown_ms": _spread(unknown),
        "revoked_ms": _spread(revoked),
        "asked_at_once": len(numbers),
        "asked_at_once_per_s": round(len(numbers) / took),
        "asked_at_once_cpu_us_each": round(1e6 * cpu / len(numbers)),
        "memory_full_mib": _rss(pid),
    }


def _revoked(count: int, misses: int) -> list[int]:
    """Beside those that are asked for otherwise (the first of each stretch)."""
    return [2 + n * count // misses for n in range(misses)]


def _spread(times_ms: Sequence[float]) -> dict[str, float]:
    return {
        "p50": round(median(times_ms), 3),
        "p99": round(quantiles(times_ms, n=100)[98], 3),
        "max": round(max(times_ms), 3),
    }


def _request(number: int) -> bytes:
    return (
        b"GET /v1/models HTTP/1.1\r\nhost: b\r\nauthorization: Bearer sk-bench-%d\r\n\r\n" % number
    )


def _each(sock: socket.socket, numbers: Sequence[int], good: bytes = b" 200 ") -> list[float]:
    """Milliseconds of each request, one after the other on one connection."""
    times = []
    for number in numbers:
        began = perf_counter()
        sock.sendall(_request(number))
        answer = sock.recv(65536)
        times.append(1000 * (perf_counter() - began))
        if good not in answer[:16]:
            raise RuntimeError(f"key {number} was answered {answer[:200]!r}")
    return times


async def _all(port: int, numbers: Sequence[int]) -> None:
    """Every key once, on many connections."""

    async def some(mine: Sequence[int]) -> None:
        async with await trio.open_tcp_stream("127.0.0.1", port) as stream:
            for number in mine:
                await stream.send_all(_request(number))
                answer = await stream.receive_some(65536)
                if b" 200 " not in answer[:16]:
                    raise RuntimeError(f"key {number} was answered {bytes(answer[:200])!r}")

    async with trio.open_nursery() as nursery:
        for first in range(CONNECTIONS):
            nursery.start_soon(some, numbers[first::CONNECTIONS])


def _start(url: str, port: int, folder: Path) -> subprocess.Popen[bytes]:
    """A router process, which writes nothing but warnings."""
    settings = folder / "llmgw.toml"
    settings.write_text(f'log_level = "warning"\nstate_dir = "{folder}"\n')
    words = ["--role", "router", "--listen", f"127.0.0.1:{port}", "--config", str(settings)]
    environment = {**os.environ, "LLMGW_DATABASE_URL": url}
    return subprocess.Popen([sys.executable, "-m", "controller", *words], env=environment)


def _until_ready(port: int) -> None:
    until = monotonic() + START_S
    while monotonic() < until:
        try:
            with socket.create_connection(("127.0.0.1", port)) as sock:
                sock.sendall(b"GET /readyz HTTP/1.1\r\nhost: b\r\n\r\n")
                if b" 200 " in sock.recv(65536)[:16]:
                    return
        except OSError:
            trio.run(trio.sleep, 0.02)  # it does not listen yet
    raise RuntimeError(f"the router is not ready after {START_S:.0f} s")


def _rss(pid: int) -> float | None:
    resident = processes.rss_mib(pid)
    return None if resident is None else round(resident, 1)
