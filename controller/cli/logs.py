"""`logs`: the tail of an agent's or a shard's log, or what is added to it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from controller.cli.client import part
from controller.cli.failures import Failure
from controller.cli.output import plain

if TYPE_CHECKING:
    from controller.cli.session import Session

ANSWER_S = 60.0
"""An agent of a big fleet comes every 30 s."""


@click.command()
@click.argument("node")
@click.option("--shard", type=click.IntRange(min=1), help="A shard's log. [the agent's own]")
@click.option("-n", "--lines", type=click.IntRange(1, 10_000), default=100, show_default=True)
@click.option("-f", "--follow", is_flag=True, help="Go on with what is added, until Ctrl-C.")
@click.pass_obj
def logs(session: Session, node: str, shard: int | None, lines: int, follow: bool) -> None:
    """Show a log of a node."""
    path = f"/nodes/{part(node)}/logs"
    if not follow:
        text = session.client.text(path, ANSWER_S, shard=shard, lines=lines)
        document = {"node": node, "shard": shard, "text": text}
        found = {field: value for field, value in document.items() if value is not None}
        session.out.show(found, lambda: plain(text))
        return
    session.no_json("and a followed log has no end: drop -f")
    for name, event in session.client.events(path, shard=shard, lines=lines, follow=True):
        if name == "error":
            raise Failure(event["error"])
        session.out.write(plain(event["text"]))
    raise Failure(f"the log of node {node} ended: the controller went away, ask again")
