"""Weights of models on this node: find them, bring them.

Each download is a child process (agent.fetch) with progress; it ends when its shard no longer
wants it or the agent ends, and what it brought stays for the next try. Called by supervise; what
lies on the disks is told by agent.probes.weights_scan.
"""

from __future__ import annotations

import json
import os
import sys
from contextlib import contextmanager
from pathlib import Path
from subprocess import PIPE
from typing import TYPE_CHECKING, Any

import trio

from agent.probes.weights_tree import cut_because
from agent.source import BadSource, Source, complete_path, parse_source

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

RESERVE_BYTES = 1 << 30
"""Stays free on the disk of the weights: logs, state and a database may live there too."""
LINE_BYTES = 64 * 1024
ROOT = Path(__file__).parent.parent
QUIET_HUB = {"HF_HUB_DISABLE_PROGRESS_BARS": "1", "HF_HUB_DISABLE_TELEMETRY": "1"}


class NoWeights(Exception):
    """The weights of a model are not here and cannot be brought; the message says why."""


class Weights:
    """The weights directory of a node. `env` is the environment of downloads: proxies, HF_*, AWS_*.

    `hf_token_file` holds the hub's token; only its name is handed on, by a pipe.
    """

    def __init__(
        self,
        folder: Path,
        env: Mapping[str, str],
        reserve_bytes: int = RESERVE_BYTES,
        hf_token_file: Path | None = None,
    ) -> None:
        self.folder = folder
        self._hf_token_file = hf_token_file
        self._removing: dict[Path, trio.Event] = {}
        path = os.pathsep.join(filter(None, [str(ROOT), env.get("PYTHONPATH")]))
        self._env = {**env, "PYTHONPATH": path, **QUIET_HUB}
        self._reserve = reserve_bytes

    async def ensure(self, text: str, progress: Callable[[dict[str, Any]], None]) -> Path:
        """The file or folder of a source, brought here when it is not; raises NoWeights.

        `progress` gets {"source", "bytes_done", "bytes_total"?} while a download runs.
        """
        try:
            source = parse_source(text)
        except BadSource as error:
            raise NoWeights(str(error)) from error
        await self._not_removing(source)
        if source.kind == "file":
            path = source.path or Path()
            if not await trio.to_thread.run_sync(path.exists):
                raise NoWeights(f"{text} does not exist on this node: put it there or fix source")
            return await _whole(path, text, "put the whole of it there")
        folder = source.folder(self.folder)
        complete = await trio.to_thread.run_sync(complete_path, source, folder)
        path = complete or await self._download(source, progress)
        return await _whole(path, text, f"correct it where it comes from, and remove {folder} here")

    @contextmanager
    def removing(self, folder: Path) -> Iterator[None]:
        """While a download is removed: who wants it waits, and then brings it anew."""
        self._removing[folder] = trio.Event()
        try:
            yield
        finally:
            self._removing.pop(folder).set()

    async def _not_removing(self, source: Source) -> None:
        """Wait until nothing is being removed that the source may mean."""
        folder = None if source.kind == "file" else source.folder(self.folder)
        while busy := [e for f, e in self._removing.items() if folder in (None, f)]:
            await busy[0].wait()

    async def _download(self, source: Source, progress: Callable[[dict[str, Any]], None]) -> Path:
        job = {
            "source": source.text,
            "weights_dir": str(self.folder),
            "reserve_bytes": self._reserve,
            "hf_token_file": self._hf_token_file and str(self._hf_token_file),
        }
        child = await trio.lowlevel.open_process(
            [sys.executable, "-P", "-m", "agent.fetch"],
            stdin=PIPE,
            stdout=PIPE,
            env=self._env,
            start_new_session=True,
        )
        assert child.stdin is not None
        assert child.stdout is not None
        try:
            await child.stdin.send_all(json.dumps(job).encode() + b"\n")
            return await _outcome(child.stdout, source, progress)
        finally:
            child.kill()  # no effect when it has ended by itself
            with trio.CancelScope(shield=True):
                await child.wait()
                await child.stdin.aclose()
                await child.stdout.aclose()


async def _whole(path: Path, text: str, remedy: str) -> Path:
    """The path, unless bytes are known to be missing there, whoever noted it complete (D25)."""
    why = await trio.to_thread.run_sync(cut_because, path)
    if why is not None:
        raise NoWeights(f"{text} is not whole, no engine can load it: {why}; {remedy}")
    return path


async def _outcome(
    lines: trio.abc.ReceiveStream, source: Source, progress: Callable[[dict[str, Any]], None]
) -> Path:
    """Follow a download to its last word."""
    rest = b""
    while data := await lines.receive_some(LINE_BYTES):
        *whole, rest = (rest + data).split(b"\n")
        for line in whole:
            said = json.loads(line)
            if "path" in said:
                return Path(said["path"])
            if "error" in said:
                raise NoWeights(said["error"])
            progress({"source": source.text, **said})
        if len(rest) > LINE_BYTES:
            break
    raise NoWeights(f"the download of {source.text} ended without a word: it was killed or crashed")
