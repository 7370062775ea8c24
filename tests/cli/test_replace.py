"""`llmgwctl replace`, and what drains tell while one waits."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import partial

import pytest
import trio

from tests.api.served import TINY
from tests.cli.served import ENVIRONMENT, as_process


@pytest.fixture
async def full(ctl, tmp_path):
    (tmp_path / "m.json").write_text(json.dumps(TINY))
    await ctl.good("model", "add", str(tmp_path / "m.json"))
    return ctl


async def test_replace_says_what_will_be_done(full):
    text = "Replica 1 of tiny is to be replaced: another is ready first.\n"
    assert await full.good("replace", "1") == text
    assert await full.good("replace", "tiny", "--stale") == text
    assert "room for both" in await full.good("replace", "tiny", "--force")
    assert await full.good("replace", "tiny", "--cancel") == "Replica 1 of tiny stays.\n"
    assert await full.good("replace", "1", "--cancel") == (
        "Nothing of model tiny is to be replaced.\n"
    )
    document = (await full("replace", "1", "--json")).document
    assert document == {"model": "tiny", "replicas": [1], "force": False, "cancelled": False}
    assert "replica 1: to be replaced" in await full.good("replicas")


async def test_replace_refuses_in_words(full):
    for line, code, said in (
        ("replace 99", 1, "no replica 99"),
        ("replace 2", 1, "nothing of it runs"),
        ("replace nope", 1, "no model nope"),
        ("replace --model 1", 1, "no model 1"),
        ("replace 1 --stale", 2, "name a model"),
        ("replace 1 --cancel --force", 2, "no other option"),
    ):
        done = await full(*line.split())
        assert (done.code, said in done.err) == (code, True), (line, done)


async def test_the_wait_ends_in_time_and_tells_what_keeps_it(full):
    done = await full("replace", "tiny", "--wait", "--timeout", "0s")
    assert done.code == 124
    assert "0 of 1 replicas of tiny replaced (1 pending, 1 ready) after 0s; it goes on" in done.err
    assert "replica 2 finds no place: the node is cordoned" in done.err


async def _marked(database):
    query = "select replace_asked is not null from llmgw_core.replica where id = 1"
    with trio.fail_after(60):
        while True:
            with database.connect() as db:
                if db.execute(query).fetchone()[0]:
                    return
            await trio.sleep(0.05)


async def _while_waiting(full, database, change):
    """How `replace tiny --wait` ends when the rows change under it."""
    ended = []
    async with trio.open_nursery() as nursery:

        async def wait() -> None:
            command = ("replace", "tiny", "--wait", "--timeout", "60s")
            ended.append(await trio.to_thread.run_sync(partial(as_process, full.url, *command)))

        nursery.start_soon(wait)
        await _marked(database)
        await trio.sleep(1.5)  # one look at the replicas as they were
        with database.connect() as db:
            db.execute(change)
    return ended[0]


GONE = "update llmgw_core.replica set state = 'stopping' where id = 1;" + (
    "update llmgw_core.replica set state = 'gone' where id = 1"
)
TAKEN_BACK = "update llmgw_core.replica set replace_asked = null"


@pytest.mark.slow
async def test_the_wait_ends_when_all_are_replaced(full, database):
    done = await _while_waiting(full, database, GONE)
    assert (done.code, done.out) == (0, "Replica 1 of tiny: replaced.\n")
    assert "0 of 1" not in done.err, "no progress where nobody looks"


@pytest.mark.slow
async def test_the_wait_fails_when_somebody_takes_it_back(full, database):
    done = await _while_waiting(full, database, TAKEN_BACK)
    assert done.code == 1
    assert "replica 1 of tiny stays: somebody took it back" in done.err


def stderr_on_terminal(url, *arguments):
    """What a command tells somebody who looks."""
    leader, follower = os.openpty()
    command = [sys.executable, "-m", "controller.cli", *arguments]
    env = ENVIRONMENT | {"LLMGW_SERVER": url, "TERM": "xterm"}
    subprocess.run(
        command, env=env, stdout=subprocess.PIPE, stderr=follower, timeout=60, check=False
    )
    os.close(follower)
    try:
        return os.read(leader, 65536).decode()
    finally:
        os.close(leader)


async def test_drain_tells_its_progress_on_terminals_only(full):
    line = ("drain", "n1", "--wait", "--timeout", "0s")
    piped = await full.process(*line)
    assert piped.code == 124
    assert "still has 1 replica after 0s; the drain goes on" in piped.err
    assert "1 replica left on node n1" not in piped.err
    shown = await trio.to_thread.run_sync(partial(stderr_on_terminal, full.url, *line))
    assert "1 replica left on node n1" in shown
