"""vLLM: `vllm serve`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from agent.assignment import NVLINK
from agent.engines.gang import environment, gang_of, own_address, parallelism, without_door
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

TENSOR = ("--tensor-parallel-size", "-tp")
PIPELINE = ("--pipeline-parallel-size", "-pp")
DATA = ("--data-parallel-size", "-dp")
MEMORY = "--gpu-memory-utilization"


class Vllm:
    """/health refuses connections until the model is loaded."""

    numbers_only = True

    def launch(self, a: Assignment, place: Place) -> Launch:
        """The weights are local already: vLLM shall ask no hub and send no statistics."""
        gang = gang_of(a)
        program = place.program(a, "vllm")
        if program is None:
            raise CannotLaunch(
                f"model {a.model} needs vLLM and this node has no `vllm` in PATH: install it or "
                'set engine_paths = { vllm = "/path/to/vllm" } in agent.toml'
            )
        argv = [program, "serve", str(place.weights(a)), "--served-model-name", a.model]
        env = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
        argv += ["--host", a.host, "--port", str(a.port)] if a.rank == 0 else ["--headless"]
        if gang is not None:
            argv += self._of_gang(a, gang)
            env |= {"VLLM_HOST_IP": own_address(a.host), **environment(a, gang)}
        elif not has_option(a.args, *TENSOR) and (width := self._width(a)) > 1:
            argv += [TENSOR[0], str(width)]
        shares = [gpu.share for gpu in a.gpus if gpu.share is not None]
        if shares and not has_option(a.args, MEMORY):
            # By itself it takes nine tenths of a card, whoever else has a claim there.
            argv += [MEMORY, f"{min(shares):g}"]
        return Launch((*argv, *a.args), env)

    @staticmethod
    def _width(a: Assignment) -> int:
        """Cards of one tensor: all, less what the profile's stages and copies take of them."""
        parts = 1
        for names in (PIPELINE, DATA):
            given = option(a.args, *names) or "1"
            parts *= int(given) if given.isdecimal() and int(given) > 0 else 1
        return len(a.gpus) // parts if len(a.gpus) % parts == 0 else len(a.gpus)

    def _of_gang(self, a: Assignment, gang: Gang) -> list[str]:
        argv = ["--nnodes", str(gang.nodes), "--node-rank", str(a.rank)]
        argv += ["--master-addr", gang.head, "--master-port", str(gang.master_port)]
        if has_option(a.args, *DATA):  # then the profile has its own idea of all of it
            return argv
        # One tensor over all nodes needs NVLink between them; processors have nothing faster.
        wide = gang.transport == NVLINK or not a.gpus
        return argv + parallelism(a, gang, TENSOR, PIPELINE, wide=wide)

    def check(self, a: Assignment) -> Check:
        """Ready when healthy and serving our name; /v1 wants the key when one is set."""
        if (rank := without_door(a)) is not None:
            return rank
        bearer = option(a.args, "--api-key") or a.env.get("VLLM_API_KEY")
        return Check(a.host, a.port, a.health_path or "/health", a.model, bearer)
