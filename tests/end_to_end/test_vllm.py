"""The same way with a real vLLM, without a GPU: `ops/test --vllm` makes its environment."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import openai
import pytest

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
