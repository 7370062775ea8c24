"""The processes of one controller: started again, stopped in order, never left behind."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

import httpx
import pytest

from controller.router.core import COMPILED
from sql.embedded import free_port
from tests.control.process import (
    ENVIRONMENT,
    MODULE,
    PATIENCE_S,
    Controller,
    alive,
    end,
    until,
)
from tests.fake_engine import FakeEngine

pytestmark = pytest.mark.slow


SUPERVISED = """
import sys
from controller.__main__ import main
sys.executable = sys.argv.pop(1)
main()
"""


@pytest.fixture
def engine():
    with FakeEngine({"tokens": 4}) as running:
        yield running


@pytest.fixture
def static(start, engine):
    """Starts a whole controller without a database before the fake engine."""

    def go(*flags: str) -> Controller:
        given = ("--endpoint", f"a={engine.url}=m", *flags)
        one = start(None, *given, role="all").ready()
        until(lambda: serves(one), "the router serves")
        return one

    return go


def serves(one: Controller) -> bool:
    try:
        return one.chat().status_code == 200
    except httpx.TransportError:
        return False


def refuses(one: Controller) -> bool:
    """Whether nobody listens to clients any more."""
    try:
        one.chat()
    except httpx.ConnectError:
        return True
    return False


def both_heed_signals(one: Controller) -> None:
    """Waits until both workers are past the time when a SIGHUP would end them."""
    until(lambda: len(one.events("router serves")) == 2, "both workers serve")


def restarted(one: Controller, name: str, before: int) -> int:
    """Waits for another process of this name."""
    return until(
        lambda: (now := one.children().get(name)) and now != before and now, f"{name} again"
    )


def test_a_killed_child_is_started_again_and_the_other_goes_on(static):
    one = static()
    before = one.children()
    assert sorted(before) == ["control", "router 0"]
    end(before["router 0"])
    restarted(one, "router 0", before["router 0"])
    assert one.get("/healthz")[0] == 200
    until(lambda: serves(one), "requests are served again")
    end(before["control"])
    assert serves(one)
    restarted(one, "control", before["control"])
    one.ready()
    said = one.events("child ended; it is started again")
    assert [(line["child"], line["code"]) for line in said] == [("router 0", -9), ("control", -9)]


def test_a_machine_that_has_no_process_to_give_costs_one_child_and_not_all(engine, tmp_path):
    python, away = tmp_path / "python", tmp_path / "away"
    python.write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
    python.chmod(0o700)
    one = Controller(tmp_path, None, "--endpoint", f"a={engine.url}=m", role="all")
    one.command = [sys.executable, "-c", SUPERVISED, str(python), *one.command[3:]]
    with one:
        until(lambda: serves(one), "the router serves")
        before = one.ready().children()
        python.rename(away)
        end(before["router 0"])
        until(lambda: "No such file" in one.words(), "it is told that it cannot be started")
        assert one.get("/healthz")[0] == 200
        away.rename(python)
        restarted(one, "router 0", before["router 0"])
        until(lambda: serves(one), "requests are served again")
        assert one.children()["control"] == before["control"]


def test_children_of_a_killed_supervisor_end_by_themselves(static):
    one = static()
    children = one.children()
    one.signal(signal.SIGKILL)
    one.process.wait(PATIENCE_S)
    until(lambda: not any(alive(pid) for pid in children.values()), "the children end")
    assert one.get("/healthz")[0] == 0
    with pytest.raises(httpx.TransportError):
        one.chat()


def test_a_stop_lets_streams_finish_while_control_answers(static, engine):
    one = static()
    children = one.children()
    got: list[bytes] = []
    first = threading.Event()

    def read() -> None:
        document = {
            "model": "m", "messages": [], "stream": True, "fake": {"tokens": 8, "hold_after": 4},
        }  # fmt: skip
        url = f"http://127.0.0.1:{one.client}/v1/chat/completions"
        with httpx.stream("POST", url, json=document, timeout=100) as answer:
            for part in answer.iter_raw():
                got.append(part)
                first.set()

    reader = threading.Thread(target=read)
    reader.start()
    assert first.wait(PATIENCE_S)
    one.signal(signal.SIGTERM)
    until(lambda: one.events("router drains"), "the router drains")
    until(lambda: refuses(one), "nobody new is let in")
    assert one.get("/healthz")[0] == 200
    assert alive(children["router 0"])
    engine.release()
    reader.join(PATIENCE_S)
    assert b"".join(got).endswith(b"data: [DONE]\n\n")
    assert b"".join(got).count(b"tok") == 8
    assert one.process.wait(PATIENCE_S) == 0
    assert not any(alive(pid) for pid in children.values())
    signals = [line["pid"] for line in one.events("signal")]
    assert signals == [children["control"]]


def test_a_stop_while_children_start_leaves_nobody(start, engine):
    one = start(None, "--endpoint", f"a={engine.url}=m", "--workers", "2", role="all")
    children = until(lambda: len(now := one.children()) == 3 and now, "three children")
    one.signal(signal.SIGTERM)
    assert one.process.wait(PATIENCE_S) == 0
    assert not any(alive(pid) for pid in children.values())


def test_without_postgres_requests_are_served_and_the_admin_api_says_what_it_lacks(static):
    one = static()
    answer = one.chat()
    assert answer.json()["choices"][0]["message"]["content"] == "tok" * 4
    assert one.get("/readyz") == (200, "ready\n")
    status, body = one.get("/api/v1/nodes")
    assert (status, "database" in json.loads(body)["error"]) == (501, True)
    up = "llmgw_scrape_up"
    until(lambda: one.metrics()[up, (("part", "router"),)] == 1, "the router tells")
    assert (up, (("part", "fleet"),)) not in one.metrics()


def test_A28_engines_keys_reach_workers_by_files_and_are_read_again_at_sighup(
    static, engine, tmp_path
):
    old, new, key, config = "sk-old-key", "sk-new-key", tmp_path / "key", tmp_path / "llmgw.toml"
    config.write_text(f'[endpoint_keys]\na = "{key}"\n')
    key.write_text(f"{old}\n")
    engine.default = {"tokens": 4, "api_key": old}
    one = static("--workers", "2", "--config", str(config))
    both_heed_signals(one)
    children = one.children()
    engine.default = {"tokens": 4, "api_key": new}
    assert one.chat().json()["error"]["code"] == "engine_refused_key"
    key.write_text(f"{new}\n")
    one.signal(signal.SIGHUP)
    until(lambda: len(one.events("the key of an endpoint is another")) == 2, "both workers read it")
    until(lambda: all(serves(one) for _ in range(20)), "both use it")
    assert one.children() == children
    seen = one.words() + one.get("/metrics")[1]
    for pid in (one.process.pid, *children.values()):
        seen += Path(f"/proc/{pid}/cmdline").read_text() + Path(f"/proc/{pid}/environ").read_text()
    assert old not in seen
    assert new not in seen


def nowhere(how: str) -> int:
    """A descriptor to which nothing can be written."""
    if how == "full disk":
        return os.open("/dev/full", os.O_WRONLY)
    reader, writer = os.pipe()
    os.close(reader)
    return writer


@pytest.mark.parametrize("how", ["full disk", "reader left"])
def test_log_lines_that_nobody_takes_cost_no_process(engine, how, tmp_path):
    one = Controller(tmp_path, None, "--endpoint", f"a={engine.url}=m", role="all")
    descriptor = nowhere(how)
    with subprocess.Popen(one.command, env=ENVIRONMENT, stderr=descriptor) as one.process:
        try:
            until(lambda: serves(one), "the router serves")
            before = one.children()["router 0"]
            end(before)  # which each of them would say
            restarted(one, "router 0", before)
            until(lambda: serves(one), "requests are served again")
        finally:
            one.signal(signal.SIGTERM)
        assert one.process.wait(PATIENCE_S) == 0
    os.close(descriptor)


def test_children_load_nothing_of_the_folder_where_they_were_started(engine, tmp_path):
    (tmp_path / "trio.py").write_text("raise SystemExit('a stranger')\n")
    one = Controller(tmp_path, None, "--endpoint", f"a={engine.url}=m", role="all")
    command = [sys.executable, "-P", *one.command[1:]]  # as the script llmgw-controller does
    with subprocess.Popen(command, env=ENVIRONMENT, cwd=tmp_path) as one.process:
        try:
            until(lambda: serves(one), "the router serves")
        finally:
            one.signal(signal.SIGTERM)


def test_workers_share_one_port_and_one_page(static):
    one = static("--workers", "2")
    until(lambda: len(one.children()) == 3, "two workers and control")
    for _ in range(30):
        assert serves(one)

    def requests() -> float:
        return sum(v for k, v in one.metrics().items() if k[0] == "llmgw_requests_total")

    # One more was the fixture's.
    until(lambda: requests() == 31, "both workers' requests in one page")
    compiled = [("llmgw_router_compiled", (("worker", number),)) for number in "01"]
    found = until(lambda: (now := one.metrics()).keys() >= {*compiled} and now, "both tell")
    assert [found[name] for name in compiled] == [COMPILED] * 2
    workers = [k for k in found if k[0] == "llmgw_client_connections"]
    assert workers == [
        ("llmgw_client_connections", (("worker", "0"),)),
        ("llmgw_client_connections", (("worker", "1"),)),
    ]


def test_a_router_that_runs_alone_says_that_it_is_one_of_its_workers(static, start, engine):
    told = "this is one worker of several: --role all starts all of them"
    flags = ("--endpoint", f"a={engine.url}=m", "--workers", "2")
    alone = start(None, *flags, role="router")
    until(lambda: serves(alone), "the router serves")
    assert [said["workers"] for said in alone.events(told)] == [2]
    assert not static("--workers", "2").events(told)


def test_sighup_ends_no_router_and_lines_of_all_workers_are_whole(start, engine):
    one = start(
        None, "--endpoint", f"a={engine.url}=m", "--workers", "2", role="all",
        LLMGW_ACCESS_LOG="stdout",
    ).ready()  # fmt: skip
    until(lambda: serves(one), "the router serves")
    both_heed_signals(one)
    before = one.children()
    one.signal(signal.SIGHUP)
    until(lambda: "SIGHUP" in one.words(), "control was told")
    for _ in range(20):
        assert serves(one)

    def lines() -> list[dict[str, object]]:
        whole = one.words().rpartition("\n")[0]
        given = [text for text in whole.splitlines() if text.startswith('{"time"')]
        return [json.loads(text) for text in given]

    until(lambda: len(lines()) == 21, "a line for each request")
    assert {line["outcome"] for line in lines()} == {"ok"}
    assert one.children() == before


def test_a_killed_workers_counters_stay_in_the_sum(static):
    one = static("--workers", "2")
    until(lambda: len(one.children()) == 3, "two workers and control")
    for _ in range(20):
        assert serves(one)

    def requests() -> float:
        return sum(v for k, v in one.metrics().items() if k[0] == "llmgw_requests_total")

    def workers() -> int:
        return sum(k[0] == "llmgw_client_connections" for k in one.metrics())

    until(lambda: workers() == 2 and requests() == 21, "both are told of")
    before = one.children()["router 0"]
    end(before)
    restarted(one, "router 0", before)
    until(lambda: (now := requests()) >= 21 and workers() == 2 and now, "it is told of again")
    assert requests() == 21
    until(lambda: all(serves(one) for _ in range(10)), "both serve")
    until(lambda: requests() >= 31, "what they serve is counted")


@pytest.mark.parametrize("flag", ["--listen", "--admin-listen"])
def test_H04_a_taken_port_is_named_with_its_flag_and_ends_all(flag):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        place = f"127.0.0.1:{taken.getsockname()[1]}"
        free = f"127.0.0.1:{free_port()}"
        ports = {"--listen": free, "--admin-listen": free, flag: place}
        given = [word for pair in ports.items() for word in pair]
        done = subprocess.run(
            [*MODULE, "--endpoint", "a=http://127.0.0.1:9=m", *given],
            env=ENVIRONMENT, capture_output=True, text=True, timeout=60, check=False,
        )  # fmt: skip
    assert done.returncode == 1
    wanted = f"llmgw-controller: {place} is taken by another program; choose another with {flag}"
    assert wanted in done.stderr, done.stderr
    assert "Traceback" not in done.stderr


def test_H04_another_controller_does_not_share_the_client_port_unasked(static):
    one = static()
    place = f"127.0.0.1:{one.client}"
    done = subprocess.run(
        [*MODULE, "--endpoint", "a=http://127.0.0.1:9=m", "--listen", place],
        env=ENVIRONMENT, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 1
    assert f"{place} is taken by another program" in done.stderr
    assert one.chat().status_code == 200


def asked(one: Controller, number: int) -> list[socket.socket]:
    """So many streams, each asked for on a connection of its own."""
    body = json.dumps({"model": "m", "messages": [], "stream": True}).encode()
    head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: t\r\ncontent-type: application/json\r\n"
    found = []
    for _ in range(number):
        found.append(socket.create_connection(("127.0.0.1", one.client), PATIENCE_S))
        found[-1].sendall(head + b"content-length: %d\r\n\r\n" % len(body) + body)
    return found


@pytest.mark.parametrize("hard", ["", "256"])
def test_a_low_limit_of_descriptors_fails_no_engine(engine, tmp_path, hard):
    """The soft one is a shell's habit; under the hard one clients wait for each other."""
    config = tmp_path / "llmgw.toml"
    config.write_text(f'endpoints = ["a={engine.url}=m"]\n[limits]\nconnections = 200\n')
    one = Controller(tmp_path, None, "--config", str(config), role="router")
    one.command = ["prlimit", f"--nofile=256:{hard}", *one.command]
    with one:
        until(lambda: serves(one), "the router serves")
        engine.default = {"tokens": 4, "hold_after": 1}
        for stream in asked(one, 150):
            assert stream.recv(12) == b"HTTP/1.1 200"
            stream.close()
        assert not one.events("a replica fails and gets probes only")
        told = one.events(
            "fewer client connections than limits.connections: raise its limit of open files"
        )
        assert [line["connections"] for line in told] == ([64] if hard else [])
