"""A real engine and a fake one behind one router process, as clients' libraries see it.

A session has one router in static mode, so each test starts from libraries and ends in sockets.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from agent.engines import llama_server
from sql.embedded import free_port
from tests.fake_engine import FakeEngine
from tests.tiny_model import tiny_gguf

if TYPE_CHECKING:
    from collections.abc import Iterator

PATIENCE_S = 60.0
"""Two programs start, each some seconds of a core."""
KEY = "sk-conformance"
MADE = {"tiny": 8, "fake": 3}
"""Tokens of a chat's answer by model: the real engine's, asked for so many, and the fake one's."""
ENGINE_KEY = "sk-of-the-real-engine"
SETTINGS = """
[[keys]]
id = "conformance"
secret = "{key}"

[endpoint_keys]
real = "{file}"
"""


@dataclass(frozen=True)
class Door:
    """The client port, the real engine's, which wants a key, and the engine that does as told."""

    port: int
    engine_port: int
    fake: FakeEngine

    @property
    def root(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def v1(self) -> str:
        return f"{self.root}/v1"


def _answers(port: int, path: str, process: subprocess.Popen[bytes]) -> None:
    """Wait until something answers 200."""
    deadline = time.monotonic() + PATIENCE_S
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}")
    request.add_header("Authorization", f"Bearer {KEY}")
    while True:
        try:
            with urllib.request.urlopen(request, timeout=5) as answer:
                if answer.status == 200:
                    return
        except OSError:
            assert process.poll() is None, f"{process.args} ended with {process.returncode}"
        assert time.monotonic() < deadline, f"{process.args} did not answer {path}"
        time.sleep(0.05)


def _ended(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(10)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait(10)


@pytest.fixture(scope="session")
def door(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Door]:
    """`tiny` is a real llama.cpp, `fake` the engine that misbehaves on command."""
    folder = tmp_path_factory.mktemp("conformance")
    weights, port, engine_port = tiny_gguf(folder / "tiny.gguf"), free_port(), free_port()
    argv = [sys.executable, "-P", str(Path(llama_server.__file__)), "-m", str(weights)]
    argv += ["--alias", "tiny", "--port", str(engine_port), "-np", "2", "-t", "1"]
    argv += ["-c", "4096", "--embeddings", "--pooling", "mean", "--api-key", ENGINE_KEY]
    settings = folder / "llmgw.toml"
    (folder / "engine.key").write_text(f"{ENGINE_KEY}\n")
    settings.write_text(SETTINGS.format(key=KEY, file=folder / "engine.key"))
    environment = {k: v for k, v in os.environ.items() if k != "LLMGW_DATABASE_URL"}
    with FakeEngine() as fake, (folder / "log").open("wb") as log:
        router = [sys.executable, "-m", "controller", "--role", "router", "--config", str(settings)]
        router += ["--listen", f"127.0.0.1:{port}"]
        router += ["--endpoint", f"real=http://127.0.0.1:{engine_port}=tiny"]
        router += ["--endpoint", f"told={fake.url}=fake,org/fake:1"]
        engine = subprocess.Popen(argv, stdout=log, stderr=log)
        served = subprocess.Popen(router, stdout=log, stderr=log, env=environment)
        try:
            _answers(engine_port, "/health", engine)
            _answers(port, "/v1/models", served)
            yield Door(port, engine_port, fake)
        finally:
            _ended(served)
            _ended(engine)


@pytest.fixture
def told(door: Door) -> Iterator[FakeEngine]:
    """The fake engine, which behaves again after the test."""
    before = len(door.fake.records)
    yield door.fake
    door.fake.default = {}
    del door.fake.records[before:]
