"""Host facts: processors of several architectures, memory, load, operating system."""

from __future__ import annotations

import os

import pytest

from agent.probes import host, warnings
from agent.probes.host import CpuTimes, NumaNode
from agent.probes.root import Root


def test_arm_has_features_and_a_name_by_its_part_number(small):
    cpu = host.parse_cpuinfo((small / "proc/cpuinfo-rhel9-neoverse_v2").read_text())
    assert (cpu.arch, cpu.model, cpu.count) == ("aarch64", "Neoverse-V2", 1)
    assert "sve2" in cpu.flags
    assert not list(warnings.cpu(cpu))


def test_power_has_no_flags(small):
    cpu = host.parse_cpuinfo((small / "proc/cpuinfo-rhel8-power9").read_text())
    assert (cpu.arch, cpu.model, cpu.flags) == ("ppc64le", "POWER9, altivec supported", ())


def test_x86_without_avx2_is_warned_of(small):
    ivy = host.parse_cpuinfo((small / "proc/cpuinfo-rhel7-ivybridge").read_text())
    haswell = host.parse_cpuinfo((small / "proc/cpuinfo-rhel7-haswell").read_text())
    assert ivy.arch == "x86_64"
    [warning] = warnings.cpu(ivy)
    assert "inference runs several times slower (a VM needs CPU type host)" in warning
    assert not list(warnings.cpu(haswell))


def test_hybrid_processors_share_only_common_flags():
    text = "processor : 0\nflags : avx2 avx512f lm\n\nprocessor : 1\nflags : avx2 lm\n"
    assert host.parse_cpuinfo(text).flags == ("avx2", "lm")
    assert host.parse_cpuinfo(text).count == 2


def test_memory_available_is_estimated_for_old_kernels():
    old = {"MemTotal": 4096, "MemFree": 1024, "Buffers": 1024, "Cached": 2048, "Shmem": 1024}
    assert host.memory(old).available_mib == 3
    assert host.memory({}).total_mib is None
    assert host.memory({"MemTotal": 2048}).available_mib is None


def test_coherent_gpu_memory_is_not_host_memory():
    gib = 2**20
    meminfo = {"MemTotal": 480 * gib + 96 * gib, "MemAvailable": 500 * gib}
    nodes = [NumaNode(True, 480 * gib, 400 * gib), NumaNode(False, 96 * gib, 95 * gib)]
    memory = host.memory(meminfo, [*nodes, NumaNode(False, 0, 0)])
    assert memory.total_mib == 480 * 1024
    assert memory.available_mib == 405 * 1024
    assert memory.coherent_mib == 96 * 1024


def test_numa_nodes_come_from_sysfs(machine):
    node = host.NODES
    root = machine(
        {
            f"{node}/node0/cpulist": "0-71\n",
            f"{node}/node0/meminfo": "Node 0 MemTotal:  2048 kB\nNode 0 MemFree: 1024 kB\n",
            f"{node}/node1/cpulist": "\n",
            f"{node}/node1/meminfo": "Node 1 MemTotal:  4096 kB\nNode 1 MemFree: 4096 kB\n",
            f"{node}/has_cpu": "0\n",
            "/proc/meminfo": "MemTotal: 6144 kB\nMemAvailable: 5120 kB\n",
        }
    )
    assert host.read_memory(root) == host.Memory(2, 1, 4)


def test_meminfo_of_real_machines(captures):
    for name in ("meminfo-16g", "meminfo-missing-fields", "meminfo-procfs", "meminfo-hugepages"):
        memory = host.memory(host.parse_meminfo((captures / "proc" / name).read_text()))
        assert memory.total_mib > 0, name
        assert 0 < memory.available_mib <= memory.total_mib, name


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("rhel7", "Red Hat Enterprise Linux Server 7.0 (Maipo)"),
        ("sles12", "SUSE Linux Enterprise Server 12 SP1"),
        ("debian10", "Debian GNU/Linux 10 (buster)"),
    ],
)
def test_os_release(small, name, expected):
    assert host.parse_os_release((small / f"proc/os-release-{name}").read_text()) == expected


def test_os_release_without_pretty_name_or_with_broken_quotes():
    assert host.parse_os_release("NAME=Void\nVERSION='1 x'\n") == "Void 1 x"
    assert host.parse_os_release('PRETTY_NAME="Half\n') == "Half"
    assert host.parse_os_release("") is None


def test_cpu_percent_between_two_samples():
    before = host.parse_cpu_times("cpu  100 0 50 800 50 0 0 0 0 0\ncpu0 1 2 3 4\n")
    after = host.parse_cpu_times("cpu  150 0 75 860 65 0 0 0 0 0\n")
    assert host.cpu_percent(before, after) == 50.0
    assert host.cpu_percent(before, before) is None


def test_cpu_percent_when_counters_go_backwards():
    assert host.cpu_percent(CpuTimes((10, 0, 0, 90)), CpuTimes((5, 0, 0, 190))) == 0.0


def test_cpu_percent_of_real_samples(captures):
    samples = [(captures / f"proc/stat-telegraf-{n}").read_text() for n in (0, 1)]
    percent = host.cpu_percent(*(host.parse_cpu_times(text) for text in samples))
    assert percent == pytest.approx(1.2, abs=0.1)


def test_loadavg():
    assert host.parse_loadavg("0.02 0.04 0.05 1/497 11947\n") == (0.02, 0.04, 0.05)
    assert host.parse_loadavg("high") is None


def test_this_machine():
    facts = host.read_host(Root())
    assert facts.hostname == os.uname().nodename
    assert facts.kernel == os.uname().release
    assert facts.cpu.count == os.cpu_count()
    assert facts.memory.total_mib > facts.memory.available_mib > 0
