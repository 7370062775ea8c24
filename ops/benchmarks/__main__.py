"""`ops/bench`: one sub-command per benchmark; each prints a table and writes JSON on request."""

from __future__ import annotations

import click

from ops.benchmarks.chaos import chaos
from ops.benchmarks.discovery import discovery
from ops.benchmarks.keys import keys
from ops.benchmarks.path import path
from ops.benchmarks.router import router
from ops.benchmarks.scale import scale
from ops.benchmarks.snapshot import snapshot
from ops.benchmarks.tick import tick
from ops.benchmarks.usage import usage


@click.group()
def main() -> None:
    """Measure what parts of llmgw cost on this machine."""


main.add_command(chaos)
main.add_command(discovery)
main.add_command(keys)
main.add_command(path)
main.add_command(router)
main.add_command(scale)
main.add_command(snapshot)
main.add_command(tick)
main.add_command(usage)

if __name__ == "__main__":
    main()
