"""llama.cpp: its `llama-server` program, or the same server from the wheel `xllamacpp`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from agent.engines.launch import (
    CannotLaunch,
    Launch,
    Place,
    has_option,
    option,
    single_node,
)
from agent.readiness import Check

if TYPE_CHECKING:
    from agent.assignment import Assignment

FRONT = Path(__file__).with_name("llama_server.py")
FIRST_OF_SPLIT = "-00001-of-"


def gguf_file(path: Path, model: str) -> Path:
    """The GGUF to load: the file itself, or the only one (the first of a split one) in a folder."""
    if not path.is_dir():
        return path
    files = sorted(path.rglob("*.gguf"))
    heads = [f for f in files if "-of-" not in f.name or FIRST_OF_SPLIT in f.name]
    if len(heads) == 1:
        return heads[0]
    if not heads:
        raise CannotLaunch(f"the weights of model {model} at {path} hold no .gguf file")
    names = ", ".join(f.name for f in heads[:8])
    raise CannotLaunch(
        f"the weights of model {model} hold {len(heads)} GGUF files ({names}): "
        "name one in the source, as hf:org/repo/file.gguf"
    )


class LlamaCpp:
    """/health answers 503 while loading; /v1/models names the alias."""

    numbers_only = False

    def launch(self, a: Assignment, place: Place) -> Launch:
        """`llama-server` from the settings or PATH, else our own front of the wheel."""
        single_node(a)
        program = place.program(a, "llama-server")
        # The front drains on SIGTERM; 2 s of the grace are left for it to exit by itself.
        drain = f"{max(0.0, a.stop_grace_s - 2):g}"
        # By path, and -P: it must start in any folder, and not find our vllm.py for vLLM.
        front = (place.python, "-P", str(FRONT), "--drain", drain)
        argv = [*((program,) if program else front)]
        argv += ["-m", str(gguf_file(place.weights(a), a.model)), "--alias", a.model]
        argv += ["--host", a.host, "--port", str(a.port), "--metrics"]
        if a.cpus and not has_option(a.args, "-t", "--threads"):
            # Threads beyond the share spin and starve the others (engines.md).
            argv += ["-t", str(max(1, round(a.cpus)))]
        return Launch((*argv, *a.args))

    def check(self, a: Assignment) -> Check:
        """Ready when healthy and serving our alias."""
        bearer = option(a.args, "--api-key")
        return Check(a.host, a.port, a.health_path or "/health", a.model, bearer)
