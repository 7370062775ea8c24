"""The estimate as a rule: which cards it refuses, with which numbers, and where it keeps silent."""

from __future__ import annotations

import json

import pytest

from controller.placement.filters import refusals
from controller.placement.fit import estimate
from controller.placement.place import Planner
from controller.placement.reasons import Code
from controller.reconcile.fitted import fitted
from tests.placement import fit_models as m
from tests.placement.made_fleet import GIB, gpu, model, node, profile, replica

SOURCE = "hf:org/model"
FACTS = {SOURCE: json.dumps(m.LLAMA_70B_FACTS)}


def wanted(facts=FACTS, **more):
    """A profile of a 70B model in 16 bits, as the snapshot makes it."""
    spec = {"source": SOURCE, "args": more.pop("args", []), "env": {}}
    return fitted(profile(spec=spec, **more), facts)


def test_a_model_that_does_not_fit_is_refused_with_numbers():
    (reason,) = refusals(wanted(gpus=1), node(cards=2))
    assert (reason.code, reason.need, reason.have) == (
        Code.GPU_FIT, "152.99 GiB", "80 GiB, 80 GiB",
    )  # fmt: skip
    assert reason.sentence.startswith("the model does not fit on the cards: need 152.99 GiB")
    assert refusals(wanted(gpus=2), node(cards=2)) == ()


def test_the_engines_arguments_count():
    assert refusals(wanted(gpus=2, args=["--gpu-memory-utilization", "0.8"]), node(cards=2))
    assert not refusals(wanted(gpus=2, args=["--cpu-offload-gb", "20"]), node(cards=2))


@pytest.mark.parametrize(
    "facts", [{}, {"hf:org/other": FACTS[SOURCE]}, {SOURCE: "{}"}, {SOURCE: "[" + "9" * 5000 + "]"}]
)
def test_unknown_facts_refuse_nothing(facts):
    assert wanted(facts, gpus=1).fit_mib is None
    assert refusals(wanted(facts, gpus=1), node(cards=1)) == ()


def test_a_profile_that_says_what_it_needs_is_believed():
    own = wanted(gpus=1, gpu_memory_mib=70 * GIB)
    assert own.fit_mib is None
    assert refusals(own, node(cards=1)) == ()
    assert wanted(gpus=0).fit_mib is None
    assert wanted(gpus=1, engine="command").fit_mib is None


def test_a_card_of_unknown_size_is_not_promised():
    (reason,) = refusals(wanted(gpus=1), node(gpus=(gpu(memory_mib=None),)))
    assert (reason.code, reason.need) == (Code.GPU_MEMORY_UNKNOWN, "152.99 GiB")


def test_cards_are_told_apart_by_the_estimate():
    # Nodes that differ by their cards' memory only: the plan must not take them for alike.
    small = node("a", gpus=tuple(gpu(i, "a", memory_mib=40 * GIB) for i in range(2)))
    large = node("b", gpus=tuple(gpu(i, "b", memory_mib=80 * GIB) for i in range(2)))
    for nodes in ((small, large), (large, small)):
        asks = model("m", 1, wanted(gpus=2))
        place, _ = Planner(nodes, [asks], [], seed=1).place(asks, replica(1, "pending"))
        assert place.shards[0].node_id == "b"
    # Two profiles that differ by their need only are two demands.
    less = wanted({SOURCE: json.dumps(m.LLAMA_8B_FACTS)}, gpus=2, name="less")
    both = model("m", 1, wanted(gpus=2), less)
    place, refused = Planner((small,), [both], [], seed=1).place(both, replica(1, "pending"))
    assert place.profile == "less"
    assert [r.code for r in refused] == ["gpu_fit"]


HEADS = json.dumps(m.LLAMA_70B_FACTS | {"heads": 28})
FAULT = "28 attention heads cannot be cut into 8 equal parts"


@pytest.mark.parametrize("facts", [HEADS, json.dumps({"heads": 28})])
@pytest.mark.parametrize("more", [{}, {"gpu_memory_mib": 20 * GIB}, {"engine": "sglang"}])
def test_heads_that_cannot_be_cut_are_refused_as_fit_tells(facts, more):
    asks = wanted({SOURCE: facts}, gpus=8, **more)
    found = estimate(json.loads(facts), engine=asks.engine, gpus=8)
    assert asks.uncut == found.fault == FAULT
    there = node(cards=8, engines={"vllm": ("",), "sglang": ("",)})
    (reason,) = (r for r in refusals(asks, there) if r.code != Code.GPU_FIT)
    assert (reason.code, reason.have) == (Code.MODEL_UNCUT, FAULT)
    assert reason.sentence == f"the model cannot be cut for as many cards: {FAULT}"


@pytest.mark.parametrize(
    ("facts", "more"),
    [
        ({}, {}), ({SOURCE: "{}"}, {}), ({SOURCE: HEADS}, {"args": ["--tensor-parallel-size=4"]}),
        ({SOURCE: HEADS}, {"args": ["--config", "its.yaml"]}),
        ({SOURCE: HEADS}, {"engine": "llamacpp"}), ({SOURCE: HEADS}, {"engine": "command"}),
    ],
)  # fmt: skip
def test_what_nobody_knows_to_fail_is_not_refused_for_its_heads(facts, more):
    assert wanted(facts, gpus=8, **more).uncut is None


@pytest.mark.parametrize(("more", "refused"), [
    ({}, False), ({"fabric": "nvlink-domain"}, True), ({"engine": "sglang"}, True),
    ({"args": ["-tp", "8"]}, True),
])  # fmt: skip
def test_over_several_nodes_only_what_fails_in_each_way_is_refused(more, refused):
    # vLLM makes a stage of each node where no NVLink joins them: 28 heads go into 4 parts.
    asks = wanted({SOURCE: HEADS}, gpus=4, shards=2, **more)
    assert asks.uncut == (FAULT if refused else None)
    how = {"engine": asks.engine, "args": asks.spec["args"], "fabric": asks.fabric}
    found = estimate(json.loads(HEADS), gpus=4, shards=2, **how)
    assert found.fault == asks.uncut, "fit tells the same"


def test_the_next_profile_is_taken_when_heads_cannot_be_cut():
    asks = model("m", 1, wanted({SOURCE: HEADS}, gpus=8), wanted(gpus=4, name="less"))
    place, refused = Planner((node(cards=8),), [asks], [], seed=1).place(
        asks, replica(1, "pending")
    )
    assert (place.profile, [r.code for r in refused]) == ("less", ["model_uncut"])
