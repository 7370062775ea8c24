"""The client port: an OpenAI-compatible router. `run_router` runs one process of it."""

from __future__ import annotations

from controller.router.config import Limits, RouterConfig, StaticEndpoint, StaticKey, Timeouts
from controller.router.server import run_router

__all__ = ["Limits", "RouterConfig", "StaticEndpoint", "StaticKey", "Timeouts", "run_router"]
