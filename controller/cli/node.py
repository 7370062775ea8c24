"""Commands about one node: show, cordon, uncordon, drain, enrol, revoke."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Any

import click

from controller.cli.client import part
from controller.cli.failures import Failure, TimedOut
from controller.cli.fleet import nodes_text
from controller.cli.output import lines, note
from controller.cli.words import age, gigabytes, joined

if TYPE_CHECKING:
    from controller.cli.session import Session

POLL_S = 1.0
GPU_COLUMNS = ("GPU", "CLASS", "MEMORY", "USED", "UTIL", "TEMP", "POWER", "SHARD", "HEALTH")


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
    session.out.show(found, lambda: _node_text(session, found))


def _node_text(session: Session, found: dict[str, Any]) -> str:
    load = found.get("load", {})
    facts = {
        "why": found.get("state_reason"),
        "host": joined(found[k] for k in ("hostname", "mgmt_addr", "os") if k in found),
        "labels": joined(f"{k}={v}" for k, v in found.get("labels", {}).items()),
        "engines": joined(found.get("engines")),
        "disk": f"{gigabytes(found.get('disk_free_gb'))} free of "
        f"{gigabytes(found.get('disk_total_gb'))} (local)",
        "load": joined(f"{k} {v:g}" for k, v in load.items() if k in ("cpu_percent", "load1")),
        "weights": joined(found.get("models_on_disk")),
        "agent": found.get("agent_version"),
    }
    return lines(
        nodes_text(session, [found]),
        *(f"{name}: {value}" for name, value in facts.items() if value not in (None, "-")),
        *(f"warning: {warning}" for warning in found.get("warnings", [])),
        _cards(session, found.get("gpus", [])),
    )


def _cards(session: Session, cards: list[dict[str, Any]]) -> str:
    def figure(card: dict[str, Any], name: str, unit: str) -> str:
        return f"{card[name]:g}{unit}" if name in card else "-"

    rows = (
        (c["index"], c["class"], figure(c, "memory_mb", " MiB"),
         figure(c, "memory_used_mb", " MiB"), figure(c, "utilization_percent", " %"),
         figure(c, "temperature_c", " C"), figure(c, "power_w", " W"), c.get("shard"),
         "ok" if c["healthy"] else joined(c.get("problems")))
        for c in cards
    )  # fmt: skip
    return session.out.table(GPU_COLUMNS, rows) if cards else ""


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
            note(f"{left} replicas left on node {id_}")
            told = left
        if time.monotonic() > deadline:
            raise TimedOut(
                f"node {id_} still has {left} replicas after {age(timeout_s)}; the drain goes on, "
                "llmgwctl decisions tells what keeps them"
            )
        time.sleep(POLL_S)


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
