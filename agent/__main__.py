"""`llmgw-agent`: settings, signals, and the order of starting and stopping."""

from __future__ import annotations

import sql.plain_logs  # noqa: F401 - before anything that imports structlog

# isort: split
import signal
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import structlog
import trio

from agent import __version__, provision
from agent.address import LOOPBACK
from agent.commands import examine, probe
from agent.config import AgentSettings, BadConfig, engine_environment, fetch_environment, load
from agent.door import SqlDoor
from agent.facts import Facts
from agent.log import configure
from agent.loop import Agent
from agent.machine import Machine
from agent.probes.inventory import read_engines
from agent.probes.root import Root
from agent.probes.weights_scan import WeightsScan
from agent.provision import Provision
from agent.shards import Shards
from agent.state import StateDir, StateDirBusy, node_secret
from agent.supervise import Site
from agent.weights import Weights
from agent.weights_collect import Collector
from sql.pool import open_pool

if TYPE_CHECKING:
    from agent.door import Door

log = structlog.get_logger()


def provisioner(settings: AgentSettings, state: StateDir, machine: Machine) -> Provision:
    """What installs engines here, as far as the settings allow it."""
    site = provision.Site(
        folder=settings.engines_path,
        logs=state.logs,
        env=engine_environment(),
        engine_paths=settings.engine_paths,
        found=partial(read_engines, Root(), settings.probe_config()),
        changed=machine.wake,
    )
    return Provision(settings.provision, site)


def build(
    settings: AgentSettings, door: Door, state: StateDir, machine: Machine, engines: Provision
) -> tuple[Agent, Shards]:
    """An agent out of its settings, and the shards that it works on."""
    env = engine_environment()
    weights = Weights(
        settings.weights_path.resolve(),
        fetch_environment(),
        settings.weights_reserve,
        settings.hf_token_file,
    )
    site = Site(
        node=settings.node,
        state=state,
        weights=weights,
        env=env,
        engine_paths=settings.engine_paths,
        numbering=machine.numbering,
        released=machine.released,
        provision=engines.ensure,
    )
    shards = Shards(site, settings.mgmt_addr or LOOPBACK)
    agent = Agent(
        node=settings.node,
        secret=node_secret(settings.secret_path),
        enrolment_token=settings.token(),
        door=door,
        state=state,
        shards=shards,
        facts=Facts(machine, WeightsScan(settings.scan_paths), shards.sources, engines.rows),
        engine_log_bytes=settings.engine_log_size,
        collector=Collector(weights, shards.sources_in_use),
    )
    return agent, shards


async def serve(settings: AgentSettings, state: StateDir) -> None:
    """Run until SIGTERM or SIGINT."""
    url = settings.database.url.get_secret_value()
    machine = Machine(settings.probe_config(), url, ledger_file=state.path / "health.json")
    async with open_pool(settings.database, f"llmgw-agent {settings.node}") as pool, machine:
        engines = provisioner(settings, state, machine)
        agent, shards = await trio.to_thread.run_sync(
            build, settings, SqlDoor(pool), state, machine, engines
        )
        tidy = partial(
            engines.keep_tidy, shards.environments, partial(agent.loops.succeeded, "engines")
        )
        with trio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(agent.run)
                nursery.start_soon(agent.loops.supervise, "engines", tidy)
                log.info("agent runs", state_dir=str(state.path), version=__version__)
                async for number in signals:
                    log.info("signal", name=signal.Signals(number).name)
                    break
                await agent.shut_down(keep=settings.on_exit == "keep")
                nursery.cancel_scope.cancel()


def _labels(pairs: tuple[str, ...]) -> dict[str, str] | None:
    return dict(pair.split("=", 1) for pair in pairs) if pairs else None


def _check_label(_: Any, __: Any, value: tuple[str, ...]) -> tuple[str, ...]:
    for pair in value:
        if "=" not in pair:
            raise click.BadParameter(f"{pair} is not name=value")
    return value


@click.group(invoke_without_command=True)
@click.option("--config", "path", type=click.Path(path_type=Path), help="agent.toml to read.")
@click.option("--node", help="Name of this node; the host's name by default.")
@click.option("--state-dir", type=click.Path(path_type=Path), help="Folder of secret, state, logs.")
@click.option("--weights-dir", type=click.Path(path_type=Path), help="Folder of downloads.")
@click.option("--enrolment-token-file", type=click.Path(path_type=Path), help="For a new node.")
@click.option("--mgmt-addr", help="Address under which routers reach engines here.")
@click.option("--ports", help="Ports for engines, as 20000-20999.")
@click.option("--label", "labels", multiple=True, callback=_check_label, help="name=value.")
@click.option("--on-exit", type=click.Choice(["keep", "stop"]), help="Engines at the agent's end.")
@click.option("--log-level", type=click.Choice(["debug", "info", "warning"]))
@click.version_option(__version__)
@click.pass_context
def main(
    context: click.Context, /, path: Path | None, labels: tuple[str, ...], **flags: Any
) -> None:
    """Run inference engines on this node as Postgres says; or, as a command, look at the node.

    The database URL comes from LLMGW_DATABASE_URL or agent.toml, the enrolment token from
    LLMGW_ENROLMENT_TOKEN or a file: flags can be read by every user of the machine.
    """
    if context.invoked_subcommand is not None:
        return
    try:
        settings = load(path, {**flags, "labels": _labels(labels)})
        state = StateDir(settings.state_dir)
    except (BadConfig, StateDirBusy, OSError) as error:
        click.echo(f"llmgw-agent: {error}", err=True)
        sys.exit(1 if isinstance(error, StateDirBusy) else 2)
    file = configure(state.agent_log, settings.node, settings.log_level)
    try:
        trio.run(serve, settings, state)
    except BadConfig as error:
        click.echo(f"llmgw-agent: {error}", err=True)
        sys.exit(2)
    finally:
        state.close()
        file.close()


main.add_command(probe)
main.add_command(examine)

if __name__ == "__main__":
    main()
