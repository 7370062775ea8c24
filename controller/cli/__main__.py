"""`python -m controller.cli`, the same as `llmgwctl`."""

from __future__ import annotations

from controller.cli.root import main

main()
