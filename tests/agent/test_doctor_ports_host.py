"""Checks of InfiniBand and RoCE ports, and of the machine itself."""

from __future__ import annotations

from dataclasses import replace

import pytest

from agent.probes import local_ports
from agent.probes.disks import Disk
from agent.probes.engines import Engine
from agent.probes.host import Cpu, Memory
from agent.probes.pressure import Pressure, Stall
from agent.probes.root import Root
from tests.agent.doctor_machines import HOST, ask, cpu_only, expect, port, with_ports

DOWN = {"state": "DOWN", "phys_state": "Polling", "lid": 0, "sm_lid": 0, "sm_guid": None}


def ethernet(index: int, **changes: object):
    layer = {"link_layer": "Ethernet", "lid": 0, "sm_lid": 0, "sm_guid": None}
    return port(index, **{**layer, "netdev": f"eth{index}", "network": "10.1.0.0/16", **changes})


def test_infiniband_up():
    found = with_ports(*(port(n) for n in range(8)))
    expect(found, "infiniband", "pass", "8 of 8 ports active at 400 Gb/s")
    expect(found, "subnet manager", "pass", "SM b83fd2030045a6c0 (LID 1)", "mlx5_7/1")
    expect(found, "port errors", "pass", "8 ports")
    assert ask(found, "roce") is None


def test_infiniband_half_down():
    ports = [port(n, **(DOWN if n % 2 else {})) for n in range(8)]
    expect(with_ports(*ports), "infiniband", "warn", "4 of 8", "mlx5_1/1 DOWN Polling", "ibstat")
    declared = (replace(one, fabric="ib-a") for one in ports)
    expect(with_ports(*declared), "infiniband", "fail", "4 of 8", "mlx5_7/1 DOWN", "ib-a")


def test_infiniband_without_a_lid_and_switched_off():
    expect(with_ports(port(0, lid=0)), "infiniband", "warn", "ACTIVE", "without a LID")
    off = port(1, **{**DOWN, "phys_state": "Disabled"})
    expect(with_ports(port(0), off), "infiniband", "pass", "1 of 2", "1 switched off")
    expect(with_ports(port(0), replace(off, fabric="a")), "infiniband", "fail", "Disabled")


def test_infiniband_slower_than_its_like():
    ports = [port(0), port(1), port(2, rate_gbps=200.0), port(3, board="storage", rate_gbps=100.0)]
    expect(with_ports(*ports), "infiniband", "warn", "mlx5_2/1 200 of 400 Gb/s", "cable")


def test_infiniband_that_cannot_be_looked_at():
    expect(with_ports(error="ibstat: no answer"), "infiniband", "warn", "no answer")
    expect(with_ports(port(0, link_layer=None)), "infiniband", "warn", "not known: mlx5_0/1")
    assert ask(cpu_only(), "infiniband") is None


def test_subnet_manager_reasons():
    root = "sminfo on mlx5_0/1: cannot open /dev/infiniband/umad*: run the agent as root"
    closed = port(0, sm_guid=None, sm_error=root, fabric="ib-a")
    words = ("umad", "declared as ib-a, not proven", "infiniband-diags")
    expect(with_ports(closed, port(1)), "subnet manager", "warn", *words)
    dead = port(0, sm_guid=None, sm_error="sminfo on mlx5_0/1: no subnet manager answers")
    expect(with_ports(dead, port(1)), "subnet manager", "fail", "no subnet manager", "opensm")
    none = port(0, state="INIT", lid=0, sm_guid=None, sm_error="mlx5_0/1: no LID yet: see")
    expect(with_ports(none), "subnet manager", "fail", "no LID yet")
    expect(with_ports(port(0, sm_guid=None)), "subnet manager", "warn", "was not asked")
    assert ask(with_ports(port(0, **DOWN)), "subnet manager") is None


def test_roce():
    expect(with_ports(ethernet(0)), "roce", "pass", "1 of 1")
    bare = ethernet(1, network=None)
    expect(with_ports(ethernet(0), bare), "roce", "warn", "mlx5_1/1 (eth1)", "IP address")
    down = ethernet(1, state="DOWN", phys_state="Disabled", fabric="roce-a")
    expect(with_ports(ethernet(0), down), "roce", "fail", "mlx5_1/1 DOWN", "roce-a")
    assert ask(with_ports(ethernet(0)), "infiniband") is None


def test_port_errors():
    few = port(0, errors={"link_downed": 1, "symbol_error": 40, "VL15_dropped": 10**9})
    expect(with_ports(few), "port errors", "pass")
    many = port(1, errors={"symbol_error": 65535})
    expect(with_ports(few, many), "port errors", "warn", "mlx5_1/1 symbol_error 65535", "cable")
    assert ask(with_ports(port(0, **DOWN)), "port errors") is None


