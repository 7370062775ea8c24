"""`llmgwctl`: the operator's command line over the admin API.

`root.py` holds the command table and the exit codes, `client.py` the HTTP, `output.py` what goes to
stdout and stderr; each other file is one group of commands.
"""

from __future__ import annotations

from controller.cli.root import main

__all__ = ["main"]
