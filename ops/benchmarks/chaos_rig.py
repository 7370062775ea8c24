"""What `ops/bench chaos` runs: teams with bounds, clients with their keys, and who kills whom."""

from __future__ import annotations

import hashlib
import json
import random
import time
import zlib
from collections import Counter
from decimal import Decimal
from pathlib import Path
from typing import Any

from controller.router.spool import SUFFIX
from tests.control.process import Controller
from tests.end_to_end.chaos import Load, Postgres, kill_all, kill_router

WORKERS, KEYS = 3, 40
TEAMS = ("free", "spent", "rich", "requests", "tokens", "slots", "each", "all")
"""Key n is in team n modulo 8: without bounds; a budget that is used up; one that never is; a limit
of each kind; a budget on each key, used up, and slots; everything, never used up."""
MODEL_PRICES = {"prompt": 1_370_000, "cached": 430_000, "completion": 3_110_000}
"""Micros per million tokens: a request costs fractions of a micro."""
PROMPT, CACHED, USUAL = 7, 2, 5
MOST = 120
"""Micros that no request is thought to pass; less may be left of a budget that is used up."""
LIMITS = {
    "requests": (300, None, None), "tokens": (None, 6_000, None), "slots": (None, None, 2),
    "each": (None, None, 4), "all": (10_000, 1_000_000, 50),
}  # fmt: skip
MAY_REFUSE = {
    ("spent", "insufficient_quota"), ("each", "insufficient_quota"),
    ("requests", "rate_limit_exceeded"), ("tokens", "rate_limit_exceeded"),
    ("slots", "rate_limit_exceeded"), ("each", "rate_limit_exceeded"),
}  # fmt: skip
UNAVAILABLE = {"auth_unavailable", "allowance_unavailable"}
BROKEN = {
    "ConnectionRefusedError", "ConnectionResetError", "BrokenPipeError", "IncompleteRead",
    "RemoteDisconnected",
}  # fmt: skip
ENDLESS = 10**12


def team_of(key: int) -> str:
    """By its number."""
    return TEAMS[key % len(TEAMS)]


def cost(tokens: int) -> Decimal:
    """Exact micros of an answer of the fake engine."""
    each = MODEL_PRICES
    prompt = (PROMPT - CACHED) * each["prompt"] + CACHED * each["cached"]
    return Decimal(prompt + tokens * each["completion"]) / 1_000_000


class Clients(Load):
    """Each request is of one of the keys, told by its name."""

    clients = 24
    pause_s = 0.05

    def __init__(self, port: int, seed: int) -> None:
        super().__init__(port, seed)
        self.refused: Counter[tuple[str, str]] = Counter()
        self.how: dict[str, str] = {}
        self.torn: list[str] = []

    def number(self, name: str) -> int:
        """Of its key: those of the tests at the end carry it, others are spread."""
        return int(name[1:3]) if name[0] == "k" else zlib.crc32(name.encode()) % KEYS

    def key(self, name: str) -> str:
        """The secret."""
        return f"sk-chaos-{self.number(name)}"

    def body(self, tokens: int, *, stream: bool) -> dict[str, Any]:
        """With an end, so that what it may cost is known; half of the streams ask for usage."""
        fake = {"tokens": tokens, "delay": 0.01, "gap": 0.001}
        more = {"stream_options": {"include_usage": True}} if stream and tokens % 2 else {}
        whole = super().body(tokens, stream=stream) | more
        return whole | {"max_tokens": tokens, "fake": fake}

    def ended(self, name: str, end: str) -> None:
        """Refusals by team too."""
        with self._lock:
            self.ends[end] += 1
            self.how[name] = end
            if end != "200" and end not in BROKEN | UNAVAILABLE:
                self.refused[team_of(self.number(name)), end] += 1

    def send(self, name: str, body: dict[str, Any]) -> tuple[str, bytes]:
        """A whole answer has all its tokens."""
        end, told = super().send(name, body)
        if end == "200" and told.count(b'"tok') != (self.sent[name] if body["stream"] else 1):
            self.torn.append(name)
        return end, told

    def once(self, name: str) -> str:
        """One more request, with the longest answer; how it ended."""
        tokens = self.sent[name] = 9
        end, _ = self.send(name, self.body(tokens, stream=True))
        self.ended(name, end)
        if end == "200":
            self.whole[name] = tokens
        return end


