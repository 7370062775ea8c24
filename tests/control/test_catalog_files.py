"""Controllers with different catalog files: one is in force, the others are told of.

What the database answers is tested with rows; the last test has two real controllers.
"""

from __future__ import annotations

import json
import signal
import uuid

import pytest
import trio

from controller.catalog import own
from controller.catalog.apply import apply
from controller.catalog.own import OwnFile
from controller.catalog.reading import parse
from sql.errors import DatabaseAway
from tests.control.process import PATIENCE_S, until

MODEL = """[[models]]
name = "{name}"
source = "file:/m.gguf"
profiles = [{{name = "p", engine = "llamacpp", cpus = 1}}]
"""
STATE = """select hostname, catalog, catalog_problem from llmgw.controllers order by started_at"""


class Host:
    """One machine with a catalog file; each start is a new process."""

    def __init__(self, pool, folder, name, path=None):
        self.pool, self.name = pool, name
        self.path = path or folder / f"{name}.toml"
        self.own = None

    def write(self, *models, path=None):
        """Put models into its file."""
        self.path = path or self.path
        self.path.write_text("".join(MODEL.format(name=name) for name in models))
        return self

    async def start(self):
        """A new process offers the file."""
        number = uuid.uuid4()
        await self.pool.execute(
            "select llmgw_core.controller_join_v1($1, 'control', $2, 1, 'v')", number, self.name
        )
        self.own = OwnFile(self.pool, number, self.name, lambda: self.path)
        return await self.offer()

    async def hup(self):
        """An operator's SIGHUP."""
        self.own.told = True
        await self.offer()
        self.own.told = False

    async def offer(self):
        """What the loop does once."""
        await self.own._offer(self.path)
        return self

    async def state(self):
        """What is shown of its present process."""
        row = await self.pool.fetchrow(
            "select catalog, catalog_problem from llmgw.controllers where id = $1",
            self.own.controller,
        )
        return row["catalog"], row["catalog_problem"]


@pytest.fixture
def host(pool, tmp_path):
    return lambda name, path=None: Host(pool, tmp_path, name, path)


async def models(pool):
    return [row["name"] for row in await pool.fetch("select name from llmgw.models order by 1")]


async def test_restarts_with_unchanged_files_do_not_take_turns(pool, host):
    a = await host("a").write("one").start()
    b = await host("b").write("two").start()
    assert await models(pool) == ["two"]  # the last that was new
    assert (await a.state())[0] == "differs"
    for _ in range(3):
        await a.start()
        await b.start()
        assert await models(pool) == ["two"]
    state, problem = await a.state()
    assert state == "differs"
    assert str(a.path) in problem
    assert f"{b.path} of b" in problem
    assert await b.state() == ("applied", None)
    told = await pool.fetch(
        "select actor, detail from llmgw.events where action = 'catalog file differs'"
    )
    assert len(told) == 1  # however often it starts
    assert told[0]["actor"] == f"catalog file {a.path} on a"
    assert told[0]["detail"]["in_force"]["hostname"] == "b"


async def test_an_operator_decides_by_sighup_or_by_an_edit(pool, host):
    a = await host("a").write("one").start()
    b = await host("b").write("two").start()
    await a.hup()
    assert await models(pool) == ["one"]
    assert (await b.state())[0] == "differs"
    await b.start()
    assert await models(pool) == ["one"]
    await b.write("two", "three").start()
    assert await models(pool) == ["three", "two"]
    # Back to what it had before that: content that was here before, and yet this host's edit.
    await b.write("two").start()
    assert await models(pool) == ["two"]
    await a.start()
    assert await models(pool) == ["two"]


async def test_a_rollout_over_hosts_is_applied_once(pool, host):
    hosts = [await host(name).write("old").start() for name in "abc"]
    assert [(await h.state())[0] for h in hosts] == ["applied"] * 3
    for number, one in enumerate(hosts, 1):
        await one.write("new").start()
        assert await models(pool) == ["new"]
        for other in hosts[number:]:  # a crash in between, with the file of before
            await other.start()
            assert (await other.state())[0] == "differs"
            assert await models(pool) == ["new"]
    assert [(await h.state())[0] for h in hosts] == ["applied"] * 3
    # A container has a new name at each start: the old file is no news from there either.
    late = await host("d").write("old").start()
    assert (await late.state())[0] == "differs"
    assert await models(pool) == ["new"]


