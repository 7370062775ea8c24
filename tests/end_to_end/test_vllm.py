"""The same way with a real vLLM, without a GPU: `ops/test --vllm` makes its environment."""

from __future__ import annotations

import os
import signal
import tempfile
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import openai
import psutil
import pytest

from agent import procfs
from tests.end_to_end.cluster import Cluster, clusters
from tests.end_to_end.installation import Up, installations
from tests.tiny_hf import tiny_hf

if TYPE_CHECKING:
    from collections.abc import Iterator

PROGRAM = os.environ.get("LLMGW_TEST_VLLM")
CATALOG = """
[[models]]
name = "tiny-vllm"
source = "file:{folder}"

[[models.profiles]]
name = "cpu"
engine = "vllm"
args = [
    "--max-model-len", 1024, "--max-num-seqs", 4,
    "--enforce-eager", "--kv-cache-memory-bytes", 67108864,
]
cpus = 1
memory = "3GiB"
start_deadline = "5m"
"""

READY_S, FIRST_ANSWER_S = 300, 60
"""On two busy cores; the first answer is slow, for the engine is ready before it is warm."""
LAUNCH = "select launch from llmgw_core.replica where model = 'wide' and state = 'ready'"

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.slow,
    pytest.mark.timeout(1200),
    pytest.mark.skipif(PROGRAM is None, reason="no real vLLM: ops/test --vllm makes one"),
]


PAIR = {
    "engine": "vllm",
    "args": ["--max-model-len", 1024, "--max-num-seqs", 4, "--enforce-eager",
             "--kv-cache-memory-bytes", 67108864],
    "env": {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": 1},
    "shards": 2, "fabric": "any", "memory": "3GiB", "start_deadline": "5m", "stop_grace": "5s",
}  # fmt: skip


@pytest.fixture
def pair(monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    """Two nodes on loopback that both have vLLM."""
    monkeypatch.setenv("LLMGW_ENGINE_PATHS", f"vllm={PROGRAM}")
    yield from clusters(Path(tempfile.mkdtemp(prefix="llmgw-test-vllm-", dir="/var/tmp")))


@pytest.fixture
def up(monkeypatch: pytest.MonkeyPatch) -> Iterator[Up]:
    monkeypatch.setenv("LLMGW_ENGINE_PATHS", f"vllm={PROGRAM}")
    yield from installations()


def test_vllm_is_started_serves_and_is_stopped(up: Up) -> None:
    up.catalog.write_text(CATALOG.format(folder=tiny_hf(up.base / "tiny-hf")))
    up.start("--catalog", str(up.catalog), ready_s=300)
    with openai.OpenAI(base_url=f"http://127.0.0.1:{up.port}/v1", api_key=up.key) as client:
        stream = client.chat.completions.create(
            model="tiny-vllm",
            messages=[{"role": "user", "content": "hello"}],
            max_tokens=12,
            stream=True,
        )
        assert "".join(c.choices[0].delta.content or "" for c in stream if c.choices)
    assert up.stop() == 0
    assert not up.processes()


def test_D05_D14_one_tensor_over_two_nodes_and_a_killed_shard_starts_both_again(
    pair: Cluster,
) -> None:
    pair.weights = tiny_hf(pair.folder / "tiny-hf")
    pair.model("wide", **PAIR)
    pair.serving("wide", 1, READY_S, FIRST_ANSWER_S)
    # First only what the agent started, whose worker answers on as an orphan (trap 5 of vLLM), then
    # as the kernel kills a whole group.
    for launch, kill in enumerate((os.kill, os.killpg), start=2):
        shards = pair.shards("wide")
        assert {shard.node for shard in shards} == {"n1", "n2"}
        before = [process for shard in shards for process in session(shard.pid)]
        assert len(before) >= 5, "API server, engine core and worker; headless and worker"
        files = {file for process in before for file in shared_memory(process)}
        assert files
        kill(max(shards, key=lambda shard: shard.id).pid, signal.SIGKILL)
        pair.wait(partial(launched, pair, launch), f"launch {launch}", READY_S)
        pair.serving("wide", 1, 60, FIRST_ANSWER_S)
        assert not [process for process in before if process.is_running()]
        if kill is os.kill:  # else the one that removes them was killed too
            assert not [file for file in files if file.exists()]
    pair.remove("wide")
    pair.gone("wide")


def launched(pair: Cluster, launch: int) -> bool:
    return pair.row(LAUNCH) == (launch,)


def session(leader: int) -> list[psutil.Process]:
    """All processes of an engine."""
    return [psutil.Process(p.pid) for p in procfs.processes() if p.session == leader]


def shared_memory(process: psutil.Process) -> set[Path]:
    """Blocks that it shares with others of its replica."""
    found = {Path(m.path) for m in process.memory_maps() if "/dev/shm/psm_" in m.path}
    return {path for path in found if path.exists()}