class Fleet:
    """The supervisor and its routers, and who kills them. Folders are those of one machine."""

    def __init__(self, folder: Path, database: Postgres, engines: list[str], seed: int) -> None:
        self._database = database
        self._random = random.Random(seed)
        self.state = folder / "state"
        flags = [w for n, url in enumerate(engines) for w in ("--endpoint", f"e{n}={url}=m")]
        self._make = lambda *more: Controller(
            folder, database.url, "--workers", str(WORKERS), *flags, *more,
            role="all", LLMGW_STATE_DIR=str(self.state),
        )  # fmt: skip
        self.controller = self._make()
        self.killed: Counter[str] = Counter()

    def router(self) -> None:
        """One of them."""
        kill_router(self.controller, self._random.randrange(WORKERS))
        self.killed["routers"] += 1

    def postgres(self, *, everything: bool = False) -> None:
        """For a while, in which routers may be killed too."""
        self._database.kill()
        self.killed["Postgres"] += 1
        time.sleep(self._random.uniform(0.1, 1.5))
        if everything:
            self.everything()
        else:
            for _ in range(self._random.randrange(WORKERS)):
                self.router()
        time.sleep(self._random.uniform(0.1, 1.5))
        self._database.start()
        if everything:
            self.start()

    def everything(self) -> None:
        """The supervisor too: nobody is there until `start`."""
        kill_all(self.controller)
        self.killed["supervisors"] += 1
        self.controller.__exit__()
        self.controller = self._make("--listen", f"127.0.0.1:{self.controller.client}")

    def start(self) -> None:
        """Waits until it serves."""
        self.controller.__enter__()
        self.controller.ready(60)

    def rage(self, load: Clients, count: int) -> None:
        """Kill until so many answers are whole; once everything there is."""
        half = False
        while len(load.whole) < count:
            load.more(min(self._random.randint(count // 100, count // 30), count - len(load.whole)))
            if not half and len(load.whole) > count / 2:
                half = True
                self.postgres(everything=True)
            elif self._random.random() < 0.25:
                self.postgres()
            else:
                self.router()

    def settled(self) -> bool:
        """Whether there are spools of living routers only: each has one."""
        spools = self.state.rglob(f"*{SUFFIX}")
        return len({path.name.rpartition("-")[0] for path in spools}) <= WORKERS

    def written(self) -> bool:
        """Whether no router has a row that Postgres has not."""
        status, _ = self.controller.get("/metrics")
        found = self.controller.metrics() if status == 200 else {}
        gauge = "llmgw_usage_rows_waiting"
        return all(found.get((gauge, (("worker", str(w)),))) == 0 for w in range(WORKERS))


def prepare(database: Postgres, count: int, lease_s: float) -> None:
    """Teams below an organisation, keys, prices, budgets and limits."""
    micros = count * cost(USUAL)
    budgets = dict.fromkeys(("acme", "acme/rich", "acme/all"), ENDLESS)
    budgets["acme/spent"] = int(max(5 * MOST, micros * 3 / 10 / len(TEAMS)))
    of_key = int(max(2 * MOST, micros / 2 / KEYS))
    with database.connect() as connection:
        ask = connection.execute
        ask("update llmgw_core.setting set value = %s where name = 'budget_lease'", (lease_s,))
        ask("select llmgw_core.price_put('bench', 'm', %s)", (json.dumps(MODEL_PRICES),))
        ask("select llmgw.scope_create_v1('bench', 'org', 'acme', null, null)")
        for team in TEAMS:
            ask("select llmgw.scope_create_v1('bench', 'team', %s, 'acme', null)", (team,))
        for n in range(KEYS):
            told = f"key{n:03}", hashlib.sha256(f"sk-chaos-{n}".encode()).digest(), f"n{n}"
            ask("select llmgw.key_create_v2('bench', %s, %s, %s, null, null, %s, null, null)",
                (*told, f"acme/{team_of(n)}"))  # fmt: skip
        budget = "select llmgw.budget_put_v1('bench', %s, %s, %s, %s, null, null)"
        for scope, whole in budgets.items():
            ask(budget, (scope, None, whole, "month"))
        for n in range(TEAMS.index("each"), KEYS, len(TEAMS)):
            ask(budget, (None, f"key{n:03}", of_key, "30d"))
        for team, bounds in LIMITS.items():
            ask("select llmgw.limit_put_v1('bench', %s, null, null, %s::bigint, %s::bigint,"
                " %s::bigint)", (f"acme/{team}", *bounds))  # fmt: skip
