"""`llmgwctl what-if`: what the planner would do on a changed fleet, without doing it."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Final

import click

from controller.cli.failures import Failure
from controller.cli.models import read_document
from controller.cli.output import lines
from controller.cli.words import on_nodes

if TYPE_CHECKING:
    from collections.abc import Iterable

    from controller.cli.session import Session

TIMEOUT_S: Final = 60.0
MOVE_COLUMNS = ("REPLICA", "MODEL", "PROFILE", "FROM", "TO")
PLACE_COLUMNS = ("MODEL", "PROFILE", "WHERE")
STOP_COLUMNS = ("REPLICA", "MODEL", "FROM")
GPU_COLUMNS = ("CLASS", "CARDS", "FREE", "CARDS THEN", "FREE THEN")
_NODES: Final = re.compile(r"(\d+)x(\d+)(?:x([^:]+?))?(?::(.+))?")


class NewNodes(click.ParamType):  # type: ignore[type-arg]
    """`4x8xH100`: four nodes of eight cards; `:141GiB` says how large cards of a new class are."""

    name = "COUNTxGPUSxCLASS"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> dict[str, Any]:
        """Usage error with the right form."""
        found = _NODES.fullmatch(value)
        if found is None:
            self.fail(
                f"{value!r} names no nodes: write COUNTxGPUSxCLASS as 4x8xH100, 2x8xB300:288GiB "
                "for cards that the fleet has not, 2x0 for nodes without cards",
                param,
                ctx,
            )
        count, gpus, class_, memory = found.groups()
        more = {"class": class_, "memory": memory}
        known = {name: text for name, text in more.items() if text is not None}
        return {"count": int(count), "gpus": int(gpus), **known}


class Scale(click.ParamType):  # type: ignore[type-arg]
    """`m=4`."""

    name = "MODEL=COUNT"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[str, int]:
        """Usage error with the right form."""
        model, _, count = value.rpartition("=")
        if not model or not (count.isascii() and count.isdigit()):
            self.fail(f"{value!r} is no scale: write MODEL=COUNT as chat=4", param, ctx)
        return model, int(count)


@click.command("what-if")
@click.option("--add-nodes", type=NewNodes(), multiple=True, help="As 4x8xH100.")
@click.option("--remove-node", "remove", metavar="NODE", multiple=True, help="As if it were gone.")
@click.option("--drain", metavar="NODE", multiple=True, help="As if it were drained.")
@click.option("--scale", type=Scale(), multiple=True, help="As if a model had so many replicas.")
@click.option(
    "--model-file",
    "files",
    multiple=True,
    type=click.Path(dir_okay=False, allow_dash=True),
    help="As if this model (TOML or JSON) were in the catalog, or were as it says.",
)
@click.option("--seed", type=int, help="Settles ties. [the leader's]")
@click.pass_obj
def what_if(
    session: Session, add_nodes: tuple[dict[str, Any], ...], remove: tuple[str, ...],
    drain: tuple[str, ...], scale: tuple[tuple[str, int], ...], files: tuple[str, ...],
    seed: int | None,
) -> None:  # fmt: skip
    """What would move, fit and not fit. All options may be repeated; nothing is changed."""
    body: dict[str, Any] = {
        "add_nodes": list(add_nodes),
        "remove_nodes": list(remove),
        "drain_nodes": list(drain),
        "scale": dict(scale),
        "models": [model for file in files for model in _models(file)],
    }
    if len(body["scale"]) < len(scale):
        raise click.UsageError("--scale names a model twice")
    if seed is not None:
        body["seed"] = seed
    session.timeout_s = max(session.timeout_s, TIMEOUT_S)
    found = session.client.post("/what-if", body)
    session.out.show(found, lambda: _text(session, found))


def _models(file: str) -> list[Any]:
    """A model's definition, or those of a catalog without pools."""
    document = read_document(file)
    if "pools" in document:
        raise Failure(f"{file} declares pools: what-if takes models only, apply pools first")
    if set(document) == {"models"} and isinstance(document["models"], list):
        return document["models"]
    return [document]


def _text(session: Session, found: dict[str, Any]) -> str:
    return lines(
        *(f"assumed: {told}" for told in found["assumptions"]),
        *_under_way(found["under_way"]),
        *_changes(session, found),
        *_unplaced(found["unplaced"]),
        *_drained(found["drained"]),
        *([f"run nothing any more: {', '.join(found['emptied'])}"] if found["emptied"] else []),
        session.out.table(GPU_COLUMNS, _gpus(found["gpus"])) if found["gpus"] else "",
        *(f"note: {told}" for told in found["notes"]),
        ""
        if found["settled"]
        else f"Not the end: after {found['rounds']} rounds more would follow.",
        "Nothing was changed.",
    )


def _under_way(items: int) -> list[str]:
    noun = "change is" if items == 1 else "changes are"
    return [f"{items} {noun} under way anyway; what follows includes them"] if items else []


def _changes(session: Session, found: dict[str, Any]) -> Iterable[str]:
    if not (found["moves"] or found["placed"] or found["stopped"]):
        yield "Nothing would move."
    if found["moves"]:
        rows: list[Any] = [
            (m["replica"], m["model"], m.get("profile"), _where(m["from"]), _where(m["to"]))
            for m in found["moves"]
        ]
        yield f"{len(rows)} would move:"
        yield session.out.table(MOVE_COLUMNS, rows)
    if found["placed"]:
        rows = [(p["model"], p.get("profile"), _where(p["at"])) for p in found["placed"]]
        yield f"{len(rows)} would be placed:"
        yield session.out.table(PLACE_COLUMNS, rows)
    if found["stopped"]:
        rows = [(s["replica"], s["model"], _where(s["at"])) for s in found["stopped"]]
        yield f"{len(rows)} would stop:"
        yield session.out.table(STOP_COLUMNS, rows)


def _where(parts: list[dict[str, Any]]) -> str:
    return on_nodes({"shards": parts})


def _unplaced(rows: list[dict[str, Any]]) -> Iterable[str]:
    for row in rows:
        noun = "replica" if row["replicas"] == 1 else "replicas"
        now = f", {row['before']} without a place now" if row["before"] else ""
        why = row.get("reason", "it has not been tried")
        yield f"{row['replicas']} {noun} of {row['model']} would not fit{now}: {why}"
        yield from (f"  {c['profile']}: {c['reason']}" for c in row["causes"])


def _drained(rows: list[dict[str, Any]]) -> Iterable[str]:
    for row in rows:
        ids = ", ".join(map(str, row["left"]))
        yield f"node {row['node']} would " + (f"keep replicas {ids}" if ids else "come empty")


def _gpus(rows: list[dict[str, Any]]) -> Iterable[tuple[object, ...]]:
    return ((g["class"], g["total"], g["free"], g["total_after"], g["free_after"]) for g in rows)
