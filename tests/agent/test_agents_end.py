"""Shards when their agent ends, is killed, comes back, or its machine was restarted."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import trio

from agent.state import StateDir
from sql.embedded import free_port
from tests.agent.conftest import Node, until

if TYPE_CHECKING:
    from collections.abc import Callable

    Make = Callable[..., dict[str, Any]]


PART = {
    "rank": 1, "shards": 2,
    "gang": {"head": "127.0.0.1", "master_port": 1, "nodes": 2, "transport": "network"},
}  # fmt: skip


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
