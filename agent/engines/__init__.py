"""Engines: how an assignment becomes a command, an environment and a readiness check.

One file per engine and one line in ENGINES. An engine is a pure translation: it looks programs up
but starts nothing (agent.supervise does). To add one: write its file, add its line and a test.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from agent.engines.command import Command
from agent.engines.devices import devices, hint
from agent.engines.launch import CannotLaunch, Launch, Place
from agent.engines.llamacpp import LlamaCpp
from agent.engines.sglang import SGLang
from agent.engines.vllm import Vllm

if TYPE_CHECKING:
    from agent.engines.launch import Engine

__all__ = ["ENGINES", "CannotLaunch", "Launch", "Place", "devices", "engine_of", "hint"]

ENGINES: dict[str, Engine] = {
    "llamacpp": LlamaCpp(),
    "vllm": Vllm(),
    "sglang": SGLang(),
    "command": Command(),
}


def engine_of(name: str) -> Engine:
    """The engine of this name; CannotLaunch lists those there are."""
    try:
        return ENGINES[name]
    except KeyError:
        raise CannotLaunch(
            f"this agent knows no engine {name!r}, only {', '.join(ENGINES)}: "
            "upgrade the agent or change the profile"
        ) from None
