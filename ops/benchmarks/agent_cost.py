"""What one real agent costs a node that does nothing: memory and CPU of it and its children."""

from __future__ import annotations

import hashlib
import secrets
import subprocess
import sys
import tempfile
from contextlib import contextmanager
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Any

import click
import psycopg
import trio

from ops.benchmarks import postgres, processes

if TYPE_CHECKING:
    from collections.abc import Iterator

REPORTED = "select count(*) > 0 from llmgw_core.node where host_reported_at is not null"
REPORT_S = 60.0


@contextmanager
def running(database: postgres.Database, folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    """`llmgw-agent` as an operator starts it."""
    made = secrets.token_urlsafe(24)
    with psycopg.connect(database.controller_url, autocommit=True) as connection:
        enrol = "select llmgw.node_enroll_v1('bench', 'bench', %s, 1, 3600)"
        connection.execute(enrol, (hashlib.sha256(made.encode()).digest(),))
    env = {
        "LLMGW_DATABASE_URL": database.agent_url,
        "LLMGW_ENROLMENT_TOKEN": made,
        "PATH": "/usr/local/bin:/usr/bin:/bin",
    }
    arguments = ["--node", "bench", "--state-dir", str(folder / "state")]
    arguments += ["--weights-dir", str(folder / "weights"), "--mgmt-addr", "127.0.0.1"]
    with (folder / "agent.log").open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "agent", *arguments], env=env, stdout=log, stderr=log
        )
        try:
            yield process
        finally:
            process.terminate()
            process.wait(30)


async def measure(seconds: float, settle_s: float) -> dict[str, Any]:
    """An idle agent for a while, after it has reported once and `settle_s` more."""
    with (
        postgres.database(connections=50) as database,
        tempfile.TemporaryDirectory() as folder,
        running(database, Path(folder)) as process,
        psycopg.connect(database.server.url, autocommit=True) as connection,
    ):
        with trio.move_on_after(REPORT_S) as limit:
            while not (connection.execute(REPORTED).fetchone() or (False,))[0]:
                if process.poll() is not None:
                    break
                await trio.sleep(0.5)
        if limit.cancelled_caught or process.poll() is not None:
            said = (Path(folder) / "agent.log").read_text()[-1500:]
            raise click.ClickException(
                f"the agent did not report within {REPORT_S:g} s; it said: {said}"
            )
        await trio.sleep(settle_s)
        before, begun = processes.tree(process.pid), monotonic()
        await trio.sleep(seconds)
        after, took = processes.tree(process.pid), monotonic() - begun
        return {
            "seconds": round(took, 1),
            "cpu_percent": round(
                100 * (processes.spent_s(after) - processes.spent_s(before)) / took, 2
            ),
            "processes": [_one(pid, before, after, took, process.pid) for pid in sorted(after)],
        }


def _one(
    pid: int,
    before: dict[int, processes.Times],
    after: dict[int, processes.Times],
    took: float,
    agent: int,
) -> dict[str, Any]:
    was = before.get(pid, processes.Times(0, 0.0, 0.0))
    spent = after[pid].own_s - was.own_s
    return {
        "agent": pid == agent,
        "command": processes.command(pid),
        "rss_mib": round(processes.rss_mib(pid) or 0.0, 1),
        "cpu_percent": round(100 * spent / took, 2),
        "ended_children_percent": round(100 * (after[pid].ended_s - was.ended_s) / took, 2),
    }
