"""The command line of `llmgw-agent probe` and `doctor`: options, output, exit codes, the database.

Each test asks as a person would, most of them in this process; some in one of their own.
"""

from __future__ import annotations

import json
import os
import socket
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import pytest
from click.testing import CliRunner, Result

from agent import database_check
from agent.__main__ import main
from sql.settings import DatabaseSettings
from tests.agent import made_smi
from tests.agent.replay import Captured, Says, as_document, ask, child

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator
    from pathlib import Path

FAILED = {"Pending": "No", "Remapping Failure Occurred": "Yes"}
CPUINFO = "processor\t: 0\nmodel name\t: Some CPU\nflags\t\t: fpu sse avx avx2\n"


@pytest.fixture(autouse=True)
def no_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the one who runs the tests has in the environment is not what is tested."""
    for name in [name for name in os.environ if name.startswith("LLMGW_")]:
        monkeypatch.delenv(name)


@pytest.fixture
def made(tmp_path: Path) -> Captured:
    """A machine without cards."""
    machine = Captured(tmp_path / "machine")
    machine.file("/proc/cpuinfo", CPUINFO)
    machine.file("/proc/meminfo", "MemTotal: 8388608 kB\nMemAvailable: 4194304 kB\n")
    return machine.file("/sys/bus/pci/devices/0000:00:00.0/class", "0x060000\n")


@pytest.fixture
def broken(made: Captured) -> Captured:
    """The same with two cards of which one has to be replaced."""
    cards = [
        made_smi.card(0, "NVIDIA A100-SXM4-80GB", 81920, 763),
        made_smi.card(1, "NVIDIA A100-SXM4-80GB", 81920, 763, Remapped_Rows=FAILED),
    ]
    return made.tool("nvidia-smi", {"-q -x": Says(made_smi.xml(cards))})


def run(*arguments: str) -> Result:
    return CliRunner().invoke(main, list(arguments))


@pytest.mark.parametrize("command", ["probe", "doctor"])
def test_help_names_every_option(command):
    said = ask(command, "--help")
    assert all(option in said for option in ("--root", "--path", "--json", "--config"))
    assert command in ask("--help")


def test_probe_json_is_one_document_whatever_it_found(broken):
    ended = run("probe", *broken.options, "--json")
    found = as_document(ended.output)  # output is stdout and stderr: not even a log line is in it
    assert [finding["code"] for finding in found["gpus"][1]["findings"]] == ["repair_failed"]
    kinds = "host load gpus gpu_use ports port_use engines disks weights checks"
    assert list(found) == kinds.split()


def test_doctor_json_is_one_document_whatever_it_found(broken):
    ended = run("doctor", *broken.options, "--json")
    checks = {check["name"]: check for check in json.loads(ended.output)}
    assert ended.exit_code == 1
    assert checks["row remaps"]["result"] == "fail"
    assert "replaced" in checks["row remaps"]["remedy"]
    assert checks["cpu"] == {"name": "cpu", "result": "pass", "evidence": "Some CPU, AVX2"}
    assert {"database", "clock"}.isdisjoint(checks), "a captured machine has no database of ours"


@pytest.mark.slow
def test_the_same_in_a_process_of_its_own(broken):
    probed = broken.child("probe", "--json")
    assert (probed.code, probed.err) == (0, "")
    assert len(as_document(probed.out)["gpus"]) == 2
    examined = broken.child("doctor")
    assert (examined.code, examined.err) == (1, "")
    assert examined.out.startswith("fail  ")


def test_the_page_has_what_a_person_looks_for(broken):
    broken.file("/proc/self/mountinfo", "22 1 8:1 / / rw - ext4 /dev/sda1 rw\n")
    page = ask("probe", *broken.options)
    titles = [line for line in page.splitlines() if line and not line.startswith(" ")]
    assert titles == ["Host", "GPUs", "Use of GPUs", "Findings", "Disks", "Engines"]
    assert "driver 580.95.05, CUDA 13.0, told by nvidia-smi" in page
    assert "unhealthy: repair_failed" in page
    assert "70.12 W" in page
    assert "31 C" in page


def test_E04_a_node_without_cards_passes_and_says_so(made):
    ended = run("doctor", *made.options)
    assert ended.exit_code == 0
    assert "CPU-only node" in ended.output
    assert "  none" in ask("probe", *made.options)


@pytest.mark.parametrize(
    ("sign", "words"),
    [
        ("/proc/driver/nvidia/version", "no nvidia-smi is in PATH"),
        ("/dev/dxg", "no nvidia-smi is in PATH"),
    ],
)
def test_E04_a_driver_that_shows_no_card_is_no_node_without_cards(made, sign, words):
    made.file(sign, "x")
    ended = run("doctor", *made.options)
    assert ended.exit_code == 1
    assert words in ended.output
    found = made.probe()
    assert found["gpus"] is None
    assert words in found["host"]["warnings"][0]
    assert "cannot be asked" in ask("probe", *made.options)


def test_E04_a_card_without_driver_fails_with_what_to_do(made):
    place = "/sys/bus/pci/devices/0000:17:00.0"
    made.file(f"{place}/vendor", "0x10de\n").file(f"{place}/class", "0x030200\n")
    ended = run("doctor", *made.options)
    assert ended.exit_code == 1
    assert "0000:17:00.0" in ended.output
    assert "->" in ended.output


@pytest.mark.parametrize("command", ["probe", "doctor"])
def test_a_root_that_is_not_there_is_a_usage_error(tmp_path, command):
    for place in ("nowhere", "file"):
        (tmp_path / "file").write_text("x")
        ended = run(command, "--root", str(tmp_path / place))
        assert ended.exit_code == 2
        assert place in ended.output
        assert "Traceback" not in ended.output


def test_a_root_without_a_path_has_no_tools(broken):
    assert as_document(ask("probe", "--root", str(broken.root), "--json"))["gpus"] == []


def test_an_empty_root_is_a_machine_of_which_nothing_is_known(tmp_path):
    made = Captured(tmp_path)
    found = made.probe()
    assert (found["gpus"], found["ports"], found["disks"]) == ([], [], [])
    assert not {"cpus_host", "memory_host_mib", "memory_available_mib"} & set(found["host"])
    assert made.doctor()["driver"]["result"] == "pass"


def test_weights_below_a_directory_of_the_captured_machine(made):
    made.file("/models/a/config.json", json.dumps({"model_type": "llama", "hidden_size": 64}))
    found = as_document(ask("probe", *made.options, "--scan-dir", "/models", "--json"))
    assert [weights["path"] for weights in found["weights"]] == ["/models/a"]


@pytest.mark.parametrize("command", ["probe", "doctor"])
def test_settings_that_are_named_and_wrong_are_a_usage_error(tmp_path, command):
    ended = run(command, "--config", str(tmp_path / "agent.toml"))
    assert ended.exit_code == 2
    assert "agent.toml" in ended.output


@pytest.fixture
def closed_port() -> Iterator[int]:
    """A port on which nobody listens, nor can."""
    with socket.socket() as kept:
        kept.bind(("127.0.0.1", 0))
        yield kept.getsockname()[1]


def live(*arguments: str, url: str | None, folder: Path) -> tuple[int, str, str]:
    """A command on the machine that runs the tests, with or without a database."""
    own = {"HOME": str(folder), "LLMGW_STATE_DIR": str(folder)}
    ran = child(arguments, **own, **({"LLMGW_DATABASE_URL": url} if url else {}))
    return ran.code, ran.out, ran.err


@pytest.mark.slow
def test_the_live_machine_is_probed_without_postgres_and_settings(tmp_path):
    code, out, err = live("probe", "--json", url=None, folder=tmp_path)
    assert (code, err) == (0, "")
    assert as_document(out)["host"]["cpus_host"] > 0


@pytest.mark.slow
def test_doctor_without_a_database_says_how_to_name_one(tmp_path):
    _, out, err = live("doctor", "--json", url=None, folder=tmp_path)
    checks = {check["name"]: check for check in json.loads(out)}
    assert err == ""
    assert checks["database"]["result"] == "warn"
    assert "LLMGW_DATABASE_URL" in checks["database"]["remedy"]


@pytest.mark.slow
def test_doctor_with_a_database_out_of_reach_fails_with_the_reason(tmp_path, closed_port):
    url = f"postgresql://llmgw_agent:hush-hush@127.0.0.1:{closed_port}/llmgw"
    code, out, err = live("doctor", "--json", url=url, folder=tmp_path)
    checks = {check["name"]: check for check in json.loads(out)}
    assert (code, err) == (1, "")
    assert checks["database"]["result"] == "fail"
    assert str(closed_port) in checks["database"]["evidence"]
    assert "cannot be reached" in checks["database"]["evidence"]
    assert "clock" not in checks
    assert "hush-hush" not in out


@pytest.mark.parametrize("url", ["postgresql://a@127.0.0.1:99999/x", "elsewhere", "http://a/b"])
async def test_a_url_that_is_none_is_a_failed_check_and_no_crash(url):
    [check] = await database_check.checks(DatabaseSettings(url=url))
    assert (check.name, check.result) == ("database", "fail")


@pytest.mark.slow
def test_doctor_with_its_database_passes_and_compares_the_clocks(tmp_path, database):
    _, out, err = live("doctor", "--json", url=database.agent_url, folder=tmp_path)
    checks = {check["name"]: check for check in json.loads(out)}
    assert err == ""
    assert checks["database"]["result"] in ("pass", "warn"), checks["database"]  # warn: it is slow
    assert checks["database"]["evidence"].startswith("answers in ")
    assert checks["clock"]["result"] == "pass"


async def test_the_clock_is_compared_when_the_answer_comes(monkeypatch):
    """Leaving takes seconds on busy cores, which made a right clock look wrong."""
    now = [1000.0]

    class Pool:
        async def fetchrow(self, _: str) -> dict[str, object]:
            return {"now": now[0], "may": True}

    @asynccontextmanager
    async def opened(*_: object) -> AsyncIterator[Pool]:
        yield Pool()
        now[0] += 30

    monkeypatch.setattr(database_check, "open_pool", opened)
    monkeypatch.setattr(database_check.time, "clock_gettime", lambda _: now[0])
    checks = await database_check.checks(DatabaseSettings(url="postgresql://a@b/c"))
    assert [(check.name, check.result) for check in checks] == [
        ("database", "pass"), ("clock", "pass"),
    ]  # fmt: skip


@pytest.mark.slow
def test_doctor_with_the_wrong_login_fails_and_says_what_is_missing(tmp_path, database):
    code, out, _ = live("doctor", "--json", url=database.read_url, folder=tmp_path)
    checks = {check["name"]: check for check in json.loads(out)}
    assert (code, checks["database"]["result"]) == (1, "fail")
    assert "llmgw_agent" in checks["database"]["remedy"]
