"""The order of `up`: start, wait until a model answers, stay, stop in order."""

from __future__ import annotations

import signal
from functools import partial
from typing import TYPE_CHECKING

import trio

from controller.catalog.apply import apply_file
from controller.catalog.faults import CatalogError
from controller.up import CannotStart, Options, ask, children, demo, readiness, weights
from controller.up.database import LEFT_OVER, Database, prepare
from controller.up.folder import Folder
from controller.up.programs import ACTOR, api_key, check_ports, start_agent, start_controller
from controller.up.report import Report, since_start_s
from controller.up.welcome import document, welcome
from sql import queries
from sql.errors import DatabaseError, Refused
from sql.pool import open_pool
from sql.settings import DatabaseSettings

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable
    from pathlib import Path

    from controller.up.children import Child
    from controller.up.readiness import Progress
    from sql.pool import Pool

    Announce = Callable[[dict[str, str | None], str], None]

POLL_S = 0.1
ADMIN_S = 60.0
"""For the admin port, which opens while the first model still loads."""
CONTROLLER_GRACE_S = 45.0
"""The router lets running requests end for 30 s."""
AGENT_GRACE_S = 60.0
"""The agent stops its engines, 30 s for all at once."""
STOP_MOST_S = 150.0
INTERRUPTED = 130
NO_CHAT = (400, 405, 422, 501)
"""What an engine says that serves, but not chats."""


class Installation:
    """What runs, and how it is stopped."""

    def __init__(
        self, options: Options, folder: Folder, report: Report, announce: Announce
    ) -> None:
        self.options, self.folder, self.report = options, folder, report
        self.announce = announce
        self.database: Database | None = None
        self.children: list[Child] = []
        """In the order of stopping."""
        self.answers = False
        self.stopping = False

    async def stop(self) -> None:
        """Router and controller, then the agent with its engines, then Postgres."""
        self.stopping = True
        for child in self.children:
            if child.running:
                self.report.waiting(f"stopping the {child.name}")
            await self._stop(
                child, CONTROLLER_GRACE_S if child.name == "controller" else AGENT_GRACE_S
            )
        if self.database is not None:
            await self.database.stop(self.folder)
            self.database = None
            self.report.done("all stopped")

    async def _stop(self, child: Child, grace_s: float) -> None:
        if not await child.stop(grace_s):
            self.report.done(f"the {child.name} did not stop within {grace_s:.0f} s and was killed")

    def kill(self) -> None:
        """At once, all but Postgres, for which a gentle stop takes a moment only."""
        for child in self.children:
            if child.running:
                child.kill()


async def run(options: Options, announce: Announce) -> int:
    """Everything; the exit status. ``announce`` gets what to tell, as a document and as text.

    Raises CannotStart, mostly inside exception groups.
    """
    folder = await trio.to_thread.run_sync(Folder, options.state_dir)
    try:
        with Report() as report:
            found = await trio.to_thread.run_sync(children.stop_left_over, folder, LEFT_OVER)
            if found:
                report.done(f"stopped what a killed run had left: {', '.join(found)}")
            check_ports(options)
            return await _until_signal(Installation(options, folder, report, announce))
    finally:
        folder.close()


async def _until_signal(installation: Installation) -> int:
    """Live until a signal or the end, then stop in order; a second signal makes it quick."""
    live, gentle = trio.CancelScope(), trio.CancelScope()
    wanted = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)  # the last: its terminal was closed
    with trio.open_signal_receiver(*wanted) as signals:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(_on_signals, signals, live, gentle, installation.report)
            try:
                with live:
                    await _live(installation)
            finally:
                with trio.CancelScope(shield=True):
                    with gentle:
                        gentle.deadline = trio.current_time() + STOP_MOST_S
                        await installation.stop()
                    if gentle.cancelled_caught:
                        installation.kill()
                        await installation.stop()
                nursery.cancel_scope.cancel()
    # Ctrl-C is how a running installation is meant to end.
    return INTERRUPTED if live.cancelled_caught and not installation.answers else 0


async def _on_signals(
    signals: AsyncIterator[int], live: trio.CancelScope, gentle: trio.CancelScope, report: Report
) -> None:
    async for _ in signals:
        if live.cancel_called:
            gentle.cancel()
        else:
            report.done("stopping; once more to stop at once")
            live.cancel()


async def _live(installation: Installation) -> None:
    """Start all, say where it is, stay until cancelled. CannotStart also when a child dies."""
    options, folder, report = installation.options, installation.folder, installation.report
    gguf = await _prepare(installation)
    database = installation.database
    assert database is not None
    settings = DatabaseSettings.model_validate({"url": database.controller_url})
    async with open_pool(settings, ACTOR) as pool, trio.open_nursery() as nursery:
        # The agent first: its engine takes longest to load, and needs no controller for that.
        installation.children.append(await start_agent(folder, options, database, pool))
        installation.children.insert(0, await start_controller(folder, options, database))
        for child in installation.children:
            nursery.start_soon(_watch, installation, child)
        await _apply_catalogs(options, folder, pool, gguf)
        key = await api_key(folder, pool)
        models = await _ready(installation, pool, key)
        await _administrable(options)
        served = next((model for model in models if model.ready), None)
        installation.answers = True
        report.pause()
        facts = (options, folder, key, served)
        installation.announce(document(*facts), welcome(*facts))
        if not options.check:
            await trio.sleep_forever()
        nursery.cancel_scope.cancel()
    if not all(model.ready for model in models):
        raise CannotStart("not every model got ready, see above")


