"""vLLM: `vllm serve`."""

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


class Vllm:
    """/health refuses connections until the model is loaded."""

    numbers_only = True

    def launch(self, a: Assignment, place: Place) -> Launch:
        """The weights are local already: vLLM shall ask no hub and send no statistics."""
        single_node(a)
        program = place.program(a, "vllm")
        if program is None:
            raise CannotLaunch(
                f"model {a.model} needs vLLM and this node has no `vllm` in PATH: install it or "
                'set engine_paths = { vllm = "/path/to/vllm" } in agent.toml'
            )
        argv = [program, "serve", str(place.weights(a)), "--served-model-name", a.model]
        argv += ["--host", a.host, "--port", str(a.port)]
        if len(a.gpus) > 1 and not has_option(a.args, "--tensor-parallel-size", "-tp"):
            argv += ["--tensor-parallel-size", str(len(a.gpus))]
        return Launch((*argv, *a.args), {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"})

    def check(self, a: Assignment) -> Check:
        """Ready when healthy and serving our name; /v1 wants the key when one is set."""
        bearer = option(a.args, "--api-key") or a.env.get("VLLM_API_KEY")
        return Check(a.host, a.port, a.health_path or "/health", a.model, bearer)
