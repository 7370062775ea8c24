"""`llmgwctl up`: one installation on this machine, from nothing to a model that answers.

It starts what a fleet would have on many machines: Postgres (or a given one), a controller, an
agent, and a catalog; all are the real programs, run as children. Called by controller/cli/up.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path


class CannotStart(Exception):
    """Why there is no running installation, and what to do; for people."""


@dataclass(frozen=True, slots=True)
class Options:
    """What `llmgwctl up` was asked for."""

    state_dir: Path
    database_url: str | None = None
    host: str = "127.0.0.1"
    port: int = 8080
    admin_port: int = 9090
    engine_ports: str = "20000-20999"
    catalog: Path | None = None
    demo: bool = True
    check: bool = False
    """Stream one answer, then stop in order: for tests and measurements."""
    wait_s: float = 1800.0
    """How long models may take until they are ready; downloads count."""
    answer_s: float = 60.0
    """For a first answer once a model is ready; a new router reads its table within 2 s."""
