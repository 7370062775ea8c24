"""G01: one document on stdout whatever happens. G02: exit codes that tell. Terminals and pipes."""

from __future__ import annotations

import json
import re
import signal
import socket
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import trio

from controller.cli.client import server_url
from controller.cli.root import COMMANDS, hoisted
from tests.api.served import TINY
from tests.cli.served import ENVIRONMENT, Ctl, as_process, in_thread, on_terminal

READS = [
    "status",
    "nodes",
    "node n1",
    "controllers",
    "models",
    "models --prices",
    "replicas",
    "explain-placement tiny",
    "fit tiny",
    "decisions",
    "weights",
    "weights orphans",
    "keys",
    "keys list",
    "budgets",
    "budgets events",
    "limits",
    "keys list --scope acme --state active",
    "scopes",
    "scopes list --below acme --deleted",
    "users",
    "audit --object key --since 1h",
    "usage",
    "usage --by key --top 3",
    "usage rows",
    "node show n2",
    "doctor n1",
    "events",
    "nvlink",
    "fabrics",
    "capacity",
]
WRITES = [
    "cordon n1", "uncordon n1", "drain n1", "node enroll n7", "node revoke n2", "keys create k",
    "keys create k --scope acme --ips 10.0.0.0/8 --tag app=x", "keys rotate {key} --grace 1m",
    "keys move {key} --to acme",
    "keys change {key} --models tiny --ips any --expires never",
    "keys change {key} --fallback none", "keys create k --fallback timeout,error",
    "scopes create org beta --fallback refusal", "scopes change acme --fallback inherit",
    "scopes change acme --weight 2",
    "keys move {key} --out", "scopes create team acme/ml",
    "scopes rename acme/ml nn", "scopes move acme/nn --top", "scopes delete nn",
    "scale tiny --min 2", "weights collect --all",
    "gpu mark n1 1 unhealthy --reason fan",
    "replace tiny", "replace 1 --cancel", "what-if --scale tiny=2",
    "model remove tiny", "drain n3 --wait --timeout 1s",
]  # fmt: skip
REFUSED = {
    "node nope": 1,
    "cordon nope": 1,
    "drain nope --wait": 1,
    "scale nope --min 1": 1,
    "replace nope": 1,
    "what-if --drain nope": 1,
    "what-if --scale tiny": 2,
    "replace 99": 1,
    "replace": 2,
    "scale tiny --min 3 --max 1": 1,
    "model remove nope": 1,
    "model add /nope": 1,
    "apply -f /nope": 1,
    "explain-placement nope": 1,
    "fit nope": 1,
    "fit tiny --profile nope": 1,
    "fit": 2,
    "keys revoke nope": 1,
    "budgets set --scope nope --micros 5 --period day": 1,
    "budgets set": 2,
    "budgets remove 7": 1,
    "limits set --key nope --parallel 1": 1,
    "limits remove x": 1,
    "keys rotate nope": 1,
    "keys move nope --to nope": 1,
    "keys move nope": 2,
    "keys change nope": 2,
    "keys change nope --name x": 1,
    "keys create k --scope nope": 1,
    "keys create k --ips 10.0.0.1/8": 1,
    "keys create k --tag x": 2,
    "scopes create org a/b": 1,
    "scopes create org 12": 1,
    "scopes create tribe a": 2,
    "scopes change acme": 2,
    "scopes change acme --fallback maybe": 1,
    "scopes change nope --fallback none": 1,
    "scopes change acme --weight 101": 1,
    "scopes create org b --fallback error,": 1,
    "keys change nope --fallback none": 1,
    "keys create k --fallback always": 1,
    "scopes delete nope": 1,
    "scopes move nope --top": 1,
    "scopes move nope": 2,
    "scopes rename nope n": 1,
    "users remove nope": 1,
    "audit --since soon": 2,
    "keys create k --models nope": 1,
    "node revoke nope": 1,
    "logs nope": 1,
    "logs n3": 1,
    "doctor nope": 1,
    "gpu mark nope 0 healthy --reason x": 1,
    "gpu forget n1 0": 1,
    "topology nope": 1,
    "topology nope --scan": 1,
    "weights collect /nope": 1,
    "weights collect": 2,
    "weights colect --all": 2,
    "db status": 1,
    "db upgrade": 1,
    "nodez": 2,
    "": 2,
    "nodes extra": 2,
    "nodes --wrong": 2,
    "node": 2,
    "scale tiny": 2,
    "scale tiny --min x": 2,
    "drain n1 --timeout soon": 2,
    "decisions --since yesterday": 2,
    "events --since soon": 2,
    "gpu mark n1 0 healthy": 2,
    "topology": 2,
    "logs n1 -f": 2,
    "db psql": 2,
    "drain n1 --wait --timeout 0s": 124,
}


