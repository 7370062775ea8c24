"""A Postgres that can be killed, clients under load, and kills: what chaos tests are made of."""

from __future__ import annotations

import http.client
import json
import random
import shutil
import signal
import tempfile
import threading
import time
from collections import Counter
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import psutil
import psycopg

from sql import embedded, logins, migrate
from tests.control.process import Controller, end, until

if TYPE_CHECKING:
    from collections.abc import Iterator

KEY = "sk-chaos"


class Postgres:
    """A server of our own, which can be killed and comes back with what it had committed."""

    def __init__(self, base: Path) -> None:
        self._base = base
        self._port = embedded.free_port()
        self.start()
        migrate.upgrade(self.server.url)
        with self.connect() as connection:
            logins.ensure(connection, "chaos", "llmgw_controller", "test-only")
        rest = self.server.url.rpartition("@")[2]
        self.url = f"postgresql://chaos:test-only@{rest}"

    def start(self) -> None:
        # What was committed must be there after a kill of the process, if not of the machine.
        options = {"synchronous_commit": "on", "max_wal_size": "128MB"}
        self.server = embedded.start(
            self._base, port=self._port, fast_and_unsafe=True, options=options
        )

    def kill(self) -> None:
        """All processes at once, without a word."""
        parent = psutil.Process(self.server.process.pid)
        family = [parent, *parent.children(recursive=True)]
        for process in family:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        self.server.process.wait(60)
        psutil.wait_procs(family[1:], 60)

    def connect(self) -> psycopg.Connection[Any]:
        return psycopg.connect(self.server.url, autocommit=True)

    def rows(self, query: str, *args: object) -> list[tuple[Any, ...]]:
        with self.connect() as connection:
            return connection.execute(query, args or None).fetchall()  # type: ignore[arg-type]


@contextmanager
def postgres() -> Iterator[Postgres]:
    base = Path(tempfile.mkdtemp(prefix="llmgw-chaos-pg-", dir="/var/tmp"))
    made = Postgres(base)
    try:
        yield made
    finally:
        embedded.stop(made.server.process)
        shutil.rmtree(base, ignore_errors=True)


class Load:
    """Clients that send all the time and remember what they got whole."""

    clients = 4
    pause_s = 0.02
    """After an answer that was not whole."""

    def __init__(self, port: int, seed: int) -> None:
        self._port = port
        self._random = random.Random(seed)
        self._lock = threading.Lock()
        self._stopping = threading.Event()
        self.sent: dict[str, int] = {}
        self.whole: dict[str, int] = {}
        self.ends: Counter[str] = Counter()
        self._threads = [
            threading.Thread(target=self._run, args=(number,)) for number in range(self.clients)
        ]

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopping.set()
        for thread in self._threads:
            thread.join(60)

    def _run(self, client: int) -> None:
        number = 0
        while not self._stopping.is_set():
            number += 1
            name = f"c{client}-{number}"
            with self._lock:
                tokens, stream = self._random.randint(1, 9), self._random.random() < 0.5
                self.sent[name] = tokens
            if self._ask(name, tokens, stream=stream):
                with self._lock:
                    self.whole[name] = tokens
            else:
                time.sleep(self.pause_s)

    def _ask(self, name: str, tokens: int, *, stream: bool) -> bool:
        end, _ = self.send(name, self.body(tokens, stream=stream))
        self.ended(name, end)
        return end == "200"

    def key(self, name: str) -> str:
        """Of the request with this name."""
        return KEY

    def body(self, tokens: int, *, stream: bool) -> dict[str, Any]:
        """What is asked for."""
        return {"model": "m", "stream": stream, "messages": [], "fake": {"tokens": tokens}}

    def ended(self, name: str, end: str) -> None:
        """Remember how a request ended."""
        with self._lock:
            self.ends[end] += 1

    def send(self, name: str, body: dict[str, Any]) -> tuple[str, bytes]:
        """How it ended ("200", the code of a refusal, a broken connection's error); the answer."""
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=60)
        try:
            headers = {"Authorization": f"Bearer {self.key(name)}", "X-Request-Id": name}
            connection.request("POST", "/v1/chat/completions", json.dumps(body), headers)
            answer = connection.getresponse()
            told = answer.read()  # raises when the last byte does not come
        except (OSError, http.client.HTTPException) as error:
            return type(error).__name__, b""
        finally:
            connection.close()
        return "200" if answer.status == 200 else json.loads(told)["error"]["code"], told

    def more(self, count: int) -> None:
        """Wait until so many more answers are whole."""
        wanted = len(self.whole) + count
        enough = f"{count} more answers, after {self.ends}"
        until(lambda: len(self.whole) >= wanted, enough, 120)


class Watch:
    """Asks for (what, number) all the time, on a connection of its own, and keeps the largest."""

    def __init__(self, database: Postgres, query: str, pace_s: float = 0.005) -> None:
        self._database = database
        self._query = query
        self._pace_s = pace_s
        self._stopping = threading.Event()
        self.most: dict[str, float] = {}
        self.looks = 0
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopping.set()
        self._thread.join(60)

    def _run(self) -> None:
        while not self._stopping.is_set():
            with suppress(psycopg.OperationalError), self._database.connect() as connection:
                self._look(connection)
            time.sleep(self._pace_s)  # it was killed

    def _look(self, connection: psycopg.Connection[Any]) -> None:
        while not self._stopping.is_set():
            for what, found in connection.execute(self._query).fetchall():  # type: ignore[arg-type]
                self.most[what] = max(self.most.get(what, float(found)), float(found))
            self.looks += 1
            time.sleep(self._pace_s)


def kill_router(controller: Controller, worker: int) -> None:
    end(until(lambda: controller.children().get(f"router {worker}"), "a router runs", 60))


def knows_keys(controller: Controller, workers: int) -> None:
    """All routers have reached Postgres: they serve on while it is away."""
    known = [("llmgw_keys_known", (("worker", str(worker)),)) for worker in range(workers)]

    def all_known() -> bool:
        status, _ = controller.get("/metrics")
        found = controller.metrics() if status == 200 else {}
        return all(found.get(name) for name in known)

    until(all_known, "all routers know keys", 60)


def kill_all(controller: Controller) -> None:
    """The supervisor and everything that it runs."""
    parent = psutil.Process(controller.process.pid)
    for process in [parent, *parent.children(recursive=True)]:
        with suppress(psutil.NoSuchProcess):
            process.send_signal(signal.SIGKILL)
    controller.process.wait(60)
