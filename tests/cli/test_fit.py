"""llmgwctl fit: the page that people read."""

from __future__ import annotations

import json

import pytest

from tests.api.test_fit import BIG, SOURCE, report


@pytest.fixture
async def big(ctl, tmp_path):
    (tmp_path / "m.json").write_text(json.dumps(BIG))
    await ctl.good("model", "add", str(tmp_path / "m.json"))
    return ctl


async def test_the_page_says_line_by_line_what_is_needed(big, database):
    report(database)
    text = await big.good("fit", "big", "--profile", "two")
    lines = text.splitlines()
    assert lines[0] == f"big from {SOURCE}, by the weights on n1 in /models/n1"
    assert lines[2] == "profile two: vllm on 2 cards"
    assert lines[3].startswith("H100 of 81559 MiB, 4 in the fleet: fits: needs ")
    assert [line.split()[0] for line in lines[4:11]] == [
        "PART", "weights", "cache", "context", "communication", "activations", "graphs",
    ]  # fmt: skip
    assert "sequences of 4096 tokens" in lines[11]
    text = await big.good("fit", "big")
    assert "does not fit: needs 152.99 GiB per card" in text
    assert "placed by its own gpu_memory of 71680 MiB per card" in text
    assert "profile cpu: llamacpp without cards: nothing to fit" in text
    assert "the largest part" not in text


async def test_without_weights_the_page_says_so(big):
    text = await big.good("fit", "big", "--profile", "one", "--gpu", "H100")
    assert f"no agent has the weights of {SOURCE} yet" in text
    assert "unknown, for this is missing: tensor_bytes" in text
    done = await big("--json", "fit", "big", "--profile", "nope")
    assert (done.code, list(done.document)) == (1, ["error"])
