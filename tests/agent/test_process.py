"""Identity of processes and their signals."""

from __future__ import annotations

import os
import signal
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st

from agent import procfs
from agent.process import Identity, Mark, alive, end_tree, ended, exit_code, send, spawn, tree
from tests.agent.conftest import until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

SLEEP = [sys.executable, "-c", "import time; time.sleep(600)"]


@pytest.fixture
def mark(tmp_path: Path) -> Mark:
    return Mark(1, 10, "n1", str(tmp_path))


@pytest.fixture
def start(tmp_path: Path, mark: Mark) -> Iterator[Callable[..., Identity]]:
    """Start programs as an agent does; all are gone after the test."""
    begun: list[Identity] = []

    def go(*argv: str, marked: bool = True) -> Identity:
        env = {"PATH": os.environ["PATH"], **(mark.environment() if marked else {})}
        begun.append(spawn(argv or SLEEP, env, tmp_path, tmp_path / "log"))
        return begun[-1]

    yield go
    for identity in begun:
        if send(identity, signal.SIGKILL):
            os.waitpid(identity.pid, 0)


def test_H10_a_started_program_leads_its_own_session_and_group(
    start: Callable[..., Identity],
) -> None:
    p = procfs.process(start().pid)
    assert p is not None
    assert p.session == p.group == p.pid
    assert p.session != os.getsid(0)


def test_H10_a_signal_for_a_number_given_again_reaches_nobody(
    start: Callable[..., Identity],
) -> None:
    real = start()
    earlier = replace(real, start_ticks=real.start_ticks - 1)
    assert not alive(earlier)
    assert not send(earlier, signal.SIGKILL)
    assert not send(replace(real, boot_id="another"), signal.SIGKILL)
    assert alive(real)


async def test_H10_the_tree_of_a_number_given_again_is_not_touched(
    start: Callable[..., Identity], mark: Mark
) -> None:
    stranger = start(marked=False)
    earlier = replace(stranger, start_ticks=stranger.start_ticks - 1)
    assert tree(earlier, mark) == []
    assert await end_tree(earlier, mark, 1.0) == []
    assert alive(stranger)


