"""The documents as a whole: a captured machine, an empty one, this one."""

from __future__ import annotations

import json

from agent.probes import inventory
from agent.probes.inventory import ProbeConfig
from agent.probes.root import Root

CONFIG = ProbeConfig(
    mgmt_addr="10.0.0.5", labels={"rack": "a"}, ports=(20000, 20999), weights=("/models",)
)
GIB = 2**30


def limited(machine, small) -> Root:
    top = "/sys/fs/cgroup"
    return machine(
        {
            "/proc/cpuinfo": (small / "proc/cpuinfo-rhel7-ivybridge").read_text() * 1,
            "/proc/meminfo": "MemTotal: 268435456 kB\nMemAvailable: 209715200 kB\n",
            "/proc/stat": "cpu  1 0 1 8 0 0 0 0 0 0\n",
            "/proc/loadavg": "1.50 2.50 3.50 1/2 3\n",
            "/proc/sys/kernel/hostname": "gpu-7\n",
            "/proc/sys/kernel/osrelease": "5.15.0-101-generic\n",
            "/etc/os-release": (small / "proc/os-release-debian10").read_text(),
            "/proc/self/cgroup": "0::/box\n",
            "/proc/self/mountinfo": f"31 23 0:28 / {top} rw - cgroup2 cgroup2 rw\n"
            "29 1 259:2 / /models rw shared:1 - ext4 /dev/nvme0n1p2 rw\n",
            f"{top}/box/memory.max": f"{8 * GIB}\n",
            f"{top}/box/memory.current": f"{7 * GIB}\n",
            f"{top}/box/memory.stat": f"inactive_file {6 * GIB}\n",
            f"{top}/box/cpu.max": "50000 100000\n",
        }
    )


async def test_E13_host_report_shows_both_host_and_effective_figures(machine, small):
    report = await inventory.host_facts(limited(machine, small), CONFIG)
    assert report["cpus_host"] == 1
    assert report["cpus_effective"] == 0.5
    assert report["memory_host_mib"] == 256 * 1024
    assert report["memory_effective_mib"] == 8 * 1024
    assert (report["hostname"], report["kernel"]) == ("gpu-7", "5.15.0-101-generic")
    assert report["os"] == "Debian GNU/Linux 10 (buster)"
    assert report["arch"] == "x86_64"
    assert (report["mgmt_addr"], report["labels"]) == ("10.0.0.5", {"rack": "a"})
    assert report["ports"] == [20000, 20999]
    assert ["AVX2" in warning for warning in report["warnings"]] == [True]
    json.dumps(report)


async def test_E14_page_cache_is_available_in_both_reports(machine, small):
    root = limited(machine, small)
    assert (await inventory.host_facts(root, CONFIG))["memory_available_mib"] == 7 * 1024
    facts = await inventory.fast_facts(root, set())
    assert facts.load["memory_used_mib"] == 1024
    assert (facts.load["load1"], facts.load["load15"]) == (1.5, 3.5)
    assert "cpu_percent" not in facts.load
    again = await inventory.fast_facts(root, set(), facts.cpu_times)
    assert "cpu_percent" not in again.load, "no time has passed between equal samples"


async def test_disk_report(machine, small):
    assert await inventory.disk_facts(limited(machine, small), CONFIG) == [
        {"mount": "/models", "filesystem": "ext4", "kind": "local", "holds_weights": True}
    ]


async def test_E01_machine_that_tells_nothing_still_reports(machine):
    root = machine({})
    report = await inventory.host_facts(root, ProbeConfig())
    assert set(report) == {"labels", "agent_version", "warnings"}
    assert await inventory.disk_facts(root, ProbeConfig()) == []
    facts = await inventory.fast_facts(root, set())
    assert (facts.load, facts.gpus, facts.cpu_times) == ({}, [], None)


async def test_this_machine():
    root = Root()
    report = await inventory.host_facts(root, ProbeConfig())
    assert report["memory_host_mib"] >= report["memory_effective_mib"] > 0
    assert 0 < report["cpus_effective"] <= report["cpus_host"]
    facts = await inventory.slow_facts(root, ProbeConfig())
    assert {"engine": "command", "state": "installed"} in facts.engines
    assert any(disk["mount"] == "/" for disk in facts.disks)
    json.dumps([report, facts.host, facts.gpus, facts.engines, facts.disks])
