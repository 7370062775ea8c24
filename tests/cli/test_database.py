"""`llmgwctl db` and `llmgwctl logs`: without a controller, and through one."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from functools import partial

import pytest
import trio

from controller.cli import failures
from controller.cli.database import connection_variables
from sql import embedded
from tests.api.served import LINES, Agent
from tests.cli.served import ENVIRONMENT, as_process, in_thread


def test_upgrade_and_status(empty_database, monkeypatch):
    monkeypatch.setenv("LLMGW_DATABASE_URL", empty_database)
    assert in_thread(["db", "status", "--json"]).document["state"].startswith("empty")
    first = in_thread(["db", "upgrade", "--json"])
    assert (first.code, first.document["state"]) == (0, "up to date")
    assert (
        in_thread(["db", "upgrade"]).out
        == f"The database is at revision {first.document['revision']}: up to date.\n"
    )
    state = in_thread(["db", "status", "--json"]).document
    assert (state["state"], state["revision"]) == ("up to date", state["program"])


def test_a_configuration_may_name_the_database(empty_database, tmp_path):
    file = tmp_path / "llmgw.toml"
    file.write_text(f'[database]\nurl = "{empty_database}"\n')
    assert in_thread(["db", "--config", str(file), "status"]).code == 0
    file.write_text("nonsense = 1\n")
    wrong = in_thread(["db", "--config", str(file), "status", "--json"])
    assert wrong.code == failures.FAILED
    assert "unknown field 'nonsense'" in wrong.document["error"]


def test_nobody_there(monkeypatch):
    monkeypatch.setenv("LLMGW_DATABASE_URL", "postgresql://u:hidden@127.0.0.1:9/x")
    for command in ("status", "upgrade"):
        done = in_thread(["db", command, "--json"])
        assert done.code == failures.FAILED
        assert "cannot be reached" in done.document["error"]
        assert "hidden" not in done.err


def test_the_password_is_in_no_argument():
    given = connection_variables(
        "postgresql://me:s%40cret@db.example:6432/gw?sslmode=verify-full&options=-c%20a.b%3D1"
    )
    assert given == {
        "PGHOST": "db.example", "PGPORT": "6432", "PGUSER": "me", "PGPASSWORD": "s@cret",
        "PGDATABASE": "gw",
        "PGSSLMODE": "verify-full", "PGOPTIONS": "-c a.b=1 -c search_path=llmgw,llmgw_core",
    }  # fmt: skip


@pytest.mark.slow
async def test_psql_has_our_views_first(database):
    path = f"{embedded.bin_dir()}:{os.environ['PATH']}"
    ask = partial(
        as_process, "", "db", "psql", "-At", "-c", "select count(*) from nodes",
        env={"LLMGW_DATABASE_URL": database.read_url, "PATH": path},
    )  # fmt: skip
    done = await trio.to_thread.run_sync(ask)
    assert (done.code, done.out) == (0, "0\n"), done
    manual = await trio.to_thread.run_sync(
        partial(
            as_process,
            "",
            "db",
            "psql",
            "-c",
            "\\dv+",
            env={"LLMGW_DATABASE_URL": database.url, "PATH": path},
        )
    )
    assert "Every node as llmgwctl nodes shows it" in manual.out


async def test_logs_come_as_text_or_one_document(ctl, database):
    answered = trio.Event()

    async def answer() -> None:
        while not answered.is_set():
            with database.connect() as db:
                db.execute(
                    "update llmgw_core.ask set answer = E'a\\x1bb\\n', answer_offset = 3,"
                    " answered_at = clock_timestamp() where answered_at is null"
                )
            await trio.sleep(0.05)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(answer)
        assert await ctl.good("logs", "n1") == "a�b\n"
        assert (await ctl("logs", "n1", "--json", "-n", "5")).document == {
            "node": "n1",
            "text": "a\x1bb\n",
        }
        answered.set()


@pytest.mark.slow
async def test_G02_a_followed_log_goes_on_until_the_interrupt(ctl, agent_pool, nursery):
    agent = Agent(agent_pool)
    await agent.enroll((await ctl.good("node", "enroll", "n1")).strip())
    nursery.start_soon(agent.run)
    command = [sys.executable, "-m", "controller.cli", "logs", "n1", "-f"]
    with subprocess.Popen(
        command, env=ENVIRONMENT | {"LLMGW_SERVER": ctl.url}, stdout=subprocess.PIPE
    ) as process:
        line = partial(trio.to_thread.run_sync, process.stdout.readline)
        with trio.fail_after(60):
            assert [await line(), await line()] == [b"one\n", b"two\n"]
            agent.log = LINES + "three\n"
            assert await line() == b"three\n"
            process.send_signal(signal.SIGINT)
            assert await trio.to_thread.run_sync(process.wait) == failures.INTERRUPTED
    nursery.cancel_scope.cancel()
