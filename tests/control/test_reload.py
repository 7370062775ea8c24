"""SIGHUP on a running controller: what is taken over, and what a bad file does."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.certificates import certificate
from tests.control.process import until

pytestmark = pytest.mark.slow
CATALOG = """[[models]]
name = "{name}"
source = "file:/m.gguf"
profiles = [{{name = "p", engine = "llamacpp", cpus = 1}}]
"""


def test_sighup_reads_configuration_and_catalog_again(database, fleet, start, tmp_path):
    path, first, second = (tmp_path / name for name in ("llmgw.toml", "first.toml", "second.toml"))
    first.write_text(CATALOG.format(name="first"))
    second.write_text(CATALOG.format(name="second"))
    path.write_text(f'catalog = "{first}"\n')
    one = start(database.controller_url, "--config", str(path)).ready()

    def models() -> list[str]:
        return [row["name"] for row in fleet.rows("select name from llmgw.models order by 1")]

    until(lambda: models() == ["first"], "the catalog is applied")
    path.write_text(f'catalog = "{second}"\nworkers = 7\nlog_level = "warning"\n')
    one.signal(signal.SIGHUP)
    until(lambda: models() == ["second"], "the new catalog is applied in the first one's place")
    said = one.events("settings changed that need a restart")
    assert [line["settings"] for line in said] == [["workers"]]
    assert not one.events("catalog applied")[1:]  # quieter since

    path.write_text("catalog = 5\nwokers = 1\n")
    one.signal(signal.SIGHUP)
    (line,) = until(lambda: one.events("the configuration was not reloaded"), "told")
    assert "did you mean 'workers'?" in line["error"]
    path.write_bytes(b"# f\xfcr uns\n")
    one.signal(signal.SIGHUP)
    told = "the configuration was not reloaded"
    *_, line = until(lambda: len(now := one.events(told)) == 2 and now, "told of the letter")
    assert "is no UTF-8" in line["error"]
    second.write_text("[[models]]\nnmae = 1\n")
    one.signal(signal.SIGHUP)
    # Twice when the signal before this one is carried out only now.
    line, *_ = until(lambda: one.events("the catalog was not applied"), "told")
    assert str(second) in line["file"]
    assert models() == ["second"]
    one.ready()


def hears(pid: int) -> bool:
    """Whether a process handles SIGHUP; before it does, that would end it."""
    status = Path(f"/proc/{pid}/status").read_text()
    caught = next(line for line in status.splitlines() if line.startswith("SigCgt:"))
    return bool(int(caught.split()[1], 16) & 1 << signal.SIGHUP - 1)


@pytest.mark.parametrize(("role", "children"), [("all", 2), ("router", 0)])
def test_sighup_reaches_routers(start, tmp_path, role, children):
    """They log by the new level, and what needs a restart is told of once, however many read it."""
    path, cert, key = (tmp_path / name for name in ("llmgw.toml", "cert.pem", "key.pem"))
    certificate(cert, key)
    fixed = f'endpoints = ["a=http://127.0.0.1:9=m"]\ntls_cert = "{cert}"\ntls_key = "{key}"\n'
    path.write_text(f'{fixed}log_level = "warning"\ndrain = "1s"\n')
    one = start(None, "--config", str(path), role=role)

    def all_hear() -> bool:
        found = one.children().values()
        return len(found) == children and all(hears(pid) for pid in (one.process.pid, *found))

    until(all_hear, "all handle signals")
    path.write_text(f'{fixed}log_level = "info"\ndrain = "2s"\n')
    one.signal(signal.SIGHUP)
    until(lambda: one.events("certificate read again"), "the router says more")
    (line,) = until(lambda: one.events("settings changed that need a restart"), "told")
    assert line["settings"] == ["drain"]
    path.write_text("wokers = 1\n")
    one.signal(signal.SIGHUP)
    until(lambda: len(one.events("certificate read again")) == 2, "the router goes on")
    (line,) = until(lambda: one.events("the configuration was not reloaded"), "told")
    assert "did you mean 'workers'?" in line["error"]
