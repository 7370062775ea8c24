"""Options in a profile's args that no start could survive: what llmgw itself sets, too few cards.

Pure; called by `profile.py`. All else in args is the engine's to judge.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from controller.placement.fit_options import Options

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_PORT: Final = "llmgw gives each start a port and asks there whether the engine is ready: drop it"
_NAME: Final = "a model is served under its own name, its aliases besides: drop it"
_WEIGHTS: Final = "the weights are the model's source: drop it"
_KEY: Final = (
    "routers send engines that llmgw starts no key, and who is on the node can read it: drop it, "
    "and let only routers reach the engines' ports"
)
OURS: Final[Mapping[str, Mapping[str, str]]] = {
    "vllm": {"--port": _PORT, "--served-model-name": _NAME, "--model": _WEIGHTS, "--api-key": _KEY},
    "sglang": {
        "--port": _PORT,
        "--api-key": _KEY,
        "--served-model-name": _NAME,
        "--model-path": _WEIGHTS,
        "--model": _WEIGHTS,
    },
    "llamacpp": {
        "--port": _PORT,
        "--api-key": _KEY,
        "-a": _NAME,
        "--alias": _NAME,
        "-m": _WEIGHTS,
        "--model": _WEIGHTS,
    },
}
"""Engine -> option -> why not. The agent sets most, and would wait for what would never come."""
SPLITS: Final[Mapping[str, tuple[tuple[str, ...], tuple[str, ...]]]] = {
    "vllm": (("--tensor-parallel-size", "-tp"), ("--pipeline-parallel-size", "-pp")),
    "sglang": (
        ("--tp-size", "--tp", "--tensor-parallel-size"),
        ("--pp-size", "--pipeline-parallel-size"),
    ),
}
"""Engine -> names of the options for cards of one tensor and for stages of a pipeline."""

SHARE: Final = "--mem-fraction-static"


def greedy(engine: str, args: Sequence[str]) -> str | None:
    """Why an engine would not keep to its claim of a shared card. The agent tells vLLM its part."""
    if engine != "sglang" or Options(args, {}).text(SHARE) is not None:
        return None
    return (
        f"share with sglang needs {SHARE} in args: else it takes nearly all that the card has free"
    )


def fault(engine: str, args: Sequence[str], gpus: int, shards: int) -> str | None:
    """Why an engine with these arguments on ``gpus`` cards of each of ``shards`` nodes would fail.

    Copies of a model (data parallel) are not counted: they may be replicas of their own.
    """
    options = Options(args, {})
    for name, why in OURS.get(engine, {}).items():
        if options.flag(name):
            return f"args has {name}: {why}"
    if engine not in SPLITS or gpus == 0:
        return None
    tensor, stages = (options.one(*names) for names in SPLITS[engine])
    if tensor * stages <= gpus * shards:
        return None
    product = f"{tensor} x {stages} cards" if stages > 1 else f"{tensor} cards"
    given = f"{gpus} on each of {shards} nodes" if shards > 1 else str(gpus)
    return (
        f"args want {product} ({', '.join(names[0] for names in SPLITS[engine])}) and the profile "
        f"has {given}: raise gpus or shards, or lower them"
    )
