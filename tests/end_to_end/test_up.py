"""`llmgwctl up`: from nothing to a streamed answer of the real engine, or words that help."""

from __future__ import annotations

import json
import re
import signal
import socket
import subprocess
import sys
from typing import TYPE_CHECKING

import openai
import psycopg
import pytest

from tests import fake_engine
from tests.end_to_end.installation import Up, installations

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture
def up() -> Iterator[Up]:
    yield from installations()


def ctl(up: Up, *arguments: str) -> object:
    """What `llmgwctl --json` prints."""
    command = [
        sys.executable,
        "-m",
        "controller.cli",
        "--server",
        f"127.0.0.1:{up.admin_port}",
        "--json",
    ]
    done = subprocess.run(
        [*command, *arguments], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_first_run_then_second_on_the_same_data(up: Up) -> None:
    first = up.run("--catalog", str(up.catalog), "--check")
    assert first.returncode == 0, first.stderr
    assert "first token" in first.stderr
    key, port = up.key, (up.state_dir / "postgres_port").read_text()
    assert key in first.stdout
    assert not up.processes()

    up.start("--catalog", str(up.catalog))
    assert up.key == key
    assert (up.state_dir / "postgres_port").read_text() == port, "free, so it is kept"
    streams_by_sdk(up)
    nodes_are_the_same_in_psql(up)
    usage_is_written(up)
    assert up.stop() == 0
    stops = [line for line in up.err if re.search(r"stopping the|all stopped", line)]
    assert [re.search(r"controller|agent|all", line)[0] for line in stops] == [
        "controller",
        "agent",
        "all",
    ]
    assert not up.processes()


def streams_by_sdk(up: Up) -> None:
    with openai.OpenAI(
        base_url=f"http://127.0.0.1:{up.port}/v1", api_key=up.key, max_retries=0
    ) as client:
        assert "tiny-test" in {model.id for model in client.models.list()}
        stream = client.chat.completions.create(
            model="tiny",
            messages=[{"role": "user", "content": "hello"}],
            max_tokens=12,
            stream=True,
            stream_options={"include_usage": True},
        )
        chunks = list(stream)
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert {c.model for c in chunks} == {"tiny"}
    assert chunks[-1].usage.completion_tokens <= 12


def usage_is_written(up: Up) -> None:
    """The SDK's request, with the engine's own token counts."""
    query = (
        "select model_asked, model, status, completion_tokens from llmgw.usage_recent"
        " where completion_tokens <= 12 and completion_tokens > 0"
    )
    with up.postgres() as connection:
        connection.autocommit = True
        up.wait_for(lambda: connection.execute(query).fetchone() is not None, 60)
        assert connection.execute(query).fetchone()[:3] == ("tiny", "tiny-test", "ok")


def nodes_are_the_same_in_psql(up: Up) -> None:
    """Ages and load move between two reads; everything else is the same rows."""
    up.wait_for(lambda: _same_nodes(up), 60)


def _same_nodes(up: Up) -> bool:
    """Whether they are now: the agent may say something new between the two reads."""
    by_ctl = ctl(up, "nodes")
    with up.postgres() as connection:
        rows = connection.execute(
            "select jsonb_strip_nulls(to_jsonb(v)) from llmgw.nodes v order by v.id"
        ).fetchall()
    moving = {"last_seen_ago", "load", "disk_free_gb", "memory_available_mib"}
    still = [{k: v for k, v in row.items() if k not in moving} for (row,) in rows]
    shown = [{k: v for k, v in row.items() if k not in moving} for row in by_ctl]
    assert len(shown) == len(still) == 1
    return {k: still[0].get(k) for k in shown[0]} == shown[0]


def test_killed_run_is_cleared_away_by_the_next(up: Up) -> None:
    up.start("--catalog", str(up.catalog))
    up.process.kill()
    up.process.wait()
    assert up.processes()  # Postgres, controller, agent and engine are on their own now
    again = up.run("--catalog", str(up.catalog), "--check")
    assert again.returncode == 0, again.stderr
    assert "stopped what a killed run had left: controller, agent, postgres" in again.stderr
    assert not up.processes()


def test_sigterm_before_ready_stops_in_order(up: Up) -> None:
    command = up.command("--catalog", str(up.catalog))
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    for line in process.stderr:
        if "the database is ready" in line:
            process.send_signal(signal.SIGTERM)
            break
    _, rest = process.communicate(timeout=120)
    assert process.returncode == 130
    assert "all stopped" in rest
    assert not up.processes()


def test_second_start_on_the_same_state_is_refused(up: Up) -> None:
    up.start("--catalog", str(up.catalog))
    other = up.run("--catalog", str(up.catalog), "--check")
    assert other.returncode == 1
    assert "another llmgwctl up runs on" in other.stderr
    assert up.stop(signal.SIGTERM) == 0


def test_taken_port_is_named_with_what_to_do(up: Up) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", up.port))
        taken.listen()
        done = up.run("--no-demo", "--check")
    assert done.returncode == 1
    assert f"port {up.port} on 127.0.0.1 is taken by another program" in done.stderr
    assert f"--port {up.port + 1}" in done.stderr


def test_unreachable_database_is_named_without_its_password(up: Up) -> None:
    done = up.run(
        "--no-demo", "--check", "--database-url", "postgresql://me:hidden@127.0.0.1:9/none"
    )
    assert done.returncode == 1
    assert "postgresql://me:***@127.0.0.1:9/none cannot be used" in done.stderr
    assert "hidden" not in done.stderr + done.stdout


def test_given_database_is_used_and_left_running(
    up: Up, empty_database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LLMGW_DATABASE_URL", empty_database)
    done = up.run("--catalog", str(up.catalog), "--check")
    assert done.returncode == 0, done.stderr
    assert "first token" in done.stderr
    assert not (up.state_dir / "postgres").exists()
    with psycopg.connect(empty_database) as connection:
        assert connection.execute("select name from llmgw.models").fetchall() == [("tiny-test",)]


def test_bad_catalog_is_refused_with_its_fault(up: Up) -> None:
    up.catalog.write_text(up.catalog.read_text().replace("llamacpp", "llama-dot-cpp"))
    done = up.run("--catalog", str(up.catalog), "--check")
    assert done.returncode == 1
    assert "llama-dot-cpp" in done.stderr
    assert not up.processes()


def test_failing_engine_ends_with_its_last_words_and_once_mended_the_next_run_serves(
    up: Up,
) -> None:
    sound = up.catalog.read_text()
    text = sound.replace('"llamacpp"', '"command"')
    words = 'command = ["sh", "-c", "echo no such card >&2; exit 3"]'
    up.catalog.write_text(text.replace('args = ["-c", "4096", "-np", "2"]', words))
    done = up.run("--catalog", str(up.catalog), "--check", timeout_s=300)
    assert done.returncode == 1
    assert "no such card" in done.stderr
    assert not up.processes()
    up.catalog.write_text(sound)
    done = up.run("--catalog", str(up.catalog), "--check", timeout_s=300)
    assert done.returncode == 0, done.stderr


def test_model_without_a_place_ends_with_the_reasons(up: Up) -> None:
    up.catalog.write_text(up.catalog.read_text().replace("256MiB", "900000GiB"))
    done = up.run("--catalog", str(up.catalog), "--check")
    assert done.returncode == 1
    assert "there is no place for it" in done.stderr
    assert "memory" in done.stderr


def test_a_ready_model_that_gives_no_token_is_told_and_the_rest_goes_on(up: Up) -> None:
    mute = [sys.executable, fake_engine.__file__, "--host", "{host}", "--port", "{port}"]
    mute += ["--default", json.dumps({"delay": 600})]
    text = up.catalog.read_text().replace('"llamacpp"', '"command"\nhealth_path = "/health"')
    words = f"command = {json.dumps(mute)}"
    up.catalog.write_text(text.replace('args = ["-c", "4096", "-np", "2"]', words))
    up.start("--catalog", str(up.catalog), "--answer", "1")
    up.wait_for(lambda: any("gave no token" in line for line in up.err), 60)
    told = next(line for line in up.err if "gave no token" in line)
    assert "tiny-test is ready, but gave no token in 1 s" in told
    assert told.rstrip().endswith("llmgwctl replace tiny-test starts it anew")
    (shown,) = ctl(up, "replicas", "--model", "tiny-test")
    assert shown["state"] == "ready"
    assert up.stop() == 0
    port = int((up.state_dir / "postgres_port").read_text())
    with socket.socket() as taken:
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        taken.bind(("127.0.0.1", port))
        taken.listen()
        checked = up.run("--catalog", str(up.catalog), "--answer", "1", "--check")
    assert checked.returncode == 1
    assert "no model answers" in checked.stderr
    assert int((up.state_dir / "postgres_port").read_text()) != port, "taken, so another"
    assert not up.processes()
