"""What-if over the API: the live snapshot, no row written, the answer in its documented form."""

from __future__ import annotations

import pytest

from controller.api import results
from tests.api.served import TINY
from tests.control.duties import cards
from tests.sql.fleet import open_fleet
from tests.sql.fleet import snapshot as rows_of


@pytest.fixture
def built(database):
    """Two nodes of two cards, a model with one replica on the first."""
    with open_fleet(database) as fleet:
        first = cards(fleet, "n1", 2)
        cards(fleet, "n2", 2)
        fleet.model("m", {"gpus": 1, "gpu_class": "H100"}, max_replicas=1)
        fleet.running("m", first, 0)
        yield fleet


BIG = {
    "name": "big",
    "source": "file:/models/big",
    "prices": {"prompt": 1},
    "profiles": [{"name": "p", "engine": "llamacpp", "gpus": 8, "gpu_class": "H100"}],
}


async def test_a_settled_fleet_does_nothing_and_no_row_is_written(api, built):
    before = rows_of(built.admin)
    sequences = (
        "select schemaname || sequencename || coalesce(last_value, 0) as v from pg_sequences"
    )
    numbers = built.rows(sequences)
    found = await api.good("POST", "/what-if", {})
    results.WhatIf.model_validate(found)
    assert found["moves"] == found["placed"] == found["stopped"] == found["unplaced"] == []
    assert (found["under_way"], found["settled"]) == (0, True)
    asked = {
        "add_nodes": [{"count": 1, "gpus": 8, "class": "H100"}],
        "drain_nodes": ["n1"],
        "scale": {"m": 2},
        "models": [BIG],
    }
    found = await api.good("POST", "/what-if", asked)
    results.WhatIf.model_validate(found)
    assert rows_of(built.admin) == before
    assert built.rows(sequences) == numbers


async def test_every_kind_of_change(api, built):
    drained = await api.good("POST", "/what-if", {"drain_nodes": ["n1"]})
    (move,) = drained["moves"]
    assert (move["model"], move["from"], move["to"][0]["node"]) == (
        "m", [{"node": "n1", "gpus": [0]}], "n2",
    )  # fmt: skip
    removed = await api.good("POST", "/what-if", {"remove_nodes": ["n1", "n2"]})
    assert [s["replica"] for s in removed["stopped"]] == [move["replica"]]
    assert removed["unplaced"][0]["reason"] == "no node has registered"
    scaled = await api.good("POST", "/what-if", {"scale": {"m": 9}})
    assert (len(scaled["placed"]), scaled["unplaced"][0]["replicas"]) == (3, 5)
    assert scaled["gpus"] == [
        {"class": "H100", "total": 4, "free": 3, "total_after": 4, "free_after": 0}
    ]
    new = await api.good("POST", "/what-if", {"models": [BIG]})
    assert "have too few cards" in new["unplaced"][0]["reason"]
    body = {"models": [BIG], "add_nodes": [{"count": 1, "gpus": 8, "class": "H100"}]}
    fits = await api.good("POST", "/what-if", body)
    assert fits["placed"][0]["at"] == [{"node": "new-h100-1", "gpus": list(range(8))}]
    assert fits["assumptions"] == ["1 x 8 H100: each as n1 is, with nothing on it"] or (
        fits["assumptions"] == ["1 x 8 H100: each as n2 is, with nothing on it"]
    )


async def test_the_same_seed_gives_the_same_answer(api, built):
    body = {"scale": {"m": 3}, "seed": 5}
    assert await api.good("POST", "/what-if", body) == await api.good("POST", "/what-if", body)


async def test_what_is_wrong_is_named(api, built):
    for body, status, said in (
        ({"drain_nodes": ["n3"]}, 404, "there is no node n3: the nodes are n1, n2"),
        ({"scale": {"mm": 1}}, 404, "there is no model mm"),
        ({"scale": {"m": -1}}, 400, "-1 is not between"),
        ({"add_nodes": [{"count": 1, "gpus": 8}]}, 400, "no class"),
        ({"add_nodes": [{"count": 0, "gpus": 8, "class": "H100"}]}, 400, "count"),
        ({"add_node": []}, 400, "did you mean 'add_nodes'"),
        ({"drain_nodes": ["n1"], "remove_nodes": ["n1"]}, 400, "both drained and removed"),
        ({"models": [TINY | {"fallbacks": ["nope"]}]}, 400, "no model nope to fall back to"),
        ({"models": [TINY | {"alias": []}]}, 400, "did you mean 'aliases'"),
    ):
        answer = await api.bad(status, "POST", "/what-if", body)
        assert said in answer, (body, answer)


async def test_a_model_file_replaces_the_model_of_its_name(api, built):
    wider = {
        "name": "m", "source": "file:/m.gguf", "min_replicas": 2, "max_replicas": 2,
        "profiles": [{"name": "p", "engine": "llamacpp", "gpus": 2, "gpu_class": "H100"}],
    }  # fmt: skip
    found = await api.good("POST", "/what-if", {"models": [wider]})
    assert [p["at"] for p in found["placed"]] == [[{"node": "n2", "gpus": [0, 1]}]]
