"""GET /fit: the estimate for profiles and classes of cards, and what is said without facts."""

from __future__ import annotations

import json

import pytest

from controller.api.fit import FitView
from tests.placement import fit_models as m

SOURCE = "hf:org/llama-70b"
BIG = {
    "name": "big",
    "source": SOURCE,
    "aliases": ["large"],
    "profiles": [
        {"name": "one", "engine": "vllm", "gpus": 1},
        {"name": "two", "engine": "vllm", "gpus": 2, "args": ["--max-model-len", "4096"]},
        {"name": "own", "engine": "vllm", "gpus": 4, "gpu_memory": "70GiB", "gpu_class": "L40S"},
        {"name": "cpu", "engine": "llamacpp"},
        {"name": "free", "engine": "command", "command": ["x"], "gpus": 1},
    ],
}
WEIGHT = """insert into llmgw_core.weight (node_id, source, path, bytes, complete, facts, reason)
    values (%s, %s, %s, 5, %s, %s, %s)"""


def report(database, node="n1", complete=True, facts=None, reason=None):
    facts = json.dumps(m.LLAMA_70B_FACTS) if facts is None else facts
    with database.connect() as db:
        db.execute(WEIGHT, (node, SOURCE, f"/models/{node}", complete, facts, reason))


@pytest.fixture
async def big(fleet, api, database):
    await api.good("POST", "/models", BIG)
    return api


async def test_each_profile_and_class_is_told(big, database):
    report(database)
    with database.connect() as db:
        db.execute(
            "insert into llmgw_core.gpu (node_id, uuid, index, name, class, memory_mib) values "
            "('n2', 'G', 0, 'NVIDIA L40S', 'L40S', 46068), ('n2', 'H', 1, 'odd', 'odd', null)"
        )
    found = await big.good("GET", "/fit?model=big")
    FitView.model_validate(found)
    assert found["weights"] == {"node": "n1", "path": "/models/n1", "bytes": 5}
    assert "problem" not in found
    one, two, own, cpu, free = found["profiles"]
    assert [(c["class"], c["cards"], c.get("fits")) for c in one["cases"]] == [
        ("H100", 4, False), ("L40S", 1, False), ("odd", 1, None),
    ]  # fmt: skip
    assert one["cases"][0]["verdict"].startswith("does not fit: needs 152.99 GiB per card, 73.")
    assert one["cases"][2]["verdict"].endswith("no card of odd has reported its memory")
    h100 = two["cases"][0]
    assert (h100["fits"], h100["context"], h100["card_mib"]) == (True, 4096, 81559)
    assert h100["need_mib"] == -(-sum(line["mib"] for line in h100["lines"]) * 10 // 9)
    assert h100["sequences"] > 1
    assert (own["gpu_memory_mib"], [c["class"] for c in own["cases"]]) == (70 * 1024, ["L40S"])
    assert (own["cases"][0]["fits"], own["cases"][0]["verdict"]) == (
        False, "does not fit: the profile's gpu_memory is 70 GiB, 25.01 GiB more than it has"
    )  # fmt: skip
    assert cpu["cases"] == []
    assert free["cases"][0]["verdict"] == (
        "unknown, for this is missing: engine command runs what only its user knows"
    )


async def test_one_profile_and_one_class_may_be_asked_for(big, database):
    report(database)
    found = await big.good("GET", "/fit?model=large&profile=own&gpu=H100")
    assert found["model"] == "big"
    (own,) = found["profiles"]
    assert [(c["class"], c["fits"]) for c in own["cases"]] == [("H100", True)]
    found = await big.good("GET", "/fit?model=big&profile=one&gpu=B200")
    (case,) = found["profiles"][0]["cases"]
    assert (case["cards"], "fits" in case, "need_mib" in case) == (0, False, True)


async def test_without_weights_it_says_what_is_missing(big, database):
    found = await big.good("GET", "/fit?model=big&profile=two")
    FitView.model_validate(found)
    assert "weights" not in found
    assert found["problem"].startswith(f"no agent has the weights of {SOURCE} yet")
    case = found["profiles"][0]["cases"][0]
    assert "fits" not in case
    assert set(case["missing"]) == {
        "tensor_bytes", "attention.kv_values_full", "hidden_size", "layers",
    }  # fmt: skip
    report(database, complete=False, reason="1 of 30 files missing")
    found = await big.good("GET", "/fit?model=big&profile=two")
    assert found["problem"] == (
        f"no agent has the whole weights of {SOURCE} yet: n1 says: 1 of 30 files missing"
    )
    report(database, "n2")
    assert (await big.good("GET", "/fit?model=big"))["weights"]["node"] == "n2"


async def test_unknown_names_are_told(big):
    assert "there is no model nope" in await big.bad(404, "GET", "/fit?model=nope")
    said = await big.bad(404, "GET", "/fit?model=big&profile=nope")
    assert said == "model big has no profile nope: it has one, two, own, cpu, free"
    assert "model" in await big.bad(400, "GET", "/fit")


@pytest.mark.parametrize(("memory", "gpus", "verdict", "notes"), [
    ("900GiB", 1, "does not fit: the profile's gpu_memory is 900 GiB, 820.35 GiB more than", []),
    ("10GiB", 1, "does not fit: needs 152.99 GiB per card", ["gpu_memory of 10 GiB is believed"]),
    ("79GiB", 8, "fits: needs", []), (None, 6, "does not start: 64 attention heads", []),
])  # fmt: skip
async def test_what_the_profile_says_of_its_memory_counts(
    fleet, api, database, memory, gpus, verdict, notes
):
    report(database)
    own = {"gpu_memory": memory} if memory else {}
    profile = {"name": "p", "engine": "vllm", "gpus": gpus, "gpu_class": "H100"} | own
    await api.good("POST", "/models", BIG | {"profiles": [profile]})
    (case,) = (await api.good("GET", "/fit?model=big"))["profiles"][0]["cases"]
    assert case["verdict"].startswith(verdict)
    assert case["fits"] is (verdict.startswith("fits"))
    assert [part in note for part, note in zip(notes, case["notes"], strict=True)] == [True] * len(
        notes
    )


async def test_its_own_memory_is_judged_without_facts_too(fleet, api):
    profile = {"name": "p", "engine": "vllm", "gpus": 1, "gpu_memory": "900GiB"}
    await api.good("POST", "/models", BIG | {"profiles": [profile]})
    (case,) = (await api.good("GET", "/fit?model=big"))["profiles"][0]["cases"]
    assert (case["fits"], case["lines"]) == (False, [])


async def test_a_shared_card_is_judged_by_the_part_that_is_claimed(fleet, api, database):
    report(database, facts=json.dumps(m.LLAMA_8B_FACTS))
    profile = {"name": "p", "engine": "vllm", "gpus": 1, "gpu_class": "H100", "share": True}
    profile |= {"gpu_memory": "40GiB", "args": ["--max-model-len", "8192"]}
    await api.good("POST", "/models", BIG | {"profiles": [profile]})
    (case,) = (await api.good("GET", "/fit?model=big"))["profiles"][0]["cases"]
    held = sum(line["mib"] for line in case["lines"] if line["name"] != "cache")
    # What is left of 40 GiB, not of nine tenths of the card.
    assert case["tokens"] == pytest.approx((40 * 1024 - held) * 8, rel=0.01)
