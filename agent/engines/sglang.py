"""SGLang: `python -m sglang.launch_server` of the Python that has it."""

from __future__ import annotations

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


class SGLang:
    """/health answers 200 once the server is up."""

    numbers_only = True

    def launch(self, a: Assignment, place: Place) -> Launch:
        """The program is a Python interpreter: SGLang is a module, not a command."""
        single_node(a)
        program = place.program(a, "python3")
        if program is None:
            raise CannotLaunch(
                f"model {a.model} needs SGLang and this node has no python3 in PATH: "
                'set engine_paths = { sglang = "/path/to/venv/bin/python" } in agent.toml'
            )
        argv = [program, "-m", "sglang.launch_server", "--model-path", str(place.weights(a))]
        argv += ["--served-model-name", a.model, "--host", a.host, "--port", str(a.port)]
        argv += ["--enable-metrics"]
        if len(a.gpus) > 1 and not has_option(
            a.args, "--tp-size", "--tp", "--tensor-parallel-size"
        ):
            argv += ["--tp-size", str(len(a.gpus))]
        return Launch((*argv, *a.args), {"HF_HUB_OFFLINE": "1"})

    def check(self, a: Assignment) -> Check:
        """Ready when healthy and serving our name."""
        bearer = option(a.args, "--api-key")
        return Check(a.host, a.port, a.health_path or "/health", a.model, bearer)
