"""Commands of the catalog: models, model add and remove, scale, apply."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import orjson

from controller.cli.client import part
from controller.cli.failures import Failure
from controller.cli.node import Duration
from controller.cli.output import lines
from controller.cli.words import age, joined

if TYPE_CHECKING:
    from controller.cli.session import Session

PRICE_COLUMNS = ("MODEL", "PROMPT", "CACHED", "COMPLETION", "SINCE", "UNTIL", "SET BY")
COLUMNS = ("MODEL", "REPLICAS", "ALIASES", "PROFILES", "FALLBACKS")


@click.command()
@click.option("--prices", is_flag=True, help="What they cost, and cost before.")
@click.pass_obj
def models(session: Session, prices: bool) -> None:
    """The catalog and what runs of it."""
    found = session.client.pages("/models")
    if prices:
        known = session.client.pages("/prices")
        session.out.show(known, lambda: _prices_text(session, found, known))
        return
    rows = (
        (m["name"], f"{m['ready_replicas']}/{m['min_replicas']} ready "
         f"({m['total_replicas']} total)", joined(m.get("aliases")), joined(m.get("profiles")),
         joined(m.get("fallbacks")))
        for m in found
    )  # fmt: skip
    empty = "No models. Add one with llmgwctl apply -f catalog.toml or llmgwctl model add FILE."
    session.out.show(found, lambda: session.out.table(COLUMNS, rows) if found else empty)


def _prices_text(
    session: Session, models: list[dict[str, Any]], known: list[dict[str, Any]]
) -> str:
    """In micros per million tokens; a model that has no price now has a line that says so."""
    unpriced = [{"model": m["name"]} for m in models if "prices" not in m]
    rows = (
        (p["model"], p.get("prompt"), p.get("cached"), p.get("completion"), _time(p.get("since")),
         _time(p.get("until")), p.get("set_by"))
        for p in sorted([*unpriced, *known], key=lambda p: p["model"])
    )  # fmt: skip
    if not models and not known:
        return "No models."
    return lines(
        session.out.table(PRICE_COLUMNS, rows),
        "Micros per million tokens; - is unpriced, not free.",
    )


def _time(at: str | None) -> str | None:
    return None if at is None else at[:19].replace("T", " ")


@click.group()
def model() -> None:
    """Add a model to the catalog or remove one."""


@model.command()
@click.argument("file", type=click.Path(dir_okay=False, allow_dash=True))
@click.pass_obj
def add(session: Session, file: str) -> None:
    """Add the model that FILE (TOML or JSON; - is stdin) defines, or change it."""
    document = read_document(file)
    if "models" in document:
        if (
            len(document) > 1
            or not isinstance(document["models"], list)
            or len(document["models"]) != 1
        ):
            raise Failure(f"{file} is a whole catalog: use llmgwctl apply -f {file}")
        document = document["models"][0]
    done = session.client.post("/models", document)
    said = f"Model {done['added']}: {done['action']}."
    session.out.show(done, lambda: lines(said, *_details(done["added"], done), *_notes(done)))


@model.command()
@click.argument("name")
@click.pass_obj
def remove(session: Session, name: str) -> None:
    """Remove a model; its replicas finish what they do and stop."""
    done = session.client.delete(f"/models/{part(name)}")
    left = done.get("replicas")
    follows = f"its replicas {joined(left)} drain and go" if left else "it had no replicas"
    session.out.show(done, lambda: f"Model {name} is removed; {follows}.")


@click.command()
@click.argument("name")
@click.option("--min", "least", type=int, required=True, help="0: on demand.")
@click.option("--max", "most", type=int, help="[as --min, at least 1]")
@click.option("--idle-timeout", type=Duration(), help='Such as "15m". [stays]')
@click.pass_obj
def scale(
    session: Session, name: str, least: int, most: int | None, idle_timeout: float | None
) -> None:
    """Set how many replicas a model has."""
    body = {"min": least, "max": most, "idle_timeout": idle_timeout}
    given = {field: value for field, value in body.items() if value is not None}
    now = session.client.post(f"/models/{part(name)}/scale", given)
    idle = f", idle timeout {age(now['idle_timeout'])}" if "idle_timeout" in now else ""
    demand = ", on demand" if now["on_demand"] else ""
    said = f"Model {name}: min {now['min']}, max {now['max']}{idle}{demand}."
    session.out.show(now, lambda: said)


@click.command()
@click.option(
    "-f",
    "--file",
    required=True,
    type=click.Path(dir_okay=False, allow_dash=True),
    help="Catalog in TOML or JSON; - is stdin and needs --name.",
)
@click.option("--dry-run", is_flag=True, help="Show what would change, keep nothing.")
@click.option("--name", help="Name under which the file is kept. [its absolute path]")
@click.pass_obj
def apply(session: Session, file: str, dry_run: bool, name: str | None) -> None:
    """Make the catalog what a file says; what it declared before and no longer does is removed."""
    if file == "-" and name is None:
        raise click.UsageError("-f - has no name to keep the catalog under: give --name")
    document = read_document(file)
    if "file" in document:
        raise Failure(f"{file}: unknown field 'file', the fields are pools, models")
    body = document | {"file": name or str(Path(file).absolute())}
    done = session.client.post("/catalog", body, dry_run=dry_run)
    session.out.show(done, lambda: _applied(session, done))


def _applied(session: Session, done: dict[str, Any]) -> str:
    news = [c for c in done["changes"] if c["action"] != "unchanged"]
    same = len(done["changes"]) - len(news)
    end = f"{same} unchanged." + (" Dry run: nothing was kept." if done["dry_run"] else "")
    rows = ((c["action"], c["kind"], c["name"]) for c in news)
    return lines(
        session.out.table(("CHANGE", "KIND", "NAME"), rows) if news else "",
        *(line for c in news for line in _details(f"{c['kind']} {c['name']}", c)),
        *_notes(done),
        end,
    )


def _details(name: str, change: dict[str, Any]) -> list[str]:
    """A line for each field that differs; of fingerprints the notes tell what follows."""
    return [
        f"{name}: {d['field']}: {_value(d.get('was'))} -> {_value(d.get('now'))}"
        for d in change.get("differences", [])
        if not d["field"].endswith(".fingerprint")
    ]


def _value(value: Any) -> str:
    return "-" if value is None else orjson.dumps(value).decode()


def _notes(done: dict[str, Any]) -> list[str]:
    return [f"note: {note}" for note in done.get("notes", [])]


def read_document(file: str) -> dict[str, Any]:
    """The document in a TOML or JSON file; `-` is stdin. Failure says where it is broken."""
    from controller.catalog.faults import CatalogError
    from controller.catalog.reading import document_of, read_text

    try:
        if file == "-":
            return document_of(sys.stdin.read(), "stdin")
        return document_of(read_text(Path(file)), file)
    except CatalogError as error:
        raise Failure(str(error)) from None
