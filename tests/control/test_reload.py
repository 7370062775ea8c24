"""SIGHUP on a running controller: what is taken over, and what a bad file does."""

from __future__ import annotations

import signal

import pytest

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
