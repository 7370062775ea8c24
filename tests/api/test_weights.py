"""Orphans are listed, and removed by their node's agent, which has the last word."""

from __future__ import annotations

import json

import pytest
import trio

from agent.door import SqlDoor
from agent.source import NOTE, parse_source
from agent.weights import Weights
from agent.weights_collect import Collector
from controller.cli.weights import _under_way
from tests.api.served import SECRET, TINY
from tests.cli.served import Ctl

BOOT = "11111111-1111-1111-1111-111111111111"


class Keeper:
    """Node n1 with a weights directory: reports its downloads and removes what it is asked to."""

    def __init__(self, pool, root):
        self.door, self.root, self.live = SqlDoor(pool), root, []
        self.collector = Collector(Weights(root, {}), lambda: self.live)
        self.listed = []

    async def holds(self, *sources, **more):
        """Downloads of these sources, on disk and reported."""
        for source in sources:
            folder = parse_source(source).folder(self.root)
            folder.mkdir(parents=True)
            (folder / "w").write_bytes(b"x" * 1000)
            (folder / NOTE).write_text(json.dumps({"source": source, "complete": True}))
            known = {"source": source, "path": str(folder), "bytes": 1000, "managed": True}
            self.listed.append({**known, "complete": True, **more})
        await self.door.report(SECRET, "weights", self.listed)
        return [entry["path"] for entry in self.listed]

    async def run(self):
        """Sync and answer until cancelled."""
        report = {"boot": BOOT, "applied_gen": 0, "shards": []}
        while True:
            answer = await self.door.sync(SECRET, 0, report)
            for ask in answer.asks:
                said = await self.collector.collect(ask["id"], ask["paths"])
                await self.door.report_collect(SECRET, ask["id"], said)
            await trio.sleep(0.05)


@pytest.fixture
async def keeper(api, fleet, agent_pool, tmp_path):
    token = (await api.good("POST", "/nodes/enroll", {"node": "n1"}))["token"]
    await agent_pool.fetchval("select agent.enroll($1, 'n1', $2)", token, SECRET)
    return Keeper(agent_pool, tmp_path)


def model(source, name="mine"):
    return {**TINY, "name": name, "aliases": [], "source": source}


async def paths(api, query=""):
    return [row["path"] for row in await api.good("GET", f"/weights/orphans{query}")]


async def test_what_no_model_and_no_live_shard_uses_is_an_orphan(api, keeper, pool):
    own, gone, within = await keeper.holds("hf:a/own", "hf:a/gone", "https://h/m.gguf")
    await api.good("POST", "/models", model("hf:a/own"))
    await api.good("POST", "/models", model(f"file:{within}/m.gguf", "inner"))
    assert await paths(api, "?node=n1") == [gone]
    assert await paths(api, "?node=n2") == []
    for path, status, words in (
        (own, 409, "model mine of the catalog uses it"),
        (within, 409, "model inner of the catalog uses it"),
        ("/models/nope", 404, "no weights lie at /models/nope on any node"),
    ):
        said = await api.bad(status, "POST", "/weights/collect", {"paths": [gone, path]})
        assert "nothing was removed" in said
        assert words in said
    assert await api.bad(404, "POST", "/weights/collect", {"node": "nope"})
    assert await api.bad(400, "POST", "/weights/collect", {"path": gone})
    assert await pool.fetchval("select count(*) from llmgw_core.ask") == 0
    assert parse_source("hf:a/gone").folder(keeper.root).exists()


async def test_an_orphan_is_removed_and_the_agent_has_the_last_word(api, keeper, pool, nursery):
    gone, used = await keeper.holds("hf:a/gone", "hf:a/used")
    keeper.live = ["hf:a/used"]  # the database has not heard of it yet
    nursery.start_soon(keeper.run)
    done = await api.good("POST", "/weights/collect", {"node": "n1"})
    [node] = done["nodes"]
    assert done["freed_bytes"] == node["freed_bytes"] == 1000
    assert node["freed"] == [{"path": gone, "bytes": 1000}]
    assert [one["path"] for one in node["kept"]] == [used]
    assert "live shard of this node uses it" in node["kept"][0]["reason"]
    assert await paths(api) == [used], "what went is listed no more"
    rows = await pool.fetch(
        "select actor, action, object, detail from llmgw_core.audit where action like '%weights%'"
        " order by id"
    )
    assert [(r["action"], r["object"]) for r in rows] == [
        ("collect weights", "node n1"),
        ("weights collected", "node n1"),
    ]
    assert rows[1]["actor"] == "node n1"
    assert rows[1]["detail"]["freed_bytes"] == 1000
    nursery.cancel_scope.cancel()


