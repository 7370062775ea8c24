"""The kernel log: every public spelling of the drivers' messages, and every way to read them."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agent.probes import kernel_log, kernel_messages
from agent.probes.root import Root
from agent.xids import Cursor

FELL = "GPU has fallen off the bus."
XIDS = [
    (f"Xid (PCI:0000:3b:00): 79, pid=1234, name=python, {FELL}", 79, "0000:3b:00.0", 1234, FELL),
    (f"Xid (PCI:0000:3b:00): 79, pid='<unknown>', name=<unknown>, {FELL}", 79, None, None, FELL),
    (f"Xid (PCI:0000:3b:00): 79, pid=<unknown>, name=<unknown>, {FELL}", 79, None, None, FELL),
    (f"Xid (PCI:0000:3b:00): 79, pid=1896, {FELL}", 79, None, 1896, FELL),
    (f"Xid (PCI:0000:01:00): 79, {FELL}", 79, "0000:01:00.0", None, FELL),
    (f"Xid (PCI:0001:00:00.0): 79, {FELL}", 79, "0001:00:00.0", None, FELL),
    (f"NVRM: Xid (PCI:0001:00:00.0): 79, {FELL}", 79, "0001:00:00.0", None, FELL),
    ("Xid (0000:03:00): 14, Channel 00000001", 14, "0000:03:00.0", None, "Channel 00000001"),
    ("Xid (0001:00): 13, 0003 00000000", 13, "0000:01:00.0", None, "0003 00000000"),
    ("Xid (PCI:0018:01:00): 45", 45, "0018:01:00.0", None, ""),
    ("Xid (PCI:0000:01:00 GPU-I:05): 94, pid=7194, Contained: CE", 94, None, 7194, "Contained: CE"),
    ("Xid (PCI:0000:3B:00 GPU-I:01 GPU-CI:02): 13, x", 13, "0000:3b:00.0", None, "x"),
    ("Xid (PCI:0000:9b:00): 119, pid=9, name=nvc:[driver], Timeout", 119, None, 9, "Timeout"),
    ("Xid (PCI:c8f9:00:00): 31, pid=1, name=a b, Ch 8", 31, "c8f9:00:00.0", 1, "Ch 8"),
    ("Xid (PCI:0000:dc:00): 45, pid=5, name=python3, Ch 1 caused by previous Xid 149", 45, None, 5,
     "Ch 1 caused by previous Xid 149"),
]  # fmt: skip
OTHERS = [
    ("nvidia-nvswitch3: SXid (PCI:0000:05:00.0): 12028, Non-fatal, Link 32", "sxid_12028"),
    ("nvidia-nvswitch1 SXid (PCI:0000:06:00.0): 20009, Non-fatal, Link 04", "sxid_20009"),
    ("NVRM: GPU at 0000:01:00.0 has fallen off the bus.", "xid_79"),
    ("NVRM: GPU 0000:01:00.0: GPU has fallen off the bus.", "xid_79"),
    ("NVRM: loading NVIDIA UNIX x86_64 Kernel Module  535.129.03  Thu Oct 19", "loaded"),
    ("NVRM: loading NVIDIA UNIX Open Kernel Module for x86_64  550.54.15  Release", "loaded"),
    ("amdgpu 0000:03:00.0: amdgpu: ring gfx_0.0.0 timeout, signaled seq=1", "amd_ring_timeout"),
    ("amdgpu 0000:28:00.0: ring gfx_0.0.0 timeout, signaled seq=57638", "amd_ring_timeout"),
    ("amdgpu 0000:28:00.0: GPU reset begin!. Source:  1", "amd_reset_begin"),
    ("amdgpu 0000:c5:00.0: amdgpu: GPU reset succeeded, trying to resume", "reset"),
    ("amdgpu 0000:c5:00.0: amdgpu: GPU reset(3) succeeded!", "reset"),
    ("amdgpu 0000:c5:00.0: amdgpu: GPU reset end with ret = -110", "amd_reset_failed"),
    ("amdgpu 0000:c5:00.0: amdgpu: 2 uncorrectable hardware errors detected in umc block",
     "amd_uncorrectable"),
]  # fmt: skip
NONE = [
    "NVRM: GPU Board Serial Number: 123",
    "NVRM: Xid error: xyz, invalid data",
    "NVRM: Xid (PCI:0000:66:00): abc, pid=2280636",
    "NVRM: A GPU crash dump has been created.",
    "usb 1-1: Product: NVRM: Xid (PCI:0000:3b:00): 79, GPU has fallen off the bus.",
    "amdgpu 0000:c5:00.0: amdgpu: 0 uncorrectable hardware errors detected in umc block",
    "[drm:amdgpu_job_timedout [amdgpu]] *ERROR* ring gfx timeout, signaled seq=516877",
    "",
]


@pytest.mark.parametrize(("text", "number", "address", "pid", "words"), XIDS)
def test_xid_lines(text, number, address, pid, words):
    event = kernel_messages.event(f"NVRM: {text}")
    assert event is not None
    assert (event.what, event.number, event.pid, event.text) == ("xid", number, pid, words)
    assert event.pci_bus_id is not None
    assert address in {None, event.pci_bus_id}


@pytest.mark.parametrize(("text", "code"), OTHERS)
def test_other_lines(text, code):
    event = kernel_messages.event(text)
    assert event is not None
    assert event.code == code
    assert event.what == "loaded" or event.pci_bus_id is not None


@pytest.mark.parametrize("text", NONE)
def test_lines_that_say_nothing(text):
    assert kernel_messages.event(text) is None


def test_recovery_that_is_over_is_evidence_of_a_reset():
    changed = "NVRM: Xid (PCI:0008:01:00): 154, GPU recovery action changed from 0x1 "
    over = kernel_messages.event(changed + "(GPU Reset Required) to 0x0 (None)")
    assert (over.what, over.pci_bus_id) == ("reset", "0008:01:00.0")
    asked = kernel_messages.event(changed + "(GPU Reset Required) to 0x2 (Node Reboot Required)")
    assert (asked.what, asked.number) == ("xid", 154)


UUID = "GPU-c4a80165-86e4-bfbb-ecfa-1d81a70b138a"
KMSG = f"""5,0,0,-;Linux version 6.8.0
6,159,423091,-;pci_root PNP0A03:00: host bridge window
 SUBSYSTEM=acpi
 DEVICE=+acpi:PNP0A03:00
