"""The machine between two looks: numbers of cards, health that outlives the agent."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import trio

from agent.health_document import to_document
from agent.machine import Machine, numbers
from agent.probes.card import Gpu, Gpus
from agent.probes.inventory import ProbeConfig
from agent.probes.root import Root


def card(index: int, **more: object) -> Gpu:
    return replace(Gpu(uuid=f"GPU-{index}", pci_bus_id=f"0000:{index:02x}:00.0"), **more)


def test_E05_numbers_are_by_pci_order_and_only_when_sure() -> None:
    cards = (card(9), card(3))
    assert numbers(Gpus(cards)) == {"GPU-3": 0, "GPU-9": 1}
    assert numbers(Gpus(cards, error="one card was not asked")) == {}
    assert numbers(Gpus((*cards, card(5, problems=("lost: gone",))))) == {}
    assert numbers(Gpus((*cards, card(5, mig=True)))) == {}
    assert numbers(Gpus((*cards, card(5, pci_bus_id=None)))) == {}
    assert numbers(Gpus((*cards, Gpu(uuid="x", vendor="amd")))) == {"GPU-3": 0, "GPU-9": 1}


def captured(folder: Path, log: str = "", boot: str = "a") -> Root:
    """A machine with one NVIDIA card that nvidia-smi tells of, and a kernel log by dmesg."""
    tools = folder / "bin"
    tools.mkdir(parents=True, exist_ok=True)
    text = (
        "Timestamp : now\nDriver Version : 590.1\nAttached GPUs : 1\nGPU 00000000:3B:00.0\n"
        "    Product Name : NVIDIA H100\n    GPU UUID : GPU-x\n"
        "    FB Memory Usage\n        Total : 81559 MiB\n        Used : 0 MiB\n"
    )
    for name, said in {"nvidia-smi": text, "dmesg": log}.items():
        (folder / f"{name}.txt").write_text(said)
        script = tools / name
        script.write_text(f"#!/bin/sh\ncat '{folder}/{name}.txt'\n")
        script.chmod(0o755)
    boot_id = folder / "proc/sys/kernel/random/boot_id"
    boot_id.parent.mkdir(parents=True, exist_ok=True)
    boot_id.write_text(f"{boot * 8}-{boot * 4}-{boot * 4}-{boot * 4}-{boot * 12}\n")
    return Root(prefix=folder, path=str(tools))


async def look(folder: Path, root: Root) -> tuple[list[str], list[dict[str, object]]]:
    """Codes that count against the card in one agent's first look, and the events told."""
    async with Machine(ProbeConfig(), "", root, ledger_file=folder / "health.json") as machine:
        documents = await machine.slow()
    [gpu] = documents["gpus"]
    return [finding["code"] for finding in gpu["findings"]], documents["events"]


async def test_E08_a_hardware_error_outlives_the_agent_and_leaves_with_the_boot(
    tmp_path: Path,
) -> None:
    fell = "[  100.000000] NVRM: Xid (PCI:0000:3b:00): 48, pid=1, DBE (double bit error)\n"
    codes, events = await look(tmp_path, captured(tmp_path, fell))
    assert codes == ["xid_48"]
    assert [(event["kind"], event["object"]) for event in events] == [("xid", "GPU-x")]
    codes, events = await look(tmp_path, captured(tmp_path, fell))
    assert (codes, events) == (["xid_48"], []), "it is told once and stays"
    codes, events = await look(tmp_path, captured(tmp_path, "[1.000000] quiet\n", boot="b"))
    assert (codes, events) == ([], [])


async def test_a_damaged_ledger_is_begun_anew(tmp_path: Path) -> None:
    for damage in ("", "{", "[]", json.dumps({"version": 1, "cards": 7}), "\x00" * 99):
        (tmp_path / "health.json").write_text(damage)
        codes, _ = await look(tmp_path, captured(tmp_path))
        assert codes == []


async def test_what_did_not_change_is_not_written(tmp_path: Path) -> None:
    root = captured(tmp_path)
    file = tmp_path / "health.json"
    async with Machine(ProbeConfig(), "", root, ledger_file=file) as machine:
        await machine.slow()
        first = machine._ledger
        assert first is not None
        assert json.loads(file.read_text()) == to_document(first)
        numbered = await machine.numbering()
    assert numbered == {"GPU-x": 0}


async def test_the_numbers_wait_for_the_first_look(autojump_clock: trio.testing.MockClock) -> None:
    async with Machine(ProbeConfig(), "", Root(prefix=Path("/nonexistent"))) as machine:
        begun = trio.current_time()
        assert await machine.numbering() == {}
        assert trio.current_time() - begun == 60


def with_memory(folder: Path, looks: int, process: str = "") -> Root:
    """A card that holds 40 GiB of no process for so many looks, then nothing."""
    root = captured(folder)
    text = (folder / "nvidia-smi.txt").read_text()
    (folder / "held.txt").write_text(text.replace("Used : 0 MiB", "Used : 40960 MiB") + process)
    (folder / "nvidia-smi.txt").write_text(text + "    Processes : None\n")
    (folder / "held.txt").write_text((folder / "held.txt").read_text() + "    Processes : None\n")
    (folder / "bin/nvidia-smi").write_text(
        f"#!/bin/sh\ncd '{folder}'\necho x >> looks\n"
        f"if [ $(wc -l < looks) -le {looks} ]; then cat held.txt; else cat nvidia-smi.txt; fi\n"
    )
    return root


@pytest.mark.parametrize(("looks", "free"), [(0, True), (2, True), (9999, False)])
async def test_D20_memory_is_seen_free_before_the_card_is_given_away(
    tmp_path: Path, looks: int, free: bool
) -> None:
    async with Machine(ProbeConfig(), "", with_memory(tmp_path, looks)) as machine:
        said = await machine.released(["GPU-x"], within_s=20.0 if free else 0.5)
        assert await machine.released(["GPU-other"], within_s=0.0) is None
        use = await machine.fast(set())
    if free:
        assert said is None
        assert use["gpus"][0]["memory_foreign_mib"] == 0
    else:
        assert said is not None
        assert said.startswith("memory not released: 40960 MiB of GPU-x belong to no process")
        assert use["gpus"][0]["memory_foreign_mib"] == 40960, "nothing is placed there meanwhile"
