"""Runs the real child with the library beside it: `child.py SCENARIO_JSON [words]`."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pynvml  # the one in this folder, which is first in sys.path

sys.path.append(str(Path.cwd()))
pynvml.SCENARIO = json.loads(sys.argv.pop(1))

from agent.probes import nvml_child  # noqa: E402 - found in the working directory added above

nvml_child.CONTROL = pynvml.SCENARIO.get("control", "/dev/null")
nvml_child.main(sys.argv[1:])