async def _watch(installation: Installation, child: Child) -> None:
    status = await child.ended()
    if not installation.stopping:
        raise CannotStart(
            f"the {child.name} ended with status {status}. Its log {child.log} ends with:\n"
            f"{child.last_words()}"
        )


async def _prepare(installation: Installation) -> Path | None:
    """The database and, meanwhile, the demo's weights; their path where the demo is wanted."""
    options, report = installation.options, installation.report
    found: list[Path] = []
    wanted = options.demo and options.catalog is None

    async def bring_weights() -> None:
        if not weights.place().exists():
            report.done("the demo's model (93 MB) is being fetched")
        try:
            found.append(await trio.to_thread.run_sync(weights.fetch, abandon_on_cancel=True))
        except weights.NoWeights as error:
            raise CannotStart(str(error)) from error

    async with trio.open_nursery() as nursery:
        if wanted:
            nursery.start_soon(bring_weights)
        installation.database = await prepare(installation.folder, options.database_url, report)
        if wanted:
            report.waiting("waiting for the demo's model")
    return found[0] if found else None


async def _apply_catalogs(options: Options, folder: Folder, pool: Pool, gguf: Path | None) -> None:
    """The demo's catalog, or none any more, and the user's."""
    demo_file = folder.path / "demo.toml"
    files = []
    if gguf is not None or demo_file.exists():
        demo_file.write_text(demo.none() if gguf is None else demo.catalog(gguf))
        files.append(demo_file)
    if options.catalog is not None:
        files.append(options.catalog)
    for file in files:
        try:
            await apply_file(pool, file, ACTOR)
        except (CatalogError, Refused) as error:
            raise CannotStart(f"the catalog {file} cannot stand: {error}") from error


async def _ready(installation: Installation, pool: Pool, key: str) -> list[Progress]:
    """Wait until each wanted model is ready or beyond hope, and one has answered."""
    options, report = installation.options, installation.report
    began = trio.current_time()
    probe = FirstAnswer(options, key)
    before: dict[int, int] | None = None
    while True:
        waited_s = trio.current_time() - began
        try:
            rows = [dict(row) for row in await pool.fetch(queries("up")["wanted"], waited_s)]
        except DatabaseError as error:
            raise CannotStart(f"the database went away: {error}") from error
        if before is None:
            before = readiness.failures(rows)
        models = readiness.judge(rows, waited_s, before)
        ready = next((model for model in models if model.ready), None)
        if ready is not None and not probe.over:
            await probe.try_once(ready, report)
        settled = all(model.ready or model.trouble for model in models)
        if (settled and (probe.over or ready is None)) or waited_s > options.wait_s:
            break
        report.waiting(readiness.sentence(models) or "waiting for the first answer")
        await trio.sleep(POLL_S)
    for model in models:
        if not model.ready:
            report.done(f"{model.name} is not ready: {model.trouble or model.doing}")
    if models and not probe.answered and (options.check or not probe.over):
        raise CannotStart(f"no model answers; the logs are in {installation.folder.path / 'logs'}")
    return models


async def _administrable(options: Options) -> None:
    """Wait for the admin port: on kept data a router may answer before it."""
    began = trio.current_time()
    while trouble := await trio.to_thread.run_sync(ask.not_ready_because, options.admin_port):
        if trio.current_time() - began > ADMIN_S:
            raise CannotStart(f"the admin port is not ready: {trouble}")
        await trio.sleep(POLL_S)


class FirstAnswer:
    """Asks the first ready model until it answers: the proof that the whole way works."""

    def __init__(self, options: Options, key: str) -> None:
        self._options, self._key = options, key
        self._since: float | None = None
        self.answered = False
        self.over = False
        """It has answered, or had its time: one engine that hangs is no reason to stop the rest."""

    async def try_once(self, model: Progress, report: Report) -> None:
        """One question. No answer may mean that ready is an earlier run's word: try again."""
        options = self._options
        self._since = self._since or trio.current_time()
        asked = (options.host, options.port, self._key, model.called, options.answer_s)
        question = partial(ask.ask, *asked)
        try:
            answer = await trio.to_thread.run_sync(question, abandon_on_cancel=True)
        except ask.NotAnswered as error:
            if error.status in NO_CHAT:
                report.done(f"{model.name} is ready, but does not chat: {error}")
                self.answered = self.over = True
            elif trio.current_time() - self._since >= options.answer_s:
                said = f"{model.name} is ready, but gave no token in {options.answer_s:g} s"
                report.done(f"{said}: {error}; llmgwctl replace {model.name} starts it anew")
                self.over = True
            return
        self.answered = self.over = True
        first_s = since_start_s() - (answer.total_s - answer.first_token_s)
        after_ms = answer.first_token_s * 1000
        report.done(f"first token {first_s:.1f} s after the start, {after_ms:.0f} ms after asking")
        report.done(f"{model.called} says: {answer.text.strip()}")
