"""Processes whose clocks are hours off: nothing is decided by them (F20)."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import ExitStack
from datetime import datetime, timedelta
from pathlib import Path

import psutil
import pytest

from tests import fake_engine
from tests.control.process import until
from tests.control.test_leaders import NOW, leader, others
from tests.tiny_model import tiny_gguf

HOUR = 3600
SHIFT = """
import datetime
import time
BY = {by}
def shifted(real, unit):
    return lambda: real() + BY * unit
real_clock = time.clock_gettime
time.time, time.time_ns = shifted(time.time, 1), shifted(time.time_ns, 10**9)
time.clock_gettime = lambda which: real_clock(which) + (BY if which == time.CLOCK_REALTIME else 0)
class Shifted(datetime.datetime):
    @classmethod
    def now(cls, tz=None):
        return super().now(tz) + datetime.timedelta(seconds=BY)
datetime.datetime = Shifted
"""
"""Python runs `sitecustomize` before the program."""
REPLICA = "select state, restarts, error from llmgw.replicas where model = 'm'"


def off(folder: Path, by: int) -> dict[str, str]:
    """What makes a process of Python believe that it is ``by`` seconds later."""
    place = folder / f"clock{by}"
    place.mkdir(exist_ok=True)
    (place / "sitecustomize.py").write_text(SHIFT.format(by=by))
    return {"PYTHONPATH": str(place)}


@pytest.fixture
def agent(database, fleet, tmp_path):
    """A real agent of node n1 whose clock is five hours ahead."""
    token = tmp_path / "token"
    token.write_text(fleet.token("n1"))
    first = 27000 + os.getpid() % 90 * 10  # no other test's
    command = [sys.executable, "-m", "agent", "--node", "n1", "--on-exit", "stop"]
    command += ["--state-dir", str(tmp_path / "agent"), "--enrolment-token-file", str(token)]
    command += ["--mgmt-addr", "127.0.0.1", "--ports", f"{first}-{first + 9}"]
    env = {"PATH": os.defpath, "LLMGW_DATABASE_URL": database.agent_url, **off(tmp_path, 5 * HOUR)}
    with (tmp_path / "agent.log").open("wb") as log, ExitStack() as stack:
        process = subprocess.Popen(command, env=env, stdout=log, stderr=log)
        stack.callback(process.wait, 30)
        stack.callback(process.terminate)
        yield process


@pytest.mark.slow
def test_F20_clocks_that_are_hours_off_decide_nothing(database, fleet, start, agent, tmp_path):
    began = fleet.value(NOW)
    pair = [start(database.controller_url, **off(tmp_path, by)) for by in (-7 * HOUR, 9 * HOUR)]
    for one in pair:
        one.ready()
    program = [sys.executable, fake_engine.__file__, "--host", "{host}", "--port", "{port}"]
    engine = {"engine": "command", "command": program, "health_path": "/health"}
    fleet.model("m", {**engine, "cpus": 0.1}, source=f"file:{tiny_gguf(tmp_path / 'tiny.gguf')}")

    def ready(restarts: int) -> bool:
        rows = fleet.rows(REPLICA)
        return bool(rows) and (rows[0]["state"], rows[0]["restarts"]) == ("ready", restarts)

    until(lambda: ready(0), f"ready: {fleet.rows(REPLICA)}", 60)
    (node,) = fleet.rows("select state, warnings from llmgw.nodes")
    assert node["state"] == "ready"
    assert any(w.startswith("clock is 18000") for w in node["warnings"]), node
    first, term, _ = leader(fleet, pair)
    # An engine crashes: its backoff is a second, not hours.
    for turn in (1, 2):
        psutil.Process(
            fleet.value("select pid from llmgw_core.shard order by id desc limit 1")
        ).kill()
        until(lambda turn=turn: ready(turn), f"started again: {fleet.rows(REPLICA)}")
    assert leader(fleet, pair)[:2] == (first, term), "leases outlive wrong clocks"
    first.signal(signal.SIGKILL)
    (second,) = others(pair, first)
    assert leader(fleet, [second])[1] == term + 1
    psutil.Process(fleet.value("select pid from llmgw_core.shard order by id desc limit 1")).kill()
    until(lambda: ready(3), f"started again by the other: {fleet.rows(REPLICA)}")
    outside = """select count(*) from llmgw_core.decision where at not between to_timestamp(%s)
        and clock_timestamp()"""
    assert fleet.value(outside, began) == 0
    # The clocks were off indeed.
    times = [datetime.fromisoformat(one.events("leads")[-1]["timestamp"]) for one in pair]
    print(f"the leaders wrote {times}, the database says {fleet.value('select now()::text')}")
    assert times[1] - times[0] > timedelta(hours=15)