3,339,5140900,-,caller=T1;NVRM: GPU at PCI:0000:3b:00: {UUID}
3,340,5140910,-;NVRM: Xid (PCI:0000:3b:00): 31, pid=7, name=python, Ch 00000008
3,341,5140911,-;NVRM: Xid (PCI:0000:3b:00): 31, pid=7, name=python, Ch 00000009
3,342,9000000,-;NVRM: Xid (PCI:0000:3b:00): 79, GPU has fallen off the bus.
"""
DMESG = "\n".join(
    (
        "[    5.140900] NVRM: GPU at PCI:0000:3b:00: " + UUID,
        "\x1b[32m[    5.140910] \x1b[0m\x1b[31mNVRM: Xid (PCI:0000:3b:00): 31, Ch 00000008\x1b[0m",
        "[    9.000000][  T412] NVRM: Xid (PCI:0000:3b:00): 79, GPU has fallen off the bus.\r",
    )
)


def test_records_of_kmsg():
    log = kernel_log.parse(KMSG)
    assert [event.code for event in log.events] == ["xid_31", "xid_79"]
    first = log.events[0]
    assert (first.uuid, first.count, first.at) == (UUID, 2, 5.140911)
    assert first.text == "Ch 00000008"
    assert log.cursor == Cursor(342, 9.0)
    assert log.uuids == {"0000:3b:00.0": UUID}
    assert log.readable


def test_only_what_came_after_the_cursor():
    assert kernel_log.parse(KMSG, Cursor(342, 9.0)).events == ()
    [event] = kernel_log.parse(KMSG, Cursor(341, 5.140911)).events
    assert (event.code, event.uuid) == ("xid_79", UUID)
    [event] = kernel_log.parse(DMESG, Cursor(341, 5.2)).events  # root was lost: dmesg goes on
    assert event.code == "xid_79"
    assert kernel_log.parse("", Cursor(1, 2.0)).cursor == Cursor(1, 2.0)


def test_lines_of_dmesg_and_syslog():
    log = kernel_log.parse(DMESG)
    assert [(event.code, event.at) for event in log.events] == [("xid_31", 5.14091), ("xid_79", 9)]
    assert log.events[1].text == "GPU has fallen off the bus."
    for prefix, at in [
        ("[Fri Aug 30 11:43:09 2024] ", None),
        ("Dec  6 17:49:03 host kernel: [ 8659.726062] ", 8659.726062),
        ("2024-08-18T01:19:31.358069+00:00 minipc kernel: ", None),
        ("<3>[   12.5] ", 12.5),
    ]:
        [event] = kernel_log.parse(f"{prefix}NVRM: Xid (PCI:0000:cb:00): 13, x").events
        assert (event.number, event.at) == (13, at)


def test_lines_without_a_time_count_in_the_first_reading_only():
    text = "NVRM: Xid (PCI:0000:cb:00): 79, x\n"
    log = kernel_log.parse(text)
    assert len(log.events) == 1
    assert kernel_log.parse(text, log.cursor).events == ()


def test_json_of_journalctl():
    message = "NVRM: Xid (PCI:0000:cb:00): 48, pid=1, name=x, DBE"
    records = [
        {"MESSAGE": message, "_SOURCE_MONOTONIC_TIMESTAMP": "7000000", "__CURSOR": "s=1"},
        {"MESSAGE": list(message.encode()), "__MONOTONIC_TIMESTAMP": "8000000"},
        {"MESSAGE": None},
        {"MESSAGE": [1, "x", 999]},
    ]
    text = "-- No entries --\n{broken\n" + "\n".join(map(json.dumps, records))
    [event] = kernel_log.parse(text).events
    assert (event.number, event.at, event.count) == (48, 8.0, 2)


def test_resets_and_loads_keep_their_place():
    lines = [
        "[1.0] NVRM: loading NVIDIA UNIX x86_64 Kernel Module  535.129.03  Thu",
        "[2.0] NVRM: Xid (PCI:0000:3b:00): 119, Timeout",
        "[3.0] NVRM: loading NVIDIA UNIX x86_64 Kernel Module  550.54.15  Thu",
        "[4.0] NVRM: Xid (PCI:0000:3b:00): 119, Timeout",
        "[5.0] NVRM: Xid (PCI:0000:3b:00): 119, Timeout",
    ]
    found = [(event.code, event.count) for event in kernel_log.parse("\n".join(lines)).events]
    assert found == [("loaded", 1), ("xid_119", 1), ("loaded", 1), ("xid_119", 2)]


def test_flood_of_one_error_hides_no_other():
    flood = "[2.0] NVRM: Xid (PCI:0000:3b:00): 13, x\n" * 20_000
    log = kernel_log.parse("[1.0] NVRM: Xid (PCI:0000:3b:00): 79, x\n" + flood)
    assert [(event.number, event.count) for event in log.events] == [(79, 1), (13, 20_000)]
    many = (f"[2.0] NVRM: Xid (PCI:0000:3b:00): {n}, x" for n in range(3000))
    assert len(kernel_log.parse("\n".join(many)).events) == kernel_log.MAX_EVENTS
    uuids = (f"NVRM: GPU at PCI:{n:04x}:3b:00: {UUID}" for n in range(3000))
    assert len(kernel_log.parse("\n".join(uuids)).uuids) == kernel_log.MAX_UUIDS


async def test_kmsg_is_read_first(machine):
    log = await kernel_log.read(machine({"/dev/kmsg": KMSG}, {"dmesg": "echo wrong"}))
    assert (log.source, len(log.events), log.error) == ("/dev/kmsg", 2, None)


async def test_dmesg_stands_in(machine):
    root = machine({"/dmesg.txt": DMESG}, {"dmesg": "cat $HOME/dmesg.txt; exit 1"})
    root = Root(root.prefix, root.path, {"HOME": str(root.prefix)})
    log = await kernel_log.read(root)
    assert (log.source, len(log.events)) == ("dmesg", 2)  # good output with a bad exit status


async def test_journalctl_stands_in(machine):
    record = json.dumps({"MESSAGE": "NVRM: Xid (PCI:0000:cb:00): 79, x", "t": "1"})
    stamped = record.replace('"t"', '"__MONOTONIC_TIMESTAMP"')
    refused = "echo 'dmesg: read kernel buffer failed: Operation not permitted'; exit 1"
    tools = {"dmesg": refused, "journalctl": f"cat <<'END'\n{stamped}\nEND"}
    log = await kernel_log.read(machine({}, tools))
    assert (log.source, [event.number for event in log.events]) == ("journalctl", [79])


async def test_reason_when_only_root_may_read(machine):
    refused = "echo 'dmesg: read kernel buffer failed: Operation not permitted' >&2; exit 1"
    root = machine({"/proc/sys/kernel/dmesg_restrict": "1\n"}, {"dmesg": refused})
    log = await kernel_log.read(root, Cursor(5, 1.0))
    assert log.events == ()
    assert log.cursor == Cursor(5, 1.0)
    for word in ("/dev/kmsg", "Operation not permitted", "journalctl", "run the agent as root"):
        assert word in log.error


async def test_tool_that_hangs_is_ended(machine, monkeypatch):
    monkeypatch.setattr(kernel_log, "TOOL_TIMEOUT_S", 0.2)
    log = await kernel_log.read(machine({}, {"dmesg": "sleep 60", "journalctl": "exit 1"}))
    assert "no answer within 0.2 s" in log.error


async def test_log_without_times_says_so(machine):
    root = machine({}, {"dmesg": "echo 'NVRM: Xid (PCI:0000:cb:00): 79, x'"})
    log = await kernel_log.read(root)
    assert len(log.events) == 1
    assert "no times" in log.error


@pytest.mark.parametrize("kind", ["fifo", "directory", "binary"])
async def test_odd_kmsg_is_no_log(tmp_path: Path, kind):
    place = tmp_path / "dev" / "kmsg"
    place.parent.mkdir()
    if kind == "fifo":
        os.mkfifo(place)
    elif kind == "directory":
        place.mkdir()
    else:
        place.write_bytes(os.urandom(4096).replace(b"\n", b""))
    log = await kernel_log.read(Root(prefix=tmp_path, path=str(tmp_path)))
    assert log.events == ()


def test_live_kernel_log_gives_records_or_a_reason():
    kept = kernel_log.read_kmsg(Root())
    if isinstance(kept, str):
        assert kernel_log.parse(kept).readable
    else:
        assert kept.strerror


SPELLINGS = [*(f"NVRM: {row[0]}" for row in XIDS), *(row[0] for row in OTHERS), *NONE]
PIECES = st.one_of(
    st.sampled_from([*SPELLINGS, *KMSG.splitlines(), *DMESG.splitlines(), '{"MESSAGE": "']),
    st.text(max_size=30),
    st.sampled_from(["\n", "\x1b[", "(", ": ", "[[[[", "9" * 40, "\0", "NVRM: Xid (PCI:"]),
)


@settings(max_examples=250, deadline=None)
@given(st.lists(PIECES, max_size=12), st.integers(0, 400), st.none() | st.just(Cursor(340, 5.0)))
def test_mangled_logs_never_raise(pieces, cut, after):
    text = "".join(pieces)
    for mangled in (text, text[cut:], text[:cut] + text[cut + 1 :]):
        log = kernel_log.parse(mangled, after)
        assert len(log.events) <= kernel_log.MAX_EVENTS
        assert all(event.what for event in log.events)


@pytest.mark.slow
@pytest.mark.parametrize(
    "piece",
    ["NVRM: Xid (", "NVRM: GPU at 0000:01:00.0 ", "[drm] amdgpu ring ", "\x1b[", "{", "[[", "A\n"],
)
def test_huge_output_is_read_in_bounded_time(piece):
    log = kernel_log.parse(piece * (8 * 2**20 // len(piece)))
    assert len(log.events) <= 1