async def test_the_same_catalog_may_lie_anywhere_in_any_form(pool, host, tmp_path):
    a = await host("a").write("one", "two").start()
    b = host("b", tmp_path / "other.json")
    profile = {"cpus": 1, "engine": "llamacpp", "name": "p"}
    both = [{"profiles": [profile], "source": "file:/m.gguf", "name": n} for n in ("two", "one")]
    b.path.write_text(json.dumps({"models": both}))
    await b.start()
    assert await b.state() == ("applied", None)
    origins = "select distinct origin_file from llmgw.models"
    assert [row["origin_file"] for row in await pool.fetch(origins)] == [str(a.path)]
    # A file that got a new name goes on with what it had; it does not fight with itself.
    replicas = "select distinct created_at from llmgw_core.model where name = 'one'"
    before = await pool.fetchval(replicas)
    await a.write("one", path=tmp_path / "renamed.toml").start()
    assert await models(pool) == ["one"]
    assert [row["origin_file"] for row in await pool.fetch(origins)] == [str(a.path)]
    assert await pool.fetchval(replicas) == before


async def test_a_file_that_cannot_be_applied_is_told_and_tried_again(pool, host):
    a = await host("a").write("one").start()
    b = host("b")
    b.path.write_text('[[models]]\nnmae = "x"\n')
    await b.start()
    state, problem = await b.state()
    assert state == "refused"
    assert "did you mean 'name'?" in problem
    taken = {"models": [{"name": "two", "source": "file:/m", "profiles": []}]}
    taken["models"][0]["profiles"] = [{"name": "p", "engine": "llamacpp"}]
    await apply(pool, parse(taken, "c"), "me", origin="api", prune=False)
    await b.write("two").start()
    state, problem = await b.state()
    assert (state, problem) == ("refused", "model two is declared by the API: change it there")
    assert await a.state() == ("applied", None)
    await pool.execute("select llmgw.model_remove_v1('me', 'two')")
    await b.start()
    assert await b.state() == ("applied", None)
    assert await models(pool) == ["two"]
    b.path.write_text("")  # a disk that was full
    await b.hup()
    assert "is empty" in (await b.state())[1]
    assert await models(pool) == ["two"]
    b.path.unlink()
    await b.hup()
    assert "No such file" in (await b.state())[1]
    assert await models(pool) == ["two"]


async def test_what_the_command_applies_to_the_controllers_file_is_in_force(pool, host):
    a = await host("a").write("one").start()
    document = {"models": [{"name": "two", "source": "file:/m", "profiles": []}]}
    document["models"][0]["profiles"] = [{"name": "p", "engine": "llamacpp"}]
    catalog = parse(document, "c")
    more = {"origin": "file", "prune": True}
    await apply(pool, catalog, "ann", file="/elsewhere.toml", **more)
    assert await a.state() == ("applied", None)  # another file, beside ours
    document["models"][0]["name"] = "three"
    await apply(pool, parse(document, "c"), "ann", file=str(a.path), dry_run=True, **more)
    assert await a.state() == ("applied", None)
    await apply(pool, parse(document, "c"), "ann", file=str(a.path), **more)
    state, problem = await a.state()
    assert state == "differs"
    assert "by ann" in problem
    await a.start()
    assert await models(pool) == ["three", "two"]
    await a.hup()
    assert await models(pool) == ["one", "two"]
    assert await a.state() == ("applied", None)


async def test_without_a_file_nothing_is_said(pool, host):
    a = await host("a").write("one").start()
    a.path = None
    await a.offer()
    assert await a.state() == (None, None)
    assert await models(pool) == ["one"]


