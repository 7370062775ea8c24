"""`probe` and `doctor` where tools lie, hang, shout or are gone (issue 3, "Bad input").

One machine has every tool working; each test spoils one of them and asks for all the rest.
"""

from __future__ import annotations

import json
import os
import threading
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
import trio
import trio.testing

from agent import commands
from agent.probes.inventory import ProbeConfig
from agent.probes.root import Root
from tests.agent import made_smi
from tests.agent.replay import Captured, Says, as_document

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

MUCH = 50 * 2**20
ENOUGH_MIB = 300.0
IBSTAT = """CA 'mlx5_0'
\tCA type: MT4129
\tNumber of ports: 1
\tFirmware version: 28.39.1002
\tNode GUID: 0x946dae0300aaaaaa
\tPort 1:
\t\tState: Active
\t\tPhysical state: LinkUp
\t\tRate: 400
\t\tBase lid: 7
\t\tSM lid: 1
\t\tPort GUID: 0x946dae0300aaaaaa
\t\tLink layer: InfiniBand
"""
SMINFO = "sminfo: sm lid 1 sm guid 0xfc6a1c0300000000, activity count 9 priority 0 state 3 "
TOPO = (
    "\tGPU0\tGPU1\tmlx5_0\tCPU Affinity\tNUMA Affinity\n"
    "GPU0\t X \tNV18\tPIX\t0-35\t0\nGPU1\tNV18\t X \tSYS\t36-71\t1\n"
)
NVLINK = "".join(
    f"GPU {at}: NVIDIA GB200 (UUID: GPU-{at})\n"
    + "".join(f"\t Link {link}: 50 GB/s\n" for link in range(18))
    for at in range(2)
)
P2P = "\tGPU0\tGPU1\n GPU0\tX\tOK\n GPU1\tOK\tX\n"
NODE = {"status": "READY", "host": "10.0.0.1", "hostName": "a", "connections": {}}
IMEX = json.dumps({"nodes": {"0": NODE}, "timestamp": "9/4/2026 00:00:00.000", "status": "UP"})
LSPCI = """0000:10:00.0 3D controller [0302]: NVIDIA Corporation Device [10de:2941] (rev a1)
0000:11:00.0 3D controller [0302]: NVIDIA Corporation Device [10de:2941] (rev a1)
0000:12:00.0 Infiniband controller [0207]: Mellanox Technologies MT2910 [15b3:1021]
"""
SYSTEMCTL = """Id=nvidia-fabricmanager.service
LoadState=not-found
ActiveState=inactive

Id=nvidia-imex.service
LoadState=loaded
ActiveState=active
UnitFileState=enabled

Id=nvidia-persistenced.service
LoadState=loaded
ActiveState=active
UnitFileState=enabled
"""
DMESG = "[    1.000000] Linux version 6.8.0\n[   42.000000] nvidia: module loaded\n"
CARDS = [
    made_smi.card(
        at, "NVIDIA GB200", 189471, 400, Fabric=made_smi.fabric("Completed", "Success", uuid, 1)
    )
    for at, uuid in enumerate([made_smi.RACK, made_smi.RACK])
]
SMI = {
    "-q -x": made_smi.xml(CARDS),
    "-q": made_smi.text(CARDS),
    "topo -m": TOPO,
    "topo -p2p r": P2P,
    "nvlink -s": NVLINK,
}
CPUINFO = "processor\t: 0\nmodel name\t: Some CPU\nflags\t\t: fpu sse avx avx2\n"
TOOLS = {
    "nvidia-smi": None,
    "ibstat": IBSTAT,
    "sminfo": SMINFO + "SMINFO_MASTER\n",
    "nvidia-imex-ctl": IMEX,
    "systemctl": SYSTEMCTL,
    "lspci": LSPCI,
    "dmesg": DMESG,
    "amd-smi": "[]",
    "rocm-smi": "{}",
}
REST = ("lspci", "dmesg", "amd-smi", "rocm-smi", "ibstat", "sminfo", "nvidia-imex-ctl", "systemctl")


def whole(folder: Path) -> Captured:
    """A GB200 machine of two cards on which everything works."""
    made = Captured(folder)
    made.file("/proc/cpuinfo", CPUINFO).file("/proc/loadavg", "0.5 0.4 0.3 1/200 7\n")
    made.file("/proc/meminfo", "MemTotal: 8388608 kB\nMemAvailable: 4194304 kB\n")
    made.file("/etc/os-release", 'PRETTY_NAME="Some Linux 1"\n')
    made.file("/proc/self/mountinfo", "22 1 8:1 / / rw - ext4 /dev/sda1 rw\n")
    made.file("/proc/driver/nvidia/version", "NVRM version: NVIDIA UNIX 580.95.05\n")
    made.tool("nvidia-smi", {words: Says(out) for words, out in SMI.items()})
    for name, out in TOOLS.items():
        if out is not None:
            made.tool(name, Says(out))
    return made


