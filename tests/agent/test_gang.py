"""Replicas over several nodes on the agent's side: what it is told, launch lines, readiness."""

from __future__ import annotations

import os
import signal
import socket
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import psutil
import pytest
import trio

from agent import procfs
from agent.assignment import Assignment, BadAssignment, Gang, Gpu, parse
from agent.engines import CannotLaunch, Place, engine_of
from agent.engines.gang import interface_of, own_address
from agent.process import Mark, end_tree, spawn
from agent.readiness import not_ready_because
from tests.agent.conftest import until
from tests.agent.test_engines import program

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.agent.conftest import Node

TOLD = {"head": "10.0.0.1", "master_port": 20600, "nodes": 2, "transport": "infiniband",
        "hcas": ["mlx5_1:1", "mlx5_0:1"]}  # fmt: skip
DOCUMENT = {"shard": 7, "replica": 2, "model": "m", "desired": "running", "engine": "vllm",
            "port": 20001, "host": "127.0.0.1", "rank": 1, "shards": 2, "gang": TOLD}  # fmt: skip
GPUS = tuple(Gpu(f"GPU-{number}", number) for number in range(4))
WORLD = ("--nnodes", "2", "--node-rank")
MEETING = ("--master-addr", "10.0.0.1", "--master-port", "20600")


def assigned(rank: int = 0, **more: object) -> Assignment:
    told = Gang("10.0.0.1", 20600, 2, "nvlink")
    found = replace(parse(DOCUMENT, "127.0.0.1"), rank=rank, gpus=GPUS, gang=told)
    return replace(found, **more)  # type: ignore[arg-type]


def over(transport: str, *hcas: str) -> Gang:
    return Gang("10.0.0.1", 20600, 2, transport, hcas)


def launched(a: Assignment, tmp_path: Path) -> tuple[tuple[str, ...], dict[str, str]]:
    names = {"vllm": "vllm", "sglang": "python3", "command": "torchrun"}
    program(tmp_path, names[a.engine])
    place = Place(Path("/w"), search_path=str(tmp_path))
    launch = engine_of(a.engine).launch(a, place)
    return launch.argv[1:], dict(launch.env)


def test_what_the_shard_is_told_is_read() -> None:
    a = parse(DOCUMENT, "127.0.0.1")
    assert a.gang == Gang("10.0.0.1", 20600, 2, "infiniband", ("mlx5_1:1", "mlx5_0:1"))
    assert a.ports == (20001,)
    assert parse(DOCUMENT | {"rank": 0}, "x").ports == (20001, 20600)
    assert parse(DOCUMENT | {"gang": None, "shards": 1, "rank": 0}, "x").gang is None


@pytest.mark.parametrize(
    ("gang", "more", "words"),
    [
        ("x", {}, "shard 7: gang is 'x', not a document"),
        (TOLD | {"head": None}, {}, "shard 7: gang.head is 'None', not a text"),
        (TOLD | {"master_port": "x"}, {}, "gang.master_port is 'x', not a whole number"),
        (TOLD | {"master_port": 0}, {}, "gang.master_port 0 is not a TCP port"),
        (TOLD | {"transport": "avian"}, {}, "gang.transport is 'avian', none of nvlink, infini"),
        (TOLD | {"hcas": ["mlx5_0;x"]}, {}, "gang.hcas has 'mlx5_0;x', which names no port"),
        (TOLD | {"nodes": 3}, {}, "rank 1 of 2 shards in a gang of 3 nodes"),
        (TOLD, {"rank": 2}, "rank 2 of 2 shards"),
        (TOLD, {"rank": -1}, "rank -1 of 2 shards"),
    ],
)
def test_D10_a_gang_that_makes_no_sense_is_named(gang: object, more: dict, words: str) -> None:
    with pytest.raises(BadAssignment) as refusal:
        parse(DOCUMENT | {"gang": gang} | more, "127.0.0.1")
    assert words in str(refusal.value)


def test_vllm_head_and_headless_ranks_over_nvlink(tmp_path: Path) -> None:
    start = ("serve", "/w", "--served-model-name", "m")
    head, env = launched(assigned(0), tmp_path)
    door = ("--host", "127.0.0.1", "--port", "20001")
    assert head == (*start, *door, *WORLD, "0", *MEETING, "--tensor-parallel-size", "8")
    assert env["NCCL_MNNVL_ENABLE"] == "1"
    assert env["VLLM_HOST_IP"] == "127.0.0.1"
    assert "NCCL_IB_HCA" not in env
    other, same = launched(assigned(1), tmp_path)
    assert other == (*start, "--headless", *WORLD, "1", *MEETING, "--tensor-parallel-size", "8")
    assert same == env


