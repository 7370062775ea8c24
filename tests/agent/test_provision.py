"""Engines become environments: built whole or not at all, shared, bounded, never in the way."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import trio

from agent import provision
from agent.assignment import Assignment
from agent.config import engine_environment
from agent.probes.engines import Engine, scan_environment
from agent.probes.root import Root
from agent.provision import NoEngine, Provision
from agent.provision_settings import ProvisionSettings
from agent.provision_store import Store
from tests.agent import fake_wheels
from tests.agent.conftest import until

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

pytestmark = pytest.mark.slow


def wanted(version: str | None, engine: str = "vllm") -> Assignment:
    return Assignment(1, 10, "m", "running", engine, 1, "127.0.0.1", engine_version=version)


class Ground:
    """A node's folder, its wheels, its installer, and what its probes find."""

    def __init__(self, folder: Path, installer: str = "uv") -> None:
        self.folder, self.wheels = folder / "engines", folder / "wheels"
        self.installer = installer
        self.wheels.mkdir(exist_ok=True)
        (folder / "logs").mkdir(exist_ok=True)
        self.logs = folder / "logs"
        self.elsewhere: Sequence[Engine] = ()
        self.looks = 0
        self.said: list[dict[str, Any]] = []

    def provision(self, **settings: Any) -> Provision:
        async def found() -> Sequence[Engine]:
            return self.elsewhere

        def changed() -> None:
            self.looks += 1

        # A program in place of Python cannot tell uv what it asks a Python for.
        uv = self.installer == "uv" and "python" not in settings
        path = f"{Path(sys.executable).parent}:{os.defpath}" if uv else os.defpath
        site = provision.Site(
            folder=self.folder,
            logs=self.logs,
            env=engine_environment() | {"PATH": path, "UV_NO_CACHE": "1"},
            engine_paths=settings.pop("engine_paths", {}),
            found=found,
            changed=changed,
            floor_bytes=settings.pop("floor_bytes", 0),
        )
        given = {"engines": ["vllm"], "wheel_dir": self.wheels, "min_free": 0, **settings}
        return Provision(ProvisionSettings.model_validate(given), site)

    def program(self, script: str) -> str:
        """A "Python" that does something else."""
        path = self.wheels.with_name("python")
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)
        return str(path)

    def hanging(self) -> tuple[str, Callable[[], list[int]]]:
        """A "Python" that never ends and has a child, and the numbers of both."""
        flag = self.wheels.with_name("pids")
        path = self.program(f"sleep 600 &\necho $$ >> {flag}\necho $! >> {flag}\nwait")
        return path, lambda: [int(n) for n in flag.read_text().split()] if flag.exists() else []

    @property
    def names(self) -> list[str]:
        return Store(self.folder).names()

    @property
    def unfinished(self) -> list[Path]:
        used = {str(p.resolve()) for p in self.folder.iterdir() if p.is_symlink()}
        return [p for p in self.folder.glob(".builds/*/env-*") if str(p.resolve()) not in used]


@pytest.fixture
def ground(tmp_path: Path) -> Ground:
    return Ground(tmp_path)


@pytest.mark.parametrize("installer", ["uv", "pip"])
async def test_a_wanted_version_becomes_an_environment_once(tmp_path, installer):
    ground = Ground(tmp_path, installer)
    fake_wheels.vllm(ground.wheels, "1.2.3")
    made = ground.provision()
    path = await made.ensure(wanted("1.2.3"), ground.said.append)
    assert path == ground.folder / "vllm-1.2.3"
    assert [(e.version, e.error) for e in scan_environment(Root(), str(path))] == [("1.2.3", None)]
    assert (path / "bin/vllm").is_file()
    assert ground.said[0] == {"source": "vllm 1.2.3: begins", "bytes_done": 0}
    assert len(ground.said) > 1
    assert ground.looks == 2  # it begins, it ended
    assert await made.rows() == []
    installed = {"uv": " + vllm==1.2.3", "pip": "Successfully installed vllm-1.2.3"}
    assert installed[installer] in (ground.logs / "engine-vllm-1.2.3.log").read_text()
    assert ground.unfinished == []
    # The second time nothing is built, nor by the next agent.
    ground.said.clear()
    assert await ground.provision().ensure(wanted("1.2.3"), ground.said.append) == path
    assert ground.said == []


