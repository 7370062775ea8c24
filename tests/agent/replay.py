"""Machines made of captured outputs, for tests that ask `probe` and `doctor` as a person would.

A `Captured` machine is a folder of files (/proc, /sys, /etc, /dev) and a folder of small shell
scripts, one per tool, which print given files by their arguments. `probe` and `doctor` run the real
command line in this process, `child` in a process of its own. `table` writes one row per machine.
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from click.testing import CliRunner

from agent.__main__ import main

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

REPOSITORY = Path(__file__).resolve().parents[2]
ANY = "*"


@dataclass(frozen=True, slots=True)
class Says:
    """What a tool does when it is asked: prints `out` and `err`, runs `shell`, ends with `code`.

    `out` is text, bytes or a file; `shell` is run between the output and the end.
    """

    out: str | bytes | Path = b""
    err: str = ""
    code: int = 0
    shell: str = ""


@dataclass(frozen=True, slots=True)
class Ran:
    """How a command line ended in a process of its own. `peak_mib` is of it alone."""

    code: int
    out: str
    err: str
    took_s: float
    peak_mib: float


class Captured:
    """One captured machine below a folder."""

    def __init__(self, folder: Path) -> None:
        self.root, self.bin = folder / "root", folder / "bin"
        self._said = folder / "said"
        for made in (self.root, self.bin, self._said):
            made.mkdir(parents=True, exist_ok=True)

    def file(self, path: str, content: str | bytes | Path) -> Captured:
        """Put a file of the machine; a Path is copied."""
        place = self.root / path.lstrip("/")
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(_bytes(content))
        return self

    def link(self, path: str, target: str) -> Captured:
        """Put a symbolic link, as sysfs is full of."""
        place = self.root / path.lstrip("/")
        place.parent.mkdir(parents=True, exist_ok=True)
        place.symlink_to(target)
        return self

    def tool(self, name: str, says: Mapping[str, Says] | Says) -> Captured:
        """Put a tool. Keys are its arguments as one text; ANY answers whatever is not named.

        What a tool is not prepared for it refuses with exit status 2, as nvidia-smi does.
        """
        known = {ANY: says} if isinstance(says, Says) else dict(says)
        other = known.pop(ANY, Says(f"{name}: invalid arguments\n", code=2))
        cases = [
            f"{shlex.quote(arguments)}) {self._branch(f'{name}.{at}', said)};;"
            for at, (arguments, said) in enumerate(known.items())
        ]
        cases.append(f"*) {self._branch(f'{name}.other', other)};;")
        script = self.bin / name
        script.write_text("\n".join(["#!/bin/sh", 'case "$*" in', *cases, "esac", ""]))
        script.chmod(0o755)
        return self

    def _branch(self, name: str, said: Says) -> str:
        place = said.out
        if not isinstance(place, Path):
            place = self._said / name
            place.write_bytes(_bytes(said.out))
        words = [f"cat {shlex.quote(str(place))}"]
        if said.err:
            words.append(f"printf '%s\\n' {shlex.quote(said.err)} >&2")
        return "\n".join([*words, *filter(None, [said.shell]), f"exit {said.code}"])

    @property
    def options(self) -> list[str]:
        """The options that name this machine."""
        return ["--root", str(self.root), "--path", str(self.bin)]

    def probe(self) -> dict[str, Any]:
        """The documents of `probe --json`."""
        return as_document(ask("probe", *self.options, "--json"))

    def doctor(self) -> dict[str, dict[str, str]]:
        """The checks of `doctor --json`, by name."""
        ended = CliRunner().invoke(main, ["doctor", *self.options, "--json"])
        checks = {check["name"]: check for check in json.loads(ended.stdout)}
        failed = any(check["result"] == "fail" for check in checks.values())
        assert ended.exit_code == int(failed), ended.output
        return checks

    def child(self, command: str, *more: str) -> Ran:
        """The command in a process of its own, measured."""
        return child([command, *self.options, *more])


def ask(*arguments: str) -> str:
    """What `llmgw-agent ARGUMENTS` prints; it has to end well and say nothing on stderr."""
    ended = CliRunner().invoke(main, list(arguments))
    assert ended.exit_code == 0, (ended.output, ended.exception)
    assert ended.stderr == "", ended.stderr
    return ended.stdout


def as_document(text: str) -> dict[str, Any]:
    """Exactly one JSON object, and nothing of it a bare NaN."""
    found = json.loads(text, parse_constant=_no_constant)
    assert isinstance(found, dict)
    return found


def _no_constant(word: str) -> None:
    raise AssertionError(f"{word} is no JSON")


def child(arguments: Sequence[str], timeout_s: float = 120, **environment: str) -> Ran:
    """`python -m agent ARGUMENTS`, measured from outside; killed when it is late (code < 0)."""
    before = time.monotonic()
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        process = subprocess.Popen(
            [sys.executable, "-m", "agent", *arguments],
            cwd=REPOSITORY,
            env={**os.environ, **environment},
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
        )
        peak = _watch(process, timeout_s)
        took = time.monotonic() - before
        return Ran(process.returncode, _all_of(out), _all_of(err), took, peak)


def _watch(process: subprocess.Popen[bytes], timeout_s: float) -> float:
    """Wait for the end; the peak of its own memory in MiB.

    Of its own only: what wait4 tells of a child includes its parent's size at the fork.
    """
    peak, deadline = 0.0, time.monotonic() + timeout_s
    while process.poll() is None:
        peak = max(peak, _high_water_mib(process.pid))
        try:
            process.wait(0.05)
        except subprocess.TimeoutExpired:
            if time.monotonic() > deadline:
                process.kill()
    return peak


def _high_water_mib(pid: int) -> float:
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return 0.0
    line = next((line for line in status.splitlines() if line.startswith("VmHWM")), "VmHWM: 0")
    return int(line.split()[1]) / 1024


def _all_of(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read().decode()


def _bytes(content: str | bytes | Path) -> bytes:
    if isinstance(content, Path):
        return content.read_bytes()
    return content.encode() if isinstance(content, str) else content


def row(name: str, found: Mapping[str, Any]) -> tuple[str, ...]:
    """What a report says, for a table: capture, GPUs, class, memory, findings, MIG, domain, ports.

    Findings that keep a card out of use are in bold.
    """
    cards = [card for card in found["gpus"] or [] if "parent" not in card]
    slices = [card for card in found["gpus"] or [] if "parent" in card]
    ports = found["ports"]
    active = sum(port["active"] for port in ports)
    return (
        name,
        "?" if found["gpus"] is None else str(len(cards)),
        _each(card.get("class", "?") for card in cards),
        _each(str(card.get("memory_mib", "?")) for card in cards),
        _each(findings(found), ""),
        _each((f"{s['mig_profile']} {s['memory_mib']}" for s in slices), ""),
        domain(found),
        f"{active}/{len(ports)}" if ports else "",
    )


def _each(words: Iterable[str], none: str = "-") -> str:
    """`A100 x4, T4`: equal words together, in the order of their first."""
    counts: dict[str, int] = {}
    for word in words:
        counts[word] = counts.get(word, 0) + 1
    parts = (f"{word} x{count}" if count > 1 else word for word, count in counts.items())
    return ", ".join(parts) or none


def findings(found: Mapping[str, Any]) -> list[str]:
    """Codes of all findings, each card's in turn; those that count in bold."""
    cards = [card for card in found["gpus"] or [] if "parent" not in card]
    told = [finding for card in cards for finding in card["findings"]]
    return [f"**{one['code']}**" if one["unhealthy"] else one["code"] for one in told]


def domain(found: Mapping[str, Any]) -> str:
    """State and key of the multi-node NVLink domain."""
    nvlink = found["host"].get("nvlink", {})
    return " ".join(filter(None, (nvlink.get("state"), nvlink.get("domain"))))


def table(rows: Iterable[tuple[str, ...]]) -> str:
    """Rows as Markdown."""
    head = ("capture", "GPUs", "class", "memory MiB", "findings", "MIG", "domain", "ports up")
    lines = [head, tuple("---" for _ in head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"
