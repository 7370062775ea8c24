"""Where Python environments lie that may hold an engine.

Called by engines.py; blocking. Looks in the usual places by listing directories only: virtual and
conda environments below /opt and the agent's home, pipx and uv tools, the system's own packages,
and whatever a script in PATH was installed from.
"""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterable

    from agent.probes.root import Root

MAX_ENVIRONMENTS: Final = 256
MAX_NAMES: Final = 64
CONDAS: Final = ("miniconda3", "anaconda3", "miniforge3", "mambaforge", "micromamba", ".conda")
TOOLS: Final = (
    ".local/share/pipx/venvs",
    ".local/pipx/venvs",
    ".local/share/uv/tools",
    ".virtualenvs",
)
SYSTEM: Final = ("/usr/local", "/usr")
_SHEBANG: Final = re.compile(
    r"""^(?:#!|'''exec' )\s*["']?(/[^\s"'][^\n"']{0,4095}?/bin)/python""", re.MULTILINE
)


def environments(root: Root, homes: Iterable[str] = ()) -> list[str]:
    """Prefixes of environments in the usual places, each once."""
    found: list[str] = []
    for name in root.names("/opt")[:MAX_NAMES]:
        found += _around(root, f"/opt/{name}")
    for parent in ("/opt/pipx/venvs", "/opt/uv/tools"):
        found += _below(root, parent)
    for home in homes:
        found += [f"{home}/.local", f"{home}/venv", f"{home}/.venv"]
        for conda in CONDAS:
            found += [f"{home}/{conda}", *_below(root, f"{home}/{conda}/envs")]
        for tools in TOOLS:
            found += _below(root, f"{home}/{tools}")
        found += listed(root.read(f"{home}/.conda/environments.txt", 65536))
    found += SYSTEM
    return list(dict.fromkeys(found))[:MAX_ENVIRONMENTS]


def _around(root: Root, base: str) -> list[str]:
    return [base, f"{base}/venv", f"{base}/.venv", f"{base}/env", *_below(root, f"{base}/envs")]


def _below(root: Root, parent: str) -> list[str]:
    return [f"{parent}/{name}" for name in root.names(parent)[:MAX_NAMES]]


def listed(text: str | None) -> list[str]:
    """Prefixes that conda notes of a user's environments, one a line."""
    lines = (line.strip() for line in (text or "").splitlines()[:MAX_NAMES])
    return [line for line in lines if line.startswith("/") and line.isprintable()]


def homes_of(root: Root) -> list[str]:
    """Home directories to look in: the agent's own, or root's on a captured machine."""
    return [os.path.expanduser("~")] if root.live else ["/root"]  # noqa: PTH111 - text is wanted


def script_environments(root: Root, program: str) -> list[str]:
    """Environments that a script in PATH may belong to: by its first line, and where it lies.

    Tools of pipx and uv are links in ~/.local/bin to a script in their environment.
    """
    try:
        with open(program, "rb") as file:  # noqa: PTH123 - a place in our own file system
            start = file.read(8192).decode("utf-8", errors="replace")
    except OSError:
        start = ""
    found = prefixes_of_script(start)
    if root.live:
        found.append(os.path.dirname(os.path.dirname(os.path.realpath(program))))  # noqa: PTH120
    return list(dict.fromkeys(found))


def prefixes_of_script(start: str) -> list[str]:
    """`#!/opt/x/bin/python3` -> `/opt/x`; long paths are in a second line, after `exec`."""
    head = "\n".join(start[:8192].splitlines()[:2])
    return [match[1].removesuffix("/bin") or "/" for match in _SHEBANG.finditer(head)]


def site_packages(root: Root, prefix: str) -> list[str]:
    """Package directories of an environment; Debian calls those of the system dist-packages."""
    return [
        f"{prefix}/{lib}/{name}/{kind}"
        for lib in ("lib", "lib64")
        for name in root.names(f"{prefix}/{lib}")
        if name.startswith("python3")
        for kind in ("site-packages", "dist-packages")
    ]