def test_cpu():
    expect(cpu_only(), "cpu", "pass", "Xeon 8480+", "x86_64", "AVX2")
    old = replace(HOST, cpu=Cpu("K10", ("lm", "sse4a"), 8, "x86_64"))
    expect(cpu_only(host=old), "cpu", "warn", "K10", "no AVX2", "CPU type to host")
    arm = replace(HOST, cpu=Cpu("Neoverse-V2", ("sve", "asimd"), 144, "aarch64"))
    expect(cpu_only(host=arm), "cpu", "pass", "Neoverse-V2", "SVE")
    expect(cpu_only(host=None), "cpu", "warn", "could not be looked at")
    expect(cpu_only(host=replace(HOST, cpu=Cpu())), "cpu", "warn", "not known")


def test_E13_limits_that_leave_too_little():
    expect(cpu_only(cpus=0.5), "cpu limit", "warn", "0.5 of 64 cores", "CPUQuota")
    expect(cpu_only(usable=Memory(512, 100)), "memory limit", "warn", "0.5 GiB", "MemoryMax")
    expect(cpu_only(cpus=None), "cpu limit", "warn", "not known")
    expect(cpu_only(usable=Memory()), "memory limit", "warn", "not known")


@pytest.mark.parametrize(("full", "result"), [(0.0, "pass"), (10.0, "pass"), (10.5, "warn")])
def test_pressure(full, result):
    host = replace(HOST, pressure=Pressure(memory=Stall(20.0, full), io=Stall(3.0, 1.0)))
    expect(cpu_only(host=host), "pressure", result, f"{full:g} %")
    assert ask(cpu_only(), "pressure") is None


@pytest.mark.parametrize(
    ("free_mib", "weights", "result"),
    [(400_000, True, "pass"), (40_000, True, "warn"), (8_000, True, "fail"), (0, False, "fail")],
)
def test_disk(free_mib, weights, result):
    disks = (Disk("/", "ext4", "local", 900_000, free_mib, holds_weights=weights),)
    words = ("GiB free of 878.9 GiB",)
    expect(cpu_only(disks=disks), "disk", result, *words)


def test_disk_for_weights_needs_room_for_a_model():
    small = Disk("/srv", "xfs", "local", 40_000, 9_000, holds_weights=True)
    root = Disk("/", "ext4", "local", 40_000, 9_000)
    expect(cpu_only(disks=(root,)), "disk", "pass")
    check = expect(cpu_only(disks=(root, small)), "disk", "warn", "/srv", "remove weights")
    assert check.evidence.startswith("/srv")


def test_disk_that_is_shared_or_away():
    filer = Disk("/models", "nfs4", "shared", None, None, holds_weights=True)
    expect(cpu_only(disks=(filer,)), "disk", "warn", "/models", "not known", "df /models")
    full = replace(filer, total_mib=900_000, free_mib=100)
    expect(cpu_only(disks=(full,)), "disk", "warn", "shared")
    expect(cpu_only(disks=()), "disk", "warn", "no filesystem")
    other = Disk("/scratch", "xfs", "local", 900_000, 0)
    expect(cpu_only(disks=(*cpu_only().disks, other)), "disk", "pass")


def test_engines():
    expect(cpu_only(), "engines", "pass", "vllm 0.11.0")
    expect(cpu_only(engines=(Engine("command"),)), "engines", "warn", "llama-server", "vllm")
    broken = Engine("sglang", "0.5", "/opt/s/bin/python", "failed", "no module torch")
    found = cpu_only(engines=(*cpu_only().engines, broken))
    expect(found, "engines", "warn", "sglang 0.5 at /opt/s/bin/python", "no module torch", "vllm")
    odd = Engine("llamacpp", None, "/usr/bin/llama-server", error="its version is not told")
    expect(cpu_only(engines=(odd,)), "engines", "warn", "version is not told", "by hand")


@pytest.mark.parametrize(("engines", "kept", "result", "said"), [
    ((20000, 20999), "", "pass", ["engines get 20000-20999, outgoing connections 32768-60999"]),
    ((40000, 40999), "", "warn", ["1000 ports in both", "ports=40000-40999", "outside 32768"]),
    ((32000, 32768), "", "warn", ["1 port in both"]),
    ((60999, 61100), "1,2000-3000, 61000", "warn", ["1 port in both"]),
    ((40000, 40999), "39000-40499,40500-40999", "pass", ["without those kept"]),
    ((40000, 40999), "40000-40499,40400-40998,many", "warn", ["1 port in both"]),
])  # fmt: skip
def test_ports_of_engines_that_outgoing_connections_may_take(tmp_path, engines, kept, result, said):
    folder = tmp_path / "proc/sys/net/ipv4"
    folder.mkdir(parents=True)
    (folder / "ip_local_port_range").write_text("32768\t60999\n")
    (folder / "ip_local_reserved_ports").write_text(f"{kept}\n")
    found = cpu_only(local_ports=local_ports.read(Root(tmp_path), engines))
    expect(found, "engine ports", result, *said)


@pytest.mark.parametrize("said", [None, "", "32768", "a b"])
def test_without_the_kernels_word_nothing_is_said_of_ports(tmp_path, said):
    folder = tmp_path / "proc/sys/net/ipv4"
    folder.mkdir(parents=True)
    if said is not None:
        (folder / "ip_local_port_range").write_text(said)
    found = local_ports.read(Root(tmp_path), (20000, 20999))
    assert found is None
    assert ask(cpu_only(local_ports=found), "engine ports") is None