async def test_a_clock_set_back_does_not_bring_an_old_file_back(pool, host, database):
    a = await host("a").write("one").start()
    with database.connect() as db:
        db.execute("update llmgw_core.catalog_seen set applied_at = applied_at + interval '1 day'")
    await a.write("two").start()
    assert await a.state() == ("applied", None)


async def test_a_sighup_outlives_a_database_that_is_away(pool, host, database):
    a = await host("a").write("one").start()
    await host("b").write("two").start()
    a.own.told = True
    with database.connect() as db:
        db.execute("alter function llmgw_core.catalog_offer_v1 rename to hidden")
        db.execute(
            "create function llmgw_core.catalog_offer_v1(uuid, text, text, text, text, boolean)"
            " returns text language plpgsql as $$ begin raise exception 'away'"
            " using errcode = '57P03'; end $$;"
            " grant execute on function llmgw_core.catalog_offer_v1 to llmgw_controller"
        )
        with pytest.raises(DatabaseAway):
            await a.offer()
        assert a.own.told
        db.execute("drop function llmgw_core.catalog_offer_v1")
        db.execute("alter function llmgw_core.hidden rename to catalog_offer_v1")
    await a.offer()
    assert await models(pool) == ["one"]


async def test_a_process_that_was_forgotten_is_known_again(pool, host, database, monkeypatch):
    """Housekeeping removes the row of one that was away for an hour; it joins anew."""
    a = await host("a").write("one").start()
    number = a.own.controller
    with database.connect() as db:
        db.execute("delete from llmgw_core.controller")
    await pool.execute("select llmgw_core.controller_join_v1($1, 'control', 'a', 1, 'v')", number)
    assert await a.state() == (None, None)
    monkeypatch.setattr(own, "TELL_S", 0.01)
    _, never = trio.open_memory_channel(0)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(a.own._wait, never)
        with trio.fail_after(40):
            while await a.state() != ("applied", None):
                await trio.lowlevel.checkpoint()
        nursery.cancel_scope.cancel()


@pytest.mark.slow
def test_two_controllers_with_different_files(database, fleet, start, tmp_path):
    paths = [tmp_path / "one.toml", tmp_path / "two.toml"]
    for path in paths:
        path.write_text(MODEL.format(name=path.stem))

    def begin(path):
        return start(database.controller_url, "--catalog", str(path)).ready()

    def names():
        return [row["name"] for row in fleet.rows("select name from llmgw.models order by 1")]

    def states(one):
        shown = one.http.get("/api/v1/controllers").json()
        return sorted(c["catalog"] for c in shown if c["alive"] and "catalog" in c)

    first = begin(paths[0])
    until(lambda: names() == ["one"], "the first file is applied")
    second = begin(paths[1])
    until(lambda: names() == ["two"], "the second file was new")
    until(lambda: states(second) == ["applied", "differs"], "the first is told of")
    (row,) = fleet.rows("select * from llmgw.trouble where what = 'catalog differs'")
    assert f"/{first.process.pid}" in row["object"]
    assert str(paths[1]) in row["why"]
    (check,) = [c for c in first.http.get("/api/v1/doctor").json() if c["result"] == "warn"]
    assert (check["node"], check["name"]) == (row["object"], "catalog")
    assert "SIGHUP" in check["remedy"]
    assert first.metrics()["llmgw_controllers_catalog", (("state", "differs"),)] == 1

    first.signal(signal.SIGTERM)
    first.process.wait(PATIENCE_S)
    again = begin(paths[0])
    until(lambda: again.events("another catalog file is in force"), "it says so")
    assert names() == ["two"]
    assert not again.events("catalog applied")
    again.signal(signal.SIGHUP)
    until(lambda: names() == ["one"], "an operator told it to")
    until(lambda: states(again) == ["applied", "differs"], "now the second is told of")
    paths[1].write_text(paths[0].read_text())
    second.signal(signal.SIGHUP)
    until(lambda: states(again) == ["applied", "applied"], "both have the same")
    assert names() == ["one"]
    assert fleet.rows("select * from llmgw.trouble where what like 'catalog%%'") == []
