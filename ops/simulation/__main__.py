"""`ops/sim FLEET.yaml`: simulated nodes until Ctrl-C, against LLMGW_DATABASE_URL."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import click
import structlog
import trio

from agent.door import SqlDoor
from ops.simulation import fleet as fleets
from ops.simulation.node import build
from sql.pool import Pool, open_pool
from sql.settings import URL_VARIABLE, DatabaseSettings

log = structlog.get_logger()
SPREAD_S = 2.0
"""Agents start over this time: a fleet does not boot in one instant."""


async def run(fleet: fleets.Fleet, pool: Pool, token: str) -> None:
    """Every node's agent, for ever. ``token`` admits any new node often enough."""
    nodes, door = fleet.nodes(), SqlDoor(pool)
    async with trio.open_nursery() as nursery:
        for node in nodes:
            agent, _ = build(node, fleet.engines, door, token)
            nursery.start_soon(agent.run)
            await trio.sleep(SPREAD_S / len(nodes))
        log.info("simulated nodes run", nodes=len(nodes))


async def _main(fleet: fleets.Fleet, url: str, token: str, connections: int) -> None:
    settings = DatabaseSettings(url=url, pool_size=connections, command_timeout_s=30)
    async with open_pool(settings, "llmgw-sim") as pool:
        await run(fleet, pool, token)


@click.command()
@click.argument("file", type=click.Path(exists=True, path_type=Path), required=False)
@click.option("--nodes", type=int, default=0, help="Instead of a file: so many equal nodes.")
@click.option("--gpus", type=int, default=8, show_default=True, help="Cards per node with --nodes.")
@click.option(
    "--connections",
    type=int,
    default=8,
    show_default=True,
    help="Database connections for all nodes.",
)
def main(file: Path | None, nodes: int, gpus: int, connections: int) -> None:
    """Run a simulated fleet of FILE (see ops/simulation/fleet.py) or of --nodes equal nodes.

    LLMGW_DATABASE_URL: a login of role llmgw_agent. LLMGW_ENROLMENT_TOKEN: a token for any
    new node with enough uses, from `llmgwctl node enroll --uses N`.
    """
    url, token = os.environ.get(URL_VARIABLE), os.environ.get("LLMGW_ENROLMENT_TOKEN")
    if not url or not token:
        sys.exit(f"ops/sim: set {URL_VARIABLE} and LLMGW_ENROLMENT_TOKEN (see ops/sim --help)")
    if file is None and nodes < 1:
        sys.exit("ops/sim: name a fleet file or --nodes N")
    fleet = fleets.read(file) if file is not None else fleets.uniform(nodes, gpus)
    try:
        trio.run(_main, fleet, url, token, connections)
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