@pytest.fixture
def made(tmp_path: Path) -> Captured:
    return whole(tmp_path)


def spoil(made: Captured, name: str, change: Callable[[str], Says]) -> Captured:
    """Every answer of one tool changed."""
    if name == "nvidia-smi":
        return made.tool(name, {words: change(out) for words, out in SMI.items()})
    return made.tool(name, change(str(TOOLS[name])))


def summary(found: dict[str, Any]) -> dict[str, Any]:
    """What each tool adds to a report, by the tool."""
    host = found["host"]
    cards = [(c.get("memory_mib"), c.get("fabric_state")) for c in found["gpus"] or []]
    return {
        "nvidia-smi": (cards, host["nvlink"].get("domain")),
        "ibstat": [(p["hca"], p.get("state"), p.get("rate_gbps")) for p in found["ports"]],
        "sminfo": [p.get("key") for p in found["ports"]],
        "nvidia-imex-ctl": host.get("imex", {}).get("domain_state"),
        "systemctl": host["machine"].get("services"),
        "lspci": host["machine"].get("pci_accelerators"),
        "host": [host.get(name) for name in ("os", "cpu_model", "memory_host_mib")],
        "load": found["load"].get("load1"),
        "disks": [disk["mount"] for disk in found["disks"]],
        "engines": [engine["engine"] for engine in found["engines"]],
    }


GOES_TOO = {
    "ibstat": {"sminfo"},  # a port that nobody names cannot be asked about
}


def others(found: dict[str, Any], spoilt: str) -> dict[str, Any]:
    """The parts of a report that a spoilt tool has no part in."""
    gone = {spoilt} | GOES_TOO.get(spoilt, set())
    return {name: part for name, part in summary(found).items() if name not in gone}


