"""Usage adds up to the token while routers and Postgres are killed under load (B02, kill -9)."""

from __future__ import annotations

import hashlib
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
import pytest

from sql import embedded, logins, migrate
from tests.control.process import Controller, end, until
from tests.fake_engine import FakeEngine

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
KEY = "sk-chaos"
CLIENTS = 4
WORKERS = 2


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
        self.server.process.wait(10)
        psutil.wait_procs(family[1:], 10)

    def connect(self) -> psycopg.Connection[Any]:
        return psycopg.connect(self.server.url, autocommit=True)

    def rows(self, query: str) -> list[tuple[Any, ...]]:
        with self.connect() as connection:
            return connection.execute(query).fetchall()  # type: ignore[arg-type]


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

    def __init__(self, port: int, seed: int) -> None:
        self._port = port
        self._random = random.Random(seed)
        self._lock = threading.Lock()
        self._stopping = threading.Event()
        self.sent: dict[str, int] = {}
        self.whole: dict[str, int] = {}
        self.ends: Counter[str] = Counter()
        self._threads = [
            threading.Thread(target=self._run, args=(number,)) for number in range(CLIENTS)
        ]

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopping.set()
        for thread in self._threads:
            thread.join(30)

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
                time.sleep(0.02)

    def _ask(self, name: str, tokens: int, *, stream: bool) -> bool:
        body = {"model": "m", "stream": stream, "messages": [], "fake": {"tokens": tokens}}
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=20)
        try:
            headers = {"Authorization": f"Bearer {KEY}", "X-Request-Id": name}
            connection.request("POST", "/v1/chat/completions", json.dumps(body), headers)
            answer = connection.getresponse()
            answer.read()  # raises when the last byte does not come
        except (OSError, http.client.HTTPException) as error:
            self.ends[type(error).__name__] += 1
            return False
        finally:
            connection.close()
        self.ends[str(answer.status)] += 1
        return answer.status == 200

    def more(self, count: int) -> None:
        """Wait until so many more answers are whole."""
        wanted = len(self.whole) + count
        enough = f"{count} more answers, after {self.ends}"
        until(lambda: len(self.whole) >= wanted, enough, 60)


def kill_router(controller: Controller, worker: int) -> None:
    end(until(lambda: controller.children().get(f"router {worker}"), "a router runs"))


def knows_keys(controller: Controller) -> None:
    """Both routers have reached Postgres: they serve on while it is away."""
    known = [("llmgw_keys_known", (("worker", str(worker)),)) for worker in range(WORKERS)]

    def all_known() -> bool:
        status, _ = controller.get("/metrics")
        found = controller.metrics() if status == 200 else {}
        return all(found.get(name) for name in known)

    until(all_known, "both routers know keys")


def kill_all(controller: Controller) -> None:
    """The supervisor and everything that it runs."""
    parent = psutil.Process(controller.process.pid)
    for process in [parent, *parent.children(recursive=True)]:
        with suppress(psutil.NoSuchProcess):
            process.send_signal(signal.SIGKILL)
    controller.process.wait(10)


def prepare(database: Postgres) -> None:
    with database.connect() as connection:
        connection.execute(
            "insert into llmgw_core.api_key (id, hash, name, created_by)"
            " values ('chaos0', %s, 'k', 'test')",
            (hashlib.sha256(KEY.encode()).digest(),),
        )
        connection.execute(
            "insert into llmgw_core.price (model, since, prompt, completion, set_by)"
            " values ('m', now() - interval '1 day', 1000000, 3000000, 'test')"
        )


def test_B02_usage_adds_up_through_kills_of_routers_and_postgres(tmp_path: Path) -> None:
    state = tmp_path / "state"
    with postgres() as database, FakeEngine() as engine:
        prepare(database)
        flags = ("--workers", str(WORKERS), "--endpoint", f"e={engine.url}=m")
        first = Controller(tmp_path, database.url, *flags, role="all", LLMGW_STATE_DIR=str(state))
        again = Controller(
            tmp_path, database.url, *flags, "--listen", f"127.0.0.1:{first.client}",
            role="all", LLMGW_STATE_DIR=str(state),
        )  # fmt: skip
        with Load(first.client, seed=1) as load:
            with first:
                first.ready()
                load.more(100)
                for worker in (0, 1, 0):
                    kill_router(first, worker)
                    load.more(100)
                    knows_keys(first)
                database.kill()
                load.more(200)
                kill_router(first, 1)
                load.more(100)
                database.start()
                load.more(100)
                knows_keys(first)
                database.kill()
                load.more(50)
                kill_all(first)
            database.start()
            with again:
                again.ready()
                load.more(200)
                load.__exit__()
                spooled = ("llmgw_usage_rows_waiting", (("worker", "0"),))
                until(lambda: again.metrics().get(spooled) == 0, "all rows are written")
                until(lambda: settled(database, load), "rows of dead routers are written", 60)
                check(database, load, engine)
        assert not list(state.rglob("*.spool")), "nothing is left to write"
        assert not list(state.rglob("*.damaged"))


def settled(database: Postgres, load: Load) -> bool:
    kept = {name for (name,) in database.rows("select request_id from llmgw_core.usage_event")}
    return load.whole.keys() <= kept


def check(database: Postgres, load: Load, engine: FakeEngine) -> None:
    rows = database.rows(
        "select request_id, status, completion_tokens, cost_micros from llmgw_core.usage_event"
        " where key_id = 'chaos0'"
    )
    twice = [name for name, count in Counter(row[0] for row in rows).items() if count > 1]
    assert not twice
    served = Counter(record.headers["x-request-id"] for record in engine.chats())
    kept = {name: tokens for name, status, tokens, _ in rows if status == "ok"}
    # Whoever has a whole answer has its row, to the token, and no row is of nothing.
    assert {name: kept.get(name) for name in load.whole} == load.whole
    assert all(served[name] and load.sent[name] == tokens for name, tokens in kept.items())
    total = len(rows), sum(row[2] or 0 for row in rows), sum(row[3] for row in rows)
    for table in ("usage_minute", "usage_day"):
        sums = "select sum(requests), sum(completion_tokens), sum(cost_micros)"
        assert database.rows(f"{sums} from llmgw_core.{table}") == [total]
