"""Two controllers, one agent, the real engine on one database; then things are killed."""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING

import psutil
import pytest

from tests.end_to_end.fleet import Fleet
from tests.end_to_end.installation import CATALOG
from tests.tiny_model import tiny_gguf

if TYPE_CHECKING:
    from pathlib import Path

    from tests.conftest import Database

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]
BOOT = "select boot from llmgw_core.beat"
ENGINE = "select pid, state, id from llmgw.shards where state = 'ready' order by id desc limit 1"


def test_D04_F01_kills_are_survived(database: Database, tmp_path: Path) -> None:
    """One long story: each death with what must go on."""
    with Fleet(database, tmp_path) as fleet:
        first = fleet.controller()
        fleet.controller()
        token = fleet.ctl("node", "enroll", "n1")["token"]
        fleet.key = fleet.ctl("keys", "create", "test")["key"]
        agent = fleet.agent(token)
        catalog = tmp_path / "catalog.toml"
        catalog.write_text(CATALOG.format(weights=tiny_gguf(tmp_path / "tiny.gguf")))
        fleet.ctl("apply", "-f", str(catalog))
        both_serve(fleet)

        engine, *_ = fleet.row(ENGINE)
        agent.kill()
        assert psutil.pid_exists(engine)
        both_serve(fleet)

        boot = fleet.row(BOOT)
        fleet.agent()
        fleet.wait(lambda: fleet.row(BOOT) != boot, "the new agent to speak")
        adopted_and_kept(fleet, engine)

        os.killpg(engine, signal.SIGKILL)
        fleet.wait(lambda: (row := fleet.row(ENGINE)) and row[0] != engine, "another engine")
        both_serve(fleet)

        first.kill()
        fleet.ports.pop(0)
        fleet.wait(lambda: fleet.answers(0), "the other controller to serve")
        nobody_leads_no_more(fleet)


def both_serve(fleet: Fleet) -> None:
    for number in range(len(fleet.ports)):
        fleet.wait(lambda n=number: fleet.answers(n), f"controller {number} to serve")


def adopted_and_kept(fleet: Fleet, engine: int) -> None:
    """The new agent speaks for the old engine, and nobody started another."""
    seen = (
        "select applied_gen = alloc_gen from llmgw_core.beat join llmgw_core.node on id = node_id"
    )
    fleet.wait(lambda: fleet.row(seen) == (True,), "the new agent to know its assignments")
    fleet.wait(lambda: fleet.row(ENGINE), "the shard to be ready")
    assert fleet.row(ENGINE)[0] == engine
    assert fleet.row("select sum(restarts) from llmgw.replicas") == (0,)
    both_serve(fleet)


def nobody_leads_no_more(fleet: Fleet) -> None:
    fleet.wait(
        lambda: fleet.row("select held from llmgw.leases where name = 'tick'") == (True,),
        "the other controller to lead",
    )
