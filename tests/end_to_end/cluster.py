"""Two controllers and two nodes on a Postgres of their own, which tests may stop and start."""

from __future__ import annotations

import http.client
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import psutil
import psycopg

from sql import embedded, logins, migrate
from tests import fake_engine
from tests.conftest import PASSWORD, WORKER, Database
from tests.end_to_end.fleet import Fleet, Program
from tests.end_to_end.traffic import Stream, Traffic
from tests.tiny_model import tiny_gguf

if TYPE_CHECKING:
    from collections.abc import Iterator

ADDRESSES = {"n1": "127.0.0.1", "n2": "127.0.0.2"}
SMALL = {"cpus": 0.1, "memory": "64MiB"}
SETTINGS = {"guard": 0, "poll_idle": 500, "stable": 600}
"""One guard would cover every test, and each node's silence must be seen within a test."""


class Cluster(Fleet):
    """A fleet whose parts are killed by name."""

    def __init__(self, database: Database, folder: Path, base: Path) -> None:
        super().__init__(database, folder)
        self._base, self.server = base, database.server
        self.weights = tiny_gguf(folder / "tiny.gguf")
        # Of its worker alone; other runs on this machine have mostly others.
        first = 31000 + (os.getpid() % 10 * 4 + WORKER % 4) * 40
        self.port_ranges = {
            n: (first + 20 * i, first + 20 * i + 19) for i, n in enumerate(ADDRESSES)
        }
        self.controllers: list[Program] = []
        self.agents: dict[str, Program] = {}

    def start(self) -> None:
        """Everything, with a key."""
        for name, value in SETTINGS.items():
            self.set(name, value)
        self.controllers = [self.controller(), self.controller()]
        self.key = self.post("/keys", name="test")["key"]
        for node in ADDRESSES:
            self.join(node)
        self.wait(lambda: self.nodes() == {"n1": "ready", "n2": "ready"}, "both nodes to be ready")

    def set(self, name: str, value: float) -> None:
        self.row(
            "update llmgw_core.setting set value = %s where name = %s returning 1", value, name
        )

    def join(self, node: str, *, folder: str = "") -> None:
        """Start a node's agent. A ``folder`` of another name is a new machine to it."""
        state = self.folder / (folder or node)
        arguments = ["agent", "--node", node, "--state-dir", str(state), "--on-exit", "stop"]
        arguments += [
            "--mgmt-addr",
            ADDRESSES[node],
            "--ports",
            "{}-{}".format(*self.port_ranges[node]),
        ]
        if not (state / "node_secret").exists():
            token = self.folder / f"{node}.token"
            token.write_text(self.post("/nodes/enroll", node=node)["token"])
            arguments += ["--enrolment-token-file", str(token)]
        self.agents[node] = self._run(f"agent-{node}", arguments, self.database.agent_url)

    def post(self, path: str, **body: Any) -> Any:
        return self.call("POST", path, body)

    def call(self, verb: str, path: str, body: Any = None) -> Any:
        """The last controller's admin API: what llmgwctl does, without starting a process."""
        connection = http.client.HTTPConnection("127.0.0.1", self.ports[-1][1], timeout=60)
        try:
            headers = {"Content-Type": "application/json"}
            connection.request(verb, f"/api/v1{path}", json.dumps(body or {}), headers)
            answer = connection.getresponse()
            document = json.loads(answer.read())
            assert answer.status < 300, (verb, path, answer.status, document)
            return document
        finally:
            connection.close()

    def row(self, query: str, *values: Any) -> tuple[Any, ...] | None:
        with self.database.connect() as connection:
            return connection.execute(query, values or None).fetchone()

    def rows(self, query: str, *values: Any) -> list[tuple[Any, ...]]:
        with self.database.connect() as connection:
            return connection.execute(query, values or None).fetchall()

    def nodes(self) -> dict[str, str]:
        return dict(self.rows("select id, state from llmgw.nodes"))

    def model(self, name: str, *, least: int = 1, **profile: Any) -> None:
        """Add a model (the tiny one unless the profile says otherwise)."""
        document = {
            "name": name, "source": f"file:{self.weights}", "min_replicas": least,
            "profiles": [{"name": "cpu", "engine": "llamacpp",
                          "args": ["-c", "4096", "-np", "2", "-t", "1"], **SMALL, **profile}],
        }  # fmt: skip
        self.post("/models", **document)

    def fake(self, name: str, *, least: int = 1, **default: Any) -> None:
        """Add a model whose engine misbehaves on command and records its requests."""
        program = [sys.executable, fake_engine.__file__, "--host", "{host}", "--port", "{port}"]
        program += ["--default", json.dumps(default)]
        self.model(name, least=least, engine="command", command=program, args=[],
                   health_path="/health")  # fmt: skip

    def serving(self, name: str, count: int = 1, limit_s: float = 60, answer_s: float = 60) -> None:
        """Wait until exactly so many replicas are ready, none is on its way and routers know."""
        query = "select array_agg(state order by id) from llmgw.replicas where model = %s"
        want = (["ready"] * count,)
        self.wait(lambda: self.row(query, name) == want, f"{count} ready of {name}", limit_s)
        for number in range(len(self.ports)):
            self.wait(lambda n=number: self.answers(n, name), f"router {number}: {name}", answer_s)

    def shards(self, name: str) -> list[Shard]:
        """The live shards of a model."""
        found = self.rows(
            "select s.id, s.replica, s.node, s.pid, s.port from llmgw.shards s"
            " where s.model = %s and s.state = 'ready' order by s.id", name,
        )  # fmt: skip
        return [Shard(*row) for row in found]

    def shard(self, name: str) -> Shard:
        found: list[Shard] = self.wait(lambda: self.shards(name), f"a ready shard of {name}")
        assert len(found) == 1, found
        return found[0]

    def traffic(self, name: str, *numbers: int) -> Traffic:
        """Requests to all routers, or to those of the controllers named by number."""
        ports = [self.ports[n][0] for n in numbers or range(len(self.ports))]
        return Traffic(ports, self.key, name)

    def stream(self, name: str, number: int = 0, **more: Any) -> Stream:
        return Stream(self.ports[number][0], self.key, name, **more)

    def remove(self, *names: str) -> None:
        """Out of the catalog; nobody waits for the drains, which take some seconds."""
        for name in names:
            self.call("DELETE", f"/models/{name}")

    def gone(self, name: str) -> None:
        query = "select count(*) from llmgw.replicas where model = %s"
        self.wait(lambda: self.row(query, name) == (0,), f"{name} to be gone")

    def say(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """`llmgwctl` as people see it, to its end."""
        command = [sys.executable, "-m", "controller.cli"]
        command += ["--server", f"127.0.0.1:{self.ports[0][1]}", *arguments]
        return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)

    def kill_controller(self, number: int) -> None:
        """All its processes at once, as when the machine dies."""
        program = self.controllers.pop(number)
        self.ports.pop(number)
        for process in _family(program):
            process.kill()
        program.process.wait(60)

    def leader(self) -> int:
        """Number of the controller whose control process leads."""
        query = "select pid from llmgw.controllers where leads is not null and alive"
        (pid,) = self.wait(lambda: self.row(query), "a leader")
        families = [{process.pid for process in _family(one)} for one in self.controllers]
        (number,) = (n for n, family in enumerate(families) if pid in family)
        return number

    def stop_postgres(self) -> None:
        embedded.stop(self.server.process)

    def start_postgres(self) -> None:
        """On the same data and port."""
        port = int(urlsplit(self.server.url).port or 0)
        binaries = self.server.bin_dir
        self.server = embedded.start(
            self._base / "pg", port=port, fast_and_unsafe=True, binaries=binaries
        )