async def test_without_a_version_or_leave_nothing_is_built(ground):
    fake_wheels.vllm(ground.wheels, "1.2.3")
    ensure = ground.provision().ensure
    assert await ensure(wanted(None), ground.said.append) is None
    assert await ensure(wanted("1.2.3", "command"), ground.said.append) is None
    assert await ensure(wanted("1.2.3", "sglang"), ground.said.append) is None
    off = ground.provision(engines=[])
    assert await off.ensure(wanted("1.2.3"), ground.said.append) is None
    for paths in ({"vllm": "/x"}, {"vllm@1.2.3": "/x"}):
        named = ground.provision(engine_paths=paths)
        assert await named.ensure(wanted("1.2.3"), ground.said.append) is None
    assert ground.said == []
    assert not ground.folder.exists()


async def test_a_version_found_elsewhere_is_used_and_not_built(ground, tmp_path):
    home = tmp_path / "venv"
    (home / "bin").mkdir(parents=True)
    for name in ("vllm", "python"):
        (home / "bin" / name).write_text("#!/bin/sh\n")
        (home / "bin" / name).chmod(0o755)
    ground.elsewhere = [
        Engine("vllm", "9.9", str(tmp_path / "other/bin/python")),
        Engine("vllm", "1.2.3", str(home / "bin/python")),
        Engine("llamacpp", "b5234", "/opt/llama/bin/llama-server"),
    ]
    made = ground.provision(engines=["vllm", "llamacpp"])
    assert await made.ensure(wanted("1.2.3"), ground.said.append) == home
    assert await made.ensure(wanted("b5234", "llamacpp"), ground.said.append) is None
    assert ground.said == []


@pytest.mark.parametrize("version", ["../1", "1 --index-url x", "1;2", "", "-r", "1\n2", "x" * 200])
async def test_a_version_that_is_none_is_refused_before_anything(ground, version):
    with pytest.raises(NoEngine, match="is no version of vllm"):
        await ground.provision().ensure(wanted(version), ground.said.append)
    assert not ground.folder.exists()


async def refused(ground: Ground, made: Provision, version: str) -> str:
    with pytest.raises(NoEngine) as caught:
        await made.ensure(wanted(version), ground.said.append)
    assert ground.names == []
    await made.collect(set)
    assert ground.unfinished == []
    return str(caught.value)


@pytest.mark.parametrize(
    ("installer", "why"),
    [
        ("uv", "Because there is no version of vllm==7.7"),
        ("pip", "No matching distribution found for vllm==7.7"),
    ],
)
async def test_no_such_version(tmp_path, installer, why):
    ground = Ground(tmp_path, installer)
    fake_wheels.vllm(ground.wheels, "1.2.3")
    made = ground.provision()
    words = await refused(ground, made, "7.7")
    assert words.splitlines()[0].startswith(f"vllm 7.7 could not be installed: {why}")
    [row] = await made.rows()
    assert (row["engine"], row["version"], row["state"]) == ("vllm", "7.7", "failed")
    assert row["error"].startswith(why)


