"""Arguments that no start could survive are definition faults; numbers are no truth values."""

from __future__ import annotations

import copy
import sys
from pathlib import Path

import pytest

from agent.assignment import Assignment
from agent.engines import ENGINES, Place
from controller.catalog.arguments import OURS, SPLITS, fault
from controller.catalog.definition import Model
from controller.catalog.faults import CatalogError
from controller.catalog.profile import Profile
from controller.catalog.reading import parse
from tests.api.served import TINY


def with_profile(**more):
    model = copy.deepcopy(TINY)
    model["profiles"][0] |= more
    return {"models": [model]}


@pytest.mark.parametrize(
    ("more", "why"),
    [
        ({"engine": "vllm", "args": ["--port", "8000"]}, "args has --port: llmgw gives each start"),
        ({"engine": "vllm", "args": ["--port=8000"]}, "args has --port"),
        ({"engine": "vllm", "args": ["--served_model_name", "x"]}, "under its own name, its alias"),
        ({"engine": "sglang", "args": ["--model-path", "x"]}, "the weights are the model's source"),
        ({"engine": "vllm", "args": ["--api-key", "k"]}, "args has --api-key: routers send"),
        ({"engine": "sglang", "args": ["--api-key=k"]}, "args has --api-key: routers send"),
        ({"args": ["--api-key", "k"]}, "args has --api-key: routers send"),
        ({"args": ["-m", "x.gguf"]}, "args has -m: the weights are the model's source"),
        (
            {"engine": "vllm", "gpus": 1, "args": ["--tensor-parallel-size", "4"]},
            "args want 4 cards (--tensor-parallel-size, --pipeline-parallel-size) and the profile "
            "has 1: raise gpus or shards",
        ),
        (
            {"engine": "sglang", "gpus": 4, "shards": 2, "args": ["--tp=8", "--pp-size", "2"]},
            "args want 8 x 2 cards (--tp-size, --pp-size) and the profile has 4 on each of 2 nodes",
        ),
        (
            {"engine": "sglang", "gpus": 1, "gpu_memory": "20GiB", "share": True},
            "share with sglang needs --mem-fraction-static in args",
        ),
        ({"gpus": True}, "gpus: must be a number, not true"),
        ({"cpus": True}, "cpus: must be a number, not true"),
        ({"engine": "vllm", "gpus": 1, "driver_min": "new"}, "driver_min: must match pattern"),
        ({"engine_version": ""}, "engine_version: '' is no version of an engine"),
    ],
)
def test_definition_faults_of_arguments_and_numbers(more, why):
    with pytest.raises(CatalogError) as caught:
        parse(with_profile(**more), "c")
    assert why in str(caught.value)


@pytest.mark.parametrize("field", ["min_replicas", "max_replicas", "priority", "idle_timeout"])
@pytest.mark.parametrize("value", [True, False])
def test_no_number_of_a_model_takes_a_truth_value(field, value):
    with pytest.raises(CatalogError):
        parse({"models": [TINY | {field: value}]}, "c")


def test_fields_of_truth_take_truth_values():
    flags = {
        n for n, f in (Profile.model_fields | Model.model_fields).items() if f.annotation is bool
    }
    assert flags == {"share"}
    shared = with_profile(engine="vllm", gpus=1, gpu_memory="2GiB", share=True)
    assert parse(shared, "c").models[0].profiles[0].share is True


@pytest.mark.parametrize(
    ("engine", "args", "gpus", "shards"),
    [
        ("vllm", ["-tp", "8", "-pp", "2"], 8, 2),
        ("vllm", ["-tp", "2"], 0, 1),  # on processors parts are processes
        ("vllm", ["--data-parallel-size", "16"], 8, 1),  # copies may be other replicas
        ("vllm", ["--tensor-parallel-size", "many"], 1, 1),  # the engine's to judge
        ("vllm", ["--host", "0.0.0.0"], 1, 1),
        ("command", ["--port", "1", "-tp", "9"], 1, 1),
    ],
)
def test_what_the_engine_may_judge_is_let_through(engine, args, gpus, shards):
    assert fault(engine, args, gpus, shards) is None


def test_a_shared_card_is_kept_to_by_whoever_can_be_told():
    told = {"engine": "sglang", "args": ["--mem-fraction-static=0.3"]}
    for more in (told, {"engine": "vllm"}, {"engine": "llamacpp"}):
        shared = with_profile(gpus=1, gpu_memory="20GiB", share=True, **more)
        assert parse(shared, "c").models[0].profiles[0].share


@pytest.mark.parametrize("engine", sorted(OURS))
def test_what_is_refused_is_what_the_agent_sets(engine):
    a = Assignment(1, 2, "m", "running", engine, port=20001, host="10.0.0.5")
    place = Place(Path("/w.gguf"), {engine: sys.executable})
    argv = ENGINES[engine].launch(a, place).argv
    names = [word for word in argv if word.startswith("-")]
    assert "--port" in names
    assert len(set(OURS[engine]) & set(names)) >= 2
    assert set(SPLITS) <= set(ENGINES)
