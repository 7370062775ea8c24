"""Whatever a machine prints: parsers answer, they never raise (hypothesis)."""

from __future__ import annotations

import json
import time

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from agent.probes import cgroup, disks, engines, gpus, host, mounts, nvml, smi, values
from agent.probes.host import CpuTimes

PARSERS = [
    host.parse_cpuinfo,
    lambda text: host.memory(host.parse_meminfo(text)),
    host.parse_os_release,
    host.parse_loadavg,
    host.parse_cpu_times,
    lambda text: disks.find(mounts.parse_mountinfo(text), [text]),
    cgroup.parse_membership,
    cgroup.parse_limit,
    cgroup.parse_cpu_max,
    cgroup.parse_reclaimable,
    smi.parse,
    lambda text: smi.parse(f"GPU 0000:01:00.0\n{text}", text, cut=True),
    smi.parse_list,
    values.plain,
    gpus.gpu_class,
    lambda text: gpus.parse_kernel_gpu(text, text),
    engines.parse_llama_version,
    lambda text: engines.parse_metadata(text, text),
    values.reason,
    values.quantity,
    values.mib,
    values.whole,
    values.version,
    values.pci_bus_id,
    values.cpu_list,
]
DOCUMENT = """<nvidia_smi_log><driver_version>1</driver_version><gpu id="0:1:2.0"><uuid>GPU-1</uuid>
<fb_memory_usage><total>1 MiB</total></fb_memory_usage></gpu></nvidia_smi_log>"""
EVIL = [
    '<!DOCTYPE x [<!ENTITY a "b">]><nvidia_smi_log>&a;</nvidia_smi_log>',
    "<nvidia_smi_log></nvidia_smi_log>\0",
    "\u0660 kB", "²", "1" * 400, "0-99999999", "\x1b[4mcpu  1 2 3 4\x1b[0m", "cpu  ١ ٢ ٣ ٤",
    "MemTotal: ٣ kB", "processor : ²",
]  # fmt: skip


@pytest.mark.parametrize("number", range(len(PARSERS)))
@settings(max_examples=60, deadline=None)
@given(text=st.text(max_size=300))
def test_arbitrary_text_never_raises(number, text):
    PARSERS[number](text)


@pytest.mark.parametrize("parser", PARSERS)
@pytest.mark.parametrize("text", EVIL)
def test_text_that_looks_like_numbers_never_raises(parser, text):
    parser(text)


SAMPLES = st.sampled_from(
    [
        "1 0 8:1 / / rw shared:1 - ext4 /dev/a rw\n2 1 0:9 / /n rw - nfs4 host:/x rw",
        "processor : 0\nflags : avx2 lm\nvendor_id : x\n",
        "MemTotal: 4 kB\nMemFree: 1 kB\nMemAvailable: 2 kB\n",
        "cpu  1 2 3 4 5 6 7 8 9 10\n",
        "9:memory:/docker/ab\n0::/x/../y\n",
        DOCUMENT,
    ]
)


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_damaged_output_never_raises(data):
    text = data.draw(SAMPLES)
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(text)))
        cut = data.draw(st.integers(0, 12))
        text = text[:at] + data.draw(st.text(max_size=6)) + text[at + cut :]
    for parser in PARSERS:
        parser(text)


FACT = st.dictionaries(
    st.sampled_from(["gpu", "field", "value", "failed", "code", "begin", "end", "error", "driver"]),
    st.one_of(
        st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=9),
        st.lists(st.integers(), max_size=3), st.sampled_from(["memory", "uuid", "processes"]),
        st.dictionaries(st.sampled_from(["total", "used", "reserved"]), st.integers()),
    ),
)  # fmt: skip


@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@given(st.lists(FACT, max_size=12), st.text(max_size=20))
@example([{"gpu": 0, "field": "processes", "value": [[True, None], [1], [[], 2]]}], "")
@example([{"gpu": True, "field": "memory", "value": {"total": "x", "used": True}}], "[" * 9000)
def test_a_child_may_print_anything(facts, noise):
    answers = nvml.Answers()
    answers.take("\n".join([*(json.dumps(fact) for fact in facts), noise]))
    for card in nvml.gpus(answers, loaded=True).cards:
        assert card.memory_mib is None or card.memory_mib > 0


@given(st.lists(st.integers(0, 10**9), min_size=8, max_size=8), st.lists(
    st.integers(0, 10**9), min_size=8, max_size=8))  # fmt: skip
def test_cpu_percent_is_a_percentage(before, after):
    percent = host.cpu_percent(CpuTimes(tuple(before)), CpuTimes(tuple(after)))
    assert percent is None or 0 <= percent <= 100


@given(st.lists(st.builds(
    cgroup.Level, memory_limit=st.none() | st.integers(0, 2**50),
    memory_used=st.none() | st.integers(0, 2**50), memory_reclaimable=st.integers(0, 2**50),
    cpu_quota=st.none() | st.floats(0.01, 512)), max_size=6))  # fmt: skip
@settings(suppress_health_check=[HealthCheck.too_slow])
def test_E13_effective_is_never_more_than_host_or_any_level(levels):
    total = host.Memory(total_mib=1024, available_mib=512)
    limits = cgroup.combine(levels, 4)
    usable = cgroup.effective_memory(total, limits)
    assert usable.total_mib <= 1024
    assert usable.available_mib <= min(512, usable.total_mib)
    for level in levels:
        if level.memory_limit is not None:
            assert usable.total_mib <= level.memory_limit // 2**20


@pytest.mark.parametrize(
    "piece", ["handle for GPU 0000:01:00.0", "GPU ", "1", "<gpu>", "cpu  1 2 "]
)
def test_megabytes_on_one_line_take_linear_time(piece):
    text = piece * (500_000 // len(piece))
    began = time.process_time()
    for parser in PARSERS:
        parser(text)
    assert time.process_time() - began < 5, "0.3 s is usual; backtracking takes minutes"
