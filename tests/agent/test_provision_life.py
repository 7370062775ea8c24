"""A shard whose engine must be installed first: provisioning, starting, ready, from its home."""

from __future__ import annotations

import importlib.metadata
import os
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from agent import provision
from agent.assignment import Assignment
from agent.config import engine_environment
from agent.engines import Place, engine_of
from agent.facts import Facts
from agent.probes.weights_scan import WeightsScan
from agent.provision import Provision
from agent.provision_settings import ProvisionSettings
from tests.agent import fake_wheels
from tests.agent.conftest import Node, PaperProbes, until
from tests.agent.paper_door import PaperDoor

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from agent.probes.engines import Engine
    from agent.state import StateDir
    from agent.supervise import Site

    Make = Callable[..., dict[str, Any]]


@dataclass
class Installing(Node):
    """A node that may install engines."""

    settings: dict[str, Any] = field(default_factory=dict)
    path: str = os.defpath
    """Where uv may be; without it venv and pip do it."""
    installer: Provision | None = None

    def site(self, state: StateDir) -> Site:
        async def nothing() -> Sequence[Engine]:
            return ()

        known = provision.Site(
            folder=self.folder / "engines",
            logs=self.folder / "logs",
            env=engine_environment() | {"PATH": self.path, "UV_NO_CACHE": "1"},
            engine_paths={},
            found=nothing,
            changed=lambda: self.probes.woken.set(),  # noqa: PLW0108 - a look makes it anew
            floor_bytes=0,
        )
        settings = ProvisionSettings.model_validate({"min_free": 0, **self.settings})
        self.installer = Provision(settings, known)
        return replace(super().site(state), provision=self.installer.ensure)


@pytest.fixture
def installing(node: Node) -> Iterator[Installing]:
    wheels = node.folder.parent / "wheels"
    wheels.mkdir()
    settings = {"engines": ["vllm"], "wheel_dir": wheels}
    return Installing(node.folder, settings=settings)


@pytest.mark.slow
async def test_a_shard_installs_its_engine_and_runs_it(
    installing: Installing, odd: Make, tmp_path: Path
) -> None:
    installing.path = f"{Path(sys.executable).parent}:{os.defpath}"
    fake_wheels.vllm(tmp_path / "wheels", "1.2.3")
    shard = odd(1, engine="vllm", engine_version="1.2.3", command=None, source=f"file:{tmp_path}")
    async with installing.running():
        installing.door.assign(shard)
        word = await installing.state(1, "provisioning", 60)
        assert word["fetch"]["source"].startswith("vllm 1.2.3: ")
        await installing.state(1, "ready", 60)
        home = installing.folder / "engines/vllm-1.2.3"
        assert f"vllm 1.2.3 from {home.resolve()}" in installing.read(1)
        assert installing.shards is not None
        assert installing.shards.environments() == {"vllm-1.2.3"}
        assert installing.installer is not None
        assert await installing.installer.collect(installing.shards.environments) == []
        installing.door.assign()
        await until(lambda: not installing.processes(), "the engine is gone")
        await until(lambda: installing.shards.environments() == set(), "nobody uses it")


@pytest.mark.slow
async def test_a_shard_whose_engine_cannot_be_installed_fails_with_the_reason(
    installing: Installing, odd: Make, tmp_path: Path
) -> None:
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho 'ERROR: no luck'; exit 3\n")
    python.chmod(0o755)
    installing.settings["python"] = python
    async with installing.running():
        installing.door.assign(odd(1, engine="vllm", engine_version="1.2.3", command=None))
        word = await installing.state(1, "failed", 60)
    assert word["error"].startswith("vllm 1.2.3 could not be installed: no luck")


async def test_what_is_installed_and_what_failed_is_told_beside_engines(tmp_path: Path) -> None:
    async def rows() -> list[dict[str, Any]]:
        return [{"engine": "vllm", "version": "1", "state": "provisioning"}]

    probes, door = PaperProbes(), PaperDoor(secret="s" * 43)
    probes.facts["engines"] = [{"engine": "command", "state": "installed"}]
    facts = Facts(probes, WeightsScan([]), list, rows)
    await facts.report(door, "s" * 43)
    told = door.facts["engines"]
    assert [row["engine"] for row in told] == ["command", "vllm"]
    # The database takes 200 rows: what goes wrong is not what is left out.
    probes.facts["engines"] = [{"engine": "command", "path": str(n)} for n in range(200)]
    await facts.report(door, "s" * 43)
    assert [row["engine"] for row in door.facts["engines"]] == ["command"] * 199 + ["vllm"]
    # Engines that nobody knows now are not said to be those alone.
    probes.facts["engines"] = None
    door.facts.clear()
    await facts.report(door, "s" * 43)
    assert "engines" not in door.facts


def place_of(folder: Path, *names: str, **more: Any) -> Place:
    (folder / "bin").mkdir(parents=True)
    for name in names:
        (folder / "bin" / name).write_text("#!/bin/sh\n")
        (folder / "bin" / name).chmod(0o755)
    return Place(Path("/w"), environment=folder, **more)


@pytest.mark.parametrize(
    ("engine", "program"), [("vllm", "vllm"), ("sglang", "python3"), ("llamacpp", "python")]
)
def test_the_environment_wins_over_path_and_settings_over_it(
    tmp_path: Path, engine: str, program: str
) -> None:
    a = Assignment(1, 10, "m", "running", engine, 1, "127.0.0.1", engine_version="1.2.3")
    names = ("vllm", "python", "python3", "llama-server")
    path = place_of(tmp_path / "path", *names).environment / "bin"  # type: ignore[operator]
    home = tmp_path / "home"
    place = place_of(home, *{"python", program}, search_path=str(path))
    assert engine_of(engine).launch(a, place).argv[0] == str(home / "bin" / program)
    set_path = str(path / "vllm")
    for key in (engine, f"{engine}@1.2.3"):
        named = replace(place, engine_paths={key: set_path})
        assert engine_of(engine).launch(a, named).argv[0] == set_path


@pytest.mark.slow
@pytest.mark.timeout(600)
async def test_the_real_llamacpp_out_of_the_package_index(
    installing: Installing, llama: Make
) -> None:
    version = importlib.metadata.version("xllamacpp")
    installing.settings = {"engines": ["llamacpp"], "deadline": "8m"}
    async with installing.running():
        installing.door.assign(llama(1, engine_version=version, start_deadline_s=120))
        await until(lambda: installing.door.states.get(1) in ("ready", "failed"), "an end", 500)
        error = installing.door.words[1].get("error", "")
        if "No matching distribution" in error:
            pytest.skip(f"the package index is away or has no xllamacpp {version}: {error[:200]}")
        assert installing.door.states[1] == "ready", error
        home = installing.folder / f"engines/llamacpp-{version}"
        leaders = [Path(f"/proc/{pid}/cmdline").read_bytes() for pid in installing.processes(1)]
        assert any(str(home / "bin/python").encode() in line for line in leaders)