def test_vllm_over_a_fabric_has_a_tensor_per_node_and_names_its_ports(tmp_path: Path) -> None:
    argv, env = launched(assigned(gang=over("roce", "mlx5_1:1", "mlx5_0:1")), tmp_path)
    assert argv[-4:] == ("--tensor-parallel-size", "4", "--pipeline-parallel-size", "2")
    assert env["NCCL_IB_HCA"] == "=mlx5_1:1,mlx5_0:1"
    assert not {"NCCL_MNNVL_ENABLE", "NCCL_IB_DISABLE"} & env.keys()
    _, env = launched(assigned(gang=over("network")), tmp_path)
    assert env["NCCL_IB_DISABLE"] == "1", "ports of different fabrics never meet"


def test_the_interface_is_the_one_with_our_address(tmp_path: Path) -> None:
    lo = interface_of("127.0.0.1")
    assert lo is not None
    assert interface_of("127.1.2.3") == lo, "all of 127/8 is the loopback"
    assert interface_of("192.0.2.77") is None
    assert interface_of("a name") is None
    _, env = launched(assigned(), tmp_path)
    assert (env["NCCL_SOCKET_IFNAME"], env["GLOO_SOCKET_IFNAME"]) == (f"={lo}", lo)
    _, env = launched(assigned(host="192.0.2.77"), tmp_path)
    assert not {"NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"} & env.keys()


@pytest.mark.parametrize(
    ("resolved", "address", "interface"),
    [
        (["127.0.1.1", "192.0.2.9", "10.9.8.7"], "10.9.8.7", "eth7"),
        (["127.0.1.1"], "gpu-7.lan", None),  # as many distributions write it into /etc/hosts
        ([], "gpu-7.lan", None),
    ],
)
def test_a_management_address_may_be_a_name(
    resolved: list[str],
    address: str,
    interface: str | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def found(host: str, _: object) -> list[Any]:
        assert host == "gpu-7.lan"
        if not resolved:
            raise socket.gaierror("unknown")
        return [(socket.AF_INET, 1, 6, "", (one, 0)) for one in resolved]

    cards = {"lo": ["127.0.0.1"], "eth7": ["10.9.8.7"]}
    known = {name: [SimpleNamespace(address=a) for a in has] for name, has in cards.items()}
    monkeypatch.setattr(socket, "getaddrinfo", found)
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: known)
    _, env = launched(assigned(host="gpu-7.lan"), tmp_path)
    assert env["VLLM_HOST_IP"] == address, "vLLM binds to it, which it cannot to a name"
    assert env.get("GLOO_SOCKET_IFNAME") == interface
    assert own_address("fd00::1") == "fd00::1"


@pytest.mark.parametrize(
    ("args", "added"),
    [
        ((), ("--tensor-parallel-size", "4", "--pipeline-parallel-size", "2")),
        (("-tp", "8"), ()),
        (("-tp=2",), ("--pipeline-parallel-size", "4")),
        (("-pp", "2"), ("--tensor-parallel-size", "4")),
        (("-tp", "3"), ()),
        (("-tp", "many"), ()),
        (("-tp", "2", "-pp", "4"), ()),
        (("--data-parallel-size", "2"), ()),
    ],
)
def test_the_profile_says_how_and_the_rest_follows(
    args: tuple[str, ...], added: tuple[str, ...], tmp_path: Path
) -> None:
    argv, _ = launched(assigned(args=args, gang=over("infiniband")), tmp_path)
    assert argv[argv.index("20600") + 1 :] == (*added, *args)


def test_processors_share_one_tensor(tmp_path: Path) -> None:
    argv, _ = launched(assigned(gpus=(), gang=over("network")), tmp_path)
    assert argv[-2:] == ("--tensor-parallel-size", "2")


def test_sglang_over_two_nodes(tmp_path: Path) -> None:
    a = assigned(1, engine="sglang", gang=over("infiniband", "mlx5_0:1"))
    argv, env = launched(a, tmp_path)
    meeting = ("--dist-init-addr", "10.0.0.1:20600")
    assert argv[-8:] == (*WORLD, "1", *meeting, "--tp-size", "8")[-8:]
    assert env["NCCL_IB_HCA"] == "=mlx5_0:1"
    argv, _ = launched(replace(a, gang=replace(over("roce"), head="fd00::1")), tmp_path)
    assert "[fd00::1]:20600" in argv