async def test_what_was_not_answered_is_taken_back(api, keeper, pool, monkeypatch):
    [gone] = await keeper.holds("hf:a/gone")
    await keeper.door.sync(SECRET, 0, {"boot": BOOT, "applied_gen": 0, "shards": []})
    monkeypatch.setattr("controller.api.weights.COLLECT_S", 0.3)
    done = await api.good("POST", "/weights/collect", {"paths": [gone]})
    assert "did not answer within" in done["nodes"][0]["error"]
    assert await pool.fetchval("select count(*) from llmgw_core.ask") == 0
    answer = await keeper.door.sync(SECRET, 0, {"boot": BOOT, "applied_gen": 0, "shards": []})
    assert answer.asks == []
    await keeper.door.report_collect(SECRET, 1, {"freed": [{"path": gone, "bytes": 1}]})
    assert await paths(api) == [gone], "an answer that nobody waits for changes nothing"


async def test_a_silent_node_is_not_asked(api, keeper, database):
    await keeper.holds("hf:a/gone")
    with database.connect() as db:
        db.execute("insert into llmgw_core.weight (node_id, source, path, complete)"
                   " values ('n3', 'hf:a/gone', '/w/x', true)")  # fmt: skip
    done = await api.good("POST", "/weights/collect", {"node": "n3"})
    assert "node n3 is lost" in done["nodes"][0]["error"]


async def test_what_many_nodes_mount_counts_once(api, keeper, url, database):
    await keeper.holds("hf:a/gone", shared=True, filer="f:/w", filer_path="/hf/gone")
    with database.connect() as db:
        db.execute("delete from llmgw_core.weight where node_id <> 'n1'")
        db.execute("insert into llmgw_core.weight (node_id, source, path, bytes, complete, shared,"
                   " filer, filer_path) values ('n2', 'hf:a/gone', '/mnt/gone', 1000, true, true,"
                   " 'f:/w', '/hf/gone')")  # fmt: skip
    assert "1 model, 1000 B on disk" in await Ctl(url).good("weights", "orphans")
    assert "1 model, 1000 B on disk" in await Ctl(url).good("weights")
    with database.connect() as db:
        asked = db.execute("select llmgw.weights_collect_v1('me', null, null)").fetchone()[0]
    assert len(asked) == 1, "one node is asked to remove them"


async def test_the_command_removes_what_it_is_told_and_no_more(api, keeper, url, nursery):
    gone, more = await keeper.holds("hf:a/gone", "hf:a/more")
    ctl = Ctl(url)
    for wrong in (("collect",), ("colect", "--all"), ("collect", "--all", "--node", "n1")):
        assert (await ctl("weights", *wrong)).code == 2
    assert (await ctl("weights", "collect", f"{gone}x")).code == 1
    assert sorted(await paths(api)) == sorted([gone, more])
    nursery.start_soon(keeper.run)
    assert f"n1 {gone}: 1000 B freed" in await ctl.good("weights", "collect", gone)
    assert await paths(api) == [more]
    done = json.loads(await ctl.good("weights", "collect", "--all", "--json"))
    assert done["freed_bytes"] == 1000
    assert await ctl.good("weights", "orphans") == "No orphans.\n"
    nursery.cancel_scope.cancel()


def test_downloads_under_way_are_told_with_and_without_a_total():
    fetch = {"source": "hf:a/b", "bytes_done": 512, "bytes_total": 2048, "percent": 25.0}
    bare = {"source": "hf:a/c", "bytes_done": 512}
    shards = [{"node": "n1", "fetch": fetch}, {"node": "n2", "fetch": bare}, {"node": "n3"}]
    assert list(_under_way([{"id": 7, "shards": shards}])) == [
        "n1 fetches hf:a/b: 512 B of 2.0 KiB (25 %), for replica 7",
        "n2 fetches hf:a/c: 512 B, for replica 7",
    ]
