"""Commands about devices: doctor, gpu mark and forget, events, nvlink."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any, Final

import click

from controller.cli import failures
from controller.cli.client import part
from controller.cli.node import Duration
from controller.cli.output import lines
from controller.cli.words import joined

if TYPE_CHECKING:
    from controller.cli.session import Session

CHECK_COLUMNS: Final = ("NODE", "CHECK", "RESULT", "EVIDENCE")
EVENT_COLUMNS: Final = ("AT", "NODE", "WHAT", "DEVICE", "FROM", "TO")
NVLINK_COLUMNS: Final = ("DOMAIN", "NODE", "GPUS", "STATE", "IMEX", "CHANNELS", "KEPT OUT BY")
NO_MACHINES: Final = ("database", "tick")
"""What the doctor looks at besides nodes and controllers."""
WORST_FIRST: Final = {"fail": 0, "warn": 1, "pass": 2}


@click.command()
@click.argument("id_", metavar="[NODE]", required=False)
@click.option("--all", "everything", is_flag=True, help="Show passed checks of all nodes too.")
@click.pass_obj
def doctor(session: Session, id_: str | None, everything: bool) -> int:
    """Check one node, or all and the controllers: what is wrong, the evidence, what to do.

    Exit 1 on a failure.
    """
    if id_ is not None:
        session.client.get(f"/nodes/{part(id_)}")  # a node without checks is not an unknown node
    found = session.client.pages("/doctor", node=id_)
    found.sort(key=lambda check: (WORST_FIRST.get(check["result"], 0), check["node"]))
    session.out.show(found, lambda: _doctor_text(session, found, everything or id_ is not None))
    failed = any(check["result"] == "fail" for check in found)
    return failures.FAILED if failed else 0


def _doctor_text(session: Session, found: list[dict[str, Any]], everything: bool) -> str:
    if not found:
        return "No checks have been reported."
    shown = [check for check in found if everything or check["result"] != "pass"]
    rows = ((c["node"], c["name"], c["result"], c["evidence"]) for c in shown)
    remedies = (
        f"{c['node']} {c['name']}: {c['remedy']}"
        for c in shown
        if "remedy" in c and c["result"] != "pass"
    )
    count = Counter(check["result"] for check in found)
    parts = Counter(
        node.startswith("controller ")
        for node in {c["node"] for c in found if c["node"] not in NO_MACHINES}
    )
    who = [f"{parts[False]} {'node' if parts[False] == 1 else 'nodes'}"]
    if parts[True]:
        who.append(f"{parts[True]} {'controller' if parts[True] == 1 else 'controllers'}")
    return lines(
        session.out.table(CHECK_COLUMNS, rows) if shown else "",
        *remedies,
        f"{', '.join(who)}: {count['pass']} passed, {count['warn']} warn, {count['fail']} failed",
    )


@click.group()
def gpu() -> None:
    """Say what is known of a card: healthy, unhealthy, or taken out."""


@gpu.command()
@click.argument("id_", metavar="NODE")
@click.argument("card", metavar="INDEX")
@click.argument("word", type=click.Choice(["healthy", "unhealthy"]))
@click.option("--reason", required=True, help="Kept with the card and its history.")
@click.pass_obj
def mark(session: Session, id_: str, card: str, word: str, reason: str) -> None:
    """Take a card out of placement, or overrule what its agent holds against it.

    INDEX is the card's index or UUID. `healthy` takes an `unhealthy` back; on a card with findings
    it overrules these, until a new one comes.
    """
    body = {"mark": word, "reason": reason}
    done = session.client.post(f"/nodes/{part(id_)}/gpus/{part(card)}/mark", body)

    def said() -> str:
        now = "healthy" if done["healthy"] else "unhealthy (kept out of placement)"
        problems = joined(done.get("problems"))
        return f"GPU {card} of node {id_} is {now}" + ("." if problems == "-" else f": {problems}")

    session.out.show(done, said)


@gpu.command()
@click.argument("id_", metavar="NODE")
@click.argument("card", metavar="INDEX")
@click.pass_obj
def forget(session: Session, id_: str, card: str) -> None:
    """Remove the row of a missing card that was taken out of its machine."""
    done = session.client.delete(f"/nodes/{part(id_)}/gpus/{part(card)}")
    session.out.show(done, lambda: f"GPU {card} of node {id_} is forgotten.")


@click.command()
@click.option("--node", "id_", help="Of this node only.")
@click.option("--since", type=Duration(), help="How far back, as 24h.")
@click.option("--limit", type=click.IntRange(1, 5000), default=100, show_default=True)
@click.pass_obj
def events(session: Session, id_: str | None, since: float | None, limit: int) -> None:
    """Changes of devices, newest first: health, cards, ports, subnet managers, domains."""
    back = None if since is None else f"{since:g}s"
    found = session.client.get("/events", node=id_, since=back, limit=limit)
    rows = (
        (e["at"][:19].replace("T", " "), e["node"], e["kind"], e["object"], e.get("was"),
         e.get("now"))
        for e in found
    )  # fmt: skip
    session.out.show(
        found, lambda: session.out.table(EVENT_COLUMNS, rows) if found else "No events."
    )


@click.command()
@click.pass_obj
def nvlink(session: Session) -> None:
    """Multi-node NVLink domains and what keeps each node out."""
    found = session.client.pages("/nvlink")
    rows = (
        (n["domain"] or None, n["node"], n["gpus"], n["state"], n.get("imex"),
         n.get("imex_channels"), n["why_not"] or None)
        for n in found
    )  # fmt: skip
    empty = "No node has multi-node NVLink."
    session.out.show(found, lambda: session.out.table(NVLINK_COLUMNS, rows) if found else empty)