def test_a_command_is_told_its_rank_and_where_to_meet(tmp_path: Path) -> None:
    command = ("torchrun", "{rank}/{nodes}", "{head}:{master_port}", "{hcas}")
    a = assigned(1, engine="command", command=command, gang=over("roce", "mlx5_0:1", "mlx5_1:1"))
    argv, env = launched(a, tmp_path)
    assert argv == ("1/2", "10.0.0.1:20600", "mlx5_0:1,mlx5_1:1")
    assert env["NCCL_IB_HCA"] == "=mlx5_0:1,mlx5_1:1"
    alone = replace(a, rank=0, shards=1, gang=None, command=("torchrun", "{rank}/{nodes} {head}"))
    assert launched(alone, tmp_path) == (("0/1 127.0.0.1",), {})
    with pytest.raises(CannotLaunch, match=r"has \{master_port\}, which is none of"):
        launched(replace(alone, command=("torchrun", "{master_port}")), tmp_path)


@pytest.mark.parametrize("engine", ["vllm", "sglang", "command", "llamacpp"])
def test_D13_a_shard_that_was_not_told_of_the_others_does_not_start(engine: str) -> None:
    a = assigned(engine=engine, gang=None, command=("x",))
    with pytest.raises(CannotLaunch, match="one of 2 of replica 2"):
        engine_of(engine).launch(a, Place(Path("/w"), search_path="/bin"))
    if engine == "llamacpp":
        with pytest.raises(CannotLaunch, match="runs on one node only"):
            engine_of(engine).launch(assigned(engine=engine), Place(Path("/w")))


@pytest.mark.parametrize("engine", ["vllm", "sglang", "command"])
async def test_a_rank_without_a_door_is_ready_when_it_has_lived_a_moment(
    engine: str, tmp_path: Path
) -> None:
    a = assigned(1, engine=engine, health_path="/health")
    assert engine_of(engine).check(replace(a, rank=0)).lives_s is None
    check = engine_of(engine).check(a)
    mark = Mark(7, 2, "n1", str(tmp_path))
    argv = [sys.executable, "-c", "import signal; signal.pause()"]
    leader = spawn(argv, mark.environment(), tmp_path, tmp_path / "log")
    try:
        reason = await not_ready_because(replace(check, lives_s=600), leader, mark)
        assert reason is not None
        assert reason.startswith("started only ")

        async def ready() -> bool:
            return await not_ready_because(replace(check, lives_s=0.3), leader, mark) is None

        await until(ready, "the process has lived long enough")
    finally:
        await end_tree(leader, mark, 0)


def told(port: int, **more: object) -> dict[str, Any]:
    gang = {"head": "127.0.0.1", "master_port": port, "nodes": 2, "transport": "network"}
    return {"shards": 2, "gang": gang | more}


async def test_the_head_does_not_meet_where_a_stranger_listens(
    node: Node, odd: Callable[..., dict[str, Any]]
) -> None:
    listeners = await trio.open_tcp_listeners(0, host="127.0.0.1")
    port = listeners[0].socket.getsockname()[1]
    node.door.assign(odd(1, **told(port)))
    async with node.running():
        word = await node.state(1, "failed")
        assert f"port {port} is held by pid {os.getpid()}" in word["error"]
    for listener in listeners:
        await listener.aclose()


@pytest.mark.slow
async def test_a_rank_that_serves_nobody_gets_ready_and_is_missed_when_it_dies(
    node: Node, odd: Callable[..., dict[str, Any]]
) -> None:
    program = "import signal; print('rank {rank} of {nodes}', flush=True); signal.pause()"
    command = [sys.executable, "-c", program]
    env = {"GLOO_SOCKET_IFNAME": "eth9"}
    node.door.assign(odd(1, rank=1, command=command, env=env, **told(20600)))
    async with node.running():
        word = await node.state(1, "ready")
        seen = procfs.environment(word["pid"])
        assert seen is not None
        assert seen["GLOO_SOCKET_IFNAME"] == "eth9", "the profile's own word wins"
        assert seen["NCCL_SOCKET_IFNAME"] == f"={interface_of('127.0.0.1')}"
        assert seen["CUDA_VISIBLE_DEVICES"] == ""
        await until(lambda: node.read(1) == "rank 1 of 2\n", "it said its rank")
        os.kill(word["pid"], signal.SIGKILL)
        word = await node.state(1, "failed")
        assert (word["exit_code"], word["log_tail"]) == (-9, "rank 1 of 2\n")