async def test_a_failed_build_waits_until_time_or_settings_allow_another(ground):
    python = ground.program("echo 'ERROR: no luck'; exit 3")
    made = ground.provision(python=python)
    words = await refused(ground, made, "1.2.3")
    assert words == "vllm 1.2.3 could not be installed: no luck\nERROR: no luck"
    assert "tried again in 10 min" in await refused(ground, made, "1.2.3")
    # The next agent knows of it as well, and nothing ran again.
    assert "tried again" in await refused(ground, ground.provision(python=python), "1.2.3")
    assert (ground.logs / "engine-vllm-1.2.3.log").read_text() == "ERROR: no luck\n"
    # Other settings, or a new wheel, are a reason to try at once.
    other = ground.provision(python=python, packages={"vllm": "other=={version}"})
    assert await other.rows() == []
    assert "tried again" not in await refused(ground, other, "1.2.3")
    fake_wheels.vllm(ground.wheels, "1.2.3")
    assert await made.rows() == []
    assert "tried again" not in await refused(ground, made, "1.2.3")
    right = ground.provision()
    assert await right.ensure(wanted("1.2.3"), ground.said.append)
    assert await right.rows() == await made.rows() == []


@pytest.mark.parametrize(
    ("wheel", "packages", "words"),
    [
        (
            partial(fake_wheels.wheel, name="boxed", version="1.2.3", needs=("vllm==1.2.4",)),
            {"vllm": "boxed=={version}"},
            "is vllm 1.2.4, not 1.2.3: name 1.2.4 in the profile",
        ),
        (
            partial(fake_wheels.wheel, name="boxed", version="1.2.3"),
            {"vllm": "boxed=={version}"},
            r"brought no vllm: correct \[provision.packages\] vllm",
        ),
        (
            partial(fake_wheels.wheel, name="vllm", version="1.2.3", module="vllm"),
            {},
            "brought no program vllm",
        ),
        (
            partial(fake_wheels.vllm, version="1.2.3", said="1.2.9"),
            {},
            "vllm 1.2.3 could not be installed: ",
        ),
    ],
)
async def test_what_came_is_not_what_was_wanted(ground, wheel, packages, words):
    fake_wheels.vllm(ground.wheels, "1.2.4")
    wheel(ground.wheels)
    made = ground.provision(packages=packages)
    with pytest.raises(NoEngine, match=words):
        await made.ensure(wanted("1.2.3"), ground.said.append)
    assert ground.names == []
    assert [row["state"] for row in await made.rows()] == ["failed"]


async def test_a_broken_wheel(ground):
    path = fake_wheels.vllm(ground.wheels, "1.2.3")
    path.write_bytes(path.read_bytes()[:200])
    words = await refused(ground, ground.provision(), "1.2.3")
    assert "vllm==1.2.3 has an invalid package format" in words
    assert len(words) < 2500


async def test_too_little_space_is_told_before_anything_is_fetched(ground):
    fake_wheels.vllm(ground.wheels, "1.2.3")
    words = await refused(ground, ground.provision(min_free="900TiB"), "1.2.3")
    assert "no space" in words
    assert "[provision] min_free is 921600.00 GiB" in words
    assert not (ground.logs / "engine-vllm-1.2.3.log").exists()


async def test_D23_a_build_ends_when_the_disk_fills(ground):
    python, _ = ground.hanging()
    words = await refused(ground, ground.provision(python=python, floor_bytes=1 << 62), "1.2.3")
    assert "no space" in words
    assert "left; free some" in words


async def test_a_build_that_takes_too_long_is_ended_with_all_its_processes(ground):
    python, pids = ground.hanging()
    made = ground.provision(python=python, deadline="8s")
    words = await refused(ground, made, "1.2.3")
    assert words.endswith("not ready within [provision] deadline, 8 s")
    assert len(pids()) == 2
    await until(lambda: not any(map(alive, pids())), "what was killed ends")
    [row] = await made.rows()
    assert row["error"] == "not ready within [provision] deadline, 8 s"


def alive(pid: int) -> bool:
    try:
        return "State:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):  # the second while it is read
        return False


