"""The same way with a real vLLM, without a GPU: `ops/test --vllm` makes its environment."""

from __future__ import annotations

import os
import signal
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import openai
import pytest

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

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.slow,
    pytest.mark.timeout(600),
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


def test_D14_one_tensor_over_two_nodes_and_a_killed_shard_starts_both_again(pair: Cluster) -> None:
    pair.weights = tiny_hf(pair.folder / "tiny-hf")
    pair.model("wide", **PAIR)
    pair.serving("wide", 1, 300)
    assert {shard.node for shard in pair.shards("wide")} == {"n1", "n2"}
    other = max(pair.shards("wide"), key=lambda shard: shard.id)
    other.kill(signal.SIGKILL)
    again = "select launch from llmgw_core.replica where model = 'wide' and state = 'ready'"
    pair.wait(lambda: pair.row(again) == (2,), "the second launch", 300)
    pair.serving("wide", 1, 60)
