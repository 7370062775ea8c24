"""Commands about physical fabrics: fabrics, topology."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Any, Final

import click

from controller.cli.client import part
from controller.cli.failures import Failure, TimedOut
from controller.cli.node import Duration
from controller.cli.output import lines, note
from controller.cli.words import age, joined

if TYPE_CHECKING:
    from collections.abc import Iterator

    from controller.cli.session import Session

COLUMNS: Final = (
    "FABRIC", "KIND", "NODES", "PORTS", "RATE", "DECLARED", "SCANNED", "PROBLEMS",
)  # fmt: skip
MAP_S: Final = 60.0
"""The map of the biggest fabric is made in 10 s when it is asked for first."""
POLL_S: Final = 1.0


@click.command()
@click.pass_obj
def fabrics(session: Session) -> None:
    """Physical fabrics against the names that agents' settings declare."""
    found = session.client.pages("/fabrics")
    session.out.show(found, lambda: _fabrics_text(session, found))


def _fabrics_text(session: Session, found: list[dict[str, Any]]) -> str:
    if not found:
        return "No fabrics: no node has reported an active InfiniBand or RoCE port."
    rows = (
        (f["id"], f["kind"], f["nodes"], f"{f['ports_active']}/{f['ports_total']} active",
         f"{f['rate_gbps']:g} Gb/s" if "rate_gbps" in f else None, joined(f.get("declared")),
         _scanned(f), len(f.get("problems", [])) or None)
        for f in found
    )  # fmt: skip
    told = (f"{f['id']}: {problem}" for f in found for problem in f.get("problems", []))
    failed = (f"{f['id']}: the latest scan failed: {f['error']}" for f in found if "error" in f)
    return lines(session.out.table(COLUMNS, rows), *told, *failed)


def _scanned(fabric: dict[str, Any]) -> str | None:
    if fabric["scanning"]:
        return "under way"
    at = fabric.get("scanned_at")
    if at is None:
        return "never" if fabric["kind"] == "InfiniBand" else None
    return ("failed " if "error" in fabric else "") + _time(at)


def _time(at: str) -> str:
    return at[:19].replace("T", " ")


@click.command()
@click.argument("id_", metavar="ID")
@click.option("--scan", is_flag=True, help="Map the fabric anew first, and wait for the map.")
@click.option("--timeout", "timeout_s", type=Duration(), default="3m", show_default=True)
@click.pass_obj
def topology(session: Session, id_: str, scan: bool, timeout_s: float) -> None:
    """The map of a fabric: hosts, leaves, rails, and what is wrong. ID is of `llmgwctl fabrics`."""
    if scan:
        _scan(session, id_, timeout_s)
    found = session.client.get(f"/fabrics/{part(id_)}/topology", timeout_s=_patience(session))
    session.out.show(found, lambda: lines(*_topology_text(found)))


def _patience(session: Session) -> float:
    return max(MAP_S, session.timeout_s)


def _scan(session: Session, id_: str, timeout_s: float) -> None:
    """Asks for a scan and waits for its end; Failure with its error."""
    deadline = time.monotonic() + timeout_s
    started = session.client.post(f"/fabrics/{part(id_)}/scan", {})
    if sys.stderr.isatty():
        note(f"Node {started['scanner']} scans fabric {started['fabric']}.")
    while True:
        found = _fabric(session, started["fabric"])
        if not found["scanning"]:
            break
        if time.monotonic() > deadline:
            raise TimedOut(
                f"node {started['scanner']} has not answered with a map of fabric {id_} within "
                f"{age(timeout_s)}: the scan goes on, llmgwctl fabrics tells how it ended"
            )
        time.sleep(POLL_S)
    if "error" in found:
        raise Failure(
            f"the scan of fabric {id_} by node {found.get('scanned_by', '-')} failed: "
            f"{found['error']}; without --scan you see the last map that came"
        )


def _fabric(session: Session, key: str) -> dict[str, Any]:
    for found in session.client.pages("/fabrics"):
        if found["key"] == key:
            fabric: dict[str, Any] = found
            return fabric
    raise Failure(
        f"fabric {key} has gone during the scan: no port follows its subnet manager any more; "
        "llmgwctl fabrics lists what there is"
    )


def _topology_text(found: dict[str, Any]) -> Iterator[str]:
    from controller.fabric.map import to_text

    yield f"fabric: {found['label']} ({found['key']})"
    if "sm" in found:
        yield f"subnet manager: {found['sm']}"
    if len(found.get("sms", [])) > 1:
        yield f"subnet managers within a day: {joined(found['sms'])}"
    count = len(found["live"])
    yield f"ports of agents: {count}, {_active(found)} active"
    yield from _scan_text(found)
    yield from (f"problem: {problem}" for problem in found.get("problems", []))
    if "map" in found:
        yield "\n" + "\n".join(to_text(found["map"]))


def _active(found: dict[str, Any]) -> int:
    return sum(port.get("state") == "ACTIVE" for port in found["live"].values())


def _scan_text(found: dict[str, Any]) -> Iterator[str]:
    if "map_age_seconds" in found:
        by = f" by node {found['scanned_by']}" if "scanned_by" in found else ""
        took = f" in {found['took_ms'] / 1000:g} s" if "took_ms" in found else ""
        # A scan that failed or goes on has its own node and time: the map is of one before.
        of_map = "error" not in found and not found["scanning"]
        yield f"scanned: {age(found['map_age_seconds'])} ago" + (by + took if of_map else "")
    elif found["key"].startswith("ib:"):
        yield f"scanned: never; llmgwctl topology {found['id']} --scan maps it"
    if found["scanning"]:
        yield f"scan: under way on node {found.get('scanned_by', '-')}"
    if "error" in found:
        at = f" at {_time(found['scanned_at'])}" if "scanned_at" in found else ""
        yield f"scan error{at}: node {found.get('scanned_by', '-')}: {found['error']}"