async def test_a_stopped_shard_ends_its_build_and_leaves_no_blame(ground):
    python, pids = ground.hanging()
    made = ground.provision(python=python)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(made.ensure, wanted("1.2.3"), ground.said.append)
        await until(lambda: len(pids()) == 2, "the build hangs")
        row = {"engine": "vllm", "version": "1.2.3", "state": "provisioning"}
        assert await made.rows() == [row]
        nursery.cancel_scope.cancel()
    await until(lambda: not any(map(alive, pids())), "what was killed ends")
    assert await made.rows() == []
    assert ground.names == []
    await made.collect(set)
    assert ground.unfinished == []


async def test_when_the_first_shard_is_stopped_the_second_goes_on(ground):
    python, pids = ground.hanging()
    made = ground.provision(python=python)
    first = trio.CancelScope()

    async def one() -> None:
        with first:
            await made.ensure(wanted("1.2.3"), ground.said.append)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(one)
        await until(lambda: len(pids()) == 2, "the build hangs")
        nursery.start_soon(made.ensure, wanted("1.2.3"), ground.said.append)
        first.cancel()
        await until(lambda: len(pids()) == 4, "the second builds")
        await until(lambda: not any(map(alive, pids()[:2])), "what was killed ends")
        assert all(map(alive, pids()[2:]))
        nursery.cancel_scope.cancel()


async def test_two_shards_share_one_build(ground):
    fake_wheels.vllm(ground.wheels, "1.2.3")
    made, paths = ground.provision(), []

    async def one(told: Callable[[dict[str, Any]], None]) -> None:
        paths.append(await made.ensure(wanted("1.2.3"), told))

    second: list[dict[str, Any]] = []
    async with trio.open_nursery() as nursery:
        nursery.start_soon(one, ground.said.append)
        nursery.start_soon(one, second.append)
    assert paths == [ground.folder / "vllm-1.2.3"] * 2
    assert (ground.logs / "engine-vllm-1.2.3.log").read_text().count(" + vllm==1.2.3") == 1
    assert len(second) > 1  # it was told how far the other's build is


async def test_two_agents_build_one_after_the_other(ground):
    fake_wheels.vllm(ground.wheels, "1.2.3")
    paths = []

    async def one() -> None:
        paths.append(await ground.provision().ensure(wanted("1.2.3"), ground.said.append))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(one)
        nursery.start_soon(one)
    assert paths == [ground.folder / "vllm-1.2.3"] * 2
    assert (ground.logs / "engine-vllm-1.2.3.log").read_text().count(" + vllm==1.2.3") == 1


async def test_D22_a_builder_killed_midway_leaves_nothing_that_counts(ground):
    python, pids = ground.hanging()
    made = ground.provision(python=python)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(refused, ground, made, "1.2.3")
        await until(lambda: len(pids()) == 2, "the build hangs")
        os.kill(os.getpgid(pids()[0]), signal.SIGKILL)  # the builder alone
    await until(lambda: not any(map(alive, pids())), "its installer ends with it")
    [row] = await made.rows()
    assert row["error"] == "the build ended without a word: killed or crashed"


LIFE = """
import sys, trio
from pathlib import Path
from tests.agent.test_provision import Ground, wanted
ground = Ground(Path(sys.argv[1]))
trio.run(ground.provision(python=sys.argv[2]).ensure, wanted("1.2.3"), ground.said.append)
"""


async def test_D22_an_agent_killed_midway_leaves_nothing_that_counts(ground, tmp_path):
    python, pids = ground.hanging()
    root = Path(__file__).parents[2]
    with subprocess.Popen([sys.executable, "-c", LIFE, str(tmp_path), python], cwd=root) as agent:
        await until(lambda: len(pids()) == 2, "the build hangs")
        agent.kill()
    await until(lambda: not any(map(alive, pids())), "the installer ends with its agent")
    assert ground.names == []
    assert len(ground.unfinished) == 1
    fake_wheels.vllm(ground.wheels, "1.2.3")
    made = ground.provision()
    assert await made.rows() == []
    assert await made.ensure(wanted("1.2.3"), ground.said.append)
    assert ground.unfinished == []


