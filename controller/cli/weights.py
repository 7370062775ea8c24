"""`llmgwctl weights`: what lies on the nodes' disks, what nobody needs of it, and its removal."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import click

from controller.cli import failures
from controller.cli.output import lines
from controller.cli.words import size

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from controller.cli.session import Session

COLUMNS: Final = ("NODE", "NAME", "FORMAT", "SIZE", "COMPLETE", "IN CATALOG", "WHERE", "PATH")
ORPHAN_COLUMNS: Final = ("NODE", "SOURCE", "SIZE", "COMPLETE", "WHERE", "PATH")
COLLECT_S: Final = 120.0
"""The controller itself waits up to 90 s for agents."""


@click.group(invoke_without_command=True)
@click.pass_context
def weights(context: click.Context) -> None:
    """Model weights on the nodes' disks; by itself it lists them."""
    if context.invoked_subcommand is not None:
        return
    session: Session = context.obj
    found = session.client.pages("/weights")
    session.out.show(found, lambda: _text(session, found))


def _text(session: Session, found: list[dict[str, Any]]) -> str:
    yes = {True: "yes", False: "no"}
    rows = (
        (w["node"], w.get("source") or w.get("name"), w.get("format"), size(w.get("bytes")),
         "yes" if w["complete"] else f"no: {w.get('reason', 'unknown why')}",
         yes[w["in_catalog"]], _where(w), w["path"])
        for w in found
    )  # fmt: skip
    return lines(
        session.out.table(COLUMNS, rows) if found else "No weights have been reported.",
        total(found) if found else "",
        *_under_way(session.client.pages("/replicas")),
    )


def _where(row: dict[str, Any]) -> str:
    return f"shared {row.get('filer', '')}" if row["shared"] else "local"


def total(found: Iterable[dict[str, Any]]) -> str:
    """How many models and how many bytes; what many nodes mount of a filer counts once."""
    held: dict[tuple[str, str], int] = {}
    names = set()
    for row in found:
        names.add(row.get("source") or row.get("name") or row["path"])
        place = (row["node"], row["path"])
        if row["shared"] and "filer_path" in row:
            place = (f"filer {row.get('filer', '')}", row["filer_path"])
        held[place] = max(0, row.get("bytes", 0) - row.get("shared_bytes", 0))
    count = len(names)
    return f"{count} {'model' if count == 1 else 'models'}, {size(sum(held.values()))} on disk"


def _under_way(replicas: list[dict[str, Any]]) -> Iterator[str]:
    for replica in replicas:
        for shard in replica.get("shards", ()):
            if fetch := shard.get("fetch"):
                of = f" of {size(fetch['bytes_total'])}" if "bytes_total" in fetch else ""
                share = f" ({fetch['percent']:.0f} %)" if "percent" in fetch else ""
                yield (
                    f"{shard['node']} fetches {fetch['source']}: {size(fetch['bytes_done'])}{of}"
                    f"{share}, for replica {replica['id']}"
                )


@weights.command()
@click.option("--node", "id_", help="Of this node only.")
@click.pass_obj
def orphans(session: Session, id_: str | None) -> None:
    """Downloads that no model of the catalog and no live shard uses. Removes nothing."""
    found = session.client.pages("/weights/orphans", node=id_)
    rows = (
        (o["node"], o["source"], size(o.get("bytes")), "yes" if o["complete"] else "no",
         _where(o), o["path"])
        for o in found
    )  # fmt: skip
    session.out.show(
        found,
        lambda: (
            lines(session.out.table(ORPHAN_COLUMNS, rows), f"{total(found)}: weights collect")
            if found
            else "No orphans."
        ),
    )


@weights.command()
@click.argument("paths", nargs=-1, metavar="[PATH]...")
@click.option("--node", "id_", help="On this node only.")
@click.option("--all", "everything", is_flag=True, help="All orphans of all nodes.")
@click.pass_obj
def collect(session: Session, paths: tuple[str, ...], id_: str | None, everything: bool) -> int:
    """Remove orphans: these paths, those of a node, or --all. Exit 1 when a node did not answer.

    A path that is no orphan refuses the whole command. Each agent judges again by what it knows
    and says what it kept and why.
    """
    if not (paths or id_ or everything):
        raise click.UsageError("name paths, --node NODE, or --all for every orphan of the fleet")
    if everything and (paths or id_):
        raise click.UsageError("--all is for every node: leave it out, or the paths and --node")
    body = {"node": id_, "paths": list(paths)}
    given = {name: value for name, value in body.items() if value}
    done = session.client.post("/weights/collect", given, COLLECT_S)
    session.out.show(done, lambda: lines(*_done(done)))
    return failures.FAILED if any("error" in node for node in done["nodes"]) else 0


def _done(done: dict[str, Any]) -> Iterator[str]:
    for node in done["nodes"]:
        for one in node["freed"]:
            yield f"{node['node']} {one['path']}: {size(one['bytes'])} freed"
        for one in node["kept"]:
            yield f"{node['node']} {one['path']}: kept, {one['reason']}"
        if "error" in node:
            yield f"{node['node']}: {node['error']}"
        if "left" in node:
            yield f"{node['node']}: {node['left']} more orphans: run it again"
    yield f"{size(done['freed_bytes'])} freed" if done["nodes"] else "No orphans."
