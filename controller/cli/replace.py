"""`llmgwctl replace`: a rolling restart that the operator decides, and how far it is."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Any

import click

from controller.cli.client import part
from controller.cli.failures import Failure, TimedOut
from controller.cli.node import Duration
from controller.cli.output import note
from controller.cli.words import age, counts

if TYPE_CHECKING:
    from controller.cli.session import Session

POLL_S = 1.0


@click.command()
@click.argument("what", metavar="REPLICA|MODEL")
@click.option("--model", "is_model", is_flag=True, help="WHAT is a model, though it is a number.")
@click.option("--stale", is_flag=True, help="Of a model: only those whose profile was edited.")
@click.option("--force", is_flag=True, help="Where there is no room for both, stop one first.")
@click.option("--cancel", is_flag=True, help="Take back what was asked.")
@click.option("--wait", is_flag=True, help="Until all of them are replaced.")
@click.option("--timeout", "timeout_s", type=Duration(), default="30m", show_default=True)
@click.pass_obj
def replace(
    session: Session, what: str, *, is_model: bool, stale: bool, force: bool, cancel: bool,
    wait: bool, timeout_s: float,
) -> None:  # fmt: skip
    """Replace a replica, or those of a model: one at a time, each replacement ready first."""
    if cancel and (force or wait or stale):
        raise click.UsageError("--cancel takes back what was asked and goes with no other option")
    one = what.isascii() and what.isdigit() and not is_model
    if one and stale:
        raise click.UsageError("--stale chooses among the replicas of a model: name a model")
    body = {"force": force, "cancel": cancel} | ({} if one else {"stale": stale})
    path = f"/replicas/{what}/replace" if one else f"/models/{part(what)}/replace"
    done = session.client.post(path, body)
    if wait and done["replicas"]:
        note(_told(done))
        _until_replaced(session, done, timeout_s)
    text = f"{_named(done)}: replaced." if wait and done["replicas"] else _told(done)
    session.out.show(done, lambda: text)


def _told(done: dict[str, Any]) -> str:
    if not done["replicas"]:
        nothing = "is to be replaced" if done["cancelled"] else "runs that would be replaced"
        return f"Nothing of model {done['model']} {nothing}."
    one = len(done["replicas"]) == 1
    if done["cancelled"]:
        return f"{_named(done)} stays." if one else f"{_named(done)} stay."
    how = ", where there is no room for both after it has stopped" if done["force"] else ""
    if one:
        return f"{_named(done)} is to be replaced: another is ready first{how}."
    return f"{_named(done)} are to be replaced, one at a time: another is ready first{how}."


def _named(done: dict[str, Any]) -> str:
    """`Replicas 3, 4 of m`."""
    noun = "Replica" if len(done["replicas"]) == 1 else "Replicas"
    return f"{noun} {', '.join(map(str, done['replicas']))} of {done['model']}"


def _until_replaced(session: Session, done: dict[str, Any], timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    model, told = done["model"], ""
    launches: dict[int, list[int]] = {}
    while True:
        members = session.client.pages("/replicas", model=model)
        chosen = [r for r in members if r["id"] in done["replicas"]]
        left = [r for r in chosen if "replace_asked" in r]
        for replica in chosen:
            known = launches.setdefault(replica["id"], _shards(replica))
            # One that failed meanwhile starts anew by the present profile: that is as good.
            if "replace_asked" not in replica and _shards(replica) == known:
                raise Failure(f"replica {replica['id']} of {model} stays: somebody took it back")
        if not left:
            return
        said = _progress(len(left), done, members)
        if said != told and sys.stderr.isatty():
            note(said)
        told = said
        if time.monotonic() > deadline:
            raise TimedOut(f"{said} after {age(timeout_s)}; it goes on{_why_not(session, members)}")
        time.sleep(POLL_S)


def _shards(replica: dict[str, Any]) -> list[int]:
    """What tells one launch of a replica from the next."""
    return [shard["id"] for shard in replica["shards"]]


def _progress(left: int, done: dict[str, Any], members: list[dict[str, Any]]) -> str:
    states: dict[str, int] = {}
    for replica in members:
        states[replica["state"]] = states.get(replica["state"], 0) + 1
    of = len(done["replicas"])
    return f"{of - left} of {of} replicas of {done['model']} replaced ({counts(states)})"


def _why_not(session: Session, members: list[dict[str, Any]]) -> str:
    waiting = [r for r in members if r["state"] == "pending"]
    if not waiting:
        return ""
    found = session.client.get("/explain-placement", model=waiting[0]["model"])
    reason = found.get("main_reason")
    return f"; replica {waiting[0]['id']} finds no place: {reason}" if reason else ""
