"""Host facts: processors of several architectures, memory, load, operating system."""

from __future__ import annotations

import os

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agent.probes import board, host, warnings
from agent.probes.board import Layout, Place
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


@pytest.mark.parametrize(
    ("name", "model", "arch", "flags", "avx2"),
    [
        ("procfs-i7", "Intel(R) Core(TM) i7-8650U CPU @ 1.90GHz", "x86_64", 120, True),
        ("rhel7-haswell", "Intel(R) Xeon(R) CPU E5-2680 v3 @ 2.50GHz", "x86_64", 100, True),
        ("rhel7-ivybridge", "Intel(R) Xeon(R) CPU E5-2650 v2 @ 2.60GHz", "x86_64", 89, False),
        ("rhel7-x86_64_v3", "Intel(R) Xeon(R) CPU E5-2680 v3 @ 2.50GHz", "x86_64", 99, True),
        ("rocky8.5-zen4", "AMD EPYC 9654 96-Core Processor", "x86_64", 156, True),
        ("rocky9-zen5", "AMD Ryzen 9 9950X 16-Core Processor", "x86_64", 163, True),
        ("scientific7-k10", "AMD Opteron(tm) Processor 6136", "x86_64", 66, False),
        ("ubuntu22.04-ampere1", "Ampere-1", "aarch64", 37, False),
        ("unknown-neoverse_v2", "Neoverse-V2", "aarch64", 45, False),
        ("unknown-sapphirerapids", "Intel(R) Xeon(R) Platinum 8480+", "x86_64", 172, True),
        ("rhel8-power9", "POWER9, altivec supported", "ppc64le", 0, False),
    ],
)
def test_processors_of_real_machines(captures, name, model, arch, flags, avx2):
    cpu = host.parse_cpuinfo((captures / f"proc/cpuinfo-{name}").read_text())
    assert (cpu.model, cpu.arch, len(cpu.flags)) == (model, arch, flags)
    assert ("avx2" in cpu.flags) is avx2


def test_memory_of_real_machines_to_the_mib(captures):
    def read(name: str) -> host.Memory:
        return host.memory(host.parse_meminfo((captures / f"proc/meminfo-{name}").read_text()))

    assert read("16g") == host.Memory(15822, 13888)
    assert read("hugepages") == host.Memory(257838, 253921)
    # No MemAvailable: free, buffers, cached and clean slab, less what is shared memory.
    assert read("procfs") == host.Memory(15299, 14848)


def test_laptop_has_one_socket_with_four_cores(captures):
    places = board.parse_places((captures / "proc/cpuinfo-procfs-i7").read_text())
    assert len(places) == 8
    assert board.layout(places) == Layout(1, 4, 4, smt=True)


def cpu(number: int, socket: int, siblings: str) -> dict[str, str]:
    folder = f"{board.CPUS}/cpu{number}/topology"
    return {f"{folder}/physical_package_id": f"{socket}\n", f"{folder}/core_cpus_list": siblings}


def test_two_sockets_with_a_core_switched_off(machine):
    files = cpu(0, 0, "0,4\n") | cpu(4, 0, "0,4\n") | cpu(1, 0, "1\n") | cpu(2, 1, "2,6\n")
    root = machine(
        files
        | cpu(6, 1, "2,6\n")
        | {
            f"{board.CPUS}/present": "0-7\n",
            f"{board.CPUS}/online": "0-2,4,6\n",
            f"{board.CPUS}/offline": "3,5,7-239\n",
            f"{board.CPUS}/smt/active": "1\n",
            f"{board.CPUS}/cpufreq/x": "",
        }
    )
    assert board.read_layout(root, "") == Layout(2, 3, 2, smt=True, offline=3)


def test_socket_unknown_to_the_kernel_is_unknown():
    assert board.layout([Place(-1, "0"), Place(-1, "1")]) == Layout(None, 2, None, smt=False)
    assert board.layout([]) == Layout()


