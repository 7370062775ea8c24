"""A look as a whole: a captured machine, an empty one, this one; and the fast facts."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from agent import documents
from agent.probes import fast, inventory
from agent.probes.card import Gpu, Gpus, MigDevice, Process
from agent.probes.found import Found
from agent.probes.host import Cpu, Host, Memory
from agent.probes.ib_counters import Counters
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
            "/proc/pressure/memory": "some avg10=1.50 avg60=0 avg300=0 total=1\n",
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


async def told(root: Root, config: ProbeConfig):
    return documents.host_document(await inventory.look(root, config), config)


async def test_E13_host_report_shows_both_host_and_effective_figures(machine, small):
    report = await told(limited(machine, small), CONFIG)
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
    assert report["nvlink"]["state"] == "none"
    json.dumps(report)


async def test_E14_page_cache_is_available_in_both_reports(machine, small):
    root = limited(machine, small)
    assert (await told(root, CONFIG))["memory_available_mib"] == 7 * 1024
    facts = await fast.read(root, set(), fast.Sample())
    assert facts.load["memory_used_mib"] == 1024
    assert (facts.load["load1"], facts.load["load15"]) == (1.5, 3.5)
    assert facts.load["pressure"] == {"memory_some": 1.5}
    assert "cpu_percent" not in facts.load
    again = await fast.read(root, set(), facts.sample)
    assert "cpu_percent" not in again.load, "no time has passed between equal samples"


async def test_disks_of_a_look(machine, small):
    found = await inventory.look(limited(machine, small), CONFIG)
    assert documents.disk_documents(found.disks) == [
        {"mount": "/models", "filesystem": "ext4", "kind": "local", "holds_weights": True}
    ]


async def test_E01_machine_that_tells_nothing_still_reports(machine):
    root = machine({})
    report = await told(root, ProbeConfig())
    assert set(report) == {"labels", "agent_version", "warnings", "machine", "nvlink"}
    found = await inventory.look(root, ProbeConfig())
    assert (found.disks, found.gpus.cards, found.ports.ports) == ((), (), ())
    assert documents.gpu_documents(found) == []
    facts = await fast.read(root, set(), fast.Sample())
    assert (facts.load, facts.gpus, facts.ports) == ({}, [], [])


async def test_this_machine():
    root = Root()
    report = await told(root, ProbeConfig())
    assert report["memory_host_mib"] >= report["memory_effective_mib"] > 0
    assert 0 < report["cpus_effective"] <= report["cpus_host"]
    found = await inventory.look(root, ProbeConfig())
    engines = documents.engine_documents(found.engines)
    assert {"engine": "command", "state": "installed"} in engines
    assert any(disk.mount == "/" for disk in found.disks)
    json.dumps([report, engines, documents.gpu_documents(found)])


@pytest.mark.parametrize(("host_gib", "planned_gib"), [(128, 128 * 0.95), (32, 28), (None, None)])
def test_E02_unified_memory_is_the_hosts_less_a_reserve(host_gib, planned_gib):
    memory = Memory(None if host_gib is None else host_gib * 1024)
    card = Gpu(uuid="GPU-a", name="NVIDIA GB10", memory_kind="unified", memory_mib=128 * 1024)
    host = Host("h", None, None, Cpu(count=20), memory)
    found = inventory._with_limits(Found(host=host, gpus=Gpus((card,))))
    expected = None if planned_gib is None else pytest.approx(planned_gib * 1024, abs=1)
    assert found.gpus.cards[0].memory_mib == expected
    assert found.cpus == 20


def test_E02_what_the_host_uses_is_what_others_hold_of_a_unified_card():
    card = Gpu(uuid="GPU-a", processes=(Process(7, 100),), memory_used_mib=None)
    [use] = fast.card_use(card, {7}, pool=(60_000, 20_000))
    assert (use["memory_used_mib"], use["memory_foreign_mib"]) == (60_000, 40_000)
    [unknown] = fast.card_use(card, {7}, pool=(None, 20_000))
    assert unknown["memory_foreign_mib"] is None


def test_D01_foreign_processes_are_named_by_their_number():
    processes = tuple(Process(pid, 100) for pid in range(1, 20))
    [use] = fast.card_use(Gpu(uuid="GPU-a", processes=processes, memory_used_mib=1900), {1, 2})
    assert use["foreign_pids"] == list(range(3, 11))
    assert use["memory_foreign_mib"] == 1700
    [own] = fast.card_use(Gpu(uuid="GPU-a", processes=processes[:2]), {1, 2})
    assert "foreign_pids" not in own
    assert own["memory_foreign_mib"] == 0


def test_use_of_slices_follows_their_card():
    part = MigDevice("MIG-1", memory_mib=9000, memory_used_mib=300)
    card = Gpu(uuid="GPU-a", processes=(Process(9, 5000),), slices=(part,))
    whole, piece = fast.card_use(card, set())
    assert whole["memory_foreign_mib"] == 5000
    assert (piece["uuid"], piece["memory_foreign_mib"]) == ("MIG-1", 300)
    _, piece = fast.card_use(replace(card, processes=()), set())
    assert piece["memory_foreign_mib"] == 0
    assert fast.card_use(Gpu(index=1), set()) == [], "a lost card has no row to add to"


def test_traffic_is_measured_between_two_samples():
    before = {("mlx5_0", 1): Counters(1000, 2000, {"symbol_error": 1, "link_downed": 0})}
    after = {("mlx5_0", 1): Counters(6000, 2000, {"symbol_error": 3, "link_downed": 0})}
    [first] = fast.port_use({}, before, 5.0)
    assert first == {"hca": "mlx5_0", "port": 1, "errors": {"symbol_error": 1}}
    [second] = fast.port_use(before, after, 5.0)
    assert (second["tx_bytes"], second["rx_bytes"]) == (1000, 0)
    assert second["errors"] == {"symbol_error": 3}
    [reset] = fast.port_use(after, before, 5.0)
    assert "tx_bytes" not in reset, "a counter that went backwards says nothing"
