"""The catalog that `up` applies when none is named: one small real model, served on the CPU."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING
from urllib.parse import quote

if TYPE_CHECKING:
    from pathlib import Path

MODEL = "smollm2-135m"
ALIAS = "demo"


def catalog(weights: Path) -> str:
    """The demo's catalog as TOML."""
    # llama.cpp's threads spin: on two cores a second one would fight the router for them.
    cpus = 1 if (os.cpu_count() or 1) <= 2 else 2
    return f"""\
# Written by `llmgwctl up` at each start. A catalog of your own: llmgwctl up --catalog FILE
[[models]]
name = "{MODEL}"
description = "SmolLM2-135M-Instruct: small, fast on a CPU, and often wrong on facts"
aliases = ["{ALIAS}"]
source = "file:{quote(str(weights))}"

[[models.profiles]]
name = "cpu"
engine = "llamacpp"
args = ["-c", "8192", "-np", "4"]
cpus = {cpus}
memory = "512MiB"
"""


def none() -> str:
    """The demo's catalog once its user wants it no more."""
    return "# Written by `llmgwctl up`: the demo was switched off.\nmodels = []\n"