def test_boot_and_kind_of_machine(machine, captures):
    assert board.parse_boot_time((captures / "proc/stat-procfs").read_text()) == 1418183276
    root = machine(
        {
            "/proc/stat": "cpu  1 2 3 4\nbtime 1784274102\n",
            "/proc/sys/kernel/random/boot_id": "5EAA3D20-8dce-4afd-a480-47bb50ae3b88\n",
            "/proc/sys/kernel/osrelease": "5.15.167.4-microsoft-standard-WSL2\n",
            "/proc/cpuinfo": "processor : 0\nvendor_id : x\nflags : lm hypervisor\n",
            "/sys/class/dmi/id/sys_vendor": "QEMU\n",
            "/sys/class/dmi/id/product_name": "Standard PC (Q35 + ICH9, 2009)\n",
        }
    )
    facts = host.read_host(root)
    assert (facts.booted_at, facts.boot_id) == (1784274102, "5eaa3d20-8dce-4afd-a480-47bb50ae3b88")
    assert (facts.wsl, facts.virtual) == (True, True)
    assert facts.product == "QEMU Standard PC (Q35 + ICH9, 2009)"
    assert (facts.numa_nodes, facts.pressure.cpu.some, facts.layout) == (None, None, Layout())


@pytest.mark.parametrize(
    ("flags", "product", "expected"),
    [
        (("lm", "hypervisor"), "Amazon EC2 p5.48xlarge", True),
        (("lm",), "Amazon EC2 p5.metal", False),
        (("lm",), "Google Google Compute Engine", False),
        (("asimd",), "Amazon EC2 c7g.metal", False),
        (("asimd",), "Amazon EC2 c7g.xlarge", True),
        (("asimd",), "Microsoft Corporation Virtual Machine", True),
        (("asimd",), "NVIDIA GB200 NVL", False),
        ((), None, None),
    ],
)
def test_virtual_or_real(flags, product, expected):
    assert board.virtual(flags, product) is expected


def test_product_and_kernel_names():
    assert board.product("Dell Inc.\n", "PowerEdge XE9680\n") == "Dell Inc. PowerEdge XE9680"
    assert board.product("NVIDIA", "NVIDIA DGX Spark") == "NVIDIA DGX Spark"
    assert board.product("To Be Filled By O.E.M.", "") is None
    assert board.wsl("4.4.0-19041-Microsoft") is True
    assert board.wsl("5.15.0-1041-azure") is False
    assert board.wsl(None) is None


def test_cpu_times_need_four_fields():
    assert host.parse_cpu_times("cpu  1234\n") is None
    assert host.parse_cpu_times("cpu  1 2 3 4\n") == CpuTimes((1, 2, 3, 4))


SAMPLE = """processor : 0
model name : Some  CPU
physical id : 0
core id : 0
flags : lm avx2
cpu  1 2 3 4 5 6 7
btime 1784274102
MemTotal: 4096 kB
PRETTY_NAME="Linux 1"
"""


@settings(max_examples=150, deadline=None)
@given(st.integers(0, len(SAMPLE)), st.integers(0, len(SAMPLE)), st.text(max_size=30))
def test_mutated_files_never_raise(begin, end, middle):
    text = SAMPLE[:begin] + middle + SAMPLE[end:]
    host.parse_cpuinfo(text)
    host.memory(host.parse_meminfo(text))
    host.parse_os_release(text)
    host.parse_loadavg(text)
    host.parse_cpu_times(text)
    board.layout(board.parse_places(text))
    board.parse_boot_id(text)
    board.parse_boot_time(text)
    board.wsl(board.product(text, text))
    board.virtual(text.split(), text)


def test_this_machine():
    facts = host.read_host(Root())
    assert facts.hostname == os.uname().nodename
    assert facts.kernel == os.uname().release
    assert facts.cpu.count == os.cpu_count()
    assert facts.memory.total_mib > facts.memory.available_mib > 0
