"""Wheels made by hand: an engine that is a few lines of Python, so that no index is needed."""

from __future__ import annotations

import zipfile
from pathlib import Path

TESTS = Path(__file__).parents[1]
VLLM = """
import runpy, sys

def main():
    # `vllm serve WEIGHTS --served-model-name NAME --host H --port P` as the odd engine reads it.
    words = sys.argv[1:]
    name = words[words.index("--served-model-name") + 1]
    port = words[words.index("--port") + 1]
    print("vllm", __import__("vllm").VERSION, "from", sys.prefix, flush=True)
    sys.argv = ["odd_engine.py", "--port", port, "--model", name]
    runpy.run_path(ODD, run_name="__main__")
"""


def wheel(
    folder: Path,
    name: str,
    version: str,
    *,
    module: str | None = None,
    script: str | None = None,
    said: str | None = None,
    needs: tuple[str, ...] = (),
) -> Path:
    """Write a wheel; `said` is the version inside when it lies; without `module` it is empty."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name.replace('-', '_')}-{version}-py3-none-any.whl"
    info = f"{name.replace('-', '_')}-{said or version}.dist-info"
    files = {
        f"{info}/METADATA": "\n".join(
            [
                "Metadata-Version: 2.1",
                f"Name: {name}",
                f"Version: {said or version}",
                *(f"Requires-Dist: {need}" for need in needs),
                "",
            ]
        ),
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: hand\nRoot-Is-Purelib: true\n"
        "Tag: py3-none-any\n",
    }
    if module is not None:
        code = f"VERSION = {version!r}\nODD = {str(TESTS / 'agent/odd_engine.py')!r}\n{VLLM}"
        files[f"{module}/__init__.py"] = code
    if script is not None:
        files[f"{info}/entry_points.txt"] = f"[console_scripts]\n{script} = {module}:main\n"
    files[f"{info}/RECORD"] = "".join(f"{f},,\n" for f in (*files, f"{info}/RECORD"))
    with zipfile.ZipFile(path, "w") as archive:
        for file, text in files.items():
            archive.writestr(file, text)
    return path


def vllm(folder: Path, version: str, said: str | None = None) -> Path:
    """A wheel of "vLLM"."""
    return wheel(folder, "vllm", version, module="vllm", script="vllm", said=said)