@pytest.fixture
async def full(ctl, tmp_path):
    (tmp_path / "m.json").write_text(json.dumps(TINY))
    await ctl.good("model", "add", str(tmp_path / "m.json"))
    await ctl.good("scopes", "create", "org", "acme")
    return ctl


async def test_G01_every_command_prints_one_document(full):
    key = json.loads(await full.good("keys", "create", "k", "--json"))["id"]
    for line in READS + WRITES:
        done = await full(*line.format(key=key).split(), "--json")
        assert done.code == 0, (line, done)
        assert done.document is not None, line


async def test_G02_failures_have_their_codes_and_G01_their_document(full):
    for line, code in REFUSED.items():
        done = await full("--json", *line.split())
        assert done.code == code, (line, done)
        assert list(done.document) == ["error"], line
        assert done.document["error"] in done.err, line
        if line not in ("logs n1 -f", "db psql"):  # wrong with --json only
            plain = await full(*line.split())
            assert (plain.code, plain.out) == (code, ""), line
            assert plain.err.startswith(("llmgwctl: ", "Draining")), (line, plain)


def test_every_command_is_covered():
    named = {line.split()[0] for line in [*READS, *WRITES, *REFUSED] if line}
    assert set(COMMANDS) - named == {"up", "engine-check"}  # which ask no admin API


async def test_G02_nobody_there(full):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        gone = Ctl(f"127.0.0.1:{taken.getsockname()[1]}")
        for line in READS + WRITES:
            done = await gone(*line.split(), "--json")
            assert done.code == 1, line
            said = done.document["error"]
            assert gone.url in said
            assert "does --server point at its admin port" in said


async def answering(stream: trio.SocketStream, answer: bytes | None) -> None:
    async with stream:
        await stream.receive_some(65536)
        if answer is None:
            await trio.sleep_forever()
        await stream.send_all(answer)


async def other_server(nursery: trio.Nursery, answer: bytes | None) -> Ctl:
    listeners = await nursery.start(
        partial(trio.serve_tcp, lambda s: answering(s, answer), 0, host="127.0.0.1")
    )
    return Ctl(f"127.0.0.1:{listeners[0].socket.getsockname()[1]}")


async def test_G02_silence_is_a_timeout(nursery):
    silent = await other_server(nursery, None)
    done = await silent("nodes", "--json", "--request-timeout", "0.3")
    assert done.code == 124
    assert "within 0.3 s" in done.document["error"]
    nursery.cancel_scope.cancel()


@pytest.mark.parametrize(
    "answer",
    [
        b'HTTP/1.1 404 Not Found\r\nContent-Length: 23\r\n\r\n{"error":{"type":"x"}} ',
        b"HTTP/1.1 200 OK\r\nContent-Length: 6\r\n\r\n<html>",
        b"SSH-2.0-OpenSSH\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 600\r\n\r\n[]",
        b"",
    ],
)
async def test_G02_something_else_there(nursery, answer):
    other = await other_server(nursery, answer)
    done = await other("nodes", "--json")
    assert done.code == 1
    assert "admin port" in done.document["error"]
    nursery.cancel_scope.cancel()


async def test_G02_drain_times_out_and_says_that_it_goes_on(full):
    done = await full("drain", "n1", "--wait", "--timeout", "0s", "--json")
    assert done.code == 124
    assert "still has 1 replica" in done.document["error"]


async def test_G02_a_drain_of_a_silent_node_says_that_nobody_knows(full, database):
    with database.connect(database.url) as db:
        db.execute("update llmgw_core.beat set seen_at = seen_at - interval '1 h'")
    done = await full("drain", "n1", "--wait", "--timeout", "0s", "--json")
    assert done.code == 124
    assert (
        "it is lost: whether they run there still is known when its agent"
        in (done.document["error"])
    )


async def draining(ctl: Ctl) -> None:
    """Until n1 drains."""
    with trio.fail_after(60):
        while "draining" not in (await ctl("node", "n1")).out:
            await trio.sleep(0.02)


