"""Writes a checked catalog: one transaction under the catalog's lock, undone for a dry run.

Tells what differs from before, and what follows for replicas that run.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import trio

from controller.catalog.checks import Known, check, circle
from controller.catalog.difference import Difference, differences
from controller.catalog.reading import read_file
from sql import queries

if TYPE_CHECKING:
    from pathlib import Path
    from uuid import UUID

    from controller.catalog.definition import Catalog
    from sql.pool import Connection, Pool


@dataclass(frozen=True, slots=True)
class Change:
    """What became of one object: added, changed, unchanged or removed."""

    action: str
    kind: str
    name: str
    differences: tuple[Difference, ...] = ()
    """Of a changed object."""


@dataclass(frozen=True, slots=True)
class Written:
    """What was applied, and sentences on what follows from it."""

    changes: list[Change]
    notes: list[str]


async def apply(
    pool: Pool,
    catalog: Catalog,
    actor: str,
    *,
    origin: str,
    file: str | None = None,
    prune: bool,
    dry_run: bool = False,
    source: str | None = None,
) -> Written:
    """Applies a catalog; with ``prune`` what the same origin and file declared before is removed.

    Raises CatalogError for a definition that cannot stand, sql.errors.Refused when another origin
    declares the same object, DatabaseAway.
    """
    text = queries("catalog")
    async with pool.transaction(rollback=dry_run) as connection:
        await connection.execute(text["lock"])
        await connection.execute(text["source"], source)
        written = await _write(connection, catalog, actor, origin, file, prune=prune)
        if origin == "file":
            await connection.execute(text["mark"], actor, file, catalog.digest)
    return written


async def apply_file(pool: Pool, path: Path, actor: str, *, dry_run: bool = False) -> Written:
    """Reads and applies a catalog file, pruning what it no longer declares."""
    catalog = await trio.to_thread.run_sync(read_file, path)
    name = str(await trio.Path(path).absolute())
    return await apply(pool, catalog, actor, origin="file", file=name, prune=True, dry_run=dry_run)


async def offer(
    pool: Pool, catalog: Catalog, file: str, controller: UUID, hostname: str, *, told: bool
) -> Written | None:
    """Applies a controller's own file unless another one is in force, which is None.

    ``told`` by an operator it is applied in any case. Raises as `apply` does.
    """
    actor = f"catalog file {file} on {hostname}"
    given = (controller, hostname, actor, file, catalog.digest, told)
    async with pool.transaction() as connection:
        name = await connection.fetchval(queries("catalog")["offer"], *given)
        if name is None:
            return None
        return await _write(connection, catalog, actor, "file", name, prune=True)


async def _write(
    connection: Connection,
    catalog: Catalog,
    actor: str,
    origin: str,
    file: str | None,
    *,
    prune: bool,
) -> Written:
    """Checks and writes, under the catalog's lock."""
    pools = [{"name": n, "labels": p.labels} for n, p in sorted(catalog.pools.items())]
    models = [model.document() for model in catalog.models]
    text = queries("catalog")
    there = await connection.fetchval(text["known"])
    known = _known(there, catalog, origin, file, prune=prune)
    check(catalog, known)
    names = [model["name"] for model in models], [pool["name"] for pool in pools]
    before = await connection.fetchval(text["documents"], *names)
    rows = await connection.fetch(text["apply"], actor, pools, models, origin, file, prune)
    after = await connection.fetchval(text["documents"], *names)
    changes = [_change(row["action"], row["kind"], row["name"], before, after) for row in rows]
    touched = [c.name for c in changes if c.kind == "model" and c.action in ("changed", "removed")]
    replicas = await connection.fetch(text["replicas"], touched)
    return Written(changes, [*_circles(catalog, known), *_followed(replicas)])


def _change(action: str, kind: str, name: str, before: Any, after: Any) -> Change:
    if action != "changed":
        return Change(action, kind, name)
    return Change(action, kind, name, differences(before[kind][name], after[kind][name]))


def _circles(catalog: Catalog, known: Known) -> list[str]:
    names = circle(catalog, known)
    if not names:
        return []
    return [f"fallbacks go in a circle, {' -> '.join(names)}: a request tries each model once"]


def _followed(rows: list[Any]) -> list[str]:
    """What becomes of replicas that run: of removed models all, of changed ones the stale."""
    return [
        f"model {row['model']} is removed: its replicas {row['ids']} drain and go"
        if row["removed"]
        else f"model {row['model']}: its replicas {row['ids']} run what it was before, until "
        "llmgwctl replace"
        for row in rows
    ]


def _known(
    there: dict[str, Any], catalog: Catalog, origin: str, file: str | None, *, prune: bool
) -> Known:
    """Others' objects, and our own former ones unless they are about to be removed or replaced."""
    models = {model.name for model in catalog.models}

    def stays(row: dict[str, Any], replaced: bool) -> bool:
        ours = (row["origin"], row["origin_file"]) == (origin, file)
        return not replaced and not (ours and prune)

    kept = [row for row in there["models"] if stays(row, row["name"] in models)]
    return Known(
        models=frozenset(row["name"] for row in kept),
        aliases={alias: row["name"] for row in kept for alias in row["aliases"]},
        fallbacks={row["name"]: row["fallbacks"] for row in kept},
        pools=frozenset(
            row["name"] for row in there["pools"] if stays(row, row["name"] in catalog.pools)
        ),
    )
