"""Commands that show the whole fleet: status, nodes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from controller.cli.output import lines
from controller.cli.words import age, bar, counts, gigabytes, joined

if TYPE_CHECKING:
    from controller.cli.session import Session

ERROR_WIDTH = 240
CONTROLLER_COLUMNS = ("CONTROLLER", "ROLE", "STATE", "LEADS", "VERSION", "LAST SEEN", "CATALOG")
GANG_COLUMNS = ("TOGETHER BY", "NAME", "NODES", "WHOLE AND FREE", "LARGEST GANG")
NODE_COLUMNS = ("NODE", "STATE", "GPUS", "MEM", "CLASSES", "FABRICS", "REPLICAS", "LAST SEEN")


@click.command()
@click.pass_obj
def status(session: Session) -> None:
    """The fleet at a glance."""
    found = session.client.get("/summary")
    session.out.show(found, lambda: _status_text(session, found))


def _status_text(session: Session, found: dict[str, Any]) -> str:
    models, router, control = found["models"], found["router"], found["controllers"]
    leader = f"{control['leader']}, term {control['term']}" if "leader" in control else "nobody"
    idle = (f"{i['name']}/{i['replica']} {age(i['idle_seconds'])} ({i['gpus']} GPUs)"
            for i in found["idle_replicas"])  # fmt: skip
    in_flight, queue = router.get("in_flight", "-"), router.get("queue", "-")
    return lines(
        _capacity(session, found["gpus"]),
        *_gangs(session, found["gangs"]),
        f"nodes: {counts(found['nodes'])}",
        f"models: {models['satisfied']} of {models['total']} satisfied",
        *(f"  {m['name']} cannot be placed: {m.get('reason', 'see explain-placement')}"
          for m in models["unplaceable"]),
        *(f"  {m['name']} fails: {_one_line(m['reason'])}" for m in models["failing"]),
        f"replicas: {counts(found['replicas'])}",
        f"idle longest: {joined(idle)}",
        f"routers: {router['requests_per_s']:g} requests/s, {router['errors']} errors in the last "
        f"minute, {in_flight} in flight, {queue} waiting",
        f"controllers: {control['alive']} alive, {control['routers']} routers; leader: {leader}",
    )  # fmt: skip


def _one_line(text: str) -> str:
    """Both ends of a long error: what happened, and the engine's last words."""
    whole = " ".join(text.split())
    return whole if len(whole) <= ERROR_WIDTH else f"{whole[:90]} ... {whole[95 - ERROR_WIDTH :]}"


def _capacity(session: Session, classes: list[dict[str, Any]]) -> str:
    if not classes:
        return "No GPUs."
    rows = (
        (c["class"], bar(c["used"], c["total"]), f"{c['used']}/{c['total']}", c["free"],
         c["unavailable"], c["unhealthy"])
        for c in classes
    )  # fmt: skip
    headings = ("CLASS", "", "USED", "FREE", "UNAVAILABLE", "UNHEALTHY")
    return session.out.table(headings, ((*r[:1], r[1], *r[2:]) for r in rows))


@click.command()
@click.pass_obj
def controllers(session: Session) -> None:
    """Control and router processes, who leads, and whose catalog file is applied."""
    found = session.client.pages("/controllers")
    rows = (
        (f"{c['hostname']}/{c['pid']}", c["role"], "alive" if c["alive"] else "gone",
         joined(c.get("leads")), c["version"], _seen(c["seen_ago"]), c.get("catalog"))
        for c in found
    )  # fmt: skip
    problems = (
        f"{c['hostname']}/{c['pid']}: {c['catalog_problem']}"
        for c in found
        if c["alive"] and "catalog_problem" in c
    )
    empty = "No controllers."
    session.out.show(
        found,
        lambda: lines(session.out.table(CONTROLLER_COLUMNS, rows), *problems) if found else empty,
    )


def _gangs(session: Session, groups: list[dict[str, Any]]) -> list[str]:
    """What models that span nodes can have: free cards on the wrong fabric are no capacity."""
    rows = (
        (g["kind"], g.get("name", g["key"]), g["nodes"], g["whole_free"],
         f"{g['largest_gang']} x {g['class']}" if "class" in g else "none")
        for g in groups
    )  # fmt: skip
    return [session.out.table(GANG_COLUMNS, rows)] if groups else []


@click.command()
@click.pass_obj
def nodes(session: Session) -> None:
    """Every node."""
    found = session.client.pages("/nodes")
    session.out.show(found, lambda: nodes_text(session, found))


def nodes_text(session: Session, found: list[dict[str, Any]]) -> str:
    """The table, then each unhealthy card."""
    if not found:
        return "No nodes have registered."
    rows = (
        (n["id"], n["state"], f"{n['gpu_free']}/{n['gpu_total']} free",
         gigabytes(n.get("memory_gb")), joined(n.get("gpu_classes")), joined(n.get("fabrics")),
         n["replicas"], _seen(n.get("last_seen_ago")))
        for n in found
    )  # fmt: skip
    sick = (f"{n['id']} {card} (kept out of placement)"
            for n in found for card in n.get("unhealthy_gpus", []))  # fmt: skip
    return lines(session.out.table(NODE_COLUMNS, rows), *sick)


def _seen(seconds: float | None) -> str:
    return "-" if seconds is None else f"{age(seconds)} ago"