def reasons(found: dict[str, Any]) -> str:
    """Every place in a report where a probe may say why it has nothing."""
    host = found["host"]
    machine = [word for name, word in host["machine"].items() if name.endswith("_error")]
    ports = [port.get("sm_error") for port in found["ports"]]
    imex = [host.get("imex", {}).get("error")]
    checks = [check["evidence"] for check in found["checks"] if check["result"] != "pass"]
    return "\n".join(filter(None, [*host["warnings"], *machine, *ports, *imex, *checks]))


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The report of the machine on which everything works."""
    return whole(tmp_path_factory.mktemp("good")).probe()


def test_the_whole_machine_is_whole(good):
    assert summary(good) == {
        "nvidia-smi": ([(189071, "completed")] * 2, f"{made_smi.RACK}.1"),
        "ibstat": [("mlx5_0", "ACTIVE", 400.0)],
        "sminfo": ["ib:fc6a1c0300000000"],
        "nvidia-imex-ctl": "UP",
        "systemctl": {"nvidia-imex": "active", "nvidia-persistenced": "active"},
        "lspci": {"nvidia": 2},
        "host": ["Some Linux 1", "Some CPU", 8192],
        "load": 0.5,
        "disks": ["/"],
        "engines": ["command"],
    }
    assert good["host"]["warnings"] == []
    assert not any(check["result"] == "fail" for check in good["checks"])


def coloured(out: str) -> Says:
    return Says("".join(f"\x1b[1;32m{line}\x1b[0m\n" for line in out.splitlines()))


HARMLESS: dict[str, Callable[[str], Says]] = {
    "exit status 1": lambda out: Says(out, "a warning", code=1),
    "ANSI colours": coloured,
    "CRLF": lambda out: Says(out.replace("\n", "\r\n")),
    "byte order mark": lambda out: Says("\ufeff" + out),
    "UTF-16": lambda out: Says(out.encode("utf-16")),
    "a warning before": lambda out: Says(
        "WARNING: infoROM is corrupted at gpu 0000:10:00.0\n" + out
    ),
}
SPOILT: dict[str, Callable[[str], Says]] = {
    "needs root": lambda _: Says("", "permission denied: must be root", code=1),
    "binary": lambda _: Says(bytes(range(256)) * 64),
    "stderr only": lambda out: Says("", out, code=1),
    "crash": lambda out: Says(out[:20], shell="kill -SEGV $$"),
    "missing": lambda _: Says(""),
}


@pytest.mark.parametrize("kind", HARMLESS)
def test_issue3_good_output_in_bad_clothes_is_read_as_well(tmp_path, good, kind):
    made = whole(tmp_path)
    for name in TOOLS:
        if (kind, name) != ("a warning before", "nvidia-imex-ctl"):
            spoil(made, name, HARMLESS[kind])
    assert summary(made.probe()) == summary(good)


@pytest.mark.parametrize("kind", SPOILT)
@pytest.mark.parametrize("name", ["nvidia-smi", "ibstat", "sminfo", "nvidia-imex-ctl", "lspci"])
def test_issue3_a_spoilt_tool_costs_its_own_part_only_and_says_why(tmp_path, good, name, kind):
    made = whole(tmp_path)
    if kind == "missing":
        (made.bin / name).unlink()
    else:
        spoil(made, name, SPOILT[kind])
    found = made.probe()
    assert others(found, name) == others(good, name)
    absent = name == "ibstat" and kind == "missing"  # which may be: a machine without InfiniBand
    assert absent or name in reasons(found) or "nvidia-smi" in reasons(found), reasons(found)
    assert found["gpus"] is None or name != "nvidia-smi", "nobody knows that the cards are gone"
    made.doctor()


@pytest.mark.parametrize("name", ["amd-smi", "rocm-smi", "systemctl", "dmesg"])
def test_issue3_tools_that_tell_little_hide_nothing(tmp_path, good, name):
    made = spoil(whole(tmp_path), name, lambda _: Says("no", "Permission denied", code=1))
    assert others(made.probe(), name) == others(good, name)


def test_issue3_idle_amd_tools_do_not_hide_why_nvidia_smi_fails(made):
    spoil(made, "nvidia-smi", lambda _: Says("", "Failed to initialize NVML: Unknown Error", 255))
    found = made.probe()
    assert "Failed to initialize NVML" in found["host"]["warnings"][0]
    assert found["host"]["warnings"][0].count("amd-smi") == 0


def leaves(
    value: Any, path: tuple[object, ...] = ()
) -> Iterator[tuple[tuple[object, ...], object]]:
    """Every figure and word of a document with its place; cards and ports by their names."""
    if isinstance(value, dict):
        for name, part in value.items():
            yield from leaves(part, (*path, name))
    elif isinstance(value, list):
        for at, part in enumerate(value):
            key = part.get("index", at) if isinstance(part, dict) else at
            yield from leaves(part, (*path, key))
    else:
        yield path, value


PARTS = ("gpus", "ports", "gpu_use")
MAY_DIFFER = {"findings", "memory_foreign_mib", "sm_error", "active", "errors"}


@pytest.mark.parametrize("form", ["-q -x", "-q"])
def test_issue3_cut_off_at_every_tenth_no_value_is_a_wrong_one(tmp_path, good, form):
    told = {place: value for part in PARTS for place, value in leaves(good[part], (part,))}
    for tenth in range(1, 10):
        made = whole(tmp_path / str(tenth))
        for name, out in TOOLS.items():
            if out is not None:
                made.tool(name, Says(out[: len(out) * tenth // 10]))
        cut = {words: Says(out[: len(out) * tenth // 10]) for words, out in SMI.items()}
        made.tool(
            "nvidia-smi", {form: cut[form], **{w: s for w, s in cut.items() if "-q" not in w}}
        )
        found = made.probe()
        assert reasons(found), tenth
        for part in PARTS:
            for place, value in leaves(found[part] or [], (part,)):
                if place in told and not MAY_DIFFER & set(place):
                    near = value == told[place] or (place[-1] == "memory_mib" and value == 189471)
                    assert near, (tenth, place, value, told[place])


@pytest.mark.parametrize("comma", ["45,12 W", "45.12 W"])
def test_issue3_decimal_commas_of_a_localised_wrapper(made, comma):
    power = {"Instantaneous Power Draw": comma}
    cards = [made_smi.card(0, "NVIDIA L4", 23034, 556, GPU_Power_Readings=power)]
    made.tool("nvidia-smi", {"-q": Says(made_smi.text(cards))})
    assert made.probe()["gpu_use"][0]["power_w"] == 45.12


async def _timed(made: Captured) -> tuple[dict[str, Any], float]:
    begun = trio.current_time()
    found = await commands.report(Root(prefix=made.root, path=str(made.bin)), ProbeConfig())
    return found, trio.current_time() - begun


def timed(made: Captured, still_s: float) -> tuple[dict[str, Any], float]:
    """A report and the seconds it takes by the clock of deadlines, which jumps when all wait."""
    clock = trio.testing.MockClock(autojump_threshold=still_s)
    return trio.run(partial(_timed, made), clock=clock)


def waited(made: Captured) -> tuple[dict[str, Any], float]:
    """A report and the seconds that deadlines took: none, unless something waits for ever.

    Time stands still, so that a slow machine waits for nobody; after a minute of real time, long
    after a look ends, it jumps.
    """
    clock, ended = trio.testing.MockClock(), threading.Event()

    async def jump() -> None:
        if not await trio.to_thread.run_sync(ended.wait, 60):
            clock.jump(3600)

    async def look() -> tuple[dict[str, Any], float]:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(jump)
            try:
                return await _timed(made)
            finally:
                ended.set()

    return trio.run(look, clock=clock)


IGNORES_SIGTERM = "trap '' TERM INT HUP; while :; do sleep 9; done"


@pytest.mark.slow
def test_issue3_a_hanging_nvidia_smi_costs_its_deadline(made, good):
    spoil(made, "nvidia-smi", lambda _: Says("", shell=IGNORES_SIGTERM))
    found, seconds = timed(made, still_s=1.0)
    assert seconds <= 26
    assert "no answer within 20 s" in found["host"]["warnings"][0]
    assert summary(found)["ibstat"] == summary(good)["ibstat"]


@pytest.mark.slow
@pytest.mark.parametrize("says", [False, True], ids=["silent", "after their output"])
def test_issue3_all_tools_hang_and_a_look_takes_less_than_a_minute(made, good, says):
    for name in TOOLS:
        spoil(made, name, lambda out: Says(out if says else "", shell=IGNORES_SIGTERM))
    found, seconds = timed(made, still_s=1.0)
    assert seconds < 60
    assert reasons(found).count("no answer within") >= 2
    seen, wanted = summary(found), summary(good)
    if not says:
        seen, wanted = ({name: part[name] for name in ("host", "load")} for part in (seen, wanted))
    assert seen == wanted


@pytest.mark.slow
def test_issue3_a_child_that_holds_the_pipe_does_not_hold_the_look(made, good):
    for name in TOOLS:
        spoil(made, name, lambda out: Says(out, shell="sleep 60 &"))
    found, seconds = timed(made, still_s=0.8)
    assert seconds < 20
    assert summary(found) == summary(good)


@pytest.mark.slow
@pytest.mark.parametrize("noise", ["cat /dev/urandom", "yes '<a>'", "tr '\\0' '[' </dev/zero"])
def test_issue3_50_mib_of_noise_from_every_tool_at_once(made, noise):
    for name in TOOLS:
        spoil(made, name, lambda _: Says("", shell=f"{noise} | head -c {MUCH}"))
    ran = made.child("probe", "--json")
    found = as_document(ran.out)
    assert (ran.code, ran.err) == (0, "")
    assert ran.peak_mib < ENOUGH_MIB
    assert ran.took_s < 100
    assert "more than 8388608 bytes" in reasons(found)
    assert summary(found)["host"] == ["Some Linux 1", "Some CPU", 8192]


def odd(made: Captured, kind: str, path: str) -> None:
    """Put something that is no proper file in the place of a file."""
    place = made.root / path.lstrip("/")
    place.parent.mkdir(parents=True, exist_ok=True)
    place.unlink(missing_ok=True)
    if kind == "fifo":
        os.mkfifo(place)
    elif kind == "directory":
        place.mkdir()
    elif kind == "loop":
        place.symlink_to(place.name)
    elif kind == "sparse":
        with place.open("wb") as file:
            file.truncate(2**30)
    elif kind == "closed":
        place.write_text("x")
        place.chmod(0)
    else:
        place.write_bytes(os.urandom(4096))


FILES = [
    "/proc/cpuinfo", "/proc/meminfo", "/proc/loadavg", "/proc/stat", "/proc/self/mountinfo",
    "/proc/devices", "/etc/os-release", "/sys/class/infiniband/mlx5_0/ports/1/state",
    "/sys/bus/pci/devices/0000:10:00.0/class", "/sys/fs/cgroup/memory.max", "/proc/self/cgroup",
    "/proc/driver/nvidia/gpus/0000:10:00.0/information", "/etc/nvidia-imex/config.cfg",
    "/sys/devices/system/node/node0/meminfo", "/sys/class/drm/card0/device/vendor", "/dev/kmsg",
    "/proc/1/comm", "/proc/pressure/cpu",
]  # fmt: skip


SPARSE = pytest.param("sparse", marks=pytest.mark.slow)


@pytest.mark.parametrize("kind", ["fifo", "directory", "loop", SPARSE, "closed", "random"])
def test_issue3_odd_things_in_place_of_files(made, kind):
    for path in FILES:
        odd(made, kind, path)
    found, seconds = waited(made)
    assert seconds == 0, "nothing may wait for the other end of a pipe"
    assert len(found["gpus"]) == 2
    assert found["host"]["labels"] == {}


@pytest.mark.parametrize("kind", ["fifo", "loop", "random"])
@pytest.mark.parametrize("path", ["/proc", "/sys/class/infiniband", "/sys/bus/pci/devices", "/dev"])
def test_issue3_odd_things_in_place_of_directories(tmp_path, kind, path):
    made = Captured(tmp_path)
    made.tool("ibstat", Says(IBSTAT))
    odd(made, kind, path)
    found = made.probe()
    assert [port["hca"] for port in found["ports"]] == ["mlx5_0"]
    made.doctor()
