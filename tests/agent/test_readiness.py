"""Ready means: our own process listens, is healthy, and serves our model."""

from __future__ import annotations

import signal
import sys
from typing import TYPE_CHECKING

import pytest

from agent.process import Identity, Mark, end_tree, send, spawn
from agent.readiness import Check, not_ready_because, served_models
from sql.embedded import free_port
from tests.agent.conftest import ODD, until

if TYPE_CHECKING:
    from pathlib import Path


def start(tmp_path: Path, shard: int, port: int, model: str) -> tuple[Identity, Mark]:
    mark = Mark(shard, 1, "n1", str(tmp_path))
    argv = [sys.executable, ODD, "--port", str(port), "--model", model]
    return spawn(argv, mark.environment(), tmp_path, tmp_path / f"{shard}.log"), mark


async def test_D04_an_orphan_on_the_port_makes_nobody_ready(tmp_path: Path) -> None:
    port = free_port()
    orphan, orphans_mark = start(tmp_path, 1, port, "m")
    other, mark = start(tmp_path, 2, free_port(), "m")
    check = Check("127.0.0.1", port, "/health", "m")
    try:

        async def good() -> bool:
            return await not_ready_because(check, orphan, orphans_mark) is None

        await until(good, "the first engine answers")
        reason = await not_ready_because(check, other, mark)
        assert reason is not None
        assert f"port {port} is held by pid {orphan.pid}" in reason
        wrong = await not_ready_because(
            Check("0.0.0.0", port, "/health", "x"), orphan, orphans_mark
        )
        assert wrong == "/v1/models answers 200 and names ['m'], not x"
        lost = await not_ready_because(Check("127.0.0.1", port, "/nope"), orphan, orphans_mark)
        assert lost == "/nope answers 404: {}"
        only_port = Check("127.0.0.1", port, None)
        assert await not_ready_because(only_port, orphan, orphans_mark) is None
    finally:
        await end_tree(orphan, orphans_mark, 0)
        await end_tree(other, mark, 0)


@pytest.mark.parametrize("asked", ["a port", "a rank without a door"])
async def test_C14_a_stopped_engine_is_not_ready_without_a_health_path(
    tmp_path: Path, asked: str
) -> None:
    """The kernel goes on to accept connections for it, so an open port proves nothing."""
    port = free_port()
    engine, mark = start(tmp_path, 1, port, "m")
    lives_s = None if asked == "a port" else 0.0
    check = Check("127.0.0.1", port, None, lives_s=lives_s)

    async def well() -> bool:
        return await not_ready_because(check, engine, mark) is None

    async def halted() -> bool:
        reason = await not_ready_because(check, engine, mark)
        return reason is not None and f"pid {engine.pid} is stopped by a signal" in reason

    try:
        await until(well, "the engine is ready")
        send(engine, signal.SIGSTOP)
        await until(halted, "it is told that the engine does not run")
        send(engine, signal.SIGCONT)
        await until(well, "the engine runs again")
    finally:
        await end_tree(engine, mark, 0)


@pytest.mark.parametrize(
    ("body", "names"),
    [
        (b'{"data": [{"id": "a", "aliases": ["b"]}, {"id": "c"}]}', {"a", "b", "c"}),
        (b'{"data": [{"id": 7}]}', set()),
        (b'{"data": {"id": "a"}}', set()),
        (b'{"error": "Unauthorized"}', set()),
        (b"[]", set()),
        (b"\xff", set()),
    ],
)
def test_model_lists_are_read_carefully(body: bytes, names: set[str]) -> None:
    assert served_models(body) == names
