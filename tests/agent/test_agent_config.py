"""Settings: three sources, exact refusals, no secrets in flags or messages."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from click.testing import CliRunner

from agent.__main__ import main
from agent.address import address_towards
from agent.config import BadConfig, engine_environment, load, size_bytes

if TYPE_CHECKING:
    from pathlib import Path

URL = "postgresql://u:topsecret@127.0.0.1:5432/d"


@pytest.fixture(autouse=True)
def _clean(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("LLMGW_DATABASE_URL", "LLMGW_NODE", "LLMGW_ENROLMENT_TOKEN"):
        monkeypatch.delenv(name, raising=False)


def written(folder: Path, text: str) -> Path:
    path = folder / "agent.toml"
    path.write_text(text)
    return path


def test_flags_win_over_environment_over_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = written(
        tmp_path,
        f'node = "file"\nports = "30000-30009"\nengine_log_size = "1MiB"\non_exit = "stop"\n'
        f'[labels]\nzone = "a"\n[database]\nurl = "{URL}"\n',
    )
    monkeypatch.setenv("LLMGW_NODE", "environment")
    monkeypatch.setenv("LLMGW_LABELS", "zone=b, rack=7")
    found = load(path, {"on_exit": "keep", "node": None})
    assert (found.node, found.on_exit, found.ports) == ("environment", "keep", (30000, 30009))
    assert found.labels == {"zone": "b", "rack": "7"}
    assert found.engine_log_size == 1 << 20
    assert load(path, {"node": "flag"}).node == "flag"
    assert "topsecret" not in repr(found)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('nod = "x"', "unknown setting nod; did you mean node?"),
        (
            '[database]\nurl = "x"\npoolsize = 3',
            "unknown setting database.poolsize; did you mean pool_size?",
        ),
        ('weights_reserve = "5 apples"', "'5 apples' is not a size such as 512MiB"),
        ('ports = "9-3"', "ports 9-3 is not a range"),
        ('on_exit = "explode"', "setting on_exit"),
        ("nonsense", "is not TOML"),
    ],
)
def test_faults_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, words: str
) -> None:
    if "[database]" not in text:
        monkeypatch.setenv("LLMGW_DATABASE_URL", URL)
    with pytest.raises(BadConfig) as fault:
        load(written(tmp_path, text))
    assert words in str(fault.value)
    assert "topsecret" not in str(fault.value)


def test_without_a_database_the_command_says_what_to_set(tmp_path: Path) -> None:
    result = CliRunner().invoke(main, ["--config", str(written(tmp_path, ""))])
    assert result.exit_code == 2
    assert "set LLMGW_DATABASE_URL" in result.output


def test_engines_do_not_see_the_agents_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLMGW_DATABASE_URL", URL)
    monkeypatch.setenv("LLMGW_ENROLMENT_TOKEN", "t")
    monkeypatch.setenv("PGPASSWORD", "p")
    monkeypatch.setenv("HF_TOKEN", "h")
    found = engine_environment()
    assert found["HF_TOKEN"] == "h"
    assert not {n for n in found if n.startswith(("LLMGW_", "PG"))}


def test_a_used_token_file_may_be_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLMGW_DATABASE_URL", URL)
    path = tmp_path / "token"
    path.write_text("tok\n")
    settings = load(written(tmp_path, ""), {"enrolment_token_file": path})
    assert settings.token() == "tok"
    path.unlink()
    assert settings.token() is None


def test_sizes_have_units() -> None:
    assert [size_bytes(t) for t in ("7", "1KiB", "1.5 MiB", 3)] == [7, 1024, 3 << 19, 3]


def test_the_address_is_the_one_towards_the_database() -> None:
    assert address_towards(URL) == "127.0.0.1"
    assert address_towards("postgresql:///d?host=/run/postgresql") == "127.0.0.1"
    assert address_towards("postgresql://no-such-host.invalid/d") is None