def _family(program: Program) -> list[psutil.Process]:
    """The supervisor and its children."""
    parent = psutil.Process(program.process.pid)
    return [parent, *parent.children(recursive=True)]


class Shard:
    """A running engine."""

    def __init__(self, id_: int, replica: int, node: str, pid: int, port: int) -> None:
        self.id, self.replica, self.node, self.pid, self.port = id_, replica, node, pid, port

    @property
    def address(self) -> tuple[str, int]:
        return ADDRESSES[self.node], self.port

    @property
    def alive(self) -> bool:
        return psutil.pid_exists(self.pid)

    def kill(self, number: signal.Signals = signal.SIGKILL) -> None:
        os.killpg(self.pid, number)


def clusters(base: Path) -> Iterator[Cluster]:
    """One running cluster below ``base``, cleared afterwards."""
    base.chmod(0o755)  # as root, Postgres runs as nobody
    given = os.environ.get("LLMGW_TEST_POSTGRES_BIN")
    folder = base / "fleet"
    folder.mkdir()
    server = embedded.start(
        base / "pg", fast_and_unsafe=True, binaries=Path(given) if given else None
    )
    cluster = None
    try:
        with Cluster(_database(server), folder, base) as cluster:
            cluster.start()
            yield cluster
    finally:
        embedded.stop(cluster.server.process if cluster else server.process)
        shutil.rmtree(base, ignore_errors=True)


def _database(server: embedded.Server) -> Database:
    migrate.upgrade(server.url)
    names = ("controller", "agent", "read")
    with psycopg.connect(server.url, autocommit=True) as connection:
        for role in names:
            logins.ensure(connection, f"test_{role}", f"llmgw_{role}", PASSWORD)
    rest = server.url.rpartition("@")[2]
    controller, agent, read = (f"postgresql://test_{role}:{PASSWORD}@{rest}" for role in names)
    return Database("postgres", server.url, controller, agent, read, server)


def database_to_monotonic(at: float) -> float:
    """A time of the database, which runs on this machine, on the monotonic clock."""
    return at - time.clock_gettime(time.CLOCK_REALTIME) + time.monotonic()
