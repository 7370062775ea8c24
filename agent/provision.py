"""Engines that profiles name by version become virtual environments on this node.

`ensure` answers which environment a shard's engine runs in and builds it when it must, as a child
process (agent.provision_build); `rows` says what is being built and what failed; `keep_tidy`
removes environments that nobody uses. Shards that want the same version share one build.
Called by supervise, facts and __main__.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from subprocess import PIPE
from typing import TYPE_CHECKING, Any, Final

import structlog
import trio

from agent.provision_settings import VERSION, ProvisionSettings
from agent.provision_store import Store, program_in

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence

    from agent.assignment import Assignment
    from agent.probes.engines import Engine

    Progress = Callable[[dict[str, Any]], None]

ROOT: Final = Path(__file__).parent.parent
LINE_BYTES: Final = 64 * 1024
TIDY_S: Final = 60.0
"""A loop that is silent for loop.STALE_S is reported as one without success."""
WATCH_S: Final = 1.0
ROW_CHARS: Final = 2000
MAX_ROWS: Final = 50
"""Builds and failures that are told; a catalog may name any number of wrong versions."""
log = structlog.get_logger()


class NoEngine(Exception):
    """The wanted version of an engine is not here and cannot be brought; the message says why."""


class NotNow(NoEngine):
    """It failed lately and is not tried again yet."""


@dataclass(frozen=True, slots=True)
class Site:
    """What provisioning knows of its node."""

    folder: Path
    """state_dir/engines."""
    logs: Path
    """A build's log lies beside those of shards, and is bounded as they are."""
    env: Mapping[str, str]
    """The environment of installers: proxies, settings of pip, PATH; none of our secrets."""
    engine_paths: Mapping[str, str]
    """Programs that the settings name: they win."""
    found: Callable[[], Awaitable[Sequence[Engine]]]
    """Engines that the probes found."""
    changed: Callable[[], None]
    """Asks for a look at the node's engines."""
    floor_bytes: int = 1 << 30
    """A build is ended when the disk has less left: state, logs and others live there too."""


