"""Commands that tell what runs and why: replicas, explain-placement, decisions."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from controller.cli.node import Duration
from controller.cli.output import lines
from controller.cli.words import age, on_nodes

if TYPE_CHECKING:
    from collections.abc import Iterable

    from controller.cli.session import Session

REPLICA_COLUMNS = ("REPLICA", "MODEL", "STATE", "POOL", "NODES", "AGE", "IDLE", "ENDPOINT")
EXPLAIN_COLUMNS = ("PROFILE", "POOL", "NODE", "REASON")
SCORE_COLUMNS = ("NODE", "PROFILE", "POINTS", "PARTS")
DECISION_COLUMNS = ("AT", "KIND", "MODEL", "REPLICA", "NODE", "REASON")
_OUTCOMES = {
    "could not be placed": "could not be placed; every candidate and why:",
    "no attempt yet": "no attempt to place it yet",
}


@click.command()
@click.option("--model", help="Of this model only.")
@click.pass_obj
def replicas(session: Session, model: str | None) -> None:
    """Replicas and where they run."""
    found = session.client.pages("/replicas", model=model)
    empty = "No replicas." if model is None else f"Model {model} has no replicas."
    session.out.show(found, lambda: _replicas_text(session, found) if found else empty)


def _replicas_text(session: Session, found: list[dict[str, Any]]) -> str:
    rows = (
        (r["id"], r["model"], r["state"], r.get("pool"), on_nodes(r), age(r["age_seconds"]),
         "-" if r["idle_seconds"] < 0 else age(r["idle_seconds"]), r.get("endpoint"))
        for r in found
    )  # fmt: skip
    errors = [f"replica {r['id']}: {r['error']}" for r in found if "error" in r]
    errors += [
        f"replica {r['id']} shard {s['id']} on {s['node']}: {s['error']}"
        for r in found for s in r["shards"] if "error" in s
    ]  # fmt: skip
    stale = (f"replica {r['id']}: its profile was edited since it was placed"
             for r in found if r["stale"])  # fmt: skip
    asked = (f"replica {r['id']}: to be replaced" for r in found if "replace_asked" in r)
    return lines(session.out.table(REPLICA_COLUMNS, rows), *errors, *stale, *asked)


@click.command("explain-placement")
@click.argument("model")
@click.option(
    "--scores", is_flag=True, help="Points of what was chosen, and of nodes that fit now."
)
@click.pass_obj
def explain_placement(session: Session, model: str, *, scores: bool) -> None:
    """Why a model is placed, or is not: every candidate of the latest attempt."""
    asked = "true" if scores else None
    found = session.client.get("/explain-placement", model=model, scores=asked)
    rows = [
        (r["profile"], r.get("pool"), r.get("node"), r["reason"])
        for r in found.get("rejections", [])
    ]
    outcome = _OUTCOMES.get(found["outcome"], found["outcome"])
    at = f" (at {found['at']})" if "at" in found else ""
    session.out.show(
        found,
        lambda: lines(
            f"{model}{at}: {outcome}",
            session.out.table(EXPLAIN_COLUMNS, rows) if rows else "",
            *(_scores_text(session, found["scores"]) if scores else ()),
        ),
    )


def _scores_text(session: Session, rows: list[dict[str, Any]]) -> Iterable[str]:
    chosen = [row for row in rows if "replica" in row]
    now = [row for row in rows if "replica" not in row]
    if chosen:
        yield "chosen, the latest first:"
        yield session.out.table(
            ("REPLICA", "AT", *SCORE_COLUMNS),
            ((r["replica"], r["at"], *_points(r)) for r in chosen),
        )
    yield "one more replica now, best first:" if now else "No node fits one more replica now."
    if now:
        yield session.out.table(SCORE_COLUMNS, (_points(r) for r in now))


def _points(row: dict[str, Any]) -> tuple[object, ...]:
    parts = ", ".join(f"{name} {points:g}" for name, points in row["parts"].items())
    return row["node"], row.get("profile"), f"{row['total']:g}", parts


@click.command()
@click.option("--model", help="Of this model only.")
@click.option("--node", help="About this node only.")
@click.option("--since", type=Duration(), help='How far back, as "24h".')
@click.option("--limit", type=click.IntRange(1, 5000), default=50, show_default=True)
@click.pass_obj
def decisions(
    session: Session, model: str | None, node: str | None, since: float | None, limit: int
) -> None:
    """What was decided, newest first."""
    found = session.client.get(
        "/decisions", model=model, node=node, since=_duration(since), limit=limit
    )
    rows = (
        (d["at"], d["kind"], d.get("model"), d.get("replica"), d.get("node"), d["reason"])
        for d in found
    )
    of = [f"model {model}"] if model is not None else []
    of += [f"node {node}"] if node is not None else []
    empty = f"No decisions{' about ' if of else ''}{' and '.join(of)}"
    empty += "." if since is None else " in that time."
    session.out.show(found, lambda: session.out.table(DECISION_COLUMNS, rows) if found else empty)


def _duration(seconds: float | None) -> str | None:
    return None if seconds is None else f"{seconds:.3f}s"
