"""`audit`: who changed what, when, and from which address."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click
import orjson

from controller.cli.node import Duration

if TYPE_CHECKING:
    from controller.cli.session import Session

COLUMNS = ("AT", "ACTOR", "ACTION", "OBJECT", "DETAIL", "FROM")


@click.command()
@click.option("--object", "object_", help='Of all of a kind ("key") or of one ("key k3x9...").')
@click.option("--actor", help="By this actor only.")
@click.option("--since", type=Duration(), help="How far back, as 24h.")
@click.option("--limit", type=click.IntRange(1, 5000), default=100, show_default=True)
@click.pass_obj
def audit(
    session: Session, object_: str | None, actor: str | None, since: float | None, limit: int
) -> None:
    """Who changed what, newest first: keys, scopes, users, models, nodes."""
    back = None if since is None else f"{since:g}s"
    found = session.client.get("/audit", object=object_, actor=actor, since=back, limit=limit)
    rows = (
        (a["at"][:19].replace("T", " "), a["actor"], a["action"], a["object"],
         orjson.dumps(a["detail"]).decode() if "detail" in a else None, a.get("source"))
        for a in found
    )  # fmt: skip
    empty = "Nothing was changed."
    session.out.show(found, lambda: session.out.table(COLUMNS, rows) if found else empty)