class Provision:
    """The environments of one node."""

    def __init__(self, settings: ProvisionSettings, site: Site) -> None:
        self._settings = settings
        self._site = site
        self._store = Store(site.folder)
        self._locks: dict[str, trio.Lock] = {}
        self._waiting: dict[str, list[Progress]] = {}
        self._building: dict[str, tuple[str, str]] = {}
        self._names = trio.Lock()
        """Held while names are looked up or taken away, so that none vanishes in between."""
        self._tidy = trio.Event()
        path = os.pathsep.join(filter(None, [str(ROOT), site.env.get("PYTHONPATH")]))
        self._env = {**site.env, "PYTHONPATH": path}

    async def ensure(self, a: Assignment, progress: Progress) -> Path | None:
        """The environment that the shard's engine runs in; None leaves it to settings and PATH.

        Raises NoEngine. `progress` gets {"source", "bytes_done"} while it is being built.
        """
        version, settings = a.engine_version, (f"{a.engine}@{a.engine_version}", a.engine)
        if version is None or any(key in self._site.engine_paths for key in settings):
            return None
        if a.engine == "command":
            return None
        if not VERSION.fullmatch(version) or not VERSION.fullmatch(a.engine):
            raise NoEngine(f"{version!r} is no version of {a.engine} that could be installed")
        name = f"{a.engine}-{version}"
        if (present := await self._present(name)) is not None:
            return present
        elsewhere = await self._elsewhere(a.engine, version)
        if elsewhere or a.engine not in self._settings.engines:
            # A program without an environment of its own, as llama-server, is found in PATH.
            prefixes = [path.parent.parent for path in elsewhere]
            return next((p for p in prefixes if _starts(p, a.engine)), None)
        return await self._shared(name, a.engine, version, progress)

    async def _present(self, name: str) -> Path | None:
        async with self._names:
            if not await trio.to_thread.run_sync(self._store.whole, name):
                return None
            await trio.to_thread.run_sync(self._store.used, name)
            return self._store.link(name)

    async def _elsewhere(self, engine: str, version: str) -> list[Path]:
        """Where the probes find this very version installed."""
        wanted = (engine, version, "installed")
        found = await self._site.found()
        return [Path(e.path or "/") for e in found if (e.engine, e.version, e.state) == wanted]

    async def _shared(self, name: str, engine: str, version: str, progress: Progress) -> Path:
        """One build for all that want it; whoever comes next goes on when its shard is stopped."""
        told = self._waiting.setdefault(name, [])
        told.append(progress)
        progress(_progress(engine, version, "begins", 0))
        try:
            async with self._locks.setdefault(name, trio.Lock()):
                found = await self._present(name)
                if found is not None:
                    return found
                await self._not_again_yet(name, engine, version)
                return await self._noted(name, engine, version)
        finally:
            told.remove(progress)

    async def _not_again_yet(self, name: str, engine: str, version: str) -> None:
        digest = await trio.to_thread.run_sync(self._settings.digest, engine, version)
        failed = await trio.to_thread.run_sync(self._store.failure, name, digest)
        if failed is not None:
            raise NotNow(
                f"{engine} {version} could not be installed: {failed.error}\n"
                f"it is tried again in {failed.again_in_s / 60:.0f} min, or at once when the "
                "version or [provision] changes"
            )

    async def _noted(self, name: str, engine: str, version: str) -> Path:
        """Build, and keep what came of it."""
        self._building[name] = (engine, version)
        self._site.changed()
        digest = await trio.to_thread.run_sync(self._settings.digest, engine, version)
        log.info("engine is being installed", engine=engine, version=version)
        try:
            path = await self._build(name, engine, version)
            log.info("engine installed", engine=engine, version=version, path=str(path))
            return path
        except NoEngine as error:
            log.warning("engine not installed", engine=engine, version=version, error=str(error))
            await trio.to_thread.run_sync(self._blame, name, engine, version, str(error), digest)
            raise NoEngine(f"{engine} {version} could not be installed: {error}") from error
        finally:
            del self._building[name]
            self._tidy.set()
            self._site.changed()

    def _blame(self, name: str, engine: str, version: str, error: str, digest: str) -> None:
        try:
            self._store.blame(name, engine, version, error, digest)
        except OSError as fault:
            log.warning("failed build not noted", engine=engine, version=version, error=str(fault))

    async def _build(self, name: str, engine: str, version: str) -> Path:
        settings, site = self._settings, self._site
        await trio.to_thread.run_sync(_make, site.folder)
        job = {
            "engine": engine,
            "version": version,
            "requirement": settings.requirement(engine, version),
            "folder": str(site.folder),
            "log": str(site.logs / f"engine-{name}.log"),
            "python": str(settings.python or sys.executable),
            "min_free": settings.min_free,
            "index_url": settings.index_url and settings.index_url.get_secret_value(),
            "extra_index_urls": [url.get_secret_value() for url in settings.extra_index_urls],
            "wheel_dir": settings.wheel_dir and str(settings.wheel_dir),
        }
        with trio.move_on_after(settings.deadline):
            return await self._run(name, job)
        raise NoEngine(f"not ready within [provision] deadline, {settings.deadline:g} s")

    async def _run(self, name: str, job: Mapping[str, Any]) -> Path:
        child = await trio.lowlevel.open_process(
            [sys.executable, "-P", "-m", "agent.provision_build"],
            stdin=PIPE,
            stdout=PIPE,
            env=self._env,
            start_new_session=True,
        )
        assert child.stdin is not None
        assert child.stdout is not None
        said: dict[str, Any] = {"error": "the build ended without a word: killed or crashed"}
        try:
            async with trio.open_nursery() as nursery:

                async def full() -> None:
                    said.update(error=await self._full())
                    nursery.cancel_scope.cancel()

                nursery.start_soon(full)
                with suppress(trio.BrokenResourceError):  # it ended before it read the job
                    await child.stdin.send_all(json.dumps(job).encode() + b"\n")
                    said |= await self._last_word(name, job, child.stdout)
                nursery.cancel_scope.cancel()
        finally:
            _end(child)
            with trio.CancelScope(shield=True):
                await child.wait()
                await child.stdin.aclose()
                await child.stdout.aclose()
        if "path" not in said:
            raise NoEngine(said["error"])
        return Path(said["path"])

    async def _full(self) -> str:
        """Wait until the disk is nearly full, which ends the build; the words for it."""
        folder, floor = self._site.folder, self._site.floor_bytes
        while True:
            usage = await trio.to_thread.run_sync(shutil.disk_usage, folder)
            if usage.free < floor:
                break
            await trio.sleep(WATCH_S)
        return f"no space: {folder} has less than {floor >> 20} MiB left; free some"

    async def _last_word(
        self, name: str, job: Mapping[str, Any], lines: trio.abc.ReceiveStream
    ) -> dict[str, Any]:
        """Hand the builder's progress to all that wait for it; its outcome, empty without one."""
        rest = b""
        while data := await lines.receive_some(LINE_BYTES):
            *whole, rest = (rest + data).split(b"\n")
            for line in whole:
                said: dict[str, Any] = json.loads(line)
                if "text" not in said:
                    return said
                word = _progress(job["engine"], job["version"], said["text"], said["bytes_done"])
                for progress in self._waiting[name]:
                    progress(word)
            if len(rest) > LINE_BYTES:
                break
        return {}

    async def rows(self) -> list[dict[str, Any]]:
        """What agent.report_engines is told besides installed engines."""
        building = dict(self._building)
        made = [
            {"engine": engine, "version": version, "state": "provisioning"}
            for engine, version in building.values()
        ]
        failed = await trio.to_thread.run_sync(self._failed, frozenset(building))
        return [*made, *failed][:MAX_ROWS]

    def _failed(self, building: Collection[str]) -> list[dict[str, Any]]:
        rows = []
        for name, engine, version in self._store.blamed():
            if name in building or engine not in self._settings.engines:
                continue
            found = self._store.failure(name, self._settings.digest(engine, version))
            if found is not None:
                error = found.error[:ROW_CHARS]
                row = {"engine": engine, "version": version, "state": "failed", "error": error}
                rows.append(row)
        return rows

    async def keep_tidy(
        self, in_use: Callable[[], Collection[str]], succeeded: Callable[[], None]
    ) -> None:
        """Remove environments beyond the number kept and what killed builds left, for ever."""
        while True:
            self._tidy = trio.Event()
            await self.collect(in_use)
            succeeded()
            with trio.move_on_after(TIDY_S):
                await self._tidy.wait()

    async def collect(self, in_use: Callable[[], Collection[str]]) -> list[str]:
        """Remove environments beyond the number kept, never one in use; their names."""
        async with self._names:
            busy = set(in_use())
            for name in busy:
                await trio.to_thread.run_sync(self._store.used, name)
            surplus = await trio.to_thread.run_sync(
                self._store.surplus, self._settings.max_environments, busy
            )
            gone = [n for n in surplus if await trio.to_thread.run_sync(self._store.unname, n)]
        await trio.to_thread.run_sync(self._store.sweep)
        if gone:
            log.info("unused environments removed", names=gone)
            self._site.changed()
        return gone


def _end(child: trio.Process) -> None:
    """End the builder and its installer: it leads a process group, and nobody has reaped it yet."""
    try:
        os.killpg(child.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass


def _starts(prefix: Path, engine: str) -> bool:
    return os.access(program_in(prefix, engine), os.X_OK)


def _make(folder: Path) -> None:
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)


def _progress(engine: str, version: str, text: str, done: int) -> dict[str, Any]:
    return {"source": f"{engine} {version}: {text}", "bytes_done": done}
