"""SGLang: `python -m sglang.launch_server` of the Python that has it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from agent.engines.gang import environment, gang_of, parallelism, without_door
from agent.engines.launch import (
    CannotLaunch,
    Launch,
    Place,
    has_option,
    option,
)
from agent.readiness import Check

if TYPE_CHECKING:
    from agent.assignment import Assignment, Gang

TENSOR = ("--tp-size", "--tp", "--tensor-parallel-size")
PIPELINE = ("--pp-size", "--pipeline-parallel-size")


class SGLang:
    """/health answers 200 once the server is up."""

    numbers_only = True

    def launch(self, a: Assignment, place: Place) -> Launch:
        """The program is a Python interpreter: SGLang is a module, not a command."""
        gang = gang_of(a)
        program = place.program(a, "python3")
        if program is None:
            raise CannotLaunch(
                f"model {a.model} needs SGLang and this node has no python3 in PATH: "
                'set engine_paths = { sglang = "/path/to/venv/bin/python" } in agent.toml'
            )
        argv = [program, "-m", "sglang.launch_server", "--model-path", str(place.weights(a))]
        argv += ["--served-model-name", a.model, "--host", a.host, "--port", str(a.port)]
        argv += ["--enable-metrics"]
        env = {"HF_HUB_OFFLINE": "1"}
        if gang is not None:
            argv += self._of_gang(a, gang)
            env |= environment(a, gang)
        elif len(a.gpus) > 1 and not has_option(a.args, *TENSOR):
            argv += [TENSOR[0], str(len(a.gpus))]
        return Launch((*argv, *a.args), env)

    def _of_gang(self, a: Assignment, gang: Gang) -> list[str]:
        """Ranks above 0 keep host and port: SGLang opens a door there that answers nothing."""
        head = f"[{gang.head}]" if ":" in gang.head else gang.head
        argv = ["--nnodes", str(gang.nodes), "--node-rank", str(a.rank)]
        argv += ["--dist-init-addr", f"{head}:{gang.master_port}"]
        return argv + parallelism(a, gang, TENSOR, PIPELINE, wide=True)

    def check(self, a: Assignment) -> Check:
        """Ready when healthy and serving our name."""
        if (rank := without_door(a)) is not None:
            return rank
        bearer = option(a.args, "--api-key")
        return Check(a.host, a.port, a.health_path or "/health", a.model, bearer)
