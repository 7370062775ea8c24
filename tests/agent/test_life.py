"""The life of shards under a whole agent: start, ready, crash, stop, adoption."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import pytest
import trio

from agent import procfs
from agent.state import StateDir
from tests.agent.conftest import Node, free_port, until

if TYPE_CHECKING:
    from collections.abc import Callable

    Make = Callable[..., dict[str, Any]]


@pytest.mark.slow
async def test_real_engine_becomes_ready_serves_and_stops(node: Node, llama: Make) -> None:
    assignment = llama(1)
    node.door.assign(assignment)
    async with node.running():
        word = await node.state(1, "ready")
        # An engine that is ready before the next sync is never heard of as starting.
        assert node.door.history[1] in (["assigned", "starting", "ready"], ["assigned", "ready"])
        assert word["pid"] in node.processes(1)
        url = f"http://127.0.0.1:{assignment['port']}/v1/completions"
        body = {"prompt": "the", "max_tokens": 4, "model": "m"}
        async with httpx.AsyncClient(timeout=20) as client:
            answer = await client.post(url, json=body)
        assert answer.status_code == 200
        assert answer.json()["usage"]["completion_tokens"] >= 1
        node.door.assign({**assignment, "desired": "stopped"})
        await node.state(1, "stopped")
        assert node.processes() == []
        assert procfs.listening_inodes(assignment["port"]) == frozenset()
    assert node.door.illegal == []


async def test_shard_missing_from_a_newer_list_is_stopped_and_forgotten(
    node: Node, odd: Make
) -> None:
    node.door.assign(odd(1), odd(2))
    async with node.running():
        await node.state(1, "ready")
        await node.state(2, "ready")
        node.door.assign(node.door.assignments[1])
        await until(lambda: node.processes(1) == [], "shard 1 is gone")
        await until(lambda: not (node.folder / "shards/1.json").exists(), "it is forgotten")
        assert node.processes(2)
        assert node.door.states[2] == "ready"


@pytest.mark.parametrize(
    ("flags", "code"),
    [
        (["--exit-after", "0.2", "--code", "1", "--mute"], 1),
        (["--exit-after", "0.8", "--code", "0"], 0),
    ],
)
async def test_D07_an_engine_that_exits_is_failed_with_code_and_last_lines(
    node: Node, odd: Make, flags: list[str], code: int
) -> None:
    node.door.assign(odd(1, *flags))
    async with node.running():
        word = await node.state(1, "failed", within_s=6)
        assert word["exit_code"] == code
        assert f"last words before code {code}" in word["log_tail"]
        assert f"exited with code {code}" in word["error"]
    assert node.door.illegal == []


async def test_D07_an_engine_that_never_opens_its_port_ends_with_the_start_deadline(
    node: Node, odd: Make
) -> None:
    node.door.assign(odd(1, "--mute", start_deadline_s=0.6))
    async with node.running():
        word = await node.state(1, "failed", within_s=6)
        assert "not ready after 0.6 s: nothing listens on port" in word["error"]
        assert node.processes() == []


@pytest.mark.slow
async def test_D08_a_killed_engine_is_failed_and_its_successor_starts(
    node: Node, odd: Make
) -> None:
    first = odd(1)
    node.door.assign(first)
    async with node.running():
        word = await node.state(1, "ready")
        os.kill(word["pid"], signal.SIGKILL)
        word = await node.state(1, "failed", within_s=5)
        assert word["exit_code"] == -9
        assert "signal 9" in word["error"]
        node.door.assign({**first, "shard": 2, "replica": 10})  # the same port at once
        await node.state(2, "ready")
        await until(lambda: not (node.folder / "shards/1.json").exists(), "shard 1 is forgotten")
    assert node.door.illegal == []


async def test_D05_children_in_other_sessions_go_with_a_killed_leader(
    node: Node, odd: Make
) -> None:
    node.door.assign(odd(1, "--fork"))
    async with node.running():
        word = await node.state(1, "ready")
        assert len(node.processes(1)) == 2
        os.kill(word["pid"], signal.SIGKILL)
        await node.state(1, "failed", within_s=5)
        assert node.processes() == []  # before `failed` was said, not some time later


async def test_D05_titles_of_workers_leave_the_mark_readable(node: Node, odd: Make) -> None:
    """setproctitle writes over the environment in /proc unless it is told (engines.md, trap 5)."""
    node.door.assign(odd(1))
    async with node.running():
        word = await node.state(1, "ready")
        assert (procfs.environment(word["pid"]) or {})["SPT_NOENV"] == "1"


async def test_D05_a_deaf_engine_and_its_deaf_child_are_killed_after_the_grace(
    node: Node, odd: Make
) -> None:
    assignment = odd(1, "--fork", "--deaf", stop_grace_s=0.3)
    node.door.assign(assignment)
    async with node.running():
        await node.state(1, "ready")
        node.door.assign({**assignment, "desired": "stopped"})
        await node.state(1, "stopped", within_s=6)
        assert node.processes() == []


async def test_D10_one_bad_row_costs_only_itself(node: Node, odd: Make) -> None:
    node.door.assign(
        {**odd(1), "port": None},
        {**odd(2), "desired": "dancing"},
        {**odd(3), "engine": "no-such"},
        {"model": "m"},
        "nonsense",
        {**odd(4), "source": "file:/no/such/weights"},
        odd(5),
    )
    async with node.running() as agent:
        await node.state(5, "ready")
        for shard, words in [
            (1, "port is 'None', not a whole number"),
            (2, "desired is 'dancing'"),
            (3, "knows no engine 'no-such'"),
            (4, "does not exist on this node"),
        ]:
            assert words in (await node.state(shard, "failed"))["error"]
        assert node.shards is not None
        assert node.shards.bad_rows == 4
        assert agent.loops.ages()["sync"] < 5
    assert node.door.illegal == []


async def test_D10_a_running_engine_is_not_stopped_by_an_unreadable_row(
    node: Node, odd: Make
) -> None:
    assignment = odd(1)
    node.door.assign(assignment)
    async with node.running():
        word = await node.state(1, "ready")
        node.door.assign({**assignment, "port": "?"}, odd(2))
        await node.state(2, "ready")
        assert node.door.states[1] == "ready"
        assert procfs.process(word["pid"]) is not None


async def test_D10_a_damaged_state_file_is_set_aside(node: Node, odd: Make) -> None:
    (node.folder / "shards").mkdir(parents=True)
    (node.folder / "shards/7.json").write_text('{"version": 1, "shard"')
    node.door.assign(odd(1))
    async with node.running():
        await node.state(1, "ready")
    assert (node.folder / "shards/7.bad").exists()


@pytest.mark.slow
async def test_a_full_disk_neither_stops_a_shard_nor_silences_the_node(
    node: Node, odd: Make
) -> None:
    assignment = odd(1)
    node.door.assign(assignment)
    async with node.running():
        await node.state(1, "ready")
        shutil.rmtree(node.folder / "shards")  # every write fails from here on
        node.door.assign(assignment, odd(2))
        await node.state(2, "ready")
        node.door.assign({**assignment, "desired": "stopped"})
        await node.state(1, "stopped")
        await until(lambda: node.processes() == [], "both are gone")


async def test_a_port_held_by_a_stranger_is_named(node: Node, odd: Make) -> None:
    listeners = await trio.open_tcp_listeners(0, host="127.0.0.1")
    port = listeners[0].socket.getsockname()[1]
    node.door.assign(odd(1, port=port))
    async with node.running():
        word = await node.state(1, "failed")
        assert f"port {port} is held by pid {os.getpid()}" in word["error"]
    await listeners[0].aclose()


async def test_an_unhealthy_engine_is_not_ready_until_it_is_well_again(
    node: Node, odd: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("agent.supervise.HEALTH_S", 0.05)
    monkeypatch.setattr("agent.supervise.SLOWEST_CHECK_S", 0.05)
    node.door.assign(odd(1))
    async with node.running():
        await node.state(1, "ready")
        sick = node.folder / "run/shard-1/unhealthy"
        sick.touch()
        word = await node.state(1, "starting")
        assert "/health answers 503" in word["error"]
        sick.unlink()
        await node.state(1, "ready")


async def test_C14_a_healthy_engine_that_hangs_leaves_rotation_and_is_ended(
    node: Node, odd: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("HEALTH_S", "SLOWEST_CHECK_S"):
        monkeypatch.setattr(f"agent.supervise.{name}", 0.05)
    monkeypatch.setattr("agent.progress.STALL_S", 0.3)
    node.door.assign(odd(1))
    (node.folder / "run/shard-1").mkdir(parents=True)
    page = node.folder / "run/shard-1/metrics"

    def told(running: int, steps: int) -> None:
        new = page.with_name("new")
        new.write_text(f"vllm:num_requests_running {running}\nllamacpp:n_decode_total {steps}\n")
        new.replace(page)

    told(3, 1)
    async with node.running():
        await node.state(1, "ready")
        word = await node.state(1, "starting")
        assert "3 requests run and none moved for" in word["error"]
        told(3, 2)
        await node.state(1, "ready")
        await node.state(1, "starting")
        told(0, 2)  # an idle engine stands still by right
        await node.state(1, "ready")
        monkeypatch.setattr("agent.supervise.FROZEN_S", 0.3)
        told(2, 2)
        word = await node.state(1, "failed")
        assert word["error"].startswith("not ready after 0.3 s: 2 requests run and none moved")
        assert node.processes() == []
    assert node.door.illegal == []


async def test_D04_an_engine_is_adopted_by_the_next_agent(node: Node, llama: Make) -> None:
    node.door.assign(llama(1))
    async with node.running():
        pid = (await node.state(1, "ready"))["pid"]
    assert node.processes() == [pid]
    node.door.reports.clear()
    async with node.running():
        await until(lambda: bool(node.door.reports), "the new agent synced")
        assert node.door.reports[0]["shards"][0]["state"] == "ready"
        assert node.door.reports[0]["shards"][0]["pid"] == pid
        node.door.assign({**node.door.assignments[0], "desired": "stopped"})
        await node.state(1, "stopped")
    assert node.processes() == []
    assert node.door.illegal == []


PART = {
    "rank": 1, "shards": 2,
    "gang": {"head": "127.0.0.1", "master_port": 1, "nodes": 2, "transport": "network"},
}  # fmt: skip
LONE = """
import sys, json, structlog, trio
from pathlib import Path
from agent.state import StateDir
from tests.agent.conftest import Node
async def main():
    node = Node(Path(sys.argv[1]))
    node.door.assign(*json.loads(sys.argv[2]))
    async with node.running():
        while not all(s == "ready" for s in node.door.states.values()) or not node.door.states:
            await trio.sleep(0.02)
        print("ready", flush=True)
        await trio.sleep(600)
structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))
trio.run(main)
"""
ROOT = Path(__file__).parents[2]


async def killed_agent(node: Node, *assignments: dict[str, Any]) -> None:
    """An agent in a process of its own, killed with SIGKILL once its shards are ready."""
    agent = subprocess.Popen(
        [sys.executable, "-c", LONE, str(node.folder), json.dumps(assignments)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert agent.stdout is not None
    try:
        assert await trio.to_thread.run_sync(agent.stdout.readline) == "ready\n"
    finally:
        agent.kill()
        agent.wait()
        agent.stdout.close()


@pytest.mark.slow
async def test_D04_after_kill_9_engines_are_adopted_and_orphans_ended(
    node: Node, odd: Make
) -> None:
    kept, lost = odd(1), odd(2, "--fork")
    await killed_agent(node, kept, lost)
    (node.folder / "shards/2.json").unlink()  # killed between the start and the note of it
    assert len(node.processes()) == 3
    node.door.states = {1: "ready"}
    node.door.assign(kept, {**odd(3), "port": lost["port"], "model": "other"})
    async with node.running():
        await node.state(3, "ready")  # on the orphan's port: the orphan went first
        assert node.processes(2) == []
        [pid] = node.processes(1)
        os.kill(pid, signal.SIGKILL)
        word = await node.state(1, "failed")
        assert "exit_code" not in word  # an adopted process tells its code to nobody
        assert "unknown" in word["error"]
    assert node.door.illegal == []


@pytest.mark.slow
async def test_D08_an_engine_that_ended_while_no_agent_watched_is_failed(
    node: Node, odd: Make
) -> None:
    assignment = odd(1, "--fork")
    await killed_agent(node, assignment)
    record = json.loads((node.folder / "shards/1.json").read_text())
    os.kill(record["process"][0], signal.SIGKILL)
    node.door.states = {1: "ready"}
    node.door.assign(assignment)
    async with node.running():
        word = await node.state(1, "failed")
        assert "ended while no agent was watching" in word["error"]
        assert node.processes() == []


async def test_H10_a_record_whose_pid_is_another_process_now_signals_nobody(
    node: Node, odd: Make
) -> None:
    bystander = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    try:
        assignment = odd(1)
        node.door.assign(assignment)
        async with node.running():
            await node.state(1, "ready")
        [pid] = node.processes()
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        path = node.folder / "shards/1.json"
        record = json.loads(path.read_text())
        record["process"][0] = bystander.pid  # as if the number had been given again
        path.write_text(json.dumps(record))
        async with node.running():
            await node.state(1, "failed")
        assert bystander.poll() is None
    finally:
        bystander.kill()
        bystander.wait()


async def test_after_a_reboot_what_ran_starts_again_without_the_database(
    node: Node, odd: Make
) -> None:
    from sql.errors import DatabaseAway

    node.door.assign(odd(1), odd(2))
    async with node.running():
        await node.state(1, "ready")
        await node.state(2, "ready")
    for pid in node.processes():
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    for shard in (1, 2):
        path = node.folder / f"shards/{shard}.json"
        record = json.loads(path.read_text())
        record["process"][2] = "another-boot"
        record["was_running"] = shard == 1
        record["process"] = record["process"] if shard == 1 else None
        path.write_text(json.dumps(record))
    node.door.away = DatabaseAway("Postgres cannot be reached")
    async with node.running():
        await until(lambda: len(node.processes(1)) == 1, "shard 1 runs again")
        node.door.away = None
        await until(lambda: len(node.processes(2)) == 1, "shard 2 waited for the database")
        await node.state(1, "ready")
    assert node.door.illegal == []


async def test_on_exit_stop_says_assigned_and_the_next_agent_starts_again(
    node: Node, odd: Make
) -> None:
    node.door.assign(odd(1))
    async with node.running() as agent:
        await node.state(1, "ready")
        await agent.shut_down(keep=False)
        assert node.door.states[1] == "assigned"
        assert node.processes() == []
    async with node.running():
        await node.state(1, "ready")
    assert node.door.illegal == []


async def test_D14_on_exit_stop_ends_a_part_of_a_gang_for_good(node: Node, odd: Make) -> None:
    node.door.assign(odd(1, **PART))
    async with node.running() as agent:
        await node.state(1, "ready")
        await agent.shut_down(keep=False)
        assert node.door.states[1] == "stopped"
        assert node.door.words[1]["error"] == "its agent ended (on_exit = stop)"
        assert node.processes() == []
        assert node.door.reports[-1]["leaving"]
    async with node.running():
        await until(lambda: not (node.folder / "shards/1.json").exists(), "it is forgotten")
        assert node.processes() == []
        assert not node.door.reports[-1]["leaving"]
    assert node.door.illegal == []


async def test_the_head_of_a_gang_waits_for_the_others_as_long_as_the_controller_lets_it(
    node: Node, odd: Make
) -> None:
    gang = {**PART["gang"], "master_port": free_port()}
    head = odd(1, "--mute", **PART | {"rank": 0, "gang": gang}, start_deadline_s=0.2)
    node.door.assign(head, odd(2, "--mute", start_deadline_s=0.6))
    async with node.running():
        await node.state(2, "failed")  # its deadline began after that of the head
        assert node.door.states[1] == "starting"
        node.door.assign({**head, "desired": "stopped"})
        await node.state(1, "stopped")
    assert node.door.illegal == []


async def test_D14_after_a_reboot_a_part_of_a_gang_does_not_start_alone(
    node: Node, odd: Make
) -> None:
    node.door.assign(odd(1, **PART))
    async with node.running():
        pid = (await node.state(1, "ready"))["pid"]
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    path = node.folder / "shards/1.json"
    record = json.loads(path.read_text())
    record["process"][2] = "another-boot"
    path.write_text(json.dumps(record))
    async with node.running():
        word = await node.state(1, "failed")
        assert word["error"].startswith("the node was restarted: all shards")
        assert node.processes() == []


async def test_two_agents_on_one_folder_are_refused(node: Node) -> None:
    from agent.state import StateDirBusy

    async with node.running():
        with pytest.raises(StateDirBusy, match=f"another agent \\(pid {os.getpid()}\\)"):
            StateDir(node.folder)
    StateDir(node.folder).close()


async def test_a_number_that_means_another_shard_now_is_replaced(node: Node, odd: Make) -> None:
    node.door.assign(odd(1))
    async with node.running():
        pid = (await node.state(1, "ready"))["pid"]
        node.door.states.clear()  # another database, which counts from one again
        node.door.assign(odd(1, model="other", replica=99))
        await until(
            lambda: node.door.states.get(1) == "ready" and node.processes(1) not in ([], [pid]),
            "the other shard runs",
        )
