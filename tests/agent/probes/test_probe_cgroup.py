"""Control group limits in every layout: the smallest on the path wins, cache is not used memory."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from agent.probes import cgroup
from agent.probes.cgroup import Level, Limits
from agent.probes.host import Memory
from agent.probes.root import Root

GIB = 2**30
HOST = Memory(total_mib=256 * 1024, available_mib=200 * 1024)
TOP = "/sys/fs/cgroup"
V2 = {"/proc/self/mountinfo": f"31 23 0:28 / {TOP} rw - cgroup2 cgroup2 rw\n"}
V1 = {
    "/proc/self/mountinfo": f"31 23 0:28 /docker/ab {TOP}/memory rw - cgroup cgroup rw,memory\n"
    f"32 23 0:29 /docker/ab {TOP}/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct\n"
    f"33 23 0:30 / {TOP}/unified rw - cgroup2 cgroup2 rw\n",
    "/proc/self/cgroup": "9:memory:/docker/ab/engine\n4:cpu,cpuacct:/docker/ab\n0::/\n",
}


def test_E13_v2_limits_of_8_gib_and_2_cpus(machine):
    root = machine(
        V2
        | {
            "/proc/self/cgroup": "0::/box\n",
            f"{TOP}/box/memory.max": f"{8 * GIB}\n",
            f"{TOP}/box/memory.current": f"{3 * GIB}\n",
            f"{TOP}/box/memory.stat": "anon 5\ninactive_file 0\n",
            f"{TOP}/box/cpu.max": "200000 100000\n",
        }
    )
    assert cgroup.read_limits(root) == Limits(8 * GIB, 5 * GIB, 2.0)


def test_E13_v2_nested_limit_in_the_parent_group_wins(machine):
    root = machine(
        V2
        | {
            "/proc/self/cgroup": "0::/pod/box\n",
            f"{TOP}/pod/box/memory.max": f"{64 * GIB}\n",
            f"{TOP}/pod/box/cpu.max": "max 100000\n",
            f"{TOP}/pod/memory.max": f"{8 * GIB}\n",
            f"{TOP}/pod/cpu.max": "150000 100000\n",
        }
    )
    limits = cgroup.read_limits(root)
    assert limits == Limits(8 * GIB, None, 1.5)
    assert cgroup.effective_memory(HOST, limits) == Memory(8 * 1024, 8 * 1024)


def test_E13_v1_inside_a_container_without_namespace(machine):
    root = machine(
        V1
        | {
            f"{TOP}/memory/engine/memory.limit_in_bytes": "9223372036854771712\n",
            f"{TOP}/memory/memory.limit_in_bytes": f"{8 * GIB}\n",
            f"{TOP}/memory/memory.usage_in_bytes": f"{6 * GIB}\n",
            f"{TOP}/memory/memory.stat": f"cache 1\ntotal_inactive_file {4 * GIB}\n",
            f"{TOP}/cpu,cpuacct/cpu.cfs_quota_us": "200000\n",
            f"{TOP}/cpu,cpuacct/cpu.cfs_period_us": "100000\n",
        }
    )
    assert cgroup.read_limits(root) == Limits(8 * GIB, 6 * GIB, 2.0)


def test_E13_hybrid_takes_each_controller_where_it_lives(machine):
    files = V1 | {
        f"{TOP}/cpu,cpuacct/cpu.cfs_quota_us": "-1\n",
        f"{TOP}/cpu,cpuacct/cpu.cfs_period_us": "100000\n",
        f"{TOP}/unified/memory.max": f"{4 * GIB}\n",
    }
    assert cgroup.read_limits(machine(files)) == Limits(4 * GIB, None, None)


def test_E13_cpuset_and_affinity_count_as_well(machine):
    root = machine(
        V2
        | {
            "/proc/self/cgroup": "0::/\n",
            f"{TOP}/cpuset.cpus.effective": "0-3,8-11\n",
            "/proc/self/status": "Name:\tagent\nCpus_allowed_list:\t0-2\n",
        }
    )
    assert cgroup.read_limits(root).cpus == 3.0


def test_E13_capture_without_proc_self(machine):
    v2 = machine({f"{TOP}/cgroup.controllers": "memory\n", f"{TOP}/memory.max": f"{GIB}\n"})
    assert cgroup.read_limits(v2).memory_limit == GIB


def test_E13_outside_the_mounted_tree_the_mount_is_what_limits(machine):
    files = {"/proc/self/cgroup": "0::/../../other\n", f"{TOP}/memory.max": f"{GIB}\n"}
    assert cgroup.read_limits(machine(V2 | files)).memory_limit == GIB


def test_E13_v1_limit_of_a_group_the_container_cannot_see(machine):
    root = machine(
        V1
        | {
            f"{TOP}/memory/memory.limit_in_bytes": "9223372036854771712\n",
            f"{TOP}/memory/memory.usage_in_bytes": f"{2 * GIB}\n",
            f"{TOP}/memory/memory.stat": f"cache 1\nhierarchical_memory_limit {8 * GIB}\n",
        }
    )
    assert cgroup.read_limits(root) == Limits(8 * GIB, 6 * GIB, None)
    assert cgroup.parse_hierarchical("hierarchical_memory_limit 9223372036854771712") is None


def test_E13_controllers_that_are_not_switched_on_limit_nothing(machine):
    files = {"/proc/self/cgroup": "0::/box\n", f"{TOP}/box/cgroup.controllers": "pids\n"}
    assert cgroup.read_limits(machine(V2 | files)) == Limits()


def test_E13_cpuset_smaller_than_the_quota_wins_and_the_other_way_round(machine):
    files = V2 | {"/proc/self/cgroup": "0::/box\n", f"{TOP}/box/cpu.max": "800000 100000\n"}
    few = machine(files | {f"{TOP}/box/cpuset.cpus.effective": "0-3\n"})
    assert cgroup.read_limits(few).cpus == 4.0
    many = machine(files | {f"{TOP}/box/cpuset.cpus.effective": "0-63\n"})
    assert cgroup.read_limits(many).cpus == 8.0


def test_E13_memory_high_is_a_limit_and_swap_is_none(machine):
    root = machine(
        V2
        | {
            "/proc/self/cgroup": "0::/box\n",
            f"{TOP}/box/memory.max": f"{16 * GIB}\n",
            f"{TOP}/box/memory.high": f"{12 * GIB}\n",
            f"{TOP}/box/memory.swap.max": f"{1 * GIB}\n",
            f"{TOP}/box/memory.swap.current": f"{1 * GIB}\n",
            f"{TOP}/box/memory.current": f"{5 * GIB}\n",
        }
    )
    assert cgroup.read_limits(root) == Limits(12 * GIB, 7 * GIB, None)


def test_E13_namespace_hides_what_is_above_but_not_our_own_group(machine):
    # Inside a namespace the path is `/` and the mount shows our group as its root.
    files = {"/proc/self/cgroup": "0::/\n", f"{TOP}/memory.max": f"{3 * GIB}\n"}
    assert cgroup.read_limits(machine(V2 | files)).memory_limit == 3 * GIB
    # The host's tree mounted beside it says nothing of us.
    host = "32 23 0:28 /../.. /host/cgroup rw - cgroup2 cgroup2 rw\n"
    both = {"/proc/self/mountinfo": V2["/proc/self/mountinfo"] + host}
    assert cgroup.read_limits(machine(V2 | both | files)).memory_limit == 3 * GIB


def test_E14_page_cache_is_not_used_memory():
    # 20 GiB of weights were read: the group looks full, yet all but 1 GiB can be had again.
    level = Level(memory_limit=24 * GIB, memory_used=21 * GIB, memory_reclaimable=20 * GIB)
    assert cgroup.combine([level]).memory_available == 23 * GIB
    stat = (
        f"anon {GIB}\nfile {20 * GIB}\nactive_file {5 * GIB}\ninactive_file {15 * GIB}\nshmem 9\n"
    )
    assert cgroup.parse_reclaimable(stat) == 20 * GIB


def test_E14_max_is_no_limit_and_means_the_host_figures():
    assert cgroup.parse_limit("max\n") is None
    assert cgroup.parse_limit("9223372036854771712") is None
    assert cgroup.parse_limit(None) is None
    limits = cgroup.combine([Level(memory_used=21 * GIB)])
    assert limits == Limits()
    assert cgroup.effective_memory(HOST, limits) == HOST


def test_E14_unknown_host_memory_stays_unknown_without_a_limit():
    assert cgroup.effective_memory(Memory(), Limits()) == Memory()
    assert cgroup.effective_memory(Memory(), Limits(memory_limit=GIB)).total_mib == 1024


def test_available_is_the_least_of_all_levels():
    inner = Level(memory_limit=10 * GIB, memory_used=1 * GIB)
    outer = Level(memory_limit=16 * GIB, memory_used=14 * GIB)
    assert cgroup.combine([inner, outer]) == Limits(10 * GIB, 2 * GIB, None)


@settings(max_examples=100, deadline=None)
@given(st.text(max_size=80))
def test_any_text_never_raises(text):
    cgroup.parse_membership(text)
    cgroup.parse_limit(text)
    cgroup.parse_cpu_max(text)
    cgroup.parse_reclaimable(text)
    cgroup.parse_hierarchical(f"hierarchical_memory_limit {text}")


def test_this_machine():
    limits = cgroup.read_limits(Root())
    assert limits.cpus is not None
    assert limits.cpus > 0
