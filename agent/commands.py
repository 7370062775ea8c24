"""`llmgw-agent probe` and `llmgw-agent doctor`: one look at a machine, without the agent's life.

Both work without Postgres, and below `--root` on a captured machine. Nothing is kept or written.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click
import trio

from agent import database_check, doctor, documents, health, probe_text
from agent.config import BadConfig, load, plain_probe_config
from agent.log import quiet
from agent.machine import Machine
from agent.probes import gpus
from agent.probes.fast import card_use
from agent.probes.inventory import ProbeConfig
from agent.probes.root import Root
from agent.probes.weights_scan import WeightsScan

if TYPE_CHECKING:
    from agent.probes.found import Found
    from sql.settings import DatabaseSettings

FAILED: Final = 1


def _root(prefix: Path | None, path: str | None) -> Root:
    return Root(prefix=prefix or Path("/"), path=path)


def _settings(config: Path | None, root: Root) -> tuple[ProbeConfig, DatabaseSettings | None]:
    """The agent's own settings where it has any; a captured machine has none of ours."""
    if not root.live:
        return ProbeConfig(), None
    try:
        settings = load(config)
    except BadConfig as error:
        if config is not None:
            raise click.UsageError(str(error)) from error
        return plain_probe_config(), None
    return settings.probe_config(), settings.database


async def look(root: Root, config: ProbeConfig) -> tuple[Found, dict[str, Any]]:
    """One look and the fast facts after it. What a card shows now counts, seen before or not."""
    async with Machine(config, "", root) as machine:
        found, _ = await machine.look()
        use = await machine.fast(set())
    findings = dict(found.findings)
    for card in found.gpus.cards:
        if (key := gpus.key(card)) is not None:
            known = {finding.code: finding for finding in findings.get(key, ())}
            known |= {finding.code: finding for finding in health.findings_of(card)}
            findings[key] = tuple(known[code] for code in sorted(known))
    return replace(found, findings=findings), use


async def report(root: Root, config: ProbeConfig) -> dict[str, Any]:
    """Everything that the agent would report of the machine, by kind."""
    found, use = await look(root, config)
    return {
        "host": documents.host_document(found, config),
        "load": use["load"],
        "gpus": documents.gpu_documents(found),
        "gpu_use": _use(found, use["gpus"]),
        "ports": documents.port_documents(found.ports.ports),
        "port_use": use["ports"],
        "engines": documents.engine_documents(found.engines),
        "disks": documents.disk_documents(found.disks),
        "weights": await WeightsScan(config.weights, root).read(),
        "checks": doctor.to_documents(doctor.checks(found)),
    }


def _use(found: Found, told: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Use of cards as told quickly, completed by the look before, which could wait for tools."""
    seen = [document for card in found.gpus.cards for document in card_use(card, ())]
    documents = {document["uuid"]: document for document in seen}
    for document in told:
        documents[document["uuid"]] = documents.get(document["uuid"], {}) | document
    return list(documents.values())


class Place(click.Path):
    """A directory that is there, as a Path."""

    def __init__(self) -> None:
        super().__init__(exists=True, file_okay=False, path_type=Path)


@click.command()
@click.option("--root", "prefix", type=Place(), help="A captured machine's file system.")
@click.option("--path", help="Where the captured machine's tools are; none without it.")
@click.option("--scan-dir", "dirs", multiple=True, help="Look for weights below it too.")
@click.option("--config", type=click.Path(path_type=Path), help="agent.toml to read.")
@click.option("--json", "as_json", is_flag=True, help="The documents as the agent sends them.")
def probe(
    prefix: Path | None, path: str | None, dirs: tuple[str, ...], config: Path | None, as_json: bool
) -> None:
    """Print what the agent would report of this machine."""
    root = _root(prefix, path)
    settings, _ = _settings(config, root)
    settings = replace(settings, weights=(*settings.weights, *dirs))
    with quiet():
        found = trio.run(report, root, settings)
    click.echo(json.dumps(found, indent=2) if as_json else probe_text.page(found), nl=as_json)


async def diagnose(
    root: Root, config: ProbeConfig, database: DatabaseSettings | None
) -> tuple[doctor.Check, ...]:
    """All checks: of the machine, and on the live one of the way to the database."""
    found, _ = await look(root, config)
    checks = doctor.checks(found)
    return (*checks, *await database_check.checks(database)) if root.live else checks


@click.command(name="doctor")
@click.option("--root", "prefix", type=Place(), help="A captured machine's file system.")
@click.option("--path", help="Where the captured machine's tools are; none without it.")
@click.option("--config", type=click.Path(path_type=Path), help="agent.toml to read.")
@click.option("--json", "as_json", is_flag=True, help="The checks as JSON.")
def examine(prefix: Path | None, path: str | None, config: Path | None, as_json: bool) -> None:
    """Check this machine: what is wrong, the evidence, and what to do. Exit 1 on a failure."""
    root = _root(prefix, path)
    settings, database = _settings(config, root)
    with quiet():
        checks = trio.run(diagnose, root, settings, database)
    if as_json:
        click.echo(json.dumps(doctor.to_documents(checks), indent=2))
    else:
        click.echo(doctor.to_text(checks, colour=_colour()))
    sys.exit(FAILED if doctor.worst(checks) == "fail" else 0)


def _colour() -> bool:
    return sys.stdout.isatty() and not click.get_current_context().resilient_parsing