@pytest.mark.slow
async def test_G02_an_uncordon_ends_the_wait(full, monkeypatch):
    monkeypatch.setattr("controller.cli.node.POLL_S", 0.05)
    async with trio.open_nursery() as nursery:
        ended = []

        async def drain() -> None:
            ended.append(
                await trio.to_thread.run_sync(
                    partial(as_process, full.url, "drain", "n1", "--wait", "--timeout", "60s")
                )
            )

        nursery.start_soon(drain)
        await draining(full)
        await full.good("uncordon", "n1")
    assert ended[0].code == 1
    assert "somebody gave up its drain" in ended[0].err


@pytest.mark.slow
async def test_G02_interrupt_is_130(full):
    command = [sys.executable, "-m", "controller.cli", "drain", "n1", "--wait", "--json"]
    process = subprocess.Popen(
        command,
        env=ENVIRONMENT | {"LLMGW_SERVER": full.url},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    with process:
        await draining(full)
        process.send_signal(signal.SIGINT)
        out, _ = await trio.to_thread.run_sync(process.communicate)
    assert process.returncode == 130
    assert json.loads(out) == {"error": "interrupted"}


@pytest.mark.slow
async def test_G02_closed_pipe_and_full_disk_are_no_success(full):
    reader, writer = socket.socketpair()
    reader.close()
    closed = await full.process("nodes", stdout=writer.fileno())
    writer.close()
    assert (closed.code, closed.err) == (1, "")
    for arguments in (["nodes"], ["nodes", "--json"]):
        with Path("/dev/full").open("w") as disk:
            done = await full.process(*arguments, stdout=disk)
        assert done.code == 1
        assert "no space is left" in done.err
        assert "Traceback" not in done.err
    shut = await full.process("nodes", preexec_fn=lambda: __import__("os").close(1), stdout=None)
    assert shut.code == 1


@pytest.mark.slow
async def test_G01_terminals_get_colours_and_pipes_whole_lines(full):
    terminal = partial(trio.to_thread.run_sync, partial(on_terminal, full.url, "nodes"))
    coloured = (await terminal()).out
    assert "\x1b[" in coloured
    plain = await trio.to_thread.run_sync(
        partial(on_terminal, full.url, "nodes", env={"NO_COLOR": "1"})
    )
    assert "\x1b" not in plain.out
    assert max(map(len, plain.out.splitlines())) > 60  # never folded to the 40 columns
    piped = await full.process("nodes", env={"FORCE_COLOR": "1", "COLUMNS": "20"})
    ages = re.compile(r"\d+s ago")
    assert ages.sub("", piped.out) == ages.sub("", plain.out)
    for arguments in (["nodes", "--json"], ["drain", "n1", "--json"], ["node", "nope", "--json"]):
        done = await trio.to_thread.run_sync(partial(on_terminal, full.url, *arguments))
        json.loads(done.out)


@pytest.mark.slow
async def test_G01_slow_postgres_and_help(full, database):
    with database.connect() as db, db.transaction():
        db.execute("lock table llmgw_core.node in access exclusive mode")
        done = await full("cordon", "n1", "--json")
    assert done.code == 1
    assert "did not answer in time" in done.document["error"]
    for arguments in (["--help"], ["nodes", "--help"], ["--version"]):
        helped = await full(*arguments, "--json")
        assert helped.code == 0
        assert helped.document["text"]


def test_global_options_stand_anywhere():
    assert hoisted(["nodes", "--json", "--server", "x", "-v"]) == [
        "--json",
        "--server",
        "x",
        "nodes",
        "-v",
    ]
    assert hoisted(["db", "psql", "--server=x", "--", "--json"]) == [
        "--server=x",
        "db",
        "psql",
        "--",
        "--json",
    ]
    assert hoisted(["--token"]) == ["--token"]


def test_server_names():
    assert server_url("127.0.0.1:9090") == "http://127.0.0.1:9090"
    assert server_url("gw") == "http://gw:9090"
    assert server_url("[::1]:1") == "http://[::1]:1"
    assert server_url("https://gw.example/") == "https://gw.example"
    for wrong in ("", "ftp://x", "http://", "gw:x", "http://gw/path"):
        with pytest.raises(ValueError):  # noqa: PT011
            server_url(wrong)
    assert in_thread(["--server", "ftp://x", "nodes"]).code == 2