def made_by_hand(ground: Ground, name: str, used_at: float) -> None:
    store = Store(ground.folder)
    ground.folder.mkdir(exist_ok=True)
    with store.locked(name) as held:
        assert held
        place = store.begin(name)
        (place / "bin").mkdir()
        (place / "bin/python").symlink_to("/bin/true")
        store.publish(name, place)
    os.utime(store.link(name), (used_at, used_at), follow_symlinks=False)


async def test_the_longest_unused_environments_go_and_none_in_use(ground):
    now = time.clock_gettime(time.CLOCK_REALTIME)
    for age, version in enumerate(["5", "1", "4", "2", "3"]):
        made_by_hand(ground, f"vllm-{version}", now - 1000 + age)
    made = ground.provision(max_environments=2)
    assert ground.names == ["vllm-5", "vllm-1", "vllm-4", "vllm-2", "vllm-3"]
    # Asked for again: used now, although it was the oldest.
    assert await made.ensure(wanted("5"), ground.said.append) == ground.folder / "vllm-5"
    assert await made.collect(lambda: {"vllm-1", "vllm-none"}) == ["vllm-4", "vllm-2", "vllm-3"]
    assert sorted(ground.names) == ["vllm-1", "vllm-5"]
    assert ground.unfinished == []
    assert await made.collect(lambda: {"vllm-1", "vllm-5"}) == []
    one = ground.provision(max_environments=1)
    assert await one.collect(lambda: {"vllm-1", "vllm-5"}) == []  # in use, whatever their number


async def test_an_environment_that_is_being_built_is_not_removed(ground):
    for version in ("1", "2"):
        made_by_hand(ground, f"vllm-{version}", 1000.0 + int(version))
    made, store = ground.provision(max_environments=1), Store(ground.folder)
    with store.locked("vllm-1") as held:
        assert held
        assert await made.collect(set) == []
    assert await made.collect(set) == ["vllm-1"]


async def test_an_environment_whose_interpreter_is_gone_is_built_again(ground):
    fake_wheels.vllm(ground.wheels, "1.2.3")
    made_by_hand(ground, "vllm-1.2.3", 1000.0)
    old = ground.folder / "vllm-1.2.3/bin/python"
    old.unlink()
    old.symlink_to("/gone/python3")
    path = await ground.provision().ensure(wanted("1.2.3"), ground.said.append)
    assert (path / "bin/vllm").is_file()


async def test_keeping_tidy_removes_leftovers_and_goes_on(ground):
    made_by_hand(ground, "vllm-1", 1000.0)
    left = ground.folder / ".builds/vllm-1/env-dead"
    left.mkdir()
    made, rounds = ground.provision(), []
    async with trio.open_nursery() as nursery:
        nursery.start_soon(made.keep_tidy, set, lambda: rounds.append(1))
        await until(lambda: bool(rounds), "one round")
        nursery.cancel_scope.cancel()
    assert not left.exists()
    assert ground.names == ["vllm-1"]


def test_failures_are_forgotten_with_the_boot_and_damage(tmp_path, monkeypatch):
    store = Store(tmp_path / "engines")
    store.blame("vllm-1", "vllm", "1", "why", "d")
    found = store.failure("vllm-1", "d")
    assert found is not None
    assert (found.error, 500 < found.again_in_s <= 600) == ("why", True)
    assert store.failure("vllm-1", "other") is None
    monkeypatch.setattr("agent.provision_store.procfs.boot_id", lambda: "another")
    assert store.failure("vllm-1", "d") is None
    monkeypatch.undo()
    note = tmp_path / "engines/.builds/vllm-1/failed.json"
    for damaged in ("", "[]", '{"digest": "d"}', "\xff"):
        note.write_text(damaged)
        assert store.failure("vllm-1", "d") is None
    assert store.blamed() == []
