"""The life of shards under a whole agent: start, ready, crash, stop."""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING, Any

import httpx
import pytest
import trio

from agent import procfs
from tests.agent.conftest import Node, until

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

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
        word = await node.state(1, "failed")
        assert word["exit_code"] == code
        assert f"last words before code {code}" in word["log_tail"]
        assert f"exited with code {code}" in word["error"]
    assert node.door.illegal == []


async def test_D07_an_engine_that_never_opens_its_port_ends_with_the_start_deadline(
    node: Node, odd: Make
) -> None:
    node.door.assign(odd(1, "--mute", start_deadline_s=0.6))
    async with node.running():
        word = await node.state(1, "failed")
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
        word = await node.state(1, "failed")
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
        await node.state(1, "failed")
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
        await node.state(1, "stopped")
        assert node.processes() == []


@pytest.mark.parametrize(("end", "left"), [("stopped", None), ("failed", "memory not released")])
async def test_D20_cards_are_given_back_only_when_their_memory_was_seen_free(
    node: Node, odd: Make, end: str, left: str | None
) -> None:
    looked, free = trio.Event(), trio.Event()

    async def released(uuids: Sequence[str]) -> str | None:
        assert list(uuids) == ["GPU-a"]
        looked.set()
        await free.wait()
        return left

    node.released = released
    assignment = odd(1, gpus=[{"uuid": "GPU-a", "index": 0}])
    node.door.assign(assignment)
    async with node.running():
        word = await node.state(1, "ready")
        if end == "failed":
            os.kill(word["pid"], signal.SIGKILL)
        else:
            node.door.assign({**assignment, "desired": "stopped"})
        with trio.fail_after(10):
            await looked.wait()
        assert node.processes() == []
        told = len(node.door.reports)
        await until(lambda: len(node.door.reports) >= told + 2, "it goes on telling")
        assert node.door.states[1] not in ("stopped", "failed"), "the database still holds the card"
        free.set()
        word = await node.state(1, end)
        assert (left or "") in word.get("error", "")
    assert node.door.illegal == []


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
        await until(lambda: agent.loops.ages()["sync"] < 5, "it goes on syncing")
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


async def test_D10_an_engine_whose_row_became_unreadable_can_still_be_stopped(
    node: Node, odd: Make
) -> None:
    """By hand in psql its port became NULL: without this its replica is `stopping` for ever."""
    first = odd(1)
    node.door.assign(first)
    async with node.running():
        await node.state(1, "ready")
        node.door.assign({**first, "port": None})
        assert node.shards is not None
        await until(lambda: node.shards.bad_rows == 1, "the row is told of")
        assert node.processes(1)
        node.door.assign({**first, "port": None, "args": 7, "desired": "stopped"})
        await node.state(1, "stopped")
    assert node.processes() == []


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
        (node.folder / "shards").rename(node.folder / "away")  # every write fails from here on
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
    monkeypatch.setattr("agent.progress.STALL_S", 1.0)  # ready so long that a sync tells it
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
