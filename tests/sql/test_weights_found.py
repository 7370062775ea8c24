"""Weights that agents found on their disks, and the models that they are of."""

from __future__ import annotations

import pytest

FOUND = {"path": "/filer/llama", "bytes": 5, "complete": True, "facts": {"layers": 1}}


@pytest.mark.parametrize("source", ["file:/filer/llama", "file:///filer/llama"])
@pytest.mark.parametrize("first", ["weights", "model"])
def test_weights_that_a_scan_found_are_those_of_the_model_that_names_their_path(
    fleet, source, first
):
    node, other = fleet.node("n1"), FOUND | {"path": "/filer/llama-2", "managed": False}
    steps = {
        "weights": lambda: fleet.report(node, "weights", [FOUND | {"managed": False}, other]),
        "model": lambda: fleet.model("m", source=source),
    }
    for step in (first, *(steps.keys() - {first})):
        steps[step]()
    told = fleet.rows("select path, source, in_catalog from llmgw.weights order by path")
    assert told == [
        {"path": "/filer/llama", "source": source, "in_catalog": True},
        {"path": "/filer/llama-2", "source": None, "in_catalog": False},
    ]
    assert fleet.value("select models_on_disk from llmgw.nodes") == [source]
    assert fleet.rows("select * from llmgw.weight_orphans") == []