async def test_H10_without_pidfd_the_start_time_is_compared(
    start: Callable[..., Identity], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(os, "pidfd_open")  # as on kernels before 5.3
    real = start()
    assert not send(replace(real, start_ticks=1), signal.SIGKILL)
    assert send(real, signal.SIGKILL)
    with trio.fail_after(60):
        assert await ended(real) == -9


@pytest.mark.parametrize(("code", "expected"), [("raise SystemExit(3)", 3), ("exit()", 0)])
async def test_exit_codes_are_learned(
    start: Callable[..., Identity], code: str, expected: int
) -> None:
    with trio.fail_after(60):
        assert await ended(start(sys.executable, "-c", code)) == expected


async def test_D05_the_tree_holds_sessions_that_left_after_their_leader_died(
    start: Callable[..., Identity], mark: Mark, tmp_path: Path
) -> None:
    forks = (
        "import subprocess, sys, time\n"
        f"for _ in range(2): subprocess.Popen({SLEEP!r}, start_new_session=True)\n"
        "print('forked', flush=True)\ntime.sleep(600)"
    )
    leader = start(sys.executable, "-c", forks)
    await until(lambda: "forked" in (tmp_path / "log").read_text(), "it forked")
    assert len(tree(leader, mark)) == 3
    send(leader, signal.SIGKILL)
    with trio.fail_after(60):
        assert await ended(leader) == -9
    left = tree(leader, mark)
    assert len(left) == 2
    assert await end_tree(leader, mark, 5.0) == []
    assert not any(alive(member) for member in left)


TITLED = """
import pathlib, sys, time
at = [int(n) for n in pathlib.Path("/proc/self/stat").read_text().rpartition(")")[2].split()[47:49]]
with open("/proc/self/mem", "r+b", buffering=0) as memory:
    memory.seek(at[0])
    memory.write(bytes(at[1] - at[0]))
print("titled", flush=True)
time.sleep(600)
"""
"""A process without a readable environment, as setproctitle leaves it."""
PARENT = (
    "import subprocess, sys, time\n"
    f"subprocess.Popen([sys.executable, '-c', {TITLED!r}])\n"
    "time.sleep(600)"
)


@pytest.mark.parametrize("reaped", [False, True])
async def test_D05_children_that_lost_their_mark_are_found_by_their_session(
    start: Callable[..., Identity], mark: Mark, tmp_path: Path, *, reaped: bool
) -> None:
    leader = start(sys.executable, "-c", PARENT)
    await until(lambda: "titled" in (tmp_path / "log").read_text(), "its child has a title")
    assert len(tree(leader, mark)) == len(tree(None, mark)) == 2, "a child of a marked one"
    send(leader, signal.SIGKILL)
    with trio.fail_after(60):
        assert await ended(leader) == -9
    if reaped:  # as by init, when an earlier agent started it
        assert exit_code(leader, reap=True) == -9
    (child,) = tree(leader, mark)
    assert await end_tree(leader, mark, 0) == []
    assert not alive(child)


async def test_H10_a_session_whose_leader_is_gone_keeps_strangers_out(
    start: Callable[..., Identity], mark: Mark, tmp_path: Path
) -> None:
    leader = start(
        sys.executable, "-c",
        f"import subprocess; subprocess.Popen({SLEEP!r}); print('forked', flush=True)",
        marked=False,
    )  # fmt: skip
    with trio.fail_after(60):
        assert await ended(leader) == 0
    (stranger,) = tree(leader, mark)
    exit_code(leader, reap=True)
    assert tree(leader, mark) == [], "the number may have been given again: no mark, not ours"
    assert tree(replace(leader, boot_id="another"), mark) == []
    assert send(stranger, signal.SIGKILL)


async def test_killing_a_tree_leaves_no_shared_memory(
    start: Callable[..., Identity], mark: Mark, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("LINGER_S", "KILL_S"):  # on busy cores who removes it may not even have begun
        monkeypatch.setattr(f"agent.process.{name}", 60.0)
    leader = start(
        sys.executable, "-c",
        "from multiprocessing import shared_memory\nimport time\n"
        "print(shared_memory.SharedMemory(create=True, size=4096).name, flush=True)\n"
        "time.sleep(600)",
    )  # fmt: skip
    await until(lambda: "\n" in (tmp_path / "log").read_text(), "it told the name")
    shared = Path("/dev/shm") / (tmp_path / "log").read_text().strip()
    assert shared.exists()
    assert await end_tree(leader, mark, 0) == []
    assert not shared.exists()


def test_a_program_that_does_not_exist_is_an_os_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        spawn(["/no/such/program"], {}, tmp_path, tmp_path / "log")


@given(
    name=st.text(st.characters(exclude_categories=["Cs"]), max_size=15), ticks=st.integers(0, 2**40)
)
def test_a_name_with_brackets_and_spaces_does_not_shift_the_fields(name: str, ticks: int) -> None:
    rest = f"S 1 7 7 0 -1 0 0 0 0 0 5 6 0 0 20 0 1 0 {ticks} 0 3 0"
    p = procfs.parse_stat(f"42 ({name}) {rest}")
    assert (p.pid, p.state, p.parent, p.session, p.cpu_ticks, p.start_ticks) == (
        42,
        "S",
        1,
        7,
        11,
        ticks,
    )


def test_listeners_are_found_with_their_process() -> None:
    import socket

    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        inodes = procfs.listening_inodes(port)
        assert inodes
        assert procfs.socket_inodes(os.getpid()) >= inodes
        assert procfs.holder_of(inodes) == os.getpid()
    assert procfs.listening_inodes(port) == frozenset()
