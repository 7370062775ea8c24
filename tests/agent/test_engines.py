"""Assignments as commands."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest

from agent.assignment import Assignment, BadAssignment, Gpu, parse
from agent.engines import CannotLaunch, Place, devices, engine_of, hint
from agent.engines.launch import has_option, option
from agent.engines.llamacpp import gguf_file

BASE = Assignment(
    shard=1, replica=2, model="m", desired="running", engine="vllm", port=20001, host="10.0.0.5"
)
GPUS = (Gpu("GPU-a", 0), Gpu("GPU-b", 3))


def program(folder: Path, name: str) -> str:
    path = folder / name
    path.write_text("#!/bin/sh\n")
    path.chmod(0o755)
    return str(path)


def test_vllm_serves_our_name_over_the_cards_given(tmp_path: Path) -> None:
    a = replace(BASE, gpus=GPUS, args=("--max-model-len", "4096"))
    vllm = program(tmp_path, "vllm")
    launch = engine_of("vllm").launch(a, Place(Path("/w"), search_path=str(tmp_path)))
    assert launch.argv == (
        *(vllm, "serve", "/w", "--served-model-name", "m", "--host", "10.0.0.5"),
        *("--port", "20001", "--tensor-parallel-size", "2", "--max-model-len", "4096"),
    )
    assert devices(a) == {"CUDA_VISIBLE_DEVICES": "GPU-a,GPU-b"}
    assert devices(BASE) == {"CUDA_VISIBLE_DEVICES": ""}


def test_E05_engines_that_read_numbers_get_them_where_they_are_sure() -> None:
    a = replace(BASE, gpus=GPUS)
    assert [engine_of(n).numbers_only for n in ("vllm", "sglang", "llamacpp", "command")] == [
        True, True, False, False,
    ]  # fmt: skip
    known = {"GPU-b": 2, "GPU-a": 5, "GPU-c": 0}
    numbered = {"CUDA_VISIBLE_DEVICES": "2,5", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    assert devices(a, known) == numbered
    assert devices(a, {"GPU-a": 0}) == devices(a), "half a list would show the wrong card"
    mig = replace(BASE, gpus=(Gpu("MIG-1", 0),))
    assert devices(mig, known) == {"CUDA_VISIBLE_DEVICES": "MIG-1"}
    amd = replace(BASE, gpus=(Gpu("GPU-0123456789abcdef", 0),))
    assert devices(amd, known) == {"ROCR_VISIBLE_DEVICES": "GPU-0123456789abcdef"}


def test_E05_an_engine_that_cannot_read_uuids_is_told_of_the_variable() -> None:
    log = "ValueError: invalid literal for int() with base 10: 'MIG-1'"
    words = hint(log, {"CUDA_VISIBLE_DEVICES": "MIG-1"})
    assert "CUDA_VISIBLE_DEVICES is MIG-1" in words
    assert hint(log, {"CUDA_VISIBLE_DEVICES": "0,1"}) == ""
    assert hint("out of memory", {"CUDA_VISIBLE_DEVICES": "MIG-1"}) == hint(None, {}) == ""


def test_a_profile_may_set_its_own_parallelism_and_key(tmp_path: Path) -> None:
    program(tmp_path, "vllm")
    a = replace(BASE, gpus=GPUS, args=("--tensor-parallel-size=1", "--api-key", "k"))
    engine = engine_of("vllm")
    launch = engine.launch(a, Place(Path("/w"), search_path=str(tmp_path)))
    assert launch.argv.count("--tensor-parallel-size") == 0
    assert engine.check(a).bearer == "k"
    assert engine.check(replace(BASE, env={"VLLM_API_KEY": "e"})).bearer == "e"


@pytest.mark.parametrize(("args", "shares", "said"), [
    ((), (None, None), []), ((), (0.25, 0.125), ["0.125"]), ((), (1, None), ["1"]),
    (("--gpu_memory_utilization=0.3",), (0.25, 0.25), []),
])  # fmt: skip
def test_D28_vllm_takes_no_more_of_a_shared_card_than_its_claim(
    args: tuple[str, ...], shares: tuple[float | None, ...], said: list[str], tmp_path: Path
) -> None:
    program(tmp_path, "vllm")
    cards = tuple(replace(g, share=s) for g, s in zip(GPUS, shares, strict=True))
    a = replace(BASE, gpus=cards, args=args)
    argv = engine_of("vllm").launch(a, Place(Path("/w"), search_path=str(tmp_path))).argv
    given = [argv[n + 1] for n, word in enumerate(argv) if word == "--gpu-memory-utilization"]
    assert given == said


@pytest.mark.parametrize("share", [0, -1, 1.5, "half", True, [0.5]])
def test_a_share_that_makes_no_sense_is_told(share: object) -> None:
    document = {"shard": 1, "replica": 2, "model": "m", "desired": "running", "engine": "vllm"}
    document |= {"port": 20001, "gpus": [{"uuid": "GPU-a", "index": 0, "share": share}]}
    with pytest.raises(BadAssignment, match="not a list of cards with shares above 0"):
        parse(document, "h")
    document["gpus"] = [{"uuid": "GPU-a", "index": 0, "share": 0.5}]
    assert parse(document, "h").gpus == (Gpu("GPU-a", 0, 0.5),)


def test_options_are_read_as_engines_read_them() -> None:
    args = ("--tensor_parallel_size", "2", "-pp=3", "--tensor-parallel-size=4", "--flag")
    assert option(args, "--tensor-parallel-size", "-tp") == "4"
    assert option(args, "-pp") == "3"
    assert option(args, "--flag") is None
    assert has_option(args[:2], "--tensor-parallel-size")
    assert has_option(args, "--flag")
    assert not has_option(args, "--tensor-parallel")


def test_stages_and_copies_of_the_profile_take_their_part_of_the_cards(tmp_path: Path) -> None:
    program(tmp_path, "vllm")
    four = (*GPUS, Gpu("GPU-c", 2), Gpu("GPU-d", 3))

    def width(*args: str) -> str | None:
        a = replace(BASE, gpus=four, args=args)
        launch = engine_of("vllm").launch(a, Place(Path("/w"), search_path=str(tmp_path)))
        return option(launch.argv, "--tensor-parallel-size", "-tp")

    assert width() == "4"
    assert width("-pp", "2") == "2"
    assert width("--data-parallel-size=2", "-pp", "2") is None
    assert width("-pp", "3") == "4", "vLLM itself says what is wrong with that"
    assert width("-tp", "2", "-pp", "2") == "2"


def test_the_program_of_the_version_wins(tmp_path: Path) -> None:
    one, two = program(tmp_path, "one"), program(tmp_path, "two")
    place = Place(Path("/w"), {"vllm": one, "vllm@0.32.0": two}, "")
    assert engine_of("vllm").launch(BASE, place).argv[0] == one
    exact = replace(BASE, engine_version="0.32.0")
    assert engine_of("vllm").launch(exact, place).argv[0] == two


def test_sglang_runs_in_the_python_that_has_it(tmp_path: Path) -> None:
    python = program(tmp_path, "python")
    a = replace(BASE, engine="sglang", gpus=GPUS)
    argv = engine_of("sglang").launch(a, Place(Path("/w"), {"sglang": python})).argv
    assert argv[:5] == (python, "-m", "sglang.launch_server", "--model-path", "/w")
    assert argv[-2:] == ("--tp-size", "2")


def test_llamacpp_takes_the_program_in_path_or_our_front(tmp_path: Path) -> None:
    a = replace(BASE, engine="llamacpp", cpus=2.6)
    model = tmp_path / "a.gguf"
    front = engine_of("llamacpp").launch(a, Place(model, search_path=str(tmp_path))).argv
    assert front[:2] == (sys.executable, "-P")
    assert front[3:5] == ("--drain", "28")
    assert front[-2:] == ("-t", "3")
    server = program(tmp_path, "llama-server")
    argv = engine_of("llamacpp").launch(a, Place(model, search_path=str(tmp_path))).argv
    assert argv[:5] == (server, "-m", str(model), "--alias", "m")
    own = engine_of("llamacpp").launch(replace(a, args=("-t", "1")), Place(model)).argv
    assert own.count("-t") == 1


def test_a_folder_of_gguf_files_needs_a_name(tmp_path: Path) -> None:
    with pytest.raises(CannotLaunch, match=r"hold no \.gguf file"):
        gguf_file(tmp_path, "m")
    (tmp_path / "a-00001-of-00002.gguf").touch()
    (tmp_path / "a-00002-of-00002.gguf").touch()
    assert gguf_file(tmp_path, "m").name == "a-00001-of-00002.gguf"
    (tmp_path / "b.gguf").touch()
    with pytest.raises(CannotLaunch, match="name one in the source"):
        gguf_file(tmp_path, "m")


def test_a_command_is_filled_and_keeps_json(tmp_path: Path) -> None:
    serve = program(tmp_path, "serve")
    a = replace(
        BASE,
        engine="command",
        gpus=GPUS,
        command=("serve", "--at={host}:{port}", '{"a": 1}', "{model}", "{source_path}", "{gpus}"),
        args=("-v",),
    )
    argv = engine_of("command").launch(a, Place(Path("/w"), search_path=str(tmp_path))).argv
    assert argv == (serve, "--at=10.0.0.5:20001", '{"a": 1}', "m", "/w", "GPU-a,GPU-b", "-v")


@pytest.mark.parametrize(
    ("a", "words"),
    [
        (replace(BASE, engine="command", command=("x", "{prot}")), "which is none of {port}"),
        (replace(BASE, engine="command", command=("no-such-program",)), "no program of this node"),
        (replace(BASE, engine="command"), "names no command"),
        (BASE, "has no `vllm` in PATH"),
        (replace(BASE, shards=2), "use a profile with shards = 1"),
        (replace(BASE, engine="llamacpp"), "needs its weights"),
    ],
)
def test_refusals_say_what_to_do(a: Assignment, words: str, tmp_path: Path) -> None:
    place = Place(None, search_path=str(tmp_path))
    with pytest.raises(CannotLaunch) as refusal:
        engine_of(a.engine).launch(a, place)
    assert words in str(refusal.value)


def test_an_unknown_engine_lists_the_known() -> None:
    with pytest.raises(CannotLaunch, match="llamacpp, vllm, sglang, command"):
        engine_of("tgi")


def test_a_program_that_is_set_but_missing_is_named() -> None:
    with pytest.raises(CannotLaunch, match="engine_paths: vllm is /no/such"):
        engine_of("vllm").launch(BASE, Place(Path("/w"), {"vllm": "/no/such"}))
