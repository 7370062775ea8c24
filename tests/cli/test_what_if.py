"""`llmgwctl what-if`: what is asked, what is printed."""

from __future__ import annotations

import json

import pytest

from tests.api.test_what_if import BIG
from tests.control.duties import cards
from tests.sql.fleet import open_fleet


@pytest.fixture
async def built(bare, database):
    with open_fleet(database) as fleet:
        first = cards(fleet, "n1", 2)
        cards(fleet, "n2", 2)
        fleet.model("m", {"gpus": 1, "gpu_class": "H100"}, max_replicas=1)
        fleet.running("m", first, 0)
        yield bare


async def test_a_quiet_fleet(built):
    assert await built.good("what-if") == (
        "Nothing would move.\n"
        "CLASS  CARDS  FREE  CARDS THEN  FREE THEN\n"
        "H100   4      3     4           3\n"
        "Nothing was changed.\n"
    )


async def test_all_kinds_of_change_at_once(built, tmp_path):
    file = tmp_path / "big.json"
    file.write_text(json.dumps(BIG))
    line = ["what-if", "--add-nodes", "1x8xH100", "--drain", "n1", "--remove-node", "n2"]
    line += ["--scale", "m=2", "--model-file", str(file)]
    text = await built.good(*line)
    assert "assumed: 1 x 8 H100: each as n" in text
    assert "node n1 would come empty" in text or "would keep" in text
    assert "Nothing was changed." in text
    document = (await built(*line, "--json")).document
    assert document["settled"] is True
    assert document["gpus"][0]["total_after"] == 10
    assert "1/1" not in await built.good("node", "n2")


async def test_what_does_not_fit_is_told_with_the_reason(built, tmp_path):
    file = tmp_path / "catalog.json"
    file.write_text(json.dumps({"models": [BIG]}))
    text = await built.good("what-if", "--model-file", str(file))
    assert "1 replica of big would not fit: 2 of 2 nodes have too few cards" in text
    moved = await built.good("what-if", "--drain", "n1")
    assert "1 would move:" in moved
    assert "n1:[0]  n2:[0]" in moved
    assert "node n1 would come empty" in moved
    assert "run nothing any more: n1" in moved
    stopped = await built.good("what-if", "--remove-node", "n1", "--remove-node", "n2")
    assert "1 would stop:" in stopped


async def test_wrong_words(built, tmp_path):
    pools = tmp_path / "p.toml"
    pools.write_text("[pools.a]\n")
    for line, code, said in (
        (["--add-nodes", "4x8"], 1, "no class"),
        (["--add-nodes", "many"], 2, "4x8xH100"),
        (["--add-nodes", "1x8xB300:big"], 1, "is not a size"),
        (["--scale", "m"], 2, "MODEL=COUNT"),
        (["--scale", "m=1", "--scale", "m=2"], 2, "twice"),
        (["--drain", "nope"], 1, "there is no node nope"),
        (["--model-file", str(tmp_path / "none")], 1, "cannot be read"),
        (["--model-file", str(pools)], 1, "declares pools"),
    ):
        done = await built("what-if", *line)
        assert done.code == code, (line, done)
        assert said in done.err, (line, done)
    assert (await built("what-if", "--add-nodes", "2x0")).code == 0
