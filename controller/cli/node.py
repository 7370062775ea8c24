"""Commands about one node: show, cordon, uncordon, drain, enrol, revoke."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Any

import click

from controller.cli import node_page
from controller.cli.client import part
from controller.cli.failures import Failure, TimedOut
from controller.cli.output import note
from controller.cli.words import age

if TYPE_CHECKING:
    from controller.cli.session import Session

POLL_S = 1.0


class Duration(click.ParamType):  # type: ignore[type-arg]
    """An option such as ``10m``; seconds in Python."""

    name = "duration"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        """Usage error with the right forms."""
        from controller.catalog.units import seconds

        try:
            return seconds(value)
        except ValueError as error:
            self.fail(str(error), param, ctx)


class ShowOr(click.Group):
    """`node ID` shows a node; `node enroll` and `node revoke` are commands."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """A word that is no command is a node's id."""
        if args and args[0] not in self.commands and not args[0].startswith("-"):
            args = ["show", *args]
        return super().resolve_command(ctx, args)


@click.group(cls=ShowOr, options_metavar="", subcommand_metavar="ID | enroll | revoke ID")
def node() -> None:
    """Show one node by its id, or enrol and revoke nodes."""


@node.command()
@click.argument("id_", metavar="ID")
@click.pass_obj
def show(session: Session, id_: str) -> None:
    """Everything known of one node."""
    found = session.client.get(f"/nodes/{part(id_)}")
    session.out.show(found, lambda: node_page.text(session, found))


def _set_state(session: Session, id_: str, state: str, reason: str | None) -> dict[str, Any]:
    body = {"state": state} | ({"reason": reason} if reason else {})
    answer: dict[str, Any] = session.client.post(f"/nodes/{part(id_)}/state", body)
    return answer


@click.command()
@click.argument("id_", metavar="NODE")
@click.option("--reason", help="Shown with the node.")
@click.pass_obj
def cordon(session: Session, id_: str, reason: str | None) -> None:
    """Place nothing new on a node; what runs goes on."""
    done = _set_state(session, id_, "cordon", reason)
    session.out.show(done, lambda: f"Node {id_} is cordoned: nothing new, what runs goes on.")


@click.command()
@click.argument("id_", metavar="NODE")
@click.pass_obj
def uncordon(session: Session, id_: str) -> None:
    """Use a node again; a drain under way is given up."""
    done = _set_state(session, id_, "uncordon", None)
    session.out.show(done, lambda: f"Node {id_} may be used again.")


@click.command()
@click.argument("id_", metavar="NODE")
@click.option("--reason", help="Shown with the node.")
@click.option("--wait", is_flag=True, help="Until no replica is left on it.")
@click.option("--timeout", "timeout_s", type=Duration(), default="10m", show_default=True)
@click.pass_obj
def drain(session: Session, id_: str, reason: str | None, wait: bool, timeout_s: float) -> None:
    """Move a node's replicas away: one at a time, each replacement ready first."""
    done = _set_state(session, id_, "drain", reason)
    note(
        f"Draining node {id_}: its replicas are moved one at a time, each replacement ready before "
        "the original stops."
    )
    if wait:
        done |= {"replicas": _until_empty(session, id_, timeout_s)}
    end = f"Node {id_} is empty." if wait else f"See llmgwctl node {id_} for what is left on it."
    session.out.show(done, lambda: end)


def _until_empty(session: Session, id_: str, timeout_s: float) -> int:
    deadline = time.monotonic() + timeout_s
    told: int | None = None
    while True:
        found = session.client.get(f"/nodes/{part(id_)}")
        left: int = found["replicas"]
        if left == 0:
            return left
        if found["state"] in ("ready", "cordoned"):
            raise Failure(f"node {id_} is {found['state']}: somebody gave up its drain")
        if left != told and sys.stderr.isatty():
            note(f"{_replicas(left)} left on node {id_}")
            told = left
        if time.monotonic() > deadline:
            raise TimedOut(
                f"node {id_} still has {_replicas(left)} after {age(timeout_s)}; "
                + _what_keeps(found["state"])
            )
        time.sleep(POLL_S)


def _what_keeps(state: str) -> str:
    if state in ("unreachable", "lost"):
        return f"it is {state}: whether they run there still is known when its agent is back"
    return "the drain goes on, llmgwctl decisions tells what keeps them"


def _replicas(count: int) -> str:
    return "1 replica" if count == 1 else f"{count} replicas"


@node.command()
@click.argument("id_", metavar="[NODE]", required=False)
@click.option("--uses", type=click.IntRange(min=1), default=1, show_default=True)
@click.option("--ttl", type=Duration(), default="1h", show_default=True, help="How long it admits.")
@click.pass_obj
def enroll(session: Session, id_: str | None, uses: int, ttl: float) -> None:
    """Make an enrolment token: for one node, or without NODE for any new ones."""
    body = {"uses": uses, "ttl": ttl} | ({"node": id_} if id_ else {})
    made = session.client.post("/nodes/enroll", body)
    whom = f"node {id_}" if id_ else "any new node"
    note(f"Admits {whom} until {made['expires_at']}, {uses} time(s). It is shown this once.")
    session.out.show(made, lambda: str(made["token"]))


@node.command()
@click.argument("id_", metavar="NODE")
@click.pass_obj
def revoke(session: Session, id_: str) -> None:
    """Lock a node's agent out."""
    done = session.client.post(f"/nodes/{part(id_)}/revoke", {})
    said = f"Node {id_} is locked out; its replicas are replaced once it counts as lost."
    session.out.show(done, lambda: said)
