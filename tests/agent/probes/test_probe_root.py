"""Root: reading below a prefix, tools with deadlines, threads that may hang."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import trio

from agent.probes import root
from agent.probes.conversation import Conversation
from agent.probes.root import OUTPUT_LIMIT, Root, bounded


def test_reads_below_the_prefix_only(machine):
    captured = machine({"/proc/meminfo": "MemTotal: 1 kB\n"})
    assert captured.read("/proc/meminfo") == "MemTotal: 1 kB\n"
    assert captured.read("/etc/os-release") is None
    assert captured.names("/proc") == ["meminfo"]
    assert captured.read("/proc\0") is None
    assert not captured.live
    assert Root().live


def test_links_stay_below_the_prefix(machine, tmp_path):
    captured = machine({"/etc/os-release": "captured", "/a/b/c": "relative"})
    top = tmp_path / "root"
    (top / "etc/link").symlink_to("/etc/os-release")
    (top / "a/up").symlink_to("../../../../a/b/c")
    (top / "whole").symlink_to("/a/b")
    (top / "live").symlink_to("/proc/self/status")
    (top / "loop").symlink_to("/loop")
    assert captured.read("/etc/link") == "captured"
    assert captured.read("/a/up") == "relative", "no .. leads above the machine's own root"
    assert captured.names("/whole") == ["c"]
    assert captured.read("/whole/c") == "relative"
    assert captured.read("/live") is None
    assert captured.read("/loop") is None
    assert not captured.exists("/live")


def test_binary_and_large_files_are_text_and_cut(machine, tmp_path):
    captured = machine({"/x": ""})
    (tmp_path / "root/x").write_bytes(b"\xff\x00" * 100_000)
    assert len(captured.read("/x", limit=70_001)) == 70_001


def test_small_kernel_files_are_read_although_the_limit_is_large():
    # /proc/sys answers one read of 4 MiB with ENOMEM.
    assert Root().read("/proc/sys/kernel/osrelease")


async def test_no_tool_of_the_live_machine_answers_for_a_captured_one(tmp_path):
    result = await Root(prefix=tmp_path).run(["sh", "-c", "echo live"], 5)
    assert result.stdout == ""
    assert "no such program" in result.error


async def test_tool_output_is_kept_when_it_fails(machine):
    captured = machine({}, {"tool": "echo good; echo bad >&2; exit 14"})
    result = await captured.run(["tool"], 5)
    assert (result.stdout, result.stderr, result.exit_code) == ("good\n", "bad\n", 14)
    assert "exit status 14" in result.error


@pytest.mark.slow
async def test_hanging_tool_is_killed_with_its_children(machine, tmp_path):
    marker = tmp_path / "pid"
    captured = machine({}, {"tool": f"echo partly; sleep 600 & echo $! > {marker}; wait"})
    result = await captured.run(["tool"], 2.0)
    assert result.timed_out
    assert result.stdout == "partly\n"
    assert "no answer within 2 s" in result.error
    with trio.fail_after(60):
        while _runs(int(marker.read_text())):
            await trio.sleep(0.01)


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):  # the second while it is read
        return False


@pytest.mark.slow
async def test_child_that_keeps_the_pipe_open_does_not_hold_us_up(machine):
    captured = machine({}, {"tool": "sleep 600 & echo done"})
    with trio.fail_after(60):
        result = await captured.run(["tool"], 600)
    assert (result.stdout, result.exit_code) == ("done\n", 0)


async def test_endless_output_is_cut(machine):
    captured = machine({}, {"tool": "exec /usr/bin/yes"})
    with trio.fail_after(60):
        result = await captured.run(["tool"], 60)
    assert len(result.stdout) == OUTPUT_LIMIT
    assert "cut off" in result.error
    assert not result.timed_out


async def test_unstartable_tool_is_an_answer(machine, tmp_path):
    captured = machine({}, {"tool": ""})
    (tmp_path / "bin/tool").write_bytes(b"\x7fELF nonsense")
    result = await captured.run(["tool"], 5)
    assert "cannot be started" in result.error


async def test_stuck_thread_is_given_up_and_not_doubled():
    release, calls = threading.Event(), []

    def hang() -> str:
        calls.append(1)
        release.wait(30)
        return "late"

    assert await bounded(hang, key="dead nfs", timeout_s=0.5) is None
    assert await bounded(hang, key="dead nfs", timeout_s=60) is None, "it is not begun again"
    assert len(calls) == 1
    release.set()
    with trio.fail_after(60):
        # The thread tells nobody when it is through: asking again is the only way to know.
        while await bounded(lambda: "back", key="dead nfs", timeout_s=60) is None:
            await trio.sleep(0.01)


def test_a_call_that_is_given_up_before_its_thread_runs_is_not_made():
    calls = []
    work = root._Work(lambda: calls.append(1), "dead nfs")
    work.abandon()
    with pytest.raises(TimeoutError, match="dead nfs was given up"):
        work.run()
    assert calls == []


async def test_no_more_tools_while_many_hang_in_the_kernel(machine):
    # What the kernel does not let go is stood in for by what has not been killed.
    sleepers = [await trio.lowlevel.open_process(["sleep", "600"]) for _ in range(4)]
    root._unreaped.extend(sleepers)
    result = await machine({}, {"tool": "echo never"}).run(["tool"], 5)
    assert result.stdout == ""
    assert "not started: 4 earlier ones hang in the kernel" in result.error
    async with Conversation(("cat",), Path("/")) as link:
        assert "not started" in (await link.ask("x", 5, bool)).error
    for sleeper in sleepers:
        sleeper.kill()
        await sleeper.wait()
    assert (await machine({}, {"tool": "echo again"}).run(["tool"], 5)).stdout == "again\n"


async def test_two_callers_may_ask_the_same_at_once(nursery):
    answers: list[str | None] = []

    async def ask() -> None:
        answers.append(await bounded(lambda: "yes", key="same", timeout_s=60))

    async with trio.open_nursery() as both:
        both.start_soon(ask)
        both.start_soon(ask)
    assert answers == ["yes", "yes"]
